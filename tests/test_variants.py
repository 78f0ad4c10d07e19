"""Every variant of grpo.py and every baseline of rloo_remax.py in runs of a step or two, in this process."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import tiny_runs
import torch
from tiny_runs import same_run, weights, write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import common
import grpo
import rloo_remax
from toy import world

BASELINES = ["rloo", "remax", "reinforce++", "mean", "none"]
METHODS = [*grpo.VARIANTS, *BASELINES]
PROMPTS = world.rows("prompts", "test")[:6]

STUBS = """
calls = []

def turns(prompts, completions, **columns):  # spread in every group
    return [float(i % 3) for i in range(len(completions))]

def one(prompts, completions, **columns):
    return [1.0] * len(completions)

def length(prompts, completions, completion_length, **columns):
    return [n / 10 for n in completion_length]

def by_row(prompts, completions, flat, **columns):  # some prompts give no spread
    return [1.0 if f else float(i % 2) for i, f in enumerate(flat)]

def once(prompts, completions, **columns):  # only the first group ever drawn has spread
    calls.append(len(completions))
    return [float(len(calls) == 1 and i < 4 and i % 2) for i in range(len(completions))]

def only_sampled(prompts, completions, **columns):  # 8 sampled answers a step, 2 greedy ones
    return [float(len(completions) > 2)] * len(completions)

