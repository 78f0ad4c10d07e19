"""What each of two processes does for test_distributed.py: `torchrun --nproc-per-node 2 distributed_worker.py FOLDER`.

Starting a process group takes longer than most checks, so one group runs all of them. Every check's value is written to
FOLDER/<name>_<rank>.pt; the assertions are in test_distributed.py. An error ends the job.
"""

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tiny_runs
import torch
from tiny_runs import Watched, full
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import common
import grpo
import sft
from toy import world

FIRST_STEP = {  # one rollout or batch, several updates at a learning rate too small to move a float32 weight
    "sft": {"steps": 1, "learning_rate": 1e-12, "batch_size": 8},
    "grpo": {"steps": 1, "learning_rate": 1e-12, "prompts_per_step": 4, "minibatches": 2, "epochs_per_step": 2,
             "max_response_length": 8, "mask_truncated": True, "kl_coef": 0.5},
}  # fmt: skip
CUTS = {
    "one micro-batch": {},
    "many micro-batches, recomputed": {"microbatch_tokens": 30, "gradient_checkpointing": True, "eval_samples": 0},
}
ONE_UPDATE = {"epochs_per_step": 1, "minibatches": 1}
ONE = {"sft": {"steps": 1, "eval_prompts": 1}, "grpo": {"steps": 1, "eval_prompts": 1, **ONE_UPDATE}}
RESUMED = {
    "sft": {"steps": 3, "save_every": 2, "eval_every": 1},
    "grpo": {"steps": 3, "save_every": 2, "prompts_per_step": 4, "group_size": 2},
}
MIDDLE_OF_STEP_3 = {"sft": 3, "grpo": 2 * 4 + 3}  # in updates
LENGTHS = [[100] * 5, [20] * 5]  # of rank 0 and rank 1


def first_step(script: str, folder: Path, name: str, cut: dict) -> dict:
    """Gradients, metrics and samples of one step; its reference is not the policy. The inputs lie in `folder`."""
    changes = dict(FIRST_STEP[script])
    if script == "grpo":
        changes |= {"reward": [f"{folder / 'stub.py'}:digits=0.5"], "reward_model": [str(folder / "reward")]}
    run = Watched(script, tiny_runs.arguments(script, folder, name, **changes, **cut), folder / "reference")
    summary = (run.run_dir / "summary.json").read_text()
    return {"gradients": run.gradients, "metrics": run.metrics, "samples": run.samples, "summary": summary}


