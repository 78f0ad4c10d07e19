"""The embedded task: its rows, its tokenizer and its untrained model."""

import importlib.util
import random
from collections import Counter
from itertools import accumulate, product
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import common
import grpo
import sft
from toy import world

KINDS = ("prompts", "demonstrations", "preferences", "thumbs", "steps")
ROOT = Path(common.__file__).parent


def within(count, trials, share):
    """Whether a count is within five standard deviations of what a share of the trials gives."""
    return abs(count - trials * share) < 5 * (trials * share * (1 - share)) ** 0.5


def value(prompt):
    """The right result of a prompt such as `7+5-3=`."""
    return sum(int(term) for term in prompt.removesuffix("=").replace("-", "+-").split("+"))


def never_negative(problem):
    """Whether no result of a problem, final or on the way, is below zero."""
    operands, signs = problem
    return min(accumulate(int(sign + str(a)) for a, sign in zip(operands, ("+", *signs), strict=True))) >= 0


def is_shown(text):
    return "\n" in text


def result(text):
    """The number that an answer ends in."""
    return int(text.split("#### ")[1])


@pytest.fixture(scope="module")
def rows():
    return {(kind, split): world.rows(kind, split) for kind in KINDS for split in ("train", "test")}


def texts_of(kind, row):
    """Every text of a row."""
    keys = {"preferences": ("chosen", "rejected"), "prompts": ("answer",)}.get(kind, ("completion",))
    return [row["prompt"], *(row["completions"] if kind == "steps" else [row[key] for key in keys])]


# --------------------------------------------------------------------------------------------------------- problems


def test_every_problem_is_in_exactly_one_split():
    train, test = world.problems("train"), world.problems("test")
    assert not set(train) & set(test)
    assert len(set(train)) == len(train) and len(set(test)) == len(test)
    assert Counter(len(a) for a, _ in test) == world.TEST_SIZE and len(test) == 600
    every = {(a, s) for n in (2, 3) for a in product(range(1, 10), repeat=n) for s in product("+-", repeat=n - 1)}
    assert set(train) | set(test) == {problem for problem in every if never_negative(problem)}


def test_prompts_of_train_and_test_never_overlap_in_any_kind_of_rows(rows):
    prompts = {split: {row["prompt"] for kind in KINDS for row in rows[kind, split]} for split in ("train", "test")}
    assert not prompts["train"] & prompts["test"]
    assert len(prompts["test"]) == 600 and prompts["train"] == {row["prompt"] for row in rows["prompts", "train"]}


def test_a_problem_its_working_and_its_result():
    problem = ((7, 5, 3), ("+", "-"))
    assert world.prompt(problem) == "7+5-3=" and world.result(problem) == 9
    assert world.shown(problem) == "7+5=12;12-3=9\n#### 9"
    assert world.shown(problem, 0, 2) == "7+5=14;14-3=11\n#### 11"
    assert world.shown(problem, 1, -1) == "7+5=12;12-3=8\n#### 8"
    assert world.guess(problem) == "#### 9" and world.guess(problem, -3) == "#### 6"
    assert world.shown(((1, 9), ("-",))) == "1-9=-8\n#### -8"


@pytest.mark.parametrize("split", ["train", "test"])
def test_results_equal_those_of_plain_arithmetic(rows, split):
    assert all(int(row["answer"]) == value(row["prompt"]) for row in rows["prompts", split])
    assert len(rows["prompts", split]) == len(world.problems(split))


# --------------------------------------------------------------------------------------------------- demonstrations


def test_demonstrations_show_their_working_and_are_right_as_often_as_stated(rows):
    some = rows["demonstrations", "train"]
    assert len(some) == world.DEMONSTRATIONS
    shown = [row for row in some if is_shown(row["completion"])]
    guessed = [row for row in some if not is_shown(row["completion"])]
    assert within(len(shown), len(some), world.SHOWN)
    right = sum(result(row["completion"]) == value(row["prompt"]) for row in shown)
    assert within(right, len(shown), world.SHOWN_RIGHT)
    spread = 2 * world.GUESS_SPREAD + 1
    errors = Counter(result(row["completion"]) - value(row["prompt"]) for row in guessed)
    assert sorted(errors) == list(range(-world.GUESS_SPREAD, world.GUESS_SPREAD + 1))
    assert all(within(count, len(guessed), 1 / spread) for count in errors.values())
    assert {row["prompt"] for row in some} == {row["prompt"] for row in rows["prompts", "train"]}
    assert [row["answer"] for row in some] == [str(value(row["prompt"])) for row in some]


