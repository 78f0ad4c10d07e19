r"""Verifiable reward functions: a plug-in file, loaded by its name and never imported by a script.

    python grpo.py --reward rewards.py:math_answer=1.0 rewards.py:format_think=0.1

Every function has TRL's signature, f(prompts, completions, **columns) -> list of float or None: one value per
completion, None for "not scored". Prompts and completions are strings, or lists of {"role", "content"} messages of
which the last one counts; `columns` holds the other columns of the data set, one value per completion. To write a
reward of your own, copy `format_think` into a file beside yours.

`math_answer` takes the final answer out of the text with the few regular expressions below. Two plain numbers are
compared here, in microseconds. Anything else (roots, sets, intervals, ...) goes to math-verify's LaTeX parser.

Safety: text written by a model never reaches `eval`, `sympify` or any parser that evaluates. math-verify sees at most
200 characters, in a child process of its own that has a memory limit and is killed after one second, because
`9^{9^{9^{9}}}` would keep it busy for ever and its own timeouts need signals, which only a main thread may use. The
child starts when it is first needed and ends when this process ends, however it ends. Linux and macOS.
"""

import atexit
import functools
import json
import logging
import numbers
import os
import re
import resource
import select
import signal
import sys
import tempfile
import threading
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from subprocess import PIPE, Popen
from typing import Any, NamedTuple

MAX_ANSWER_CHARS = 200  # a longer "answer" is prose or an attack, and wrong
COMPARE_SECONDS = 1.0  # an honest comparison takes milliseconds
START_SECONDS = 120.0  # importing sympy takes one second, or many on a busy node with a cold file system
ATTEMPTS = 3  # workers tried per comparison, as something else may have killed the first
MAX_DEATHS = 5  # after so many comparisons in a row that no worker survived, blame the machine and not the answers
WORKER_BYTES = 2**30  # address space; the worker needs 60 MB


class Answer(NamedTuple):
    """A final answer; `value` is None where it is more than a plain number and only math-verify can compare it."""

    value: Fraction | None
    latex: str


# Numbers. On long texts every pattern takes time linear in the text: no two repeats can share the same characters.
DECIMAL = r"(?:(?:(?<!\d,)\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"  # 1,234.5 but not 1,2,3
VALUE = rf"""(?<![A-Za-z\d])(?<!\d\.)(?:  # no x1, no 1.2.3
    (?:(?P<whole>\d{{1,6}})[ ])? (?<!/)(?P<num>{DECIMAL})[ ]?/[ ]?(?P<den>{DECIMAL})(?![\d/])  # 3/4, 3 1/2, no dates
    | (?P<decimal>{DECIMAL}) (?P<exponent>[eE][-+]?\d{{1,3}}(?!\w))? )"""
