"""Two processes over gloo against one: the same gradients, logs, samples and files, however the work is cut."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import distributed_worker as worker
import pytest
import tiny_runs
import torch
from safetensors.torch import load_file
from tiny_runs import same_weights, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
from toy import world

RANKS = 2
LIMIT = 900.0  # seconds; only a hang takes as long, on any machine
STUB = """
import os, pathlib, time

def digits(prompts, completions, **columns):
    return [float(sum(map(int, filter(str.isdigit, c))) % 3) for c in completions]

def paired(prompts, completions, answer, k, **columns):
    rows = zip(prompts, completions, answer, k, strict=True)
    return [float(prompt.split("+")[0] == completion == gold == str(i)) for prompt, completion, gold, i in rows]

def broken_on_rank_1(prompts, completions, **columns):
    if os.environ["RANK"] == "1":
        pathlib.Path(__file__).with_name("failed_at.txt").write_text(str(time.time()))
        raise ZeroDivisionError("on purpose")
    return [0.0] * len(completions)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the checks read: a reward file, a reward model, a reference, and a run that one process left unfinished."""
    path = tmp_path_factory.mktemp("two")
    common.setup(1)
    (path / "stub.py").write_text(STUB)
    tiny_runs.toy_reward_model(path / "reward")
    tiny_runs.shifted_policy(path / "reference")
    tiny_runs.grpo_args(path)  # writes its rows: no rank may write while another reads
    settings, dies_at = worker.RESUMED["sft"], worker.MIDDLE_OF_STEP_3["sft"]
    tiny_runs.run("sft", path, "sft-whole-by-one", **settings)
    tiny_runs.interrupted("sft", path, "sft-cut-by-one", dies_at, **settings)
    return path


@pytest.fixture(scope="module")
def job(folder) -> dict:
    """The job of two processes, ended: exit code, standard error, time of the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    running = subprocess.Popen(
        [*command, str(Path(worker.__file__)), str(folder)], env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        _, said = running.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        running.terminate()  # which ends its processes too
        raise AssertionError(f"the job hangs: {running.communicate()[1][-3000:]}") from None
    return {"code": running.returncode, "said": said, "ended": time.time()}


@pytest.fixture(scope="module")
def two(folder, job):
    """Name of a check -> its values on rank 0 and rank 1."""

    def values(name: str) -> list:
        paths = [folder / f"{name}_{rank}.pt" for rank in range(RANKS)]
        assert all(path.exists() for path in paths), job["said"][-3000:]
        return [torch.load(path, weights_only=False) for path in paths]

    return values


# ------------------------------------------------------------------------------------------------------ reductions


def test_an_error_on_one_rank_ends_the_job_with_its_message(two, job, folder):
    """Rank 1 fails in the last check, while rank 0 is in a collective; all checks before it are through."""
    assert all(two(check.__name__) for check in worker.CHECKS[:-1])
    assert job["code"] != 0 and job["ended"] - float((folder / "failed_at.txt").read_text()) < 60
    assert 'reward function "broken_on_rank_1" failed: ZeroDivisionError: on purpose' in job["said"]
    assert not (folder / "failed" / "model").exists()


def test_metrics_are_one_sum_over_one_count(two):
    assert two("metrics") == [{"entropy": 7 / 4, "kl": 3.0, "loss": 3.0}] * RANKS


def test_shares_come_back_in_global_order(two):
    for rank, found in enumerate(two("shares")):
        assert found["own"] == list(range(rank, 12, RANKS))
        assert found["gathered"] == list(range(12))
        assert found["groups"] == [[10 * i + g, -i] for i in range(4) for g in range(3)]
        assert found["sum"] == [4.0, 4.0] and found["max"] == -1.0


def test_whitening_is_over_the_tokens_of_all_ranks(two):
    values, mask = worker.wide_values()
    kept = values[mask].double()
    expected = torch.where(mask, (values - kept.mean()) / torch.sqrt(kept.var(correction=1) + 1e-8), 0.0)
    for rank, (found, alike) in enumerate(two("whitened")):
        torch.testing.assert_close(found, expected[rank::RANKS, : found.shape[1]].float(), rtol=1e-5, atol=1e-6)
        assert not alike.any()


def test_all_ranks_cut_as_many_microbatches(two):
    lengths = ([worker.LENGTHS[0], [7, 3, 3, 9, 1, 5]], [worker.LENGTHS[1], [2, 2, 2, 2, 2, 60]])
    cuts = two("microbatches")
    for i, most in enumerate((100, 12)):
        assert len({len(cuts[rank][i]) for rank in range(RANKS)}) == 1
        for rank in range(RANKS):
            cut, row_lengths = cuts[rank][i], lengths[rank][i]
            assert sorted(sum(cut, [])) == list(range(len(row_lengths))) and all(cut)  # noqa: RUF017
            assert all(len(c) == 1 or len(c) * max(row_lengths[k] for k in c) <= most for c in cut)
    assert len(cuts[1][0]) == 5  # the short rows would have fitted into one


def test_on_main_runs_on_rank_0_and_tells_all(two):
    first, second = two("on_main")
    assert first == {"result": {"from": 0, "got": 5}, "ran": [0], "code": 2}
    assert second == {"result": {"from": 0, "got": 5}, "ran": [], "code": 2}


def test_the_gradient_norm_is_that_of_all_shards(two):
    first, second = two("clipped")
    assert first[0] == pytest.approx((5.0, 0.6)) and second[0] == pytest.approx((5.0, 0.8))
    assert (first[1], second[1]) == ((5.0, 3.0), (5.0, 4.0))  # below the limit: untouched
    for (norm, gradient), kept in ((first[2], math.inf), (second[2], 4.0)):
        assert norm == math.inf and gradient == kept
    assert math.isnan(first[3][0]) and math.isnan(second[3][0]) and first[3][1] == 3.0


def test_a_batch_that_the_ranks_do_not_divide_is_refused(two):
    (sft_code, sft_said), (grpo_code, grpo_said) = two("refusals")[0].values()
    assert sft_code == grpo_code == 2
    assert "--batch-size 7" in sft_said and "--prompts-per-step 3" in grpo_said
    assert [code for code, _ in two("refusals")[1].values()] == [2, 2]


# ---------------------------------------------------------------------------------------------------------- models


def test_the_sampler_gets_the_weights_of_a_sharded_policy(two):
    model = AutoModelForCausalLM.from_pretrained(tiny_runs.POLICY, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    for found in two("sampler"):
        assert found["sharded"] and found["stale"] == found["before"] != found["after"]
        assert same_weights(found["pushed"], found["policy"])
        assert same_weights(found["pushed"], dict(model.named_parameters()))
    for text, answer in zip(("7+5-3=", "1+1=", "9-4="), two("sampler")[0]["after"], strict=True):
        ids = world.tokenizer()(text).input_ids
        for token in answer:
            with torch.no_grad():
                assert model(torch.tensor([ids])).logits[0, -1].argmax() == token
            ids = [*ids, token]


def test_a_model_saved_by_two_ranks_is_an_ordinary_one(two, folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder / "saved", output_loading_info=True)
    assert not any(info.values()) and model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(folder / "saved" / "model.safetensors")  # the tied weight once
    assert len(AutoTokenizer.from_pretrained(folder / "saved")) == len(world.tokenizer())
    for whole in two("saved"):
        assert same_weights(dict(model.named_parameters()), whole)


# ----------------------------------------------------------------------------------------------- gradients and logs


@pytest.fixture(scope="module")
def one(folder):
    """The same first steps on one rank."""
    return {script: worker.first_step(script, folder, f"one-{script}", {}) for script in ("sft", "grpo")}


def close(found: dict, expected: dict) -> bool:
    """Equal keys, and values equal to 1e-5 max(1, |x|)."""
    return found.keys() == expected.keys() and all(
        abs(found[k] - expected[k]) <= 1e-5 * max(1.0, abs(expected[k])) for k in expected
    )


@pytest.mark.parametrize("cut", worker.CUTS)
@pytest.mark.parametrize("script", ["sft", "grpo"])
def test_gradients_logs_and_samples_do_not_depend_on_the_cut(two, one, script, cut):
    expected = one[script]
    per_rank = [steps[f"{script}, {cut}"] for steps in two("first_steps")]
    assert len(expected["gradients"]) == (4 if script == "grpo" else 1)
    for found in per_rank:
        for update, reference in zip(found["gradients"], expected["gradients"], strict=True):
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in reference.values()))
            assert norm > 1e-3
            for name, gradient in reference.items():
                assert (update[name] - gradient).abs().max() <= 1e-5 * norm, name
        (line,), (wanted,) = found["metrics"], expected["metrics"]
        assert close(line, wanted)
        if "eval_samples" not in worker.CUTS[cut]:
            summary, wanted = json.loads(found["summary"]), json.loads(expected["summary"])
            assert close(summary["before"], wanted["before"]) and close(summary["after"], wanted["after"])
    samples = per_rank[0]["samples"] | per_rank[1]["samples"]
    assert samples == {key: value for key, value in expected["samples"].items() if key in samples}
    assert {key for key in expected["samples"] if key[0] == "train/1"} <= samples.keys()
    assert per_rank[0]["samples"].keys().isdisjoint(per_rank[1]["samples"])


