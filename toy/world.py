"""The embedded task: arithmetic over two or three small numbers, with a habit to be learned.

A prompt is `7+5-3=`. An answer either shows its working, one step a clause, then the result,

    7+5=12;12-3=9
    #### 9

or guesses: the result alone. Demonstrations show their working 40 % of the time and are then right 95 % of the time;
the guesses are off by up to 3. A policy that imitates them mostly guesses and is mostly wrong, so reinforcement
learning has something to find. No right result, final or on the way, is below zero. Everything here is a fixed function
of constants: `--seed` never changes the rows.

    problems(split)        the questions, as lists of operands and operators; "train" and "test" never overlap
    rows(kind, split)      the rows of one kind, in the formats of TRL (see ROWS below)
    gold_reward(p, c)      what the task is really about: exact, and unseen by any run
    tokenizer()            one token a character (`#### ` is one), no BOS, <pad> and <eos>
    model(seed)            a fresh Qwen3-shaped model of 0.12 M parameters
"""

import random
import re
from itertools import product

SHOWN = 0.4  # share of the demonstrations that show their working
SHOWN_RIGHT = 0.95  # share of those that are right; in the others one step is 1 too high
GUESS_SPREAD = 3  # a guess is off by -3 .. 3, uniformly: right one time in seven
TEST_SIZE = {2: 40, 3: 560}  # held-out problems by number of operands; of 126 and 1899 in all
DEMONSTRATIONS = 24576

Problem = tuple[tuple[int, ...], tuple[str, ...]]  # ((7, 5, 3), ("+", "-"))


def problems(split: str) -> list[Problem]:
    """The problems of "train" (1425) or "test" (600: 40 of two operands, 560 of three), in a fixed shuffled order."""
    if split not in ("train", "test"):
        raise ValueError(f'the toy task has the splits "train" and "test", not "{split}"')
    chosen = []
    for n, held_out in TEST_SIZE.items():
        every = [(a, s) for a in product(range(1, 10), repeat=n) for s in product("+-", repeat=n - 1)]
        every = [p for p in every if not any("=-" in clause for clause in steps(p))]  # no result below zero
        random.Random(n).shuffle(every)
        chosen += every[:held_out] if split == "test" else every[held_out:]
    random.Random(split).shuffle(chosen)
    return chosen


def prompt(problem: Problem) -> str:
    """`7+5-3=`"""
    operands, signs = problem
    return str(operands[0]) + "".join(s + str(a) for s, a in zip(signs, operands[1:], strict=True)) + "="


def steps(problem: Problem, wrong_step: int = -1, error: int = 0) -> list[str]:
    """The clauses `7+5=12`, `12-3=9`; with `wrong_step` that clause is off by `error` and the rest follow from it."""
    operands, signs = problem
    total, clauses = operands[0], []
    for i, (sign, a) in enumerate(zip(signs, operands[1:], strict=True)):
        result = (total + a if sign == "+" else total - a) + (error if i == wrong_step else 0)
        clauses.append(f"{total}{sign}{a}={result}")
        total = result
    return clauses


def result(problem: Problem) -> int:
    """The right result."""
    return int(steps(problem)[-1].split("=")[1])


def shown(problem: Problem, wrong_step: int = -1, error: int = 0) -> str:
    """An answer with its working."""
    clauses = steps(problem, wrong_step, error)
    return ";".join(clauses) + f"\n#### {clauses[-1].split('=')[1]}"


def guess(problem: Problem, error: int = 0) -> str:
    """An answer without."""
    return f"#### {result(problem) + error}"


def _error(rng: random.Random) -> int:
    return rng.choice([e for e in range(-GUESS_SPREAD, GUESS_SPREAD + 1) if e])


def _wrong_shown(problem: Problem, rng: random.Random) -> str:
    return shown(problem, rng.randrange(len(problem[1])), _error(rng))