def wide_values() -> tuple[torch.Tensor, torch.Tensor]:
    """(values, mask) of six sequences of unequal length."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(9)[None] < torch.tensor([9, 1, 4, 7, 2, 5])[:, None]
    return torch.randn(6, 9, generator=generator), mask


# ----------------------------------------------------------------------------------------------------------- checks


def metrics(rank: int) -> dict[str, float]:
    found = common.Metrics()
    found.add("entropy", *[(4.0, 1), (3.0, 3)][rank])
    found.add_masked(
        "loss", torch.tensor([[2.0, 9.0], [3.0, 4.0]][rank]), torch.tensor([[True, False], [True, True]][rank])
    )
    if rank == 1:  # a name that the other rank does not know
        found.add("kl", 6.0, 2)
    found.add("nothing", 0.0, 0)
    return found.reduce()


def shares(_: int) -> dict[str, list]:
    items = list(range(12))
    mine = torch.tensor(common.own(items))
    grouped = torch.tensor([[10 * i + g, -i] for i in common.own(range(4)) for g in range(3)])
    return {
        "own": mine.tolist(),
        "gathered": common.gather_rows(mine).tolist(),
        "groups": common.gather_rows(grouped, 3).tolist(),
        "sum": common.all_sum(1.5 + common.rank(), torch.tensor(2)),
        "max": common.all_max(-1.0 - common.rank()),
    }


def whitened(rank: int) -> list[torch.Tensor]:
    values, mask = wide_values()
    width = (9, 7)[rank]  # ranks pad to different widths
    mine, my_mask = values[rank::2, :width], mask[rank::2, :width]
    alike = common.masked_whiten(torch.full_like(mine, 5.0), my_mask)
    return [common.masked_whiten(mine, my_mask), alike]


def microbatches(rank: int) -> list[list[list[int]]]:
    uneven = [[7, 3, 3, 9, 1, 5], [2, 2, 2, 2, 2, 60]][rank]
    return [
        common.microbatches(lengths, 100 if lengths == LENGTHS[rank] else 12) for lengths in (LENGTHS[rank], uneven)
    ]


def on_main(rank: int) -> dict:
    ran = []
    result = common.on_main(lambda x: ran.append(rank) or {"from": rank, "got": x}, 5)
    try:
        common.on_main(sys.exit, 2)
        code = None
    except SystemExit as stopped:
        code = stopped.code
    return {"result": result, "ran": ran, "code": code}


def clipped(rank: int) -> list[tuple[float, float]]:
    outcomes = []
    for gradients, most in (
        ((3.0, 4.0), 1.0),
        ((3.0, 4.0), 5.5),
        ((float("inf"), 4.0), 1.0),
        ((3.0, float("nan")), 1.0),
    ):
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(2))
        fully_shard(model)
        local = torch.tensor([gradients[rank]])
        model.weight.grad = DTensor.from_local(local, model.weight.device_mesh, model.weight.placements)
        norm = common.clip_gradients(model, most)
        outcomes.append((norm, model.weight.grad.to_local().item()))
    return outcomes


def refusals(_: int) -> dict[str, tuple]:
    found = {}
    for script, changes in (("sft", {"batch_size": 7}), ("grpo", {"prompts_per_step": 3, "minibatches": 1})):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            try:
                tiny_runs.SCRIPTS[script].main(tiny_runs.arguments(script, FOLDER, "refused", **changes))
                code = None
            except SystemExit as stopped:
                code = stopped.code
        found[script] = code, said.getvalue()
    return found


def sampler(_: int) -> dict:
    """A sharded policy, moved after the sampler was made: the sampler's weights and answers before and after a push."""
    policy = common.load_policy("toy", torch.device("cpu"), torch.float32)
    hf = common.HFSampler(policy, [1], 0, 1, torch.float32)
    prompts = [world.tokenizer()(text).input_ids for text in ("7+5-3=", "1+1=", "9-4=")]

    def answers():
        ids, lengths, *_ = hf.generate(prompts, 1, 1.0, 12, greedy=True)
        return [row[:k] for row, k in zip(ids.tolist(), lengths.tolist(), strict=True)]

    found = {"sharded": all(isinstance(p, DTensor) for p in policy.parameters()), "before": answers()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.8)
    found["stale"] = answers()
    hf.load_weights(policy)
    found["after"] = answers()
    found["pushed"] = {name: p.detach().clone() for name, p in hf.model.named_parameters()}
    found["policy"] = {name: full(p) for name, p in policy.named_parameters()}
    return found


def saved(_: int) -> dict[str, torch.Tensor]:
    """A sharded policy, moved and saved: its whole weights."""
    policy = common.load_policy("toy", torch.device("cpu"), torch.float32)
    with torch.no_grad():
        for i, parameter in enumerate(policy.parameters()):
            parameter.add_(0.001 * i)
    common.save_model(policy, world.tokenizer(), FOLDER / "saved", torch.float32)
    return {name: full(p) for name, p in policy.named_parameters()}


def first_steps(_: int) -> dict[str, dict]:
    return {
        f"{script}, {cut}": first_step(script, FOLDER, f"two-{script}-{number}", changes)
        for script in ("sft", "grpo")
        for number, (cut, changes) in enumerate(CUTS.items())
    }


def resumed(_: int) -> dict:
    """An uninterrupted run and one that dies in its third step and goes on; a copy of the latter's state is left."""
    for script, settings in RESUMED.items():
        tiny_runs.run(script, FOLDER, f"{script}-whole", **settings)
        cut = tiny_runs.interrupted(script, FOLDER, f"{script}-cut", MIDDLE_OF_STEP_3[script], **settings)
        common.on_main(shutil.copytree, cut, FOLDER / f"{script}-cut-by-two")
        common.all_gather(None)
        tiny_runs.run(script, FOLDER, f"{script}-cut", **settings, resume=True)
    return {}