def test_the_compared_steps_leave_nothing_out(one):
    """The comparison above means something only if the step has cut answers, a KL and spread rewards."""
    (line,) = one["grpo"]["metrics"]
    assert 0 < line["completions/clipped_ratio"] < 1 and abs(line["kl"]) > 1e-3 and line["reward_std"] > 0.1
    assert line["frac_reward_zero_std"] < 1
    lengths = {len(ids) for rows in one["grpo"]["samples"].values() for ids in rows}
    assert len(lengths) > 2


def test_a_gradient_that_is_bad_on_one_rank_is_skipped_on_all(two):
    for found in two("one_bad_rank"):
        steps = [json.loads(line) for line in found["logged"].splitlines()]
        assert [step["skipped_updates"] for step in steps] == [1.0, 0.0] and found["finite"]


def test_prompts_answers_and_columns_stay_together_on_each_rank(two):
    assert two("paired") == [{"rewards": [1.0] * 2}] * RANKS


def test_fewer_held_out_rows_than_ranks(two, folder):
    alone = {
        script: tiny_runs.run(script, folder, f"{script}-few-one", **settings)
        for script, settings in worker.ONE.items()
    }
    for found in two("few_held_out_rows"):
        for script, summary in found.items():
            expected = json.loads((alone[script] / "summary.json").read_text())
            assert close(json.loads(summary)["before"], expected["before"]) and expected["before"]