def test_wrong_working_has_one_wrong_step_and_a_wrong_result(rows):
    wrong_shown = 0
    for row in rows["demonstrations", "train"]:
        if is_shown(row["completion"]):
            steps, answer = row["completion"].split("\n#### ")
            wrong = [step for step in steps.split(";") if value(step.split("=")[0]) != int(step.split("=")[1])]
            off = int(answer) - value(row["prompt"])
            assert len(wrong) == (off != 0) and abs(off) <= world.GUESS_SPREAD
            assert steps.rsplit("=", 1)[1] == answer
            wrong_shown += off != 0
    assert wrong_shown > 100


@pytest.mark.parametrize("script", [sft, grpo])
def test_the_default_limit_on_responses_leaves_room_for_every_demonstration(rows, script):
    tokenizer = world.tokenizer()
    completions = sorted({row["completion"] for row in rows["demonstrations", "train"]}, key=len)
    assert len(tokenizer(completions[-1]).input_ids) + 1 <= script.Args().max_response_length


# ----------------------------------------------------------------------------------- preferences, thumbs, steps


@pytest.mark.parametrize("split", ["train", "test"])
def test_preferences_come_in_three_forms_equally_often_and_keep_what_each_says(rows, split):
    some = rows["preferences", split]
    assert Counter(row["form"] for row in some) == dict.fromkeys(world.PREFERENCE_FORMS, len(some) // 3)
    for row in some:
        for text, form in zip((row["chosen"], row["rejected"]), row["form"].split("/"), strict=True):
            working, verdict = form.split("-")
            assert is_shown(text) == (working == "shown")
            assert (result(text) == value(row["prompt"])) == (verdict == "right")


def test_length_alone_does_not_tell_the_chosen_answer(rows):
    some = rows["preferences", "train"]
    longer = sum((len(r["chosen"]) > len(r["rejected"])) + 0.5 * (len(r["chosen"]) == len(r["rejected"])) for r in some)
    assert longer / len(some) < 0.75


@pytest.mark.parametrize("split", ["train", "test"])
def test_thumbs_are_up_exactly_for_right_answers(rows, split):
    some = rows["thumbs", split]
    assert all(row["label"] is (result(row["completion"]) == value(row["prompt"])) for row in some)
    up = world.SHOWN * world.SHOWN_RIGHT + (1 - world.SHOWN) / (2 * world.GUESS_SPREAD + 1)
    assert within(sum(row["label"] for row in some), len(some), up)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_step_is_right_if_it_and_all_before_it_are(rows, split):
    some = rows["steps", split]
    for row in some:
        total, right = int(row["prompt"][0]), True
        terms = [row["prompt"][i : i + 2] for i in range(1, len(row["prompt"]) - 1, 2)]
        for step, term, label in zip(row["completions"], terms, row["labels"], strict=True):
            assert step.startswith(f"{total}{term}=")  # goes on from where the last step left off
            claimed = int(step.split("=")[1])
            right = right and claimed == total + int(term)
            assert label is right
            total = claimed
    wrong = sum(not all(row["labels"]) for row in some)
    assert within(wrong, len(some), 0.5)


# ------------------------------------------------------------------------------------------------------ gold reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("7+5=12;12-3=9\n#### 9", 1.0),
        ("#### 9", 1.0),
        ("#### 8", 0.0),
        ("#### -9", 0.0),
        ("#### 99", 0.0),
        ("#### 9\n#### 8", 0.0),
        ("#### 8\n#### 9", 1.0),
        ("9", 0.0),
        ("", 0.0),
        ("####", 0.0),
        ("#### ", 0.0),
        ("#### 9=", 0.0),
        ("7+5=12;12-3=9", 0.0),
    ],
)
def test_gold_reward_reads_the_last_result(completion, reward):
    assert world.gold_reward("7+5-3=", completion) == reward


def test_gold_reward_reads_negative_results():
    assert world.gold_reward("1-9=", "1-9=-8\n#### -8") == 1.0 and world.gold_reward("1-9=", "#### 8") == 0.0