NUMBER = re.compile(rf"(?:(?<![A-Za-z\d)\]}}%])(?P<sign>[-+]))?{VALUE}", re.X)  # the - of 12-3 and x-3 is no sign
WHOLE = re.compile(rf"(?:[^\d=<>!\\]*=)?\s*(?P<sign>[-+]?)\s*{VALUE}\s*(?:\u00b0|\^\s*\{{?\s*\\circ\s*\}}?)?", re.X)
# The one number among words, but no part of a formula such as abc+1.
IN_PROSE = re.compile(rf"(?:\D*(?:[^-+*/^<>(|=\s\d]|[^<>!\d]=))?\s*{NUMBER.pattern}\s*(?:[^-+*/^=<>(|\s\d]\D*)?", re.X)
CURRENCY = r"\\?[$\u00a3\u00a5\u20a0-\u20bf]"
REWRITES = {  # what surrounds numbers, to what NUMBER can read
    r"\\!": "",
    r"\{,\}|(?<=\d)(?:\\[,; ]|~)(?=\d{3}(?!\d))": ",",  # 10{,}000 and 10\,000
    r"(?<=\d) ?(?:\\times|\\cdot|\*) {0,2}10 ?\^ ?(?:\{ ?([-+]?\d{1,3}) ?\}|([-+]?\d{1,3}))": r"e\1\2",
    r"(?<=\d)(?=\\[dtc]?frac)": " ",  # a mixed number: 3\frac{1}{2} is 3 1/2
    r"\\[dtc]?frac ?(?:\{ ?(-?\d+) ?\} ?\{ ?(\d+) ?\}|(\d)(\d))": r"\1\3/\2\4",
    rf"(?<=[-+]){CURRENCY}": "",
    CURRENCY: " ",
}
SYMBOLS = str.maketrans("\u2010\u2013\u2212\u2044\u2215", "---//") | {0xD7: r"\times ", 0xF7: r"\div ", 0x3C0: r"\pi "}
# Exponents, subscripts and commands, which are no numbers of their own.
NOT_NUMBERS = re.compile(r"\^ ?(?:\{[^{}]*\}|\([^()]*\)|[-+]?\w+)|(?<=[A-Za-z])_(?:\{[^{}]*\}|\w+)|\\[A-Za-z]+")
TEXT = re.compile(r"\\(?:text|math|m)(?:rm|bf|it|sf|box|normal)?\s*\{([^{}]*)\}")
PROSE = re.compile(r"(?<![\\A-Za-z\d])(?!(?:sqrt|sin|cos|tan|log|exp)\b)[^\W\d_]{3,}")  # a word, not 2xy or \pi
# After the first number of a `####` line: 5 + 3, 2\pi, 2x, 2(x+1), 1,2,3, 3:30 and 10 000 are more than that number.
MORE_MATH = re.compile(r"\s*[-+*/^=]\s*[\d\\(]|\s*\\(?!text)[A-Za-z]|[A-Za-z](?![A-Za-z])|\(|[,:;] ?\d| \d{3}(?!\d)")


def normalise(text: str) -> str:
    """Full-width digits and typographic signs, spaces and fractions as ASCII: NFKC, plus what it would get wrong."""
    if text.isascii():
        return text
    text = re.sub(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))", ",", text)  # 10 000 with a typographic space
    text = re.sub(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])", " ", text)  # three and a half: NFKC makes it 31/2
    text = re.sub(r"[\u00b2\u00b3\u00b9\u2070\u2074-\u2079]+", r"^{\g<0>}", text)  # ten squared: NFKC makes it 102
    return unicodedata.normalize("NFKC", text).translate(SYMBOLS)


def plain(text: str) -> str:
    """`text` with the LaTeX and the currency around numbers rewritten so that NUMBER can match."""
    for pattern, replacement in REWRITES.items():
        text = re.sub(pattern, replacement, text)
    return text


def read_number(match: re.Match[str]) -> Answer | None:
    """What a NUMBER or WHOLE match says; None for a zero denominator or an absurd length."""
    if len(match[0]) > MAX_ANSWER_CHARS:
        return None
    num, den, decimal = ((match[part] or "").replace(",", "") for part in ("num", "den", "decimal"))
    if den and not Fraction(den):
        return None
    value = Fraction(decimal + (match["exponent"] or "")) if decimal else Fraction(num) / Fraction(den)
    value = (value + int(match["whole"] or 0)) * (-1 if match["sign"] == "-" else 1)
    if decimal and not match["exponent"]:
        return Answer(value, (match["sign"] or "") + decimal)  # no fraction: math-verify allows decimals a tolerance
    return Answer(value, rf"\frac{{{value.numerator}}}{{{value.denominator}}}")


def is_expression(text: str) -> bool:
    """Whether `text` is a formula and not prose."""
    return re.search(r"[^\W_]", text) is not None and not PROSE.search(TEXT.sub(" ", text))


def read_whole(text: str) -> Answer | None:
    r"""An answer that stands alone, such as the content of a box. `\text{18 dollars}` and `18 dollars` are 18."""
    text = re.sub(r"(?<!\\)\\[()\[\]]|\s+", " ", text).strip(" $*_`").rstrip(" .,;:$*_`")
    text = re.sub(r"\s*\\?%$", "", text)  # per cent is a unit like any other: 40% is 40
    if not text or len(text) > MAX_ANSWER_CHARS:
        return None
    unwrapped = plain(TEXT.sub(r" \1 ", text)).strip()
    match = WHOLE.fullmatch(re.sub(r"(?<=\d) (?=\d{3}(?!\d))", ",", unwrapped))  # 10 000
    if match := match or (PROSE.search(unwrapped) and IN_PROSE.fullmatch(NOT_NUMBERS.sub(" ", unwrapped))):
        return read_number(match)
    text = re.sub(r"(?<=[\d} ])([A-Za-z])$", r"{\1}", text)  # else math-verify drops the t of 5t as a unit
    return Answer(None, re.sub(r"\\?\$", "", text))  # a dollar would end the formula