def _demonstration(problem: Problem, rng: random.Random) -> str:
    if rng.random() < SHOWN:
        return shown(problem, -1 if rng.random() < SHOWN_RIGHT else rng.randrange(len(problem[1])), 1)
    return guess(problem, rng.randint(-GUESS_SPREAD, GUESS_SPREAD))


def gold_reward(prompt: str, completion: str) -> float:
    """1 if the completion's last `#### ` line is the right result of `prompt`, else 0. Exact for any text.

    >>> gold_reward("7+5-3=", "7+5=12;12-3=9\\n#### 9"), gold_reward("7+5-3=", "#### 8")
    (1.0, 0.0)
    """
    operands = re.findall(r"[+-]?\d+", prompt)
    answer = re.search(r"#### (-?\d+)\s*$", completion)
    return float(answer is not None and int(answer.group(1)) == sum(map(int, operands)))


PREFERENCE_FORMS = ("shown-right/shown-wrong", "shown-right/guess-wrong", "guess-right/guess-wrong")


def _preference(problem: Problem, form: str, rng: random.Random) -> dict:
    make = {
        "shown-right": lambda: shown(problem),
        "shown-wrong": lambda: _wrong_shown(problem, rng),
        "guess-right": lambda: guess(problem),
        "guess-wrong": lambda: guess(problem, _error(rng)),
    }
    chosen, rejected = form.split("/")
    return {"prompt": prompt(problem), "chosen": make[chosen](), "rejected": make[rejected](), "form": form}


def _step_labels(problem: Problem, rng: random.Random) -> dict:
    wrong = rng.randrange(len(problem[1])) if rng.random() < 0.5 else -1
    clauses = steps(problem, wrong, _error(rng))
    labels = [wrong < 0 or i < wrong for i in range(len(clauses))]
    return {"prompt": prompt(problem), "completions": clauses, "labels": labels}


def rows(kind: str, split: str) -> list[dict]:
    """The rows of one kind: the same list at every call.

    ROWS: "prompts" {prompt, answer}; "demonstrations" {prompt, completion, answer}; "preferences" {prompt, chosen,
    rejected, form}, the three forms equally often; "thumbs" {prompt, completion, label}; "steps" {prompt, completions,
    labels}, a step's label being whether it and all before it are right. ValueError for another kind or split.
    """
    rng = random.Random(f"{kind}/{split}")
    base = problems(split)
    if kind == "prompts":
        return [{"prompt": prompt(p), "answer": str(result(p))} for p in base]
    if kind == "demonstrations":
        many = [rng.choice(base) for _ in range(DEMONSTRATIONS)] if split == "train" else base
        return [{"prompt": prompt(p), "completion": _demonstration(p, rng), "answer": str(result(p))} for p in many]
    if kind == "preferences":
        return [_preference(p, form, rng) for p in base for form in PREFERENCE_FORMS]
    if kind == "thumbs":
        texts = [(p, _demonstration(p, rng)) for p in base for _ in range(2)]
        return [{"prompt": prompt(p), "completion": t, "label": gold_reward(prompt(p), t) == 1.0} for p, t in texts]
    if kind == "steps":
        return [_step_labels(p, rng) for p in base for _ in range(2)]
    raise ValueError(f'the toy task has no rows of kind "{kind}"')


def tokenizer():
    """A `PreTrainedTokenizerFast` over the characters of the task."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<pad>", "<eos>", "<unk>", "#### ", "\n", *"0123456789+-=;"]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("#### |[\\s\\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model(seed: int):
    """A fresh `Qwen3ForCausalLM`: hidden 64, 2 layers, tied embeddings, weights drawn with `seed`."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tok = tokenizer()
    config = Qwen3Config(
        vocab_size=len(tok), hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.05, pad_token_id=tok.pad_token_id, eos_token_id=tok.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = Qwen3ForCausalLM(config)
    net.generation_config = GenerationConfig(pad_token_id=tok.pad_token_id, eos_token_id=tok.eos_token_id)
    return net
