"""Flags, and mistakes of a user: exit code 2 and one sentence that names the flag or the row."""

import json
import os
from dataclasses import fields
from pathlib import Path

import pytest
import tiny_runs
from helpers import byte_tokenizer, tiny_model
from tiny_runs import grpo_args, write_rows

import common
import grpo
from toy import world

BOTH = pytest.mark.parametrize("script", ["sft", "grpo"])


def parse(script: str, *words: str):
    return common.parse_args(tiny_runs.SCRIPTS[script].Args, words)


def stopped(capsys, function, *args) -> tuple[int, str]:
    """(exit code, what was written) of a function that must end the program."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        function(*args)
    written = capsys.readouterr()
    return end.value.code, written.out + written.err


@pytest.fixture
def refusal(capsys, tmp_path):
    """The one sentence on stderr of a script that must end with exit code 2 before it writes anything."""

    def call(script: str, **changes) -> str:
        args = tiny_runs.arguments(script, tmp_path, **changes)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            tiny_runs.SCRIPTS[script].main(args)
        assert end.value.code == 2
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(said) == 1 and not (tmp_path / "run").exists()
        return said[0]

    return call


# ------------------------------------------------------------------------------------------------------------ flags


@BOTH
def test_help_lists_every_flag(script, capsys):
    code, text = stopped(capsys, parse, script, "--help")
    assert code == 0
    for field in fields(tiny_runs.SCRIPTS[script].Args):
        assert f"--{field.name.replace('_', '-')}" in text


@BOTH
@pytest.mark.parametrize(
    "words, named",
    [
        (["--learning-rat", "1"], "learning-rat"),
        (["--resume", "False"], "False"),
        (["--seed", "one"], "seed"),
        (["--seed"], "seed"),
        (["--dtype", "float16"], "dtype"),
        (["--lr-schedule", "triangle"], "lr-schedule"),
        (["--seed", "1", "--seed", "1"], "--seed"),
        (["--seed=1", "--seed", "2"], "--seed"),
        (["--run-dir", "a", "--run_dir", "b"], "--run-dir"),
        (["--resume", "--no-resume"], "--resume"),
        (["toy"], "toy"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2(script, capsys, words, named):
    code, text = stopped(capsys, parse, script, *words)
    assert code == 2 and named in text


def test_a_repeated_list_flag_is_refused_and_several_values_after_one_are_not(capsys):
    code, text = stopped(capsys, parse, "grpo", "--reward", "a.py:f", "--reward", "b.py:g")
    assert code == 2 and "--reward" in text
    assert parse("grpo", "--reward", "a.py:f=2", "b.py:g").reward == ["a.py:f=2", "b.py:g"]


@BOTH
def test_booleans_are_flag_and_no_flag(script):
    assert parse(script).resume is False
    assert parse(script, "--resume").resume is True
    assert parse(script, "--no-resume").resume is False
    assert parse(script, "--gradient-checkpointing", "--seed", "7") == tiny_runs.SCRIPTS[script].Args(
        gradient_checkpointing=True, seed=7
    )


# ------------------------------------------------------------------------------------------------------------- data


@BOTH
@pytest.mark.parametrize(
    "flag, value",
    [("prompt_column", "question"), ("answer_column", "solution")],
)
def test_an_unknown_column(refusal, script, flag, value):
    message = refusal(script, **{flag: value})
    assert f'--{flag.replace("_", "-")} "{value}"' in message
    assert all(name in message for name in ("prompt", "answer"))  # the columns that there are


@BOTH
@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
@pytest.mark.parametrize(
    "content, named",
    [(None, "missing.jsonl"), ("", "has no rows"), ('{"prompt": "1+1="}\n{"prompt"\n', "line 2"), ("[1]\n", "line 1")],
)
def test_a_dataset_that_cannot_be_read(refusal, tmp_path, script, flag, content, named):
    path = tmp_path / "missing.jsonl"
    if content is not None:
        path.write_text(content)
    message = refusal(script, **{flag: str(path)})
    assert named in message and str(path) in message


@BOTH
def test_an_unknown_split_of_the_toy_task(refusal, script):
    message = refusal(script, dataset="toy", dataset_split="dev")
    assert "dev" in message and "split" in message


@BOTH
@pytest.mark.parametrize("value", [None, 5.5, {}])
def test_a_prompt_that_is_no_text(refusal, tmp_path, script, value):
    rows = world.rows("demonstrations", "test")[:20]
    rows[6] = {**rows[6], "prompt": value}
    message = refusal(script, dataset=write_rows(tmp_path / "rows.jsonl", rows))
    assert "row 7" in message and "prompt" in message


@pytest.mark.parametrize(
    "script, column, value",
    [("sft", "completion", None), ("sft", "completion", 5.5), ("sft", "completion", {}), ("grpo", "answer", None)],
)
def test_a_response_or_answer_that_cannot_be_used(refusal, tmp_path, script, column, value):
    rows = world.rows("demonstrations", "test")[:20]
    rows[6] = {**rows[6], column: value}
    message = refusal(script, dataset=write_rows(tmp_path / "rows.jsonl", rows))
    assert "row 7" in message and column in message


def test_a_dataset_smaller_than_a_batch(refusal):
    message = refusal("sft", batch_size=21)
    assert "--batch-size 21" in message and "20" in message
    message = refusal("grpo", prompts_per_step=6)
    assert "--prompts-per-step 6" in message and "5" in message


def test_prompts_that_are_all_too_long(refusal):
    assert "--max-prompt-length 2" in refusal("grpo", max_prompt_length=2)
    assert "--max-length 2" in refusal("sft", max_length=2)


def test_longer_prompts_are_dropped_and_counted(tmp_path, capsys):
    rows = [{"prompt": p, "answer": "2"} for p in ("1+1=", "2+0=", "1+1+0+0+0=")]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    grpo.main(grpo_args(tmp_path, dataset=data, eval_dataset="", max_prompt_length=4, steps=1, group_size=2))
    assert "1 of 3 prompts dropped" in capsys.readouterr().out
    asked = {sample["prompt"] for sample in tiny_runs.lines(tmp_path / "run" / "samples.jsonl")}
    assert asked == {"1+1=", "2+0="}


def test_text_and_conversation_in_one_row(refusal, tmp_path):
    rows = [{"prompt": "1+1=", "completion": "2"}] * 8
    rows[2] = {"prompt": "1+1=", "completion": [{"role": "assistant", "content": "2"}]}
    assert "row 3" in refusal("sft", dataset=write_rows(tmp_path / "rows.jsonl", rows))


def test_messages_that_are_no_list(refusal, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 3
    rows[1] = {"messages": "a conversation"}
    message = refusal("sft", dataset=write_rows(tmp_path / "rows.jsonl", rows))
    assert "row 2" in message and "messages" in message


# ------------------------------------------------------------------------------------------------------------ model


@BOTH
def test_conversations_need_a_chat_template(refusal, tmp_path, script):
    chat = [{"role": "user", "content": "1+1="}]
    answer = [{"role": "assistant", "content": "2"}] if script == "sft" else "2"
    rows = [{"prompt": chat, tiny_runs.SCRIPTS[script].Args().answer_column: answer}] * 20
    assert "chat template" in refusal(script, dataset=write_rows(tmp_path / "rows.jsonl", rows))


def without_eos(path: Path) -> None:
    tokenizer = world.tokenizer()
    tokenizer.eos_token = None
    world.model(0).save_pretrained(path)
    tokenizer.save_pretrained(path)


def without_weights(path: Path) -> None:
    world.tokenizer().save_pretrained(path)


BAD_MODELS = {
    "no such directory": lambda path: None,  # noqa: ARG005
    "no tokenizer": lambda path: world.model(0).save_pretrained(path),
    "no weights": without_weights,
    "no EOS": without_eos,
}


@BOTH
@pytest.mark.parametrize("kind", BAD_MODELS)
def test_a_model_that_cannot_be_used(refusal, tmp_path, script, kind):
    path = tmp_path / "model"
    BAD_MODELS[kind](path)
    message = refusal(script, model=str(path))
    assert "--model" in message and str(path) in message
    assert ("EOS" in message) == (kind == "no EOS")


@BOTH
def test_a_model_without_a_pad_token_is_fine(tmp_path, script):
    tokenizer = byte_tokenizer(pad=None)
    model = tiny_runs.save(tiny_model(vocab_size=len(tokenizer)), tokenizer, tmp_path / "model")
    folder = tiny_runs.run(script, tmp_path, model=str(model), steps=1, eval_samples=0)
    assert len(tiny_runs.metrics(folder)) == 1


# ---------------------------------------------------------------------------------------------------------- rewards

REWARD_FILE = "one = 1\ndef good(prompts, completions, **columns):\n    return [0.0] * len(completions)\n"
BAD_REWARDS = {
    "no colon": ("stub.py", ["stub.py"]),
    "no file": ("elsewhere.py:good", ["elsewhere.py"]),
    "no function": ("stub.py:bad", ["bad"]),
    "not a function": ("stub.py:one", ["one"]),
    "does not import": ("broken.py:good", ["broken.py", "ZeroDivisionError"]),
    "syntax error": ("syntax.py:good", ["syntax.py", "SyntaxError"]),
    "a weight that is no number": ("stub.py:good=heavy", ["heavy"]),
    "a weight that is not finite": ("stub.py:good=nan", ["nan"]),
}


@pytest.fixture
def reward_files(tmp_path, monkeypatch):
    (tmp_path / "stub.py").write_text(REWARD_FILE)
    (tmp_path / "broken.py").write_text("1 / 0\n" + REWARD_FILE)
    (tmp_path / "syntax.py").write_text("def good(:\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("reward_files")
@pytest.mark.parametrize("kind", BAD_REWARDS)
def test_a_reward_that_cannot_be_used(refusal, kind):
    spec, named = BAD_REWARDS[kind]
    message = refusal("grpo", reward=[spec])
    assert "reward" in message and all(word in message for word in named)


@pytest.mark.usefixtures("reward_files")
def test_a_reward_function_named_twice(refusal):
    assert "good" in refusal("grpo", reward=["stub.py:good=1", "stub.py:good=2"])


def test_grpo_needs_some_reward(refusal):
    assert "--reward" in refusal("grpo", reward=[])


@BOTH
@pytest.mark.usefixtures("reward_files")
@pytest.mark.parametrize("spec", ["elsewhere.py:good", "stub.py:bad"])
def test_an_evaluation_reward_that_cannot_be_used(refusal, script, spec):
    assert spec in refusal(script, eval_reward=spec)


# ---------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "script, changes",
    [
        ("sft", {"batch_size": 0}),
        ("sft", {"steps": -1}),
        ("sft", {"steps": 0}),
        ("sft", {"epochs": -1.0, "steps": None}),
        ("grpo", {"steps": 0}),
        ("grpo", {"group_size": 1}),
        ("grpo", {"temperature": 0.0}),
        ("grpo", {"temperature": -1.0}),
        ("grpo", {"prompts_per_step": 3, "minibatches": 2}),
        ("grpo", {"prompts_per_step": 0}),
        ("grpo", {"minibatches": 0}),
        ("grpo", {"epochs_per_step": 0}),
        ("grpo", {"max_response_length": 0}),
        ("grpo", {"clip_low": -0.1}),
        ("grpo", {"kl_coef": -0.1}),
        ("sft", {"learning_rate": -1.0}),
        ("grpo", {"learning_rate": -1.0}),
        ("sft", {"max_grad_norm": 0.0}),
        ("sft", {"keep_checkpoints": 0}),
        ("grpo", {"keep_checkpoints": 0}),
        ("sft", {"save_every": -1}),
        ("sft", {"eval_samples": -1}),
        ("sft", {"max_response_length": 0}),
        ("sft", {"weight_decay": -1.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(f"{k}={v}" for k, v in value.items()),
)
def test_a_number_out_of_range(refusal, script, changes):
    flag = next(iter(changes)).replace("_", "-")
    assert f"--{flag}" in refusal(script, **changes)


def test_a_clip_range_that_reaches_zero_is_allowed(tmp_path):
    folder = tiny_runs.run("grpo", tmp_path, clip_low=1.0, steps=1, eval_samples=0)
    assert tiny_runs.metrics(folder)[0]["clip_ratio/low_mean"] == 0.0


# ---------------------------------------------------------------------------------------------------- run directory


@BOTH
def test_an_existing_run_directory_is_left_alone(script, tmp_path, capsys):
    args = tiny_runs.arguments(script, tmp_path, "mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    code, text = stopped(capsys, tiny_runs.SCRIPTS[script].main, args)
    assert code == 2 and "--run-dir" in text
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]


@BOTH
def test_resume_without_its_directory(refusal, script):
    assert "--run-dir" in refusal(script, run_dir="", resume=True)
    assert "--resume" in refusal(script, resume=True)


@BOTH
def test_resume_with_another_flag_names_it(script, tmp_path, capsys):
    tiny_runs.run(script, tmp_path, steps=1, eval_samples=0)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    args = tiny_runs.arguments(script, tmp_path, steps=1, eval_samples=0, weight_decay=0.1, resume=True)
    code, text = stopped(capsys, tiny_runs.SCRIPTS[script].main, args)
    assert code == 2 and "--weight-decay" in text and "0.1" in text
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert json.loads((tmp_path / "run" / "args.json").read_text())["weight_decay"] == 0.0