def last_box(text: str) -> tuple[str | None, str]:
    r"""(Content of the last closed, non-empty \boxed{...} or None, the text before the first one never closed)."""
    box, stack = (-1, -1), list[tuple[int, int]]()  # stack: where open braces' content begins, where \boxed does or -1
    for match in re.finditer(r"(\\boxed\s*)?\{|\\.|\}", text, re.S):
        if match[0] == "}" and stack:
            begin, is_box = stack.pop()
            if is_box >= 0 and box[0] < begin < match.start():  # of nested boxes the inner one
                box = (begin, match.start())
        elif match[0][-1] == "{" and match[0] != r"\{":
            stack.append((match.end(), match.start(1)))
    unclosed = min((is_box for _, is_box in stack if is_box >= 0), default=len(text))
    return (text[slice(*box)] if box[0] >= 0 else None), text[:unclosed]


def extract(text: str, is_gold: bool = False) -> Answer | None:
    """The final answer of a text as `math_answer` defines it, or None. A gold may be a bare expression as well."""
    text = normalise(text)
    box, outside = last_box(text)
    if box is not None:
        return read_whole(box)
    for line in reversed([line for line in text.split("\n") if "####" in line]):
        head, _, rest = line.rpartition("####")
        number = NUMBER.match(stripped := plain(rest).lstrip(" \t*=:`_("))
        formula = is_expression(rest) and len(rest) <= MAX_ANSWER_CHARS
        if head.endswith("#") or not (number or formula):
            continue  # a Markdown heading such as `#### Step 3`
        if number and not (formula and MORE_MATH.match(stripped, number.end())):
            return read_number(number)
        return read_whole(rest)
    if is_gold and is_expression(text) and text.strip().casefold() not in ("n/a", "na"):
        return read_whole(text)
    for line in reversed(outside.split("\n")):
        if re.search(r"\d", line) and (found := list(NUMBER.finditer(NOT_NUMBERS.sub(" ", plain(line))))):
            return read_number(found[-1])
    return None


def text_of(completion: Any) -> str:
    """The text of a completion: a string, or the content of the last message of a conversation; None is ""."""
    if completion and not isinstance(completion, str):
        completion = completion[-1]["content"]
    return completion or ""