def resumed_from_one_rank(_: int) -> dict:
    tiny_runs.run("sft", FOLDER, "sft-cut-by-one", **RESUMED["sft"], resume=True)
    return {}


def bfloat16(_: int) -> dict:
    run = tiny_runs.run("grpo", FOLDER, "bfloat16", steps=2, dtype="bfloat16", **ONE_UPDATE)
    return {"metrics": tiny_runs.metrics(run)}


def one_bad_rank(rank: int) -> dict:
    """The loss is NaN on rank 1 alone, in the first of two steps."""
    original, calls = sft.sft_loss, []

    def poisoned(*args):
        calls.append(1)
        return original(*args) * (float("nan") if rank == 1 and len(calls) == 1 else 1.0)

    with patch.object(sft, "sft_loss", poisoned):
        run = Watched("sft", tiny_runs.sft_args(FOLDER, "one-bad-rank", steps=2, eval_samples=0))
    logged = (run.run_dir / "metrics.jsonl").read_text()
    return {"logged": logged, "finite": all(full(p).isfinite().all() for p in run.policy.parameters())}


def paired(_: int) -> dict:
    """Prompts, completions, answers and columns of a rank are one row's: the stub's reward says so."""
    rows = [{"prompt": f"{k}+0=", "gold": str(k), "k": k} for k in (3, 14, 159, 2, 65, 358, 9, 79, 323, 8)]
    data = common.on_main(tiny_runs.write_rows, FOLDER / "echo.jsonl", rows)
    plus, eos = world.tokenizer().convert_tokens_to_ids("+"), world.tokenizer().eos_token_id

    def echo(self, prompt_ids, n, *_, **__):
        said = [[*ids[: ids.index(plus)], eos] for ids in prompt_ids for _ in range(n)]
        ids = common.pad(said, self.pad_id, torch.device("cpu"))
        return ids, torch.tensor(list(map(len, said))), torch.ones(len(said), dtype=torch.bool), torch.zeros(ids.shape)

    settings = {
        "dataset": data,
        "eval_dataset": "",
        "answer_column": "gold",
        "reward": [f"{FOLDER / 'stub.py'}:paired"],
        **ONE_UPDATE,
    }
    args = tiny_runs.grpo_args(FOLDER, "paired", prompts_per_step=4, steps=2, microbatch_tokens=20, **settings)
    with patch.object(common.HFSampler, "generate", echo), patch.object(common, "MAX_SAMPLER_GAP", float("inf")):
        grpo.main(args)
    common.all_gather(None)
    return {"rewards": [line["reward"] for line in tiny_runs.metrics(Path(args.run_dir))]}


def few_held_out_rows(_: int) -> dict:
    """One held-out row, two ranks."""
    return {
        script: (tiny_runs.run(script, FOLDER, f"{script}-few", **ONE[script]) / "summary.json").read_text()
        for script in ("sft", "grpo")
    }


def one_rank_fails(_: int) -> None:
    """The last: a reward function raises on rank 1 while rank 0 goes on to a collective."""
    settings = {"reward": [f"{FOLDER / 'stub.py'}:broken_on_rank_1"], "prompts_per_step": 4, "eval_samples": 0}
    tiny_runs.run("grpo", FOLDER, "failed", **settings)


CHECKS = [
    metrics, shares, whitened, microbatches, on_main, clipped, refusals, sampler, saved, first_steps, resumed,
    resumed_from_one_rank, bfloat16, one_bad_rank, paired, few_held_out_rows, one_rank_fails,
]  # fmt: skip

if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    torch.set_num_threads(1)
    common.setup(1)
    for check in CHECKS:
        torch.save(check(common.rank()), FOLDER / f"{check.__name__}_{common.rank()}.pt")