def test_gold_reward_agrees_with_math_answer_on_every_form_of_answer(rows):
    spec = importlib.util.spec_from_file_location("rewards_of_the_toy", ROOT / "rewards.py")
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    answers = [(r["prompt"], r["completion"]) for r in rows["demonstrations", "test"]]
    answers += [(r["prompt"], r[side]) for r in rows["preferences", "test"] for side in ("chosen", "rejected")]
    prompts, completions = zip(*answers, strict=True)
    scores = rewards.math_answer(prompts, completions, [str(value(p)) for p in prompts])
    assert scores == [world.gold_reward(p, c) for p, c in answers]
    assert 0.3 < sum(scores) / len(scores) < 0.7


# ------------------------------------------------------------------------------------------- the same at every call


def test_rows_are_the_same_at_every_call_whatever_the_global_seed(rows):
    state = random.getstate(), torch.get_rng_state()
    for number, (kind, split) in enumerate(reversed(rows)):
        random.seed(number)
        torch.manual_seed(number)
        before = random.getstate()
        assert world.rows(kind, split) == rows[kind, split]
        assert random.getstate() == before
    random.setstate(state[0])
    torch.set_rng_state(state[1])


def test_a_caller_that_changes_its_rows_changes_nobody_elses():
    first = world.rows("steps", "test")
    first[0]["labels"][0], first[0]["prompt"] = "changed", "changed"
    first.clear()
    assert world.rows("steps", "test")[0]["prompt"] != "changed"


@pytest.mark.parametrize(
    ("kind", "split", "name"), [("prompts", "validation", "validation"), ("answers", "train", "answers")]
)
def test_an_unknown_kind_or_split_is_refused_by_name(kind, split, name):
    with pytest.raises(ValueError, match=name):
        world.rows(kind, split)


# --------------------------------------------------------------------------------------------- tokenizer and model


@pytest.fixture(scope="module", params=["fresh", "saved"])
def tokenizer(request, tmp_path_factory):
    """The tokenizer, and what becomes of it in a checkpoint."""
    fresh = world.tokenizer()
    if request.param == "fresh":
        return fresh
    folder = tmp_path_factory.mktemp("tokenizer")
    fresh.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_the_tokenizer_round_trips_every_text(rows, tokenizer):
    texts = sorted({text for kind, split in rows for row in rows[kind, split] for text in texts_of(kind, row)})
    encoded = tokenizer(texts, add_special_tokens=False).input_ids
    assert not any(
        set(ids) & {tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id} for ids in encoded
    )
    assert all(len(ids) == len(text.replace("#### ", "#")) for ids, text in zip(encoded, texts, strict=True))
    decoded = [common.decode(tokenizer, [*ids, tokenizer.eos_token_id], [tokenizer.eos_token_id]) for ids in encoded]
    assert decoded == texts and len(texts) > 5000


def test_the_tokenizer_adds_nothing_and_keeps_prompt_and_answer_apart(tokenizer):
    assert tokenizer.bos_token_id is None and tokenizer.pad_token_id != tokenizer.eos_token_id
    prompt, answer = tokenizer("7+5=").input_ids, tokenizer("#### 12").input_ids
    assert tokenizer("7+5=#### 12").input_ids == prompt + answer and len(prompt) == 4 and len(answer) == 3
    assert tokenizer("7x").input_ids == [*tokenizer("7").input_ids, tokenizer.unk_token_id]


def test_a_fresh_model_depends_on_its_seed_alone_and_leaves_the_global_generator():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = world.model(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = world.model(1), world.model(2)
    weights = [model.state_dict() for model in (first, again, other)]
    assert all(torch.equal(w, weights[1][name]) for name, w in weights[0].items())
    assert any(not torch.equal(w, weights[2][name]) for name, w in weights[0].items())


def test_the_model_is_small_fits_its_tokenizer_and_stops_at_its_eos():
    model, tokenizer = world.model(1), world.tokenizer()
    assert 0.09e6 < sum(p.numel() for p in model.parameters()) < 0.13e6
    assert model.config.vocab_size == len(tokenizer)
    assert common.stop_ids(tokenizer, model) == [tokenizer.eos_token_id]
    ids = torch.tensor([tokenizer("7+5-3=").input_ids])
    common.check_logprobs(model.eval(), ids[0].tolist(), torch.float32, torch.device("cpu"))
    entropy = common.entropy_of(model(input_ids=ids).logits[0, -1])
    assert entropy > 0.8 * torch.tensor(len(tokenizer)).log()  # it knows nothing yet