def math_answer(prompts: Any, completions: Sequence, answer: Sequence, **columns: Any) -> list[float | None]:  # noqa: ARG001
    r"""1.0 where the final answer of a completion equals the gold answer, else 0.0; None where the gold is unreadable.

    The final answer is, in this order:
    1. the last closed `\boxed{...}`, of nested ones the inner. An unclosed box is no answer, nor is a number after it;
    2. the last line with `####` and an answer: the number right after the mark, whatever text follows it, or else a
       formula. `#### Step 3` is a heading and ignored, an empty `####` too;
    3. the last number of the text. `5 - 3 = 2` is 2, the last number of `12-3` is 3, of `1,2,3` also 3, of `3:30` 30,
       of `$\sqrt{2}$` 2 (formulas belong in a box). Exponents do not count: `42 m^2` is 42.
    No answer, or one of more than 200 characters, is worth 0.0.

    Numbers: `1,234`, `10\,000`, in a box and after `####` also `10 000`; `1/2`, `\frac{1}{2}`, `3 1/2`, `1e5`,
    `1.5 \times 10^3`; full-width digits. A comma is never a decimal point. A final full stop, currency, per cent and
    units are dropped: `40%` is 40, not 0.4, and `5 million` is 5, but a letter as in `5t` is a variable. In a box and
    after `####`, `1,2,3` is a list, equal to that list in any order and never to 123 or 3; `3:30` is a ratio; of `x=5`
    the right-hand side counts. Two numbers are equal if they differ by at most 1e-6, absolutely and relative to gold.

    Gold answers are numbers or strings: a bare number or LaTeX expression, a whole solution with a box or `####`
    (MATH, GSM8K), or else prose whose last number counts. None, bool, "", "n/a", NaN, words without a number, and what
    math-verify cannot parse, give None.

    Raises ValueError when `answer` and `completions` differ in length, RuntimeError when math-verify cannot be run.
    Sources: GSM8K (arXiv 2110.14168) for `####`, MATH (arXiv 2103.03874) for the box.
    """
    scores: list[float | None] = []
    for completion, gold_text in zip(completions, answer, strict=True):
        readable = isinstance(gold_text, str | numbers.Number) and not isinstance(gold_text, bool)
        gold = extract(str(gold_text), is_gold=True) if readable else None
        if gold is None or (gold.value is None and not same_latex(gold.latex, gold.latex)):
            scores.append(None)  # a gold that does not even equal itself cannot be read
        elif (given := extract(text_of(completion))) is None:
            scores.append(0.0)
        elif gold.value is not None and given.value is not None:
            tolerance = min(Fraction(1), abs(gold.value)) / 10**6  # math-verify, too, rounds to six decimals
            scores.append(float(abs(gold.value - given.value) <= tolerance))
        else:
            scores.append(float(same_latex(gold.latex, given.latex)))
    return scores


