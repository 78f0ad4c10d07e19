"""sft.py and grpo.py end to end on small settings, in this process."""

import json
import math
from pathlib import Path

import pytest
import tiny_runs
import torch
from helpers import byte_tokenizer, tiny_model
from tiny_runs import Watched, grpo_args, same_weights, sft_args, weights, write_rows
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
)

import common
import grpo
import sft
from toy import world

ONE_UPDATE = {"epochs_per_step": 1, "minibatches": 1}
QUIET = {"eval_prompts": 1, "eval_samples": 1}


def reward_file(folder: Path, source: str, name: str = "stub.py") -> str:
    path = folder / name
    path.write_text(source)
    return str(path)


def finite(metrics: list[dict]) -> bool:
    return all(math.isfinite(v) for line in metrics for v in line.values())


def trained_samples(folder: Path) -> list[dict]:
    """The samples of the rollouts in samples.jsonl, without those of evaluations."""
    return [sample for sample in tiny_runs.lines(folder / "samples.jsonl") if sample["split"] == "train"]


def loads_with_plain_transformers(folder: Path, policy: torch.nn.Module, dtype=torch.float32) -> None:
    """Assert that the final model is an ordinary, whole Hugging Face directory with the policy's own logits."""
    model, info = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not any(info.values()), info
    assert model.lm_head.weight is model.model.embed_tokens.weight  # still tied
    assert {p.dtype for p in model.parameters()} == {dtype}
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    text = "7+5-3=7+5=12;12-3=9\n#### 9"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids.tolist() == [world.tokenizer()(text).input_ids]
    assert tokenizer.eos_token_id == world.tokenizer().eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        assert torch.equal(model(ids).logits, policy.eval()(ids).logits)


# ------------------------------------------------------------------------------------------------------ whole runs


def test_sft_smoke(tmp_path):
    run = Watched("sft", sft_args(tmp_path))
    assert len(run.metrics) == 5 and len(run.gradients) == 5 and finite(run.metrics)
    for line in run.metrics:
        assert {"step", "loss", "grad_norm", "learning_rate", "entropy", "num_tokens", "skipped_updates"} <= line.keys()
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    start, end = world.model(seed=1), weights(run.run_dir)
    assert all(not torch.equal(end[name], p) for name, p in start.named_parameters())
    loads_with_plain_transformers(run.run_dir, run.policy)


def test_grpo_smoke(tmp_path):
    run = Watched("grpo", grpo_args(tmp_path))
    assert len(run.metrics) == 5 and len(run.gradients) == 5 * 4 and finite(run.metrics)
    for line in run.metrics:
        assert {
            "step", "loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std", "kl",
            "entropy", "approx_kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
            "completions/mean_length", "completions/clipped_ratio", "rewards/math_answer/mean",
            "sampler/logprob_gap", "skipped_updates",
        } <= line.keys()  # fmt: skip
    end = weights(run.run_dir)
    start = AutoModelForCausalLM.from_pretrained(tiny_runs.POLICY, dtype=torch.float32)
    assert all(not torch.equal(end[name], p) for name, p in start.named_parameters())
    assert all(torch.equal(run.reference_at_first[name], p) for name, p in start.named_parameters())
    assert all(torch.equal(run.reference_at_first[name], p) for name, p in run.reference.named_parameters())
    loads_with_plain_transformers(run.run_dir, run.policy)