def test_bfloat16_on_two_ranks(two, folder):
    for found in two("bfloat16"):
        assert all(math.isfinite(v) for line in found["metrics"] for v in line.values())
        assert all(0 < line["sampler/logprob_gap"] < 0.1 for line in found["metrics"])
    model, info = AutoModelForCausalLM.from_pretrained(folder / "bfloat16" / "model", output_loading_info=True)
    assert not any(info.values()) and model.dtype == torch.bfloat16


# ---------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("script", ["sft", "grpo"])
def test_two_ranks_resume_bit_for_bit(two, folder, script):
    two("resumed")
    tiny_runs.same_run(folder / f"{script}-cut", folder / f"{script}-whole")
    files = {f.name for f in (folder / f"{script}-cut" / "checkpoints" / "step_2").iterdir()}
    assert {"rng_0.pt", "rng_1.pt"} <= files


def resumed_like(folder: Path, whole: Path) -> None:
    """The step after the checkpoint is the uninterrupted run's, up to the rounding that another cut makes."""
    a, b = tiny_runs.metrics(folder), tiny_runs.metrics(whole)
    assert len(a) == len(b) == 3 and a[:2] == b[:2]
    assert a[2].keys() == b[2].keys() and a[2] == pytest.approx(b[2], rel=1e-3, abs=1e-5)
    ours, theirs = weights(folder), weights(whole)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-3) for name in ours.keys() & theirs.keys())


@pytest.mark.parametrize("script", ["sft", "grpo"])
def test_one_rank_goes_on_with_the_checkpoint_of_two(two, folder, script):
    two("resumed")
    run = tiny_runs.run(script, folder, f"{script}-cut-by-two", **worker.RESUMED[script], resume=True)
    resumed_like(run, folder / f"{script}-whole")


def test_two_ranks_go_on_with_the_checkpoint_of_one(two, folder):
    two("resumed_from_one_rank")
    resumed_like(folder / "sft-cut-by-one", folder / "sft-whole-by-one")