def format_think(prompts: Any, completions: Sequence, **columns: Any) -> list[float | None]:  # noqa: ARG001
    """1.0 where the whole completion is `<think>...</think><answer>...</answer>`, else 0.0.

    White space may stand before, between and after the two parts, anything but these four tags inside them, nothing
    included. Each tag occurs exactly once. Source: the format reward of DeepSeek-R1 (arXiv 2501.12948).
    """
    scores: list[float | None] = []
    for text in map(text_of, completions):
        tags = re.findall(r"</?(?:think|answer)>", text)  # checked first, so that the pattern below has no choices
        once = tags == ["<think>", "</think>", "<answer>", "</answer>"]
        whole = once and re.fullmatch(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", text, re.S)
        scores.append(1.0 if whole else 0.0)
    return scores


class Worker:
    """The child process that runs math-verify, one JSON line per comparison. For use by the holder of `lock` only."""

    def __init__(self) -> None:
        """No process yet. Also run after a fork: the pipes, and perhaps a locked lock, belong to the parent."""
        self.lock = threading.Lock()
        self.process: Popen[str] | None = None
        self.ready = False
        self.deaths = 0
        self.problems: dict[str, int] = {}  # how many comparisons gave no verdict, by kind

    def compare(self, gold: str, answer: str) -> bool:
        """Whether two LaTeX expressions are equal; False, counted and logged, where there is no verdict."""
        reply = self.ask(json.dumps([gold, answer]))  # ASCII, whatever the locale
        kind = reply.partition(":")[0] if isinstance(reply, str) else ""
        self.deaths = self.deaths + 1 if kind == "death" else 0
        if self.deaths >= MAX_DEATHS:
            raise RuntimeError(f"math-verify failed in {MAX_DEATHS} comparisons in a row: {reply}")
        if kind:
            count = self.problems[kind] = self.problems.get(kind, 0) + 1
            if str(count).strip("0") == "1":  # the 1st, 10th, 100th ...
                logging.getLogger("rewards").warning("%r scores 0: %s (%s no. %d)", answer, reply, kind, count)
        return reply is True

    def ask(self, question: str) -> bool | str:
        """The worker's verdict, or what went wrong as "kind: text". Raises RuntimeError if no worker gets ready."""
        tail, was_ready = "", False
        for _ in range(ATTEMPTS):
            try:
                process = self.process or self.spawn()
                self.ready = self.ready or self.read(process, START_SECONDS)
                print(question, file=process.stdin, flush=True)
                return self.read(process, COMPARE_SECONDS)
            except (OSError, EOFError) as error:  # among them TimeoutError and BrokenPipeError
                was_ready, tail = self.ready, self.stop() or str(error)
                if was_ready and isinstance(error, TimeoutError):
                    self.spawn()  # the next one gets ready while we go on
                    return f"timeout: no verdict in {COMPARE_SECONDS} s"
            except BaseException:
                self.stop()  # a late reply must never answer the next question
                raise
        if not was_ready:
            raise RuntimeError(f"math-verify did not start in {ATTEMPTS} attempts (pip install math-verify): {tail}")
        return f"death: {ATTEMPTS} workers died; stderr: {tail}"

    def spawn(self) -> Popen[str]:
        """Start the process, without waiting until it is ready."""
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 (`stop` closes it); a pipe that nobody reads fills up
        command = [sys.executable, os.path.abspath(__file__), "--worker"]
        env = {**os.environ, "PYTHONSAFEPATH": "1"}  # no file beside this one can pose as a library
        # In a session of its own, because Ctrl-C is the parent's business.
        self.process = Popen(
            command, stdin=PIPE, stdout=PIPE, stderr=self.stderr, text=True, env=env, start_new_session=True
        )
        return self.process

    def stop(self) -> str:
        """Kill the process, if there is one, and return the end of its stderr."""
        process, self.process, self.ready = self.process, None, False
        if process is None:
            return ""
        process.kill()
        process.communicate()  # closes the pipes
        with self.stderr as stderr:
            stderr.seek(0)
            return stderr.read().decode(errors="replace")[-2000:].strip()  # the end of a traceback says why

    def read(self, process: Popen[str], seconds: float) -> Any:
        """The worker's next line. Raises TimeoutError, or EOFError where the worker is dead."""
        assert process.stdout
        poller = select.poll()  # select() fails on file descriptors above 1023
        poller.register(process.stdout, select.POLLIN)
        if not poller.poll(seconds * 1000):
            raise TimeoutError(f"no reply in {seconds} s")
        if not (line := process.stdout.readline()):
            raise EOFError("the worker is dead")
        return json.loads(line)


worker = Worker()
atexit.register(worker.stop)
os.register_at_fork(after_in_child=worker.__init__)  # type: ignore[misc]
compare_once = functools.lru_cache(maxsize=4096)(worker.compare)


def same_latex(gold: str, answer: str) -> bool:
    """`Worker.compare` in turns and remembered: a group repeats answers, and one that hangs costs its second once."""
    with worker.lock:
        return compare_once(gold, answer)


def serve() -> None:
    """The worker's main loop: read [gold, answer], write true, false or the text of an exception."""
    if sys.platform == "linux":  # macOS refuses to set this limit; the time limit holds there too
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends us when an alarm rings, whatever we are doing
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not look like a reply

    from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

    logging.disable(logging.CRITICAL)
    latex_only = [LatexExtractionConfig()]  # the default also hands plain text to a parser that evaluates

    def compare(gold: str, answer: str) -> bool:
        options: Any = {"fallback_mode": "no_fallback", "extraction_mode": "first_match", "parsing_timeout": 0}
        parsed = [parse(f"${latex}$", latex_only, raise_on_error=True, **options) for latex in (gold, answer)]
        return bool(verify(*parsed, timeout_seconds=0, raise_on_error=True))

    # The first use of each part of sympy is slow, and a worker that gets these wrong is of no use.
    for pair in ((r"\frac{1}{2}", "0.5"), ("x^2+2x+1", "(x+1)^2"), ("[1,2)", "[1,2)"), ("y=2x", "2x-y=0")):
        assert compare(*pair), f"math-verify fails on {pair}"
    print("true", file=replies, flush=True)
    for line in sys.stdin:  # ends when the parent is gone
        signal.alarm(int(COMPARE_SECONDS) + 1)  # for when the parent is killed while we compute
        try:
            reply: bool | str = compare(*json.loads(line))
        except Exception as error:
            reply = f"{type(error).__name__}: {error}"[:300]  # a reply fits into the pipe
        signal.alarm(0)
        print(json.dumps(reply), file=replies, flush=True)
        if str(reply).startswith("MemoryError"):
            sys.exit()  # what is left of the limit may be too little for the next comparison


if __name__ == "__main__" and sys.argv[1:] == ["--worker"]:
    serve()