@pytest.mark.parametrize("script", ["sft", "grpo"])
def test_bfloat16(tmp_path, script):
    run = Watched(script, tiny_runs.arguments(script, tmp_path, steps=2, dtype="bfloat16", save_every=2))
    assert finite(run.metrics) and {p.dtype for p in run.policy.parameters()} == {torch.float32}
    assert json.loads((run.run_dir / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    saved, master = weights(run.run_dir), {n: tiny_runs.full(p) for n, p in run.policy.named_parameters()}
    assert same_weights(saved, {name: weight.bfloat16() for name, weight in master.items()})  # a tied weight once
    model, info = AutoModelForCausalLM.from_pretrained(run.run_dir / "model", output_loading_info=True)
    assert not any(info.values()) and model.dtype == torch.bfloat16
    if script == "grpo":
        assert {p.dtype for p in run.reference.parameters()} == {torch.bfloat16}
        assert all(0 < line["sampler/logprob_gap"] < 0.1 for line in run.metrics)


@pytest.mark.parametrize("script", ["sft", "grpo"])
def test_gradient_checkpointing_changes_no_gradient(tmp_path, script):
    changes = {"steps": 2, **QUIET, **({} if script == "sft" else ONE_UPDATE)}
    plain = Watched(script, tiny_runs.arguments(script, tmp_path, "plain", **changes))
    saving = Watched(script, tiny_runs.arguments(script, tmp_path, "saving", gradient_checkpointing=True, **changes))
    assert saving.policy.is_gradient_checkpointing and not plain.policy.is_gradient_checkpointing
    assert saving.policy.training  # transformers recomputes in training mode only
    for name, gradient in plain.gradients[0].items():
        torch.testing.assert_close(saving.gradients[0][name], gradient, rtol=1e-5, atol=1e-7)
    assert saving.metrics[0]["grad_norm"] == pytest.approx(plain.metrics[0]["grad_norm"], rel=1e-5)
    assert saving.samples == plain.samples


@pytest.mark.parametrize("script", ["sft", "grpo"])
def test_the_cut_into_microbatches_changes_neither_gradient_nor_log(tmp_path, script):
    changes = {"steps": 1, **QUIET}
    whole = Watched(script, tiny_runs.arguments(script, tmp_path, "whole", **changes))
    cut = Watched(script, tiny_runs.arguments(script, tmp_path, "cut", microbatch_tokens=1, **changes))
    for name, gradient in whole.gradients[0].items():
        torch.testing.assert_close(cut.gradients[0][name], gradient, rtol=1e-4, atol=1e-6)
    if script == "sft":  # grpo's later updates of a step follow a whole Adam step, which amplifies rounding
        assert cut.metrics[0] == pytest.approx(whole.metrics[0], rel=1e-5, abs=1e-7)


def test_a_model_with_dropout_trains_without_it_and_keeps_it_in_its_config(tmp_path):
    """Dropout would make the policy differ from the sampler and from the reference, which has the same weights."""
    config = GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, initializer_range=0.3,
    )  # fmt: skip
    folder = tiny_runs.save(AutoModelForCausalLM.from_config(config), world.tokenizer(), tmp_path / "gpt2")
    changes = {"model": str(folder), "gradient_checkpointing": True, "steps": 2, **QUIET, **ONE_UPDATE}
    reward = reward_file(
        tmp_path, "def length(prompts, completions, **columns):\n    return list(map(len, completions))\n"
    )
    run = Watched("grpo", grpo_args(tmp_path, reward=[f"{reward}:length"], **changes))
    assert run.policy.training
    assert run.metrics[0]["kl"] == pytest.approx(0, abs=1e-5) and run.metrics[0]["sampler/logprob_gap"] < 1e-5
    config = json.loads((run.run_dir / "model" / "config.json").read_text())
    assert [config[k] for k in ("resid_pdrop", "embd_pdrop", "attn_pdrop")] == [0.5] * 3


# ------------------------------------------------------------------------------------------------------------- sft


@pytest.mark.parametrize(
    "schedule, warmup, expected",
    [
        ("linear", 0, [1 - k / 5 for k in range(5)]),
        ("constant", 0, [1.0] * 5),
        ("constant", 2, [1 / 3, 2 / 3, 1, 1, 1]),
        ("cosine", 1, [1 / 2, 1, *(0.5 + 0.5 * math.cos(math.pi * k / 4) for k in (1, 2, 3))]),
    ],
)
def test_the_logged_learning_rate_is_the_one_used(tmp_path, monkeypatch, schedule, warmup, expected):
    used, step = [], torch.optim.AdamW.step

    def watch(optimizer, *rest):
        used.extend(group["lr"] for group in optimizer.param_groups)
        return step(optimizer, *rest)

    monkeypatch.setattr(torch.optim.AdamW, "step", watch)
    args = {"lr_schedule": schedule, "warmup_steps": warmup, "learning_rate": 0.5, "steps": 5, "eval_samples": 0}
    logged = [line["learning_rate"] for line in tiny_runs.metrics(tiny_runs.run("sft", tmp_path, **args))]
    assert logged == used == pytest.approx([0.5 * x for x in expected])


def chat(tmp_path, template="eos", **changes) -> dict:
    """A saved model of bytes with a chat template: --model and settings for it."""
    tokenizer = byte_tokenizer(template=template)
    model = tiny_model(vocab_size=len(tokenizer), **changes)
    return {"model": str(tiny_runs.save(model, tokenizer, tmp_path / "chat")), "max_response_length": 4}


def say(user: str, assistant: str | None = None) -> list[dict]:
    turns = [{"role": "user", "content": user}]
    return turns if assistant is None else [*turns, {"role": "assistant", "content": assistant}]


@pytest.mark.parametrize("form", ["messages", "prompt and completion"])
def test_sft_on_conversations_trains_the_answers_alone(tmp_path, monkeypatch, form):
    rows = [{"messages": say("a", "xyz")}] * 4
    if form != "messages":
        rows = [{"prompt": say("a"), "completion": say("a", "xyz")[1:]}] * 4
    seen = []
    original = common.token_logprobs

    def watch(model, input_ids, attention_mask, response_mask, *rest, **named):
        seen.append((input_ids, response_mask))
        return original(model, input_ids, attention_mask, response_mask, *rest, **named)

    args = sft_args(
        tmp_path,
        dataset=write_rows(tmp_path / "chat.jsonl", rows),
        eval_dataset="",
        batch_size=2,
        steps=2,
        **chat(tmp_path),
    )
    monkeypatch.setattr(common, "token_logprobs", watch)
    sft.main(args)
    input_ids, mask = seen[-1]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    assert [tokenizer.decode(row[m]) for row, m in zip(input_ids, mask, strict=True)] == ["xyz<eos>"] * 2
    assert [tokenizer.decode(row[~m]) for row, m in zip(input_ids, mask, strict=True)] == ["<u>a</u><a>"] * 2


def test_sft_cuts_long_responses_drops_long_prompts_and_counts_both(tmp_path, capsys):
    rows = [{"prompt": "1+1=", "completion": "#### 2"}] * 3
    rows += [{"prompt": "1+1=", "completion": "1" * 40}] * 2 + [{"prompt": "1+" * 20 + "1=", "completion": "#### 21"}]
    data = write_rows(tmp_path / "long.jsonl", rows)
    run = Watched("sft", sft_args(tmp_path, dataset=data, eval_dataset="", batch_size=5, steps=2, max_length=10))
    said = capsys.readouterr().out
    assert "3 longer than --max-length 10" in said and "1 of 6 dropped" in said
    assert run.metrics[0]["num_tokens"] == 3 * 3 + 2 * 6  # `#### `, `2`, EOS; what is left of the limit, without EOS


def test_sft_weighs_every_token_of_a_minibatch_alike(tmp_path):
    """The loss of a step is the token mean over its rows, whatever the micro-batches: a mean of means would differ."""
    rows = [{"prompt": "1+1=", "completion": c} for c in ("#### 2", "1+1=2\n#### 2", "#### 3", "1+1=2;2+0=2\n#### 2")]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    args = sft_args(tmp_path, dataset=data, eval_dataset="", batch_size=4, steps=2, microbatch_tokens=1, warmup_steps=0)
    run = Watched("sft", args)
    model, tokenizer = world.model(seed=1), world.tokenizer()
    total, count = 0.0, 0
    for row in rows:
        prompt, response = (
            tokenizer(row["prompt"]).input_ids,
            [*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id],
        )
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            logprobs = model(ids).logits[0].log_softmax(-1)
        total -= sum(logprobs[len(prompt) + i - 1, token].item() for i, token in enumerate(response))
        count += len(response)
    assert run.metrics[0]["loss"] == pytest.approx(total / count, rel=1e-5)
    assert run.metrics[0]["num_tokens"] == count


# ------------------------------------------------------------------------------------------------------------ grpo


def test_grpo_without_kl_loads_no_reference(tmp_path):
    run = Watched("grpo", grpo_args(tmp_path, kl_coef=0.0, steps=2, **QUIET))
    assert run.policy is not None and run.reference is None
    assert finite(run.metrics) and all("kl" not in line for line in run.metrics)


def test_the_first_update_has_ratio_one_and_the_second_differs(tmp_path):
    ratio = ("approx_kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    once = Watched("grpo", grpo_args(tmp_path, "once", steps=2, **ONE_UPDATE, **QUIET))
    assert all(line[name] == 0.0 for line in once.metrics for name in ratio)
    settings = {"epochs_per_step": 2, "minibatches": 1, "learning_rate": 1e-3, **QUIET}
    twice = Watched("grpo", grpo_args(tmp_path, "twice", steps=2, **settings))
    assert all(line["approx_kl"] > 1e-4 and line["clip_ratio/region_mean"] > 0 for line in twice.metrics)
    for name, gradient in once.gradients[0].items():
        torch.testing.assert_close(twice.gradients[0][name], gradient, rtol=1e-4, atol=1e-6)
    assert all(not torch.equal(twice.gradients[1][name], g) for name, g in twice.gradients[0].items())


def test_the_first_update_does_not_read_the_recomputed_log_probs(tmp_path, monkeypatch):
    """They are put wrong here: the first update stays as it is, and the second, which needs them, changes."""
    settings = {"epochs_per_step": 2, "minibatches": 1, "kl_coef": 0.0, "steps": 1, **QUIET}
    right = Watched("grpo", grpo_args(tmp_path, "right", **settings))
    original = common.batched_logprobs
    monkeypatch.setattr(common, "batched_logprobs", lambda *args, **named: original(*args, **named) - 0.3)
    wrong = Watched("grpo", grpo_args(tmp_path, "wrong", **settings))
    assert same_weights(wrong.gradients[0], right.gradients[0])
    assert not same_weights(wrong.gradients[1], right.gradients[1])


CONSTANT = """
def one(prompts, completions, **columns):
    return [1] * len(completions)
def also_one(prompts, completions, **columns):
    return [True] * len(completions)
"""


def test_the_logged_reward_is_the_weighted_sum(tmp_path):
    file = reward_file(tmp_path, CONSTANT)
    run = Watched("grpo", grpo_args(tmp_path, reward=[f"{file}:one=0.2", f"{file}:also_one=2"], steps=2, **QUIET))
    for line in run.metrics:
        assert line["reward"] == pytest.approx(2.2) and line["reward_std"] == pytest.approx(0, abs=1e-12)
        assert line["rewards/one/mean"] == line["rewards/also_one/mean"] == 1.0
    assert [sample["reward"] for sample in trained_samples(run.run_dir)] == [pytest.approx(2.2)] * 8


def test_equal_rewards_give_no_gradient(tmp_path):
    file = reward_file(tmp_path, CONSTANT)
    run = Watched("grpo", grpo_args(tmp_path, reward=[f"{file}:one"], kl_coef=0.0, steps=2, **QUIET))
    assert [line["frac_reward_zero_std"] for line in run.metrics] == [1.0, 1.0]
    assert [line["grad_norm"] for line in run.metrics] == [0.0, 0.0]
    assert all(not g.any() for update in run.gradients for g in update.values())


def test_the_logged_reward_statistics_are_those_of_the_samples(tmp_path):
    source = "def length(prompts, completions, **columns):\n    return [len(c) / 10 for c in completions]\n"
    file = reward_file(tmp_path, source)
    run = Watched("grpo", grpo_args(tmp_path, reward=[f"{file}:length"], steps=2, max_response_length=8, **QUIET))
    tokenizer = world.tokenizer()
    for step, line in enumerate(run.metrics, 1):
        groups = [run.samples[key] for key in sorted(run.samples) if key[0] == f"train/{step}/0"]
        assert [len(group) for group in groups] == [4, 4]
        rewards = torch.tensor(
            [[len(tokenizer.decode(ids, skip_special_tokens=True)) / 10 for ids in group] for group in groups]
        ).double()
        lengths = [len(ids) for group in groups for ids in group]
        cut = [ids[-1] != tokenizer.eos_token_id for group in groups for ids in group]
        assert line["reward"] == line["rewards/length/mean"] == pytest.approx(rewards.mean().item())
        assert line["reward_std"] == pytest.approx(rewards.std(correction=0).item())
        assert line["frac_reward_zero_std"] == (rewards.std(1) == 0).double().mean().item()
        assert line["completions/mean_length"] == pytest.approx(sum(lengths) / 8)
        assert line["completions/clipped_ratio"] == sum(cut) / 8 and 0 < sum(cut) < 8


def test_a_reward_file_is_executed_at_start_and_not_at_every_evaluation(tmp_path):
    source = f"with open({str(tmp_path / 'loaded.txt')!r}, 'a') as file:\n    file.write('once ')\n{CONSTANT}"
    file = reward_file(tmp_path, source)
    settings = {"reward": [f"{file}:one"], "eval_reward": f"{file}:also_one", "eval_every": 1, "steps": 3}
    tiny_runs.run("grpo", tmp_path, **settings)
    assert (tmp_path / "loaded.txt").read_text() in ("once ", "once once ")  # at most once a flag


SOMETIMES = """
calls = 0
def some(prompts, completions, **columns):  # one of each group of four is not scored
    return [None if i % 4 == 1 else float(i % 2 + i // 4) for i in range(len(completions))]
def none(prompts, completions, **columns):
    return [None] * len(completions)
"""


def test_an_unscored_sample_is_not_trained_on(tmp_path):
    file = reward_file(tmp_path, SOMETIMES)
    run = Watched("grpo", grpo_args(tmp_path, reward=[f"{file}:some"], steps=2, **QUIET))
    assert finite(run.metrics)
    assert [line["reward"] for line in run.metrics] == [pytest.approx((0 + 0 + 1 + 1 + 1 + 2) / 6)] * 2
    logged = [sample["reward"] for sample in trained_samples(run.run_dir)]
    assert logged == [0.0, None, 0.0, 1.0] * 2  # strictly JSON: null, not NaN


def test_a_run_in_which_nothing_is_scored_ends(tmp_path, capsys):
    file = reward_file(tmp_path, SOMETIMES)
    with pytest.raises(SystemExit) as end:
        tiny_runs.run("grpo", tmp_path, reward=[f"{file}:none"], steps=2, **QUIET)
    assert end.value.code == 2 and "no answer was scored" in capsys.readouterr().err


def test_one_of_two_functions_scores_nothing(tmp_path):
    file = reward_file(tmp_path, SOMETIMES)
    folder = tiny_runs.run("grpo", tmp_path, reward=[f"{file}:none=5", f"{file}:some=2"], steps=2, **QUIET)
    assert [line["reward"] for line in tiny_runs.metrics(folder)] == [pytest.approx(2 * 5 / 6)] * 2


@pytest.mark.parametrize(
    "body, wanted",
    [
        ("raise ZeroDivisionError('on purpose')", "ZeroDivisionError: on purpose"),
        ("return [1.0] * (len(completions) - 1)", "7 values for 8 samples"),
        ("return ['good'] * len(completions)", "ValueError"),
        ("return None", "TypeError"),
    ],
)
def test_a_broken_reward_function_stops_the_run_and_is_named(tmp_path, body, wanted):
    file = reward_file(tmp_path, f"def broken(prompts, completions, **columns):\n    {body}\n")
    with pytest.raises(RuntimeError, match='"broken"') as stopped:
        grpo.main(grpo_args(tmp_path, reward=[f"{file}:broken"], steps=2, eval_samples=0))
    assert wanted in str(stopped.value)


INDEX = """
def index(prompts, completions, **columns):
    return [i % 3 for i in range(len(completions))]
"""


def test_when_every_answer_is_truncated_and_masked_nothing_is_trained(tmp_path):
    """One token is too little for any answer; without --mask-truncated the same run trains."""
    reward = [f"{reward_file(tmp_path, INDEX)}:index"]
    settings = {"reward": reward, "max_response_length": 1, "steps": 2, **QUIET}
    masked = Watched("grpo", grpo_args(tmp_path, "masked", mask_truncated=True, **settings))
    assert finite(masked.metrics)
    assert [line["completions/clipped_ratio"] for line in masked.metrics] == [1.0, 1.0]
    assert [(line["loss"], line["grad_norm"]) for line in masked.metrics] == [(0.0, 0.0)] * 2
    start = AutoModelForCausalLM.from_pretrained(tiny_runs.POLICY, dtype=torch.float32)
    assert all(torch.equal(weights(masked.run_dir)[name], p) for name, p in start.named_parameters())
    plain = Watched("grpo", grpo_args(tmp_path, "plain", **settings))
    assert all(line["grad_norm"] > 0 for line in plain.metrics)


def test_masked_answers_still_count_in_their_group(tmp_path):
    """Some answers are cut at 8 tokens: the reward statistics are those of the plain run, the gradient is not."""
    settings = {"reward": [f"{reward_file(tmp_path, INDEX)}:index"], "max_response_length": 8, "steps": 1}
    masked = Watched("grpo", grpo_args(tmp_path, "masked", mask_truncated=True, **settings, **ONE_UPDATE, **QUIET))
    plain = Watched("grpo", grpo_args(tmp_path, "plain", **settings, **ONE_UPDATE, **QUIET))
    ours, theirs = masked.metrics[0], plain.metrics[0]
    assert 0 < theirs["completions/clipped_ratio"] < 1
    same = ("reward", "reward_std", "completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std")
    assert [ours[name] for name in same] == [theirs[name] for name in same]
    assert ours["grad_norm"] != pytest.approx(theirs["grad_norm"], rel=1e-2)


ECHO = """
def paired(prompts, completions, answer, k, **columns):
    rows = zip(prompts, completions, answer, k, strict=True)
    return [float(prompt.split("+")[0] == completion == gold == str(i)) for prompt, completion, gold, i in rows]
"""


def test_prompts_answers_and_columns_stay_together(tmp_path, monkeypatch):
    """A stub that echoes the prompt's number gets the full reward only if every row's parts stay one row's."""
    tokenizer = world.tokenizer()

    def echo(self, prompt_ids, n, *_, **__):
        plus = tokenizer.convert_tokens_to_ids("+")
        rows = [[*ids[: ids.index(plus)], tokenizer.eos_token_id] for ids in prompt_ids for _ in range(n)]
        lengths = torch.tensor([len(row) for row in rows])
        ids = common.pad(rows, self.pad_id, torch.device("cpu"))
        return ids, lengths, torch.ones(len(rows), dtype=torch.bool), torch.zeros(ids.shape)

    monkeypatch.setattr(common.HFSampler, "generate", echo)
    monkeypatch.setattr(common, "MAX_SAMPLER_GAP", math.inf)  # the stub's log-probs are made up
    rows = [{"prompt": f"{k}+0=", "gold": str(k), "k": k} for k in (3, 14, 159, 2, 65, 358, 9, 79, 323, 8)]
    settings = {"dataset": write_rows(tmp_path / "echo.jsonl", rows), "eval_dataset": "", "answer_column": "gold"}
    settings |= {"reward": [f"{reward_file(tmp_path, ECHO)}:paired"], "prompts_per_step": 4, "microbatch_tokens": 20}
    folder = tiny_runs.run("grpo", tmp_path, steps=4, **settings, **ONE_UPDATE)
    assert [line["reward"] for line in tiny_runs.metrics(folder)] == [1.0] * 4
    echoed = {(s["prompt"], s["completion"]) for s in trained_samples(folder)}
    assert echoed <= {(row["prompt"], row["gold"]) for row in rows}


def test_the_answer_with_the_higher_reward_becomes_more_likely(tmp_path):
    """The reward is for guessing (short answers); after some steps answers are shorter than before."""
    source = "def short(prompts, completions, **columns):\n    return [-len(c) for c in completions]\n"
    settings = {
        "reward": [f"{reward_file(tmp_path, source)}:short"],
        "group_size": 8,
        "steps": 8,
        "learning_rate": 3e-4,
    }
    folder = tiny_runs.run("grpo", tmp_path, **settings, kl_coef=0.0, eval_samples=8)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["after"]["eval/mean_length"] < 0.75 * summary["before"]["eval/mean_length"]


def test_conversations(tmp_path):
    source = """
def chat(prompts, completions, answer, **columns):
    assert all(p == [{"role": "user", "content": a}] for p, a in zip(prompts, answer, strict=True))
    assert all(len(c) == 1 and c[0].keys() == {"role", "content"} and c[0]["role"] == "assistant" for c in completions)
    return [len(c[0]["content"]) for c in completions]
"""
    rows = [{"prompt": say(str(k)), "answer": str(k)} for k in range(4)]
    settings = {"dataset": write_rows(tmp_path / "chat.jsonl", rows), "eval_dataset": "", "steps": 2, **chat(tmp_path)}
    run = Watched("grpo", grpo_args(tmp_path, reward=[f"{reward_file(tmp_path, source)}:chat"], **settings))
    assert finite(run.metrics) and run.metrics[0]["sampler/logprob_gap"] < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(run.run_dir / "model")
    assert tokenizer.chat_template == byte_tokenizer(template="eos").chat_template
    samples = trained_samples(run.run_dir)
    assert all(s["prompt"] in [row["prompt"] for row in rows] and isinstance(s["completion"], str) for s in samples)


@pytest.mark.parametrize("script", ["sft", "grpo"])
def test_a_dataset_like_gsm8k_from_the_command_line(tmp_path, script):
    """Columns `question` and `answer`, the answer a solution that ends in `#### 12`."""
    rows = [{"question": world.prompt(p), "answer": world.shown(p)} for p in world.problems("test")[:16]]
    data = write_rows(tmp_path / "gsm8k.jsonl", rows)
    columns = ["--dataset", data, "--eval-dataset", data, "--prompt-column", "question", "--answer-column", "answer"]
    own = {"sft": ["--batch-size", "4"], "grpo": ["--prompts-per-step", "4", "--group-size", "8"]}[script]
    more = ["--steps", "2", "--run-dir", str(tmp_path / "run"), "--eval-prompts", "4", *own]
    module = tiny_runs.SCRIPTS[script]
    module.main(common.parse_args(module.Args, [*columns, *more]))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    if script == "grpo":  # the shipped policy is right now and then, and the reward function reads `#### 12`
        assert 0 < summary["before"]["eval/sampled_accuracy"] < 1
        assert all(0 < line["reward"] < 1 for line in tiny_runs.metrics(tmp_path / "run"))
    else:
        assert summary["after"]["eval/loss"] < summary["before"]["eval/loss"]
        assert summary["before"].keys() >= {"eval/sampled_accuracy", "eval/greedy_accuracy"}


# --------------------------------------------------------------------------------------------------- reward models


def test_a_reward_model_scores_the_last_token_of_each_answer(tmp_path):
    path = tiny_runs.toy_reward_model(tmp_path / "judge")
    run = Watched(
        "grpo", grpo_args(tmp_path, reward=[], reward_model=[str(path)], steps=2, microbatch_tokens=60, **QUIET)
    )
    assert finite(run.metrics)
    model = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    for step, line in enumerate(run.metrics, 1):
        samples = [sample for sample in trained_samples(run.run_dir) if sample["step"] == step]
        assert line["completions/clipped_ratio"] == 0.0  # so that every answer ends in the EOS
        for sample in samples:
            ids = [*tokenizer(sample["prompt"] + sample["completion"]).input_ids, tokenizer.eos_token_id]
            with torch.no_grad():
                score = model(torch.tensor([ids])).logits.item()
            assert sample["reward"] == pytest.approx(score, abs=1e-5)
        assert line["reward"] == pytest.approx(line["rewards/reward_model/mean"])
        assert line["reward_std"] > 0.01


def test_reward_models_and_functions_add_up(tmp_path):
    path = tiny_runs.toy_reward_model(tmp_path / "judge")
    file = reward_file(tmp_path, CONSTANT)
    run = Watched("grpo", grpo_args(tmp_path, reward=[f"{file}:one=3"], reward_model=[str(path)], steps=2, **QUIET))
    for line in run.metrics:
        assert line["reward"] == pytest.approx(3 + line["rewards/reward_model/mean"])


def other_tokenizer(path: Path) -> Path:
    tiny_runs.toy_reward_model(path)
    byte_tokenizer().save_pretrained(path)
    return path


BAD_REWARD_MODELS = {
    "two labels": lambda path: tiny_runs.toy_reward_model(path, num_labels=2),
    "another tokenizer": other_tokenizer,
    "no such directory": lambda path: path / "missing",
    "pad is a stop id": lambda path: tiny_runs.toy_reward_model(path, pad_token_id=world.tokenizer().eos_token_id),
}


@pytest.mark.parametrize("kind", BAD_REWARD_MODELS)
def test_an_unfit_reward_model_is_refused(tmp_path, kind, capsys):
    path = BAD_REWARD_MODELS[kind](tmp_path / "reward")
    with pytest.raises(SystemExit) as stopped:
        grpo.main(grpo_args(tmp_path, reward_model=[str(path)], steps=1, eval_samples=0))
    assert stopped.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: --reward-model") and str(path) in message
    assert not (tmp_path / "run").exists()


def test_two_rewards_of_one_name_are_refused(tmp_path, capsys):
    path = tiny_runs.toy_reward_model(tmp_path / "judge")
    file = reward_file(tmp_path, CONSTANT.replace("also_one", "reward_model"))
    for changes in ({"reward_model": [str(path)], "reward": [f"{file}:reward_model"]}, {"reward": [f"{file}:one"] * 2}):
        with pytest.raises(SystemExit) as stopped:
            grpo.main(grpo_args(tmp_path, steps=1, eval_samples=0, **changes))
        assert stopped.value.code == 2 and "reward" in capsys.readouterr().err
