"""rewards.py, loaded the way a user's run loads it: by its path, as a plug-in, from any thread and any process."""

import concurrent.futures
import importlib.util
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

REWARDS = Path(__file__).resolve().parent.parent / "rewards.py"
LONG = 10.0  # seconds; a bound that only a hang or a quadratic regular expression can break, on any machine

# A stand-in for math-verify that misbehaves on demand and imports in no time.
FAKE_MATH_VERIFY = """
import os, time
class LatexExtractionConfig: pass
def parse(latex, *args, **options): return latex
def verify(gold, answer, **options):
    if "HANG" in answer:
        while True: pass
    if "DIE" in answer: os._exit(3)
    if "RAISE" in answer: raise ZeroDivisionError("on purpose")
    if "MEMORY" in answer: raise MemoryError
    if "PRINT" in answer: print("true")
    if "SLOW" in answer: time.sleep(0.5)
    return "WRONG" not in answer and "PRINT" not in answer
"""


def load():
    spec = importlib.util.spec_from_file_location("user_rewards", REWARDS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def score(module, completion, gold):
    (value,) = module.math_answer(prompts=["?"], completions=[completion], answer=[gold], other_column=[1])
    assert value is None or type(value) is float
    return value


def alive(pid):
    try:  # an orphan whose new parent does not collect it stays as a zombie
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def rewards():
    module = load()
    yield module
    module.worker.stop()


@pytest.fixture(scope="module")
def numeric():
    """A module whose worker is never needed."""
    return load()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A freshly loaded module whose worker imports the stand-in."""
    (tmp_path / "math_verify.py").write_text(FAKE_MATH_VERIFY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module = load()
    yield module
    module.worker.stop()


def run_script(body, **environment):
    """Run a script that has loaded rewards.py as `r`; the caller reads its output."""
    lines = [
        "import importlib.util, sys",
        f"spec = importlib.util.spec_from_file_location('user_rewards', {str(REWARDS)!r})",
        "r = importlib.util.module_from_spec(spec); spec.loader.exec_module(r)",
    ]
    script = "\n".join(lines) + "\n" + body
    env = {**os.environ, **environment}
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env)


# Numbers: decided without a worker -----------------------------------------------------------------------------------

NUMBERS = [  # completion, gold, score
    # after ####
    ("#### 1,234", 1234, 1),
    ("#### 1,234,567.50", "1234567.5", 1),
    ("#### -5", -5, 1),
    ("#### -5", 5, 0),
    ("#### - 5", -5, 1),
    ("#### \u22125", -5, 1),
    ("#### +7", 7, 1),
    ("#### $12.50", 12.5, 1),
    ("#### -$12.50", -12.5, 1),
    ("#### $-12.50", -12.5, 1),
    ("#### 18.", 18, 1),
    ("#### 29.00", 29, 1),
    ("#### 40%", 40, 1),
    ("#### 40%", "40%", 1),
    ("#### 40%", 0.4, 0),
    ("#### 40 percent", 40, 1),
    ("#### 10 000", 10000, 1),
    ("#### 3/4", 0.75, 1),
    ("#### \\frac{3}{4}", "0.75", 1),
    ("#### $\\frac{3}{4}$", "3/4", 1),
    ("#### **42**", 42, 1),
    ("#### \\(42\\)", 42, 1),
    ("#### x = 42", 42, 1),
    ("#### 42" + "x" * 400, 42, 1),
    ("#### 42 " + "blah " * 80, 42, 1),
    ("#### 42\n" + "blah 7 " * 60, 42, 1),
    ("#### 42" + " + 1" * 100, 42, 1),
    ("#### 42 which is 6 times 7", 42, 1),
    ("#### 42, of which 7 are red", 42, 1),
    ("#### 42 (6 times 7)", 42, 1),
    ("7+5=12;12-3=9#### 9", 9, 1),
    ("#### 5\nno: #### 6", 6, 1),
    ("#### 5\nno: #### 6", 5, 0),
    ("#### 5 #### 6", 6, 1),
    ("#### 5\r\n", 5, 1),
    ("7 is it\n#### ", 7, 1),
    ("#### 5\n#### ", 5, 1),
    ("####\n42", 42, 1),
    ("#### Step 3: add\nthat makes 12", 12, 1),
    ("#### 5\n#### Notes\nchecked 3 times", 5, 1),
    ("##### 5\n6", 6, 1),
    # the last number
    ("+7", 7, 1),
    ("The total is 72 clips, altogether.", 72, 1),
    ("It costs $1,234.00.", 1234, 1),
    ("5 - 3 = 2", 2, 1),
    ("7-5=2", 2, 1),
    ("12-3", 3, 1),
    ("12-3", -3, 0),
    ("12-$3", 3, 1),
    ("x-3", 3, 1),
    ("so x=-3", -3, 1),
    ("(-3)", -3, 1),
    ("from 3 to 5", 5, 1),
    ("3\u20135 days", 5, 1),
    ("1,2,3", 123, 0),
    ("1,2,3", 3, 1),
    ("1,2,345", 345, 1),
    ("12,34", 34, 1),
    ("at 3:30", 30, 1),
    ("on 12/25/2020", 2020, 1),
    ("v1.2.3", 3, 0),
    ("x1", 1, 0),
    ("2 or 3", 2, 0),
    ("about .5", 0.5, 1),
    ("1e5", 100000, 1),
    ("2.5e-3", 0.0025, 1),
    ("1.5 \\times 10^{3}", 1500, 1),
    ("1.5 \u00d7 10^3", 1500, 1),
    ("3/4", 0.75, 1),
    ("3/0", 3, 0),
    ("3 1/2 cups", 3.5, 1),
    ("-3 1/2", -3.5, 1),
    ("-\\frac{1}{2}", -0.5, 1),
    ("\\frac{-1}{2}", -0.5, 1),
    ("3\\frac{1}{2}", 3.5, 1),
    ("\\dfrac12", "1/2", 1),
    ("42 m^2", 42, 1),
    ("42 m\u00b2", 42, 1),
    ("10\u00b2", 102, 0),
    ("10\\,000", 10000, 1),
    ("1{,}234", 1234, 1),
    ("1\u202f234", 1234, 1),
    ("\uff11\uff12", 12, 1),
    ("\uff11\uff0c\uff12\uff13\uff14\uff0e\uff15", 1234.5, 1),
    ("\u7b54\u6848\u662f42\u3002", 42, 1),
    ("3\u00bd", 3.5, 1),
    ("__42__", 42, 1),
    ("US$50", 50, 1),
    ("\u20ac50", 50, 1),
    ("00042", 42, 1),
    ("<think>1</think><answer>-4</answer>", -4, 1),
    ("$\\sqrt{2}$", 2, 1),  # documented: formulas belong in a box
    ("no number", 5, 0),
    ("", 5, 0),
    ("9" * 5000, 5, 0),
    # boxes
    ("$\\boxed{-3}$", -3, 1),
    ("\\boxed{\\text{18 dollars}}", 18, 1),
    ("\\boxed{18\\text{ apples}}", 18, 1),
    ("\\boxed{18 square meters}", 18, 1),
    ("\\boxed{x = -18\\text{ degrees}}", -18, 1),
    ("\\boxed{18\\text{ meters}^2}", 18, 1),
    ("\\boxed{\\text{Answer: }18}", 18, 1),
    ("\\boxed{x=5}", 5, 1),
    ("\\boxed{n = 1,234}", 1234, 1),
    ("\\boxed{\\$5}", 5, 1),
    ("\\boxed{5.}", 5, 1),
    ("\\boxed{50\\%}", 50, 1),
    ("\\boxed{90^\\circ}", 90, 1),
    ("\\boxed{5 million}", 5, 1),
    ("\\boxed{10 000}", 10000, 1),
    ("\\boxed{1,\\!234}", 1234, 1),
    ("\\boxed{\\mathbf{5}}", 5, 1),
    ("\\boxed{\\(5\\)}", 5, 1),
    ("\\boxed{1.5\\times10^3}", 1500, 1),
    ("\\boxed{\\frac{1}{2}}", 0.5, 1),
    ("\\boxed{0.5}", "\\frac{1}{2}", 1),
    ("\\boxed {5}", 5, 1),
    ("\\boxed{4} \\boxed{5}", 5, 1),
    ("\\boxed{4} \\boxed{5}", 4, 0),
    ("\\boxed{\\boxed{5}}", 5, 1),
    ("\\boxed{x = \\boxed{5}}", 5, 1),
    ("\\boxed{5}, checked 3 times. #### 3", 5, 1),
    ("\\boxed{5} and \\boxed{6", 5, 1),
    ("\\boxed{42", 42, 0),
    ("7 \\boxed{42", 7, 1),
    ("use \\boxed{}: 5", 5, 1),
    ("\\boxed{ }, 5", 5, 0),
    ("\\boxed{" + "1" * 250 + "}", "1" * 20, 0),
    # how close is equal
    ("0.333333", "1/3", 1),
    ("0.3333", "1/3", 0),
    ("2.0000000000000004", 2, 1),
    ("1000001", 1000000, 0),
    ("1e-7", "2e-7", 0),
    ("0", 0, 1),
    ("-0.0", 0, 1),
    ("1e-9", 0, 0),
    ("1e400", "1e400", 1),
    # types of gold
    ("5", 5.0, 1),
    ("5", np.int64(5), 1),
    ("0.1", np.float32(0.1), 1),
    ("0.25", Fraction(1, 4), 1),
    ("0.0000001", 1e-07, 1),
    ("72", "She sold 48/2 = <<48/2=24>>24 clips.\n#### 72", 1),
    ("24", "She sold 48/2 = <<48/2=24>>24 clips.\n#### 72", 0),
    ("72", "We get $\\boxed{72}$.", 1),
    ("72", "The answer is 72, as 3 * 24 = 72.", 1),
    ("72", "$72.00", 1),
    ("72", "72 clips", 1),
    # types of completion
    ([{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}], 4, 1),
    ([{"role": "assistant", "content": None}], 4, 0),
    ([], 4, 0),
    (None, 4, 0),
]


@pytest.mark.parametrize(("completion", "gold", "expected"), NUMBERS)
def test_numbers_are_decided_without_a_worker(numeric, completion, gold, expected):
    assert score(numeric, completion, gold) == expected
    assert numeric.worker.process is None


UNREADABLE = [None, "", "  ", "no idea", "n/a", "N/A", float("nan"), float("inf"), True, ["5"], {"a": 5}, "1/0"]


@pytest.mark.parametrize("gold", UNREADABLE, ids=repr)
def test_unreadable_gold_is_not_scored(numeric, gold):
    assert score(numeric, "#### 5", gold) is None
    assert score(numeric, "no answer at all", gold) is None


def test_rows_keep_their_order_and_zero_is_not_missing(rewards):
    values = rewards.math_answer(["?"] * 4, ["#### 1", "#### 2", "#### 3", "x"], [1, 1, None, 1])
    assert values == [1.0, 0.0, None, 0.0]
    assert rewards.math_answer([], [], []) == []


def test_columns_of_different_length_are_refused(rewards):
    with pytest.raises(ValueError, match="shorter"):
        rewards.math_answer(["?"] * 2, ["1", "2"], [1])


def test_loading_is_light():
    process = run_script("print(sorted({'torch', 'sympy', 'math_verify', 'common'} & set(sys.modules)))")
    assert process.communicate()[0].strip() == b"[]"


HOSTILE_UNITS = [
    "\\boxed{",
    "{",
    "}",
    "\\boxed{1}",
    "1",
    "1,",
    "1,111,",
    "1/",
    "1 ",
    "1.1.",
    " ",
    "\n",
    "^{",
    "^(",
    "_{a",
]
HOSTILE_UNITS += ["a_", "#### ", "####\n", "#### 1\n", "\\frac{1", "\\text{", "\\", "$", "-$", "a1", "1e", "1*10^", "="]
HOSTILE_UNITS += ["\u00bd", "\u00b2", "\u00a0111", "<think>", "a="]


@pytest.mark.parametrize("unit", HOSTILE_UNITS)
def test_extraction_takes_linear_time(numeric, unit):
    start = time.monotonic()
    for prefix in ("", "#### "):
        numeric.extract(prefix + unit * (40_000 // len(unit)) + "x")
    assert time.monotonic() - start < LONG / 4


# Expressions: decided by math-verify ---------------------------------------------------------------------------------

EXPRESSIONS = [
    ("\\boxed{\\frac{\\sqrt{2}}{2}}", "$\\frac{1}{\\sqrt{2}}$", 1),
    ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", 1),
    ("\\boxed{\\sqrt{16}}", 4, 1),
    ("\\boxed{4}", "\\sqrt{16}", 1),
    ("#### 5 + 3 = 8", 8, 1),
    ("#### 2\\pi", "2\\pi", 1),
    ("#### 2\\pi", 2, 0),
    ("\\boxed{2\\pi}", 2, 0),
    ("\\boxed{2\u03c0}", "2\\pi", 1),
    ("\\boxed{3.141593}", "\\pi", 1),
    ("\\boxed{3.14}", "\\pi", 0),
    ("\\boxed{(x+1)^2}", "x^2+2x+1", 1),
    ("\\boxed{x^2+1}", "x^2+2x+1", 0),
    ("\\boxed{[1,2)}", "[1,2)", 1),
    ("\\boxed{[1,2]}", "[1,2)", 0),
    ("#### (1,2)", "(1,2)", 1),
    ("\\boxed{1,2,3}", "3, 1, 2", 1),
    ("\\boxed{1,2,3}", 123, 0),
    ("\\boxed{1,2,3}", 3, 0),
    ("#### 1,2,3", 123, 0),
    ("#### 1,2,3", "1,2,3", 1),
    ("#### 3:30", "3:30", 1),
    ("#### 3:30", 3, 0),
    ("\\boxed{\\{1,2\\}}", "\\{2,1\\}", 1),
    ("\\boxed{2 or 3}", 3, 0),
    ("\\boxed{A}", "A", 1),
    ("\\boxed{\\text{(A)}}", "(A)", 1),
    ("\\boxed{B}", "A", 0),
    ("\\boxed{even}", "\\text{even}", 1),
    ("\\boxed{odd}", "\\text{even}", 0),
    ("\\boxed{5 kg}", 5, 1),
    ("\\boxed{5\\text{ m/s}}", 5, 1),
    ("\\boxed{18\\text{ cm}^2}", 18, 1),
    ("\\boxed{5t}", 5, 0),
    ("\\boxed{\\frac{1}{2}c}", "\\frac{1}{2}", 0),
    ("\\boxed{5t}", "5t", 1),
    ("\\boxed{2xyz}", 2, 0),
    ("\\boxed{x \\neq 5}", 5, 0),
    ("\\boxed{x<=5}", 5, 0),
    ("\\boxed{\\infty}", 5, 0),
    ("\\boxed{\\text{}}", 5, 0),
    ("\\boxed{}{}", "A", 0),
    ("\\boxed{5\\frac{}}", 5, 0),
    ("\\boxed{__import__('os').getcwd()}", 5, 0),
    ("\\boxed{5$}$ or $\\boxed{$6$}", 6, 1),
    ("\\boxed{abc+1}", 1, 0),
    ("\\boxed{1 - abc}", 1, 0),
    ("\\boxed{3 cats and 5 dogs}", 5, 0),
    ("#### 5", "\\boxed{", None),
    ("#### \\foo{", "\\frac{", None),
]


@pytest.mark.parametrize(("completion", "gold", "expected"), EXPRESSIONS)
def test_expressions(rewards, completion, gold, expected):
    assert score(rewards, completion, gold) == expected
    assert not rewards.worker.problems


def test_only_short_answers_reach_the_worker(rewards, monkeypatch):
    sent = []
    monkeypatch.setattr(rewards, "same_latex", lambda *pair: sent.extend(pair) or True)
    hostile = ["__import__('os')", "\\sqrt{2} " * 50, "\\boxed{" + "x+" * 200 + "x}", "#### " + "\\sqrt " * 200]
    values = rewards.math_answer([0] * 4, hostile, ["\\pi"] * 4)
    assert set(sent) == {"\\pi", "2"} and values == [0.0, 1.0, 0.0, 0.0]  # 1.0 because the stub says so


def test_pool_of_threads(rewards):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        right = [pool.submit(score, rewards, f"\\boxed{{{i}\\sqrt{{4}}}}", 2 * i) for i in range(1, 17)]
        wrong = [pool.submit(score, rewards, f"\\boxed{{{i}\\sqrt{{4}}}}", 2 * i + 1) for i in range(1, 17)]
    assert {future.result() for future in right} == {1.0}
    assert {future.result() for future in wrong} == {0.0}


def test_hanging_comparison_scores_zero_in_time(rewards, caplog):
    hanging, fine = "\\boxed{9^{9^{9^{9}}}}", "\\boxed{7\\sqrt{9}}"
    score(rewards, "\\boxed{\\sqrt{25}}", 5)  # the worker is up
    start = time.monotonic()
    with caplog.at_level(logging.WARNING), concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(score, rewards, text, 21) for text in [hanging] * 16 + [fine]]
        values = [future.result() for future in futures]
    assert values == [0.0] * 16 + [1.0]
    assert time.monotonic() - start < LONG  # a group of 16 hanging answers costs little more than one
    assert "timeout" in caplog.text
    rewards.worker.problems.clear()


# The worker's life, with the stand-in --------------------------------------------------------------------------------


def test_text_in_the_c_locale(fake):
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == 1.0  # the stand-in, which the script inherits, works
    completions = ["caf\u00e9 \U0001f600 #### \uff12", "\\boxed{\\text{caf\u00e9 \U0001f600}}", "\\boxed{WRONG \u4e2d}"]
    gold = "x + \u4e2d"
    body = f"print(r.math_answer([0] * 3, {completions!a}, ['2', {gold!a}, {gold!a}]))"
    process = run_script(body, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert process.communicate()[0].strip() == b"[1.0, 1.0, 0.0]"


@pytest.mark.skipif(sys.platform != "linux", reason="the limit exists on Linux only")
def test_worker_has_a_memory_limit(fake):
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == 1.0
    limits = Path(f"/proc/{fake.worker.process.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert line.split()[3] == str(fake.WORKER_BYTES)


def test_two_loaded_copies_have_a_worker_each(fake):
    other = load()
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == score(other, "\\boxed{\\sqrt{1}}", 1) == 1.0
    assert fake.worker.process.pid != other.worker.process.pid
    other.worker.stop()
    assert score(fake, "\\boxed{\\sqrt{2}}", 1) == 1.0


def test_worker_killed_between_comparisons_restarts(fake):
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == 1.0
    first = fake.worker.process.pid
    os.kill(first, signal.SIGKILL)
    assert score(fake, "\\boxed{\\sqrt{2}}", 1) == 1.0
    assert score(fake, "\\boxed{WRONG}", 1) == 0.0
    assert fake.worker.process.pid != first
    assert not fake.worker.problems


def test_worker_killed_during_a_comparison_gives_the_verdict_all_the_same(fake):
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == 1.0
    first = fake.worker.process.pid
    killer = threading.Timer(0.2, os.kill, (first, signal.SIGKILL))
    killer.start()
    assert score(fake, "\\boxed{SLOW}", 1) == 1.0
    killer.join()
    assert fake.worker.process.pid != first
    assert not fake.worker.problems


def test_worker_that_cannot_start_stops_the_run(fake, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('a broken installation')")
    for _ in range(2):  # and does so every time
        with pytest.raises(RuntimeError, match=r"(?s)did not start in 3 attempts.*a broken installation"):
            score(fake, "\\boxed{\\sqrt{1}}", 1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="did not start"):
        pool.submit(score, fake, "\\boxed{\\sqrt{1}}", 1).result()
    (tmp_path / "math_verify.py").write_text(FAKE_MATH_VERIFY)
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == 1.0


def test_worker_that_fails_its_self_test_stops_the_run(fake, tmp_path):
    (tmp_path / "math_verify.py").write_text(FAKE_MATH_VERIFY.replace('return "WRONG"', 'return False and "WRONG"'))
    with pytest.raises(RuntimeError, match="math-verify fails on"):
        score(fake, "\\boxed{\\sqrt{1}}", 1)


def test_no_interpreter_stops_the_run(fake, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(RuntimeError, match="/no/such/python"):
        score(fake, "\\boxed{\\sqrt{1}}", 1)


def test_answers_that_kill_the_worker_score_zero_until_that_is_all_it_does(fake, caplog):
    assert score(fake, "\\boxed{DIE+1}", 1) == 0.0
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == 1.0
    assert fake.worker.problems == {"death": 1}
    assert "DIE+1" in caplog.text
    for i in range(fake.MAX_DEATHS - 1):
        assert score(fake, f"\\boxed{{DIE-x_{i}}}", 1) == 0.0
    with pytest.raises(RuntimeError, match="in a row"):
        score(fake, "\\boxed{DIE}", 1)


def test_exceptions_are_counted_and_logged_but_not_for_every_row(fake, caplog):
    answers = [f"\\boxed{{RAISE_{i}}}" for i in range(12)]
    assert fake.math_answer([0] * 12, answers, [1] * 12) == [0.0] * 12
    assert fake.worker.problems == {"ZeroDivisionError": 12}
    messages = [record.getMessage() for record in caplog.records if "on purpose" in record.getMessage()]
    assert len(messages) == 2 and "no. 1)" in messages[0] and "no. 10)" in messages[1]
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == 1.0


def test_out_of_memory_costs_one_comparison(fake):
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == 1.0
    first = fake.worker.process.pid
    assert score(fake, "\\boxed{MEMORY}", 1) == 0.0
    assert score(fake, "\\boxed{\\sqrt{2}}", 1) == 1.0
    assert fake.worker.process.pid != first  # and the memory with it
    assert fake.worker.problems == {"MemoryError": 1}


def test_what_a_library_prints_is_no_verdict(fake):
    assert score(fake, "\\boxed{PRINT}", 1) == 0.0
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == 1.0


def test_an_interrupted_comparison_leaves_no_verdict_behind(fake, monkeypatch):
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == 1.0

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fake.worker, "read", interrupt)
        score(fake, "\\boxed{\\sqrt{2}}", 1)
    assert score(fake, "\\boxed{WRONG}", 1) == 0.0


def test_a_library_beside_the_file_is_not_imported(fake, tmp_path, monkeypatch):
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    (copy / "rewards.py").write_text(REWARDS.read_text())
    (copy / "math_verify.py").write_text("raise ImportError('the wrong file')")
    monkeypatch.setattr(fake, "__file__", str(copy / "rewards.py"))
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == 1.0


def score_in_child(module, queue):
    queue.put((score(module, "\\boxed{\\sqrt{3}}", 1), score(module, "\\boxed{WRONG+1}", 1), module.worker.process.pid))


def test_forked_child_has_its_own_worker(fake):
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == 1.0
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with fake.worker.lock:  # as if another thread were comparing at the moment of the fork
        child = context.Process(target=score_in_child, args=(fake, queue))
        child.start()
        right, wrong, pid = queue.get(timeout=LONG)
        child.join(LONG)
    assert (right, wrong, child.exitcode) == (1.0, 0.0, 0)
    assert pid != fake.worker.process.pid
    wait_until(lambda: not alive(pid))
    assert score(fake, "\\boxed{WRONG+2}", 1) == 0.0


@pytest.mark.parametrize("how", ["exit", "kill while idle", "kill while comparing"])
def test_worker_ends_with_its_parent(fake, how):
    assert score(fake, "\\boxed{\\sqrt{1}}", 1) == 1.0  # the stand-in works
    body = "r.math_answer([0], [r'\\boxed{\\sqrt{1}}'], [1]); print(r.worker.process.pid, flush=True)\n"
    if how == "kill while comparing":
        body += "r.math_answer([0], [r'\\boxed{HANG}'], [1])\n"
    elif how == "kill while idle":
        body += "import time; time.sleep(100)\n"
    process = run_script(body)
    pid = json.loads(process.stdout.readline())
    if how != "exit":
        assert alive(pid)
        time.sleep(0.2)  # into the comparison, and well before its time limit
        process.kill()
    process.communicate(timeout=LONG)
    wait_until(lambda: not alive(pid))


# format_think --------------------------------------------------------------------------------------------------------

FORMATS = [
    ("<think>3<5</think>\n<answer>4</answer>", 1),
    ("<think>3<5\nso\n\n</think>\n\n<answer>\n4\n</answer>", 1),
    (" \n<think>a</think><answer>b</answer>\n", 1),
    ("<think></think><answer></answer>", 1),
    ([{"role": "assistant", "content": "<think>a</think><answer>b</answer>"}], 1),
    ("<think>a</think>", 0),
    ("<answer>b</answer>", 0),
    ("<answer>b</answer><think>a</think>", 0),
    ("x<think>a</think><answer>b</answer>", 0),
    ("<think>a</think>x<answer>b</answer>", 0),
    ("<think>a</think><answer>b</answer>x", 0),
    ("<think>a<think>b</think></think><answer>c</answer>", 0),
    ("<think>a</think><think>b</think><answer>c</answer>", 0),
    ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
    ("<think>a<answer>b</answer></think>", 0),
    ("<think>a</think><answer>b", 0),
    ("<Think>a</Think><answer>b</answer>", 0),
    ("", 0),
    (None, 0),
    ([{"role": "assistant", "content": None}], 0),
    ("<think>" * 7000, 0),
    ("<think>" + "a" * 50_000, 0),
    ("<think>" + " " * 50_000 + "</think>" + " " * 50_000 + "x<answer></answer>", 0),
    ("<think></think>" * 5000, 0),
]


@pytest.mark.parametrize(("completion", "expected"), FORMATS)
def test_format_think(rewards, completion, expected):
    start = time.monotonic()
    (value,) = rewards.format_think(["?"], [completion], answer=["4"])
    assert value == expected and type(value) is float
    assert time.monotonic() - start < 1.0  # milliseconds, where nothing is tried twice