def sometimes(prompts, completions, **columns):
    return [None if i % 4 == 1 else float(i % 2 + i // 4) for i in range(len(completions))]

def never(prompts, completions, **columns):
    return [None] * len(completions)
"""


def small(folder: Path, method: str, name: str = "run", reward: str = "turns", **changes):
    """Args of a variant or baseline: 6 prompts, 2 a step, 4 answers each, one update, a stub of STUBS as the reward."""
    (folder / "stub.py").write_text(STUBS)
    settings = {
        "dataset": write_rows(folder / "prompts.jsonl", PROMPTS), "eval_dataset": "", "max_response_length": 16,
        "prompts_per_step": 2, "group_size": 4, "steps": 2, "reward": [f"{folder / 'stub.py'}:{reward}"],
        "run_dir": str(folder / name),
    }  # fmt: skip
    if method in grpo.VARIANTS:
        return grpo.Args(variant=method, **{**settings, **changes})
    return rloo_remax.Args(baseline=method, **{**settings, **changes})


def module_of(args):
    return grpo if isinstance(args, grpo.Args) else rloo_remax


def watch(args, reference: Path | None = None) -> SimpleNamespace:
    """Run, and record what the optimizer, the sampler, the rewards and the loss were given.

    With `reference` the frozen policy is read from there, so that it differs from the trained one.
    """
    seen = SimpleNamespace(gradients=[], calls=[], batches=[], scored=[], losses=[])
    module, loss_name = module_of(args), "policy_loss"
    if module is rloo_remax:
        loss_name = "clipped_loss" if args.baseline == "reinforce++" else "reinforce_loss"
    clip, generate, collate = common.clip_gradients, common.HFSampler.generate, common.collate
    score, load, loss = common.score_samples, common.load_policy, getattr(module, loss_name)

    def watch_clip(model, *rest):
        seen.gradients.append({name: tiny_runs.full(p.grad) for name, p in model.named_parameters()})
        return clip(model, *rest)

    def watch_generate(sampler, prompts, n, *rest, greedy=False, **named):
        out = generate(sampler, prompts, n, *rest, greedy=greedy, **named)
        seen.calls.append(SimpleNamespace(prompts=prompts, n=n, greedy=greedy, answers=common.cut(*out[:2])))
        return out

    def watch_collate(prompts, responses, *rest):
        seen.batches.append((prompts, responses))
        return collate(prompts, responses, *rest)

    def watch_score(functions, models, rows, responses, *rest):
        scores = score(functions, models, rows, responses, *rest)
        seen.scored.append(SimpleNamespace(rows=rows, responses=responses, scores=scores))
        return scores

    def watch_load(name, device, dtype, trained=True, *rest):
        return load(name if trained or not reference else str(reference), device, dtype, trained, *rest)

    def watch_loss(*args, **named):
        seen.losses.append(args)
        return loss(*args, **named)

    with (
        patch.object(common, "clip_gradients", watch_clip),
        patch.object(common.HFSampler, "generate", watch_generate),
        patch.object(common, "collate", watch_collate),
        patch.object(common, "score_samples", watch_score),
        patch.object(common, "load_policy", watch_load),
        patch.object(module, loss_name, watch_loss),
    ):
        module.main(args)
    seen.folder = Path(args.run_dir)
    seen.metrics = tiny_runs.metrics(seen.folder)
    return seen


def finite(metrics: list[dict]) -> bool:
    return all(math.isfinite(v) for line in metrics for v in line.values())


def start() -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(tiny_runs.POLICY, dtype=torch.float32)
    return dict(model.named_parameters())


def unchanged(folder: Path) -> bool:
    """Whether the final model is there and is the one the run started from."""
    AutoModelForCausalLM.from_pretrained(folder / "model")
    assert json.loads((folder / "summary.json").read_text()).keys() >= {"before", "after"}
    return all(torch.equal(weights(folder)[name], p) for name, p in start().items())


def prompt_ids(rows: list[dict]) -> list[list[int]]:
    return [common.prompt_token_ids(world.tokenizer(), row["prompt"]) for row in rows]


def ascending(values) -> list[float]:
    return sorted(torch.as_tensor(values).flatten().tolist())


# ------------------------------------------------------------------------------------------------- every method


@pytest.fixture(scope="module", params=METHODS)
def whole(request, tmp_path_factory):
    """(method, folder, what two steps did)."""
    folder = tmp_path_factory.mktemp("whole")
    return request.param, folder, watch(small(folder, request.param))


def test_every_method_runs_and_moves_every_weight(whole):
    method, _, run = whole
    assert len(run.metrics) == len(run.gradients) == 2 and finite(run.metrics)
    for line in run.metrics:
        assert {
            "step", "loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std", "entropy",
            "approx_kl", "completions/mean_length", "completions/clipped_ratio", "rewards/turns/mean",
            "sampler/logprob_gap", "skipped_updates",
        } <= line.keys()  # fmt: skip
        assert line["grad_norm"] > 0 and line["skipped_updates"] == 0 and line["frac_reward_zero_std"] == 0
        assert line["approx_kl"] == 0 and line.get("clip_ratio/region_mean", 0.0) == 0  # one update: ratio 1
        assert line["reward"] == 7 / 8
        assert line["sampler/logprob_gap"] < 1e-4
    assert all(not torch.equal(weights(run.folder)[name], p) for name, p in start().items())
    assert ("kl" in run.metrics[0]) == (method == "grpo" or method in BASELINES)


def test_the_first_gradient_does_not_depend_on_the_cut_into_microbatches(whole):
    method, folder, run = whole
    cut = watch(small(folder, method, "cut", steps=1, microbatch_tokens=1))
    assert len(cut.losses) == 8 and len(run.losses) == 2
    for name, gradient in run.gradients[0].items():
        torch.testing.assert_close(cut.gradients[0][name], gradient, rtol=1e-4, atol=1e-6)
    assert cut.metrics[0] == pytest.approx(run.metrics[0], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("first", "second", "factor"),
    [
        (("grpo", {"kl_coef": 0.0}), ("gspo", {}), 1.0),  # the geometric mean of ratios has the slope of their mean
        (("dapo", {"overlong_buffer": 0, "dynamic_sampling": False}), ("cispo", {}), 1.0),
        (("rloo", {"kl_coef": 0.0}), ("mean", {"kl_coef": 0.0}), 4 / 3),  # k / (k - 1)
    ],
    ids=["grpo and gspo", "dapo and cispo", "rloo and mean"],
)
def test_in_the_first_update_two_methods_differ_by_a_factor_at_most(tmp_path, first, second, factor):
    a, b = (watch(small(tmp_path, method, method, steps=1, **changes)) for method, changes in (first, second))
    for name, gradient in b.gradients[0].items():
        torch.testing.assert_close(a.gradients[0][name], factor * gradient, rtol=1e-4, atol=1e-6)


def test_the_resolved_switches_are_printed_and_stored(tmp_path, capsys):
    folder = watch(small(tmp_path, "dapo", steps=1, clip_low=0.1)).folder
    stored = json.loads((folder / "args.json").read_text())
    expected = {
        "variant": "dapo", "advantage_scale": "group", "aggregation": "token", "objective": "clip",
        "ratio_level": "token", "clip_low": 0.1, "clip_high": 0.28, "kl_coef": 0.0, "dynamic_sampling": True,
        "overlong_buffer": 3,
    }  # fmt: skip
    assert {name: stored[name] for name in expected} == expected
    (said,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("dapo: "))
    assert all(f"{name} {value}" in said for name, value in expected.items() if name != "variant")


def test_reinforce_pp_makes_several_updates_with_a_ratio(tmp_path):
    settings = {"epochs_per_step": 2, "minibatches": 2, "learning_rate": 1e-3, "steps": 1}
    run = watch(small(tmp_path, "reinforce++", **settings))
    assert len(run.gradients) == 4 and finite(run.metrics)
    assert run.metrics[0]["approx_kl"] > 1e-4 and run.metrics[0]["clip_ratio/region_mean"] > 0


@pytest.mark.parametrize("method", ["rloo", "reinforce++"])
def test_an_unscored_answer_is_not_trained_on(tmp_path, method):
    run = watch(small(tmp_path, method, reward="sometimes", steps=1))
    assert finite(run.metrics)
    assert run.metrics[0]["reward"] == pytest.approx((0 + 0 + 1 + 1 + 1 + 2) / 6)
    assert run.metrics[0]["frac_unscored"] == pytest.approx(0.25)
    masks = [args[3] if method == "reinforce++" else args[2] for args in run.losses]
    assert sum(int(mask.any(1).sum()) for mask in masks) == 6
    logged = [s["reward"] for s in tiny_runs.lines(run.folder / "samples.jsonl") if s["split"] == "train"]
    assert logged == [0.0, None, 0.0, 1.0]


@pytest.mark.parametrize("method", ["rloo", "reinforce++", "dr_grpo"])
def test_when_every_answer_is_cut_and_masked_nothing_is_trained(tmp_path, method):
    run = watch(small(tmp_path, method, max_response_length=1, mask_truncated=True, steps=1))
    (line,) = run.metrics
    assert line["completions/clipped_ratio"] == 1.0 and line["skipped_updates"] == 1.0
    assert line["loss"] == 0.0 and line["grad_norm"] == 0.0 and unchanged(run.folder)


# ---------------------------------------------------------------------------------------------- dynamic sampling


def half_flat(folder: Path) -> str:
    """The prompts, of which every second gives no spread under the reward `by_row`."""
    return write_rows(folder / "half.jsonl", [{**row, "flat": i % 2 == 0} for i, row in enumerate(PROMPTS)])


def test_dapo_replaces_groups_without_spread(tmp_path):
    run = watch(small(tmp_path, "dapo", reward="by_row", dataset=half_flat(tmp_path), steps=4))
    assert [line["frac_reward_zero_std"] for line in run.metrics] == [0.0] * 4
    assert [line["reward"] for line in run.metrics] == [0.5] * 4
    redraws = [int(line["redraws"]) for line in run.metrics]
    assert sum(redraws) > 0 and len(run.calls) == 4 + sum(redraws)
    ids, calls = prompt_ids(PROMPTS), iter(run.calls)
    for count, (trained, answers) in zip(redraws, run.batches, strict=True):
        asked = [next(calls) for _ in range(1 + count)]
        flat = [sum(prompt in ids[0::2] for prompt in call.prompts) for call in asked]
        assert [len(call.prompts) for call in asked] == [2, *flat[:-1]] and flat[-1] == 0  # only what is missing
        assert len(trained) == len(answers) == 8 and all(prompt in ids[1::2] for prompt in trained)
        drawn = [answer for call in asked for answer in call.answers]
        assert all(answer in drawn for answer in answers)
    used = [prompt for call in run.calls for prompt in call.prompts]
    assert used == [ids[i] for i in common.data_order(6, 1, 0, len(used))]  # the data go on, none is skipped


def test_dapo_keeps_a_prompt_with_its_own_answers_and_rewards(tmp_path):
    run = watch(small(tmp_path, "dapo", reward="by_row", dataset=half_flat(tmp_path), steps=2))
    for step, (prompts, answers) in enumerate(run.batches, 1):
        drawn = {(tuple(c.prompts[i // 4]), tuple(a)) for c in run.calls for i, a in enumerate(c.answers)}
        assert {(tuple(p), tuple(a)) for p, a in zip(prompts, answers, strict=True)} <= drawn
        samples = [s for s in tiny_runs.lines(run.folder / "samples.jsonl") if s["step"] == step]
        assert [s["reward"] for s in samples if s["split"] == "train"] == [0.0, 1.0, 0.0, 1.0]


def test_dapo_ends_when_no_reward_ever_differs(tmp_path, capsys):
    """Answers differ in length, but shaping is no spread: it is the task's reward that counts."""
    run = watch(small(tmp_path, "dapo", reward="one", max_response_length=8, overlong_buffer=7))
    said = capsys.readouterr().out
    assert "step 1" in said and "nothing to learn" in said
    assert [len(call.prompts) for call in run.calls] == [2] * (1 + grpo.MAX_REDRAWS)
    assert run.gradients == [] and run.losses == [] and run.metrics == [] and unchanged(run.folder)
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == 0


def test_without_dynamic_sampling_such_a_run_goes_on(tmp_path):
    run = watch(small(tmp_path, "dapo", reward="one", dynamic_sampling=False, overlong_buffer=0))
    assert len(run.calls) == len(run.metrics) == 2 and unchanged(run.folder)
    assert [(line["frac_reward_zero_std"], line["grad_norm"]) for line in run.metrics] == [(1.0, 0.0)] * 2


def test_a_group_that_never_gets_spread_is_left_out_of_the_loss(tmp_path):
    run = watch(small(tmp_path, "dapo", reward="once", steps=1, overlong_buffer=0))
    assert [len(call.prompts) for call in run.calls] == [2] + [1] * grpo.MAX_REDRAWS
    (line,) = run.metrics
    assert line["redraws"] == grpo.MAX_REDRAWS and line["frac_reward_zero_std"] == 0.5 and line["grad_norm"] > 0
    (arguments,) = run.losses
    advantages, mask, denominator = arguments[2], arguments[3], arguments[8]
    assert int(mask.any(1).sum()) == 4 and denominator == mask.sum()
    assert advantages[mask.any(1)].abs().tolist() == pytest.approx([1.0] * 4)
    assert not advantages[~mask.any(1)].any()


def interrupted(args, at_update: int) -> None:
    """A run that dies before its optimizer step `at_update`, counted from 1."""
    clip, updates = common.clip_gradients, []

    def clip_or_die(*rest):
        updates.append(1)
        if len(updates) == at_update:
            raise tiny_runs.Interrupted
        return clip(*rest)

    with patch.object(common, "clip_gradients", clip_or_die), pytest.raises(tiny_runs.Interrupted):
        module_of(args).main(args)


@pytest.mark.parametrize("method", ["dapo", "remax", "reinforce++"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, method):
    settings = {"reward": "by_row", "dataset": half_flat(tmp_path), "steps": 3, "save_every": 2}
    whole = watch(small(tmp_path, method, "whole", **settings)).folder
    interrupted(small(tmp_path, method, "cut", **settings), at_update=3)
    assert {f.name for f in (tmp_path / "cut" / "checkpoints").iterdir()} == {"step_2"}
    if method == "dapo":
        state = json.loads((tmp_path / "cut" / "checkpoints" / "step_2" / "state.json").read_text())
        assert state["position"] > 2 * 2  # redraws have used up rows
    resumed = watch(small(tmp_path, method, "cut", **settings, resume=True))
    assert len(resumed.gradients) == 1
    same_run(whole, resumed.folder)


# --------------------------------------------------------------------------------------------------------- remax


def test_remax_asks_for_one_greedy_answer_per_prompt_and_never_trains_on_it(tmp_path):
    run = watch(small(tmp_path, "remax", reward="only_sampled", temperature=0.7))
    assert [(call.n, call.greedy) for call in run.calls] == [(4, False), (1, True)] * 2
    for step, (sampled, greedy) in enumerate(zip(run.calls[0::2], run.calls[1::2], strict=True)):
        assert greedy.prompts == sampled.prompts and len(greedy.answers) == 2
        prompts, answers = run.batches[step]
        assert answers == sampled.answers and prompts == [p for p in sampled.prompts for _ in range(4)]
    for line in run.metrics:
        assert line["reward"] == line["rewards/only_sampled/mean"] == 1.0 and line["reward_std"] == 0.0
    lengths = [len(answer) for answer in run.calls[0].answers]
    assert run.metrics[0]["completions/mean_length"] == pytest.approx(sum(lengths) / 8)
    assert all(args[1].numel() == 8 for args in run.losses)
    close_to_one = 1.0 - 0.04 * run.metrics[0]["kl"]  # the greedy answers earned 0, the sampled 1
    assert run.losses[0][1].mean().item() == pytest.approx(close_to_one, abs=1e-5)


def test_the_greedy_answer_takes_the_likeliest_token_every_time(tmp_path):
    run = watch(small(tmp_path, "remax", steps=1, temperature=1.5))
    model, eos = AutoModelForCausalLM.from_pretrained(tiny_runs.POLICY), world.tokenizer().eos_token_id
    (greedy,) = (call for call in run.calls if call.greedy)
    for prompt, answer in zip(greedy.prompts, greedy.answers, strict=True):
        ids = list(prompt)
        while len(ids) - len(prompt) < 16 and ids[-1] != eos:
            with torch.no_grad():
                ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        assert answer == ids[len(prompt) :]


def test_remax_needs_no_group(tmp_path):
    run = watch(small(tmp_path, "remax", group_size=1, steps=1, reward="length"))
    assert finite(run.metrics) and run.metrics[0]["grad_norm"] > 0


# ------------------------------------------------------------------------------------------------ KL in the reward


@pytest.mark.parametrize(("method", "two_tokens", "one_token"), [("none", 0.85, 0.95), ("remax", -0.15, -0.05)])
def test_the_kl_is_summed_over_the_answer_and_taken_from_its_reward(tmp_path, method, two_tokens, one_token):
    """Score 1, KL (0.1, 0.2), coefficient 0.5: 0.85; the greedy answer's reward, 1, stays whole."""
    length = len(PROMPTS[0]["prompt"])
    rows = [row for row in world.rows("prompts", "test") if len(row["prompt"]) == length][:4]
    place = len(prompt_ids(rows)[0])

    def kl_estimate(logprobs, ref_logprobs, kind):
        assert kind == "k1" and logprobs.shape == ref_logprobs.shape
        kl = torch.full(logprobs.shape, 9.0)
        kl[:, place : place + 2] = torch.tensor([0.1, 0.2])[: logprobs.shape[1] - place]
        return kl

    settings = {"dataset": write_rows(tmp_path / "rows.jsonl", rows), "max_response_length": 2, "kl_coef": 0.5}
    with patch.object(common, "kl_estimate", kl_estimate):
        run = watch(small(tmp_path, method, reward="one", steps=1, **settings))
    (_, answers), ((_, advantages, mask, _),) = run.batches[0], run.losses
    expected = [two_tokens if len(answer) == 2 else one_token for answer in answers]
    assert two_tokens in expected and ascending(advantages) == pytest.approx(sorted(expected), abs=1e-6)
    assert ascending(mask.sum(1)) == sorted(len(answer) for answer in answers)


def test_the_kl_is_that_of_the_sampled_distribution_to_the_reference(tmp_path):
    shifted = tiny_runs.shifted_policy(tmp_path / "shifted")
    settings = {"kl_coef": 0.5, "temperature": 0.7, "steps": 1}
    run = watch(small(tmp_path, "none", reward="one", **settings), reference=shifted)
    policy, reference = (AutoModelForCausalLM.from_pretrained(path) for path in (tiny_runs.POLICY, shifted))
    divergences = []
    for prompt, answer in zip(*run.batches[0], strict=True):
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            ours, theirs = ((m(ids).logits[0, :-1] / 0.7).log_softmax(-1) for m in (policy, reference))
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        divergences.append(sum((ours - theirs)[t, ids[0, t + 1]].item() for t in places))
    assert run.metrics[0]["kl"] == pytest.approx(sum(divergences) / 8, rel=1e-4) and max(divergences) > 0.1
    expected = sorted(1 - 0.5 * kl for kl in divergences)
    assert ascending(run.losses[0][1]) == pytest.approx(expected, abs=1e-4)
    assert run.metrics[0]["reward"] == 1.0  # the log shows the task's reward


@pytest.mark.parametrize("method", ["grpo", "gspo", "rloo", "reinforce++"])
def test_the_kl_budget_stops_the_run(tmp_path, capsys, method):
    settings = {"kl_coef": 0.0, "steps": 3, "reward": "turns"}
    shifted = tiny_runs.shifted_policy(tmp_path / "shifted")
    run = watch(small(tmp_path, method, kl_budget=1e-3, **settings), reference=shifted)
    assert len(run.metrics) == len(run.gradients) == 1 and run.metrics[0]["kl"] > 1e-3
    assert "step 1" in (said := capsys.readouterr().out) and "--kl-budget" in said
    assert not unchanged(run.folder)
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == 1  # those that were made


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_wide_kl_budget_stops_nothing(tmp_path, method):
    shifted = tiny_runs.shifted_policy(tmp_path / "shifted")
    assert len(watch(small(tmp_path, method, kl_budget=1e3), reference=shifted).metrics) == 2


# --------------------------------------------------------------------------------------------------------- rewards


def judges(folder: Path) -> list[str]:
    """Two reward models that differ in their score heads; their scores are about -0.5."""
    paths = [tiny_runs.toy_reward_model(folder / name) for name in ("first", "second")]
    model = AutoModelForSequenceClassification.from_pretrained(paths[1], dtype=torch.float32)
    model.score.weight.data.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(paths[1])
    return [str(path) for path in paths]


def scores_by_transformers(paths: list[str], scored: SimpleNamespace) -> torch.Tensor:
    """(M, B) of plain forward passes."""
    scores = []
    for path in paths:
        model = AutoModelForSequenceClassification.from_pretrained(path)
        samples = zip(prompt_ids(scored.rows), scored.responses, strict=True)
        with torch.no_grad():
            scores.append([model(torch.tensor([prompt + answer])).logits.item() for prompt, answer in samples])
    return torch.tensor(scores, dtype=torch.float64)


@pytest.mark.parametrize(("method", "how"), [("grpo", "mean"), ("dapo", "min"), ("rloo", "mean-std"), ("remax", "min")])
def test_several_reward_models_are_one_capped_reward(tmp_path, method, how):
    paths = judges(tmp_path)
    settings = {"reward_model": paths, "reward_aggregate": how, "reward_std_coef": 0.5, "reward_cap": -0.5}
    run = watch(small(tmp_path, method, reward="one", steps=1, **settings))
    seen = []
    for scored in run.scored:
        both = scores_by_transformers(paths, scored)
        spread = both.std(0, correction=0)
        together = {"mean": both.mean(0), "min": both.amin(0), "mean-std": both.mean(0) - 0.5 * spread}[how]
        assert spread.max() > 0.01
        torch.testing.assert_close(scored.scores[1], together.clamp(max=-0.5), rtol=0, atol=1e-5)
        assert scored.scores[0].tolist() == [1.0] * len(together)  # the cap is not for reward functions
        seen.append(together)
    assert (torch.cat(seen) > -0.5).any() and (torch.cat(seen) < -0.5).any()
    line, first = run.metrics[0], run.scored[0].scores
    if method != "dapo":  # whose first draw may be replaced in part
        assert line["rewards/reward_model/mean"] == pytest.approx(first[1].mean().item())
        assert line["reward"] == pytest.approx(1.0 + line["rewards/reward_model/mean"])


def standardised(rewards: torch.Tensor) -> torch.Tensor:
    """(P, G): distance from the group's mean in its standard deviations, 0 without spread."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / rewards.std(1, correction=0, keepdim=True).clamp(min=1e-12)


def test_the_overlong_penalty_is_part_of_the_reward_but_not_of_the_log(tmp_path):
    run = watch(small(tmp_path, "grpo", steps=1, kl_coef=0.0, max_response_length=12, overlong_buffer=8))
    (scored,), (arguments,) = run.scored, run.losses
    lengths = torch.tensor([len(answer) for answer in scored.responses])
    penalised = scored.scores[0] - ((lengths - 4) / 8).clamp(0, 1)
    assert lengths.unique().numel() > 1 and lengths.max() > 4
    assert ascending(arguments[2]) == pytest.approx(ascending(standardised(penalised.reshape(2, 4))), abs=1e-5)
    assert run.metrics[0]["reward"] == 7 / 8


@pytest.mark.parametrize("scale", ["sum", "each"])
def test_rewards_are_scaled_together_or_each_by_its_own_spread(tmp_path, scale):
    """With `each` the weights compare spreads: a reward in larger numbers does not drown the others."""
    args = small(tmp_path, "grpo", steps=1, kl_coef=0.0, reward_scale=scale)
    args.reward = [f"{tmp_path / 'stub.py'}:turns=2", f"{tmp_path / 'stub.py'}:length=100"]
    run = watch(args)
    (scored,), (arguments,) = run.scored, run.losses
    turns, length = scored.scores.reshape(2, 2, 4)  # (P, G) each
    together = 2 * turns + 100 * length
    each = 2 * standardised(turns) + 100 * standardised(length)
    expected = standardised(together) if scale == "sum" else each
    assert ascending(arguments[2]) == pytest.approx(ascending(expected), rel=1e-4, abs=1e-4)
    assert run.metrics[0]["reward"] == pytest.approx(together.mean().item())


# ------------------------------------------------------------------------------------------------ sampler correction


@pytest.mark.parametrize("level", ["off", "token", "sequence"])
def test_the_sampler_correction_weighs_what_the_sampler_found_too_rarely(tmp_path, monkeypatch, level):
    """A sampler whose log-probs are 0.1 too low: e^0.1 per token, at most 2 per sequence."""
    generate = common.HFSampler.generate

    def low(*args, **named):
        ids, lengths, finished, logprobs = generate(*args, **named)
        return ids, lengths, finished, logprobs - 0.1

    monkeypatch.setattr(common.HFSampler, "generate", low)
    run = watch(small(tmp_path, "grpo", steps=1, sampler_correction=level))
    (line,), (arguments,) = run.metrics, run.losses
    mask, weights_of = arguments[3], arguments[12]
    lengths = mask.sum(1, keepdim=True)
    expected = {
        "off": torch.ones(mask.shape),
        "token": torch.full(mask.shape, math.exp(0.1)),
        "sequence": (0.1 * lengths).exp().clamp(max=2.0).expand(mask.shape),
    }[level]
    torch.testing.assert_close(weights_of[mask], expected[mask], rtol=1e-4, atol=1e-4)
    assert line["sampler/importance_weight"] == pytest.approx(expected[mask].mean().item(), rel=1e-4)
    assert line["sampler/logprob_gap"] == pytest.approx(0.1, rel=1e-3)


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("method", "changes", "named"),
    [
        ("rloo", {"group_size": 1}, "--group-size"),
        ("mean", {"group_size": 1}, "--group-size"),
        ("rloo", {"epochs_per_step": 2}, "--epochs-per-step"),
        ("remax", {"minibatches": 2}, "--minibatches"),
        ("none", {"epochs_per_step": 2}, "--epochs-per-step"),
        ("grpo", {"group_size": 1}, "--group-size"),
        ("grpo", {"overlong_buffer": 16}, "--overlong-buffer 16"),
        ("dapo", {"overlong_buffer": 17}, "--overlong-buffer 17"),
        ("dapo", {"overlong_buffer": -1}, "--overlong-buffer"),
        ("rloo", {"kl_budget": -1.0}, "--kl-budget"),
        ("rloo", {"reward_cap": -math.inf}, "--reward-cap"),
        ("rloo", {"reward_cap": math.nan}, "--reward-cap"),
        ("rloo", {"prompts_per_step": 7}, "--prompts-per-step 7"),
        ("rloo", {"reward": []}, "--reward"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(f"{k}={v}" for k, v in value.items()),
)
def test_settings_without_meaning_are_refused(tmp_path, refused, method, changes, named):
    args = small(tmp_path, method)
    for name, value in changes.items():
        setattr(args, name, value)
    assert named in refused(module_of(args).main, args)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["rloo", "dapo"])
def test_a_batch_that_nothing_scored_ends_the_run_with_a_hint(tmp_path, capsys, method):
    args = small(tmp_path, method, reward="never")
    with pytest.raises(SystemExit) as stopped:
        module_of(args).main(args)
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and "--answer-column" in message
