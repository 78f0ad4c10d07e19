"""Runs of a second or two: a few toy rows in files, small settings, and ways to read, watch and disturb a run.

No pytest here: the worker processes of the distributed tests use it too.
"""

import inspect
import json
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3ForSequenceClassification

import common
import grpo
import sft
from toy import world

POLICY = common.ROOT / "toy" / "policy"
SCRIPTS = {"sft": sft, "grpo": grpo}


def write_rows(path: Path, rows: list[dict]) -> str:
    """A .jsonl file of these rows; its name. One that is there already is left alone: other ranks may be reading it."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return str(path)


def sft_args(folder: Path, name: str = "run", **changes) -> sft.Args:
    """20 rows in batches of 8: every checkpoint of --save-every 2 lies in the middle of an epoch."""
    data = write_rows(folder / "demonstrations.jsonl", world.rows("demonstrations", "test")[:20])
    settings = {
        "dataset": data, "eval_dataset": data, "eval_prompts": 5, "eval_samples": 2, "max_response_length": 12,
        "batch_size": 8, "steps": 5, "warmup_steps": 2, "run_dir": str(folder / name),
    }  # fmt: skip
    return sft.Args(**{**settings, **changes})


def grpo_args(folder: Path, name: str = "run", **changes) -> grpo.Args:
    """5 prompts, 2 a step: as above; 2 epochs of 2 minibatches are 4 updates a step."""
    data = write_rows(folder / "prompts.jsonl", world.rows("prompts", "test")[:5])
    settings = {
        "dataset": data, "eval_dataset": data, "eval_prompts": 5, "eval_samples": 2, "max_response_length": 20,
        "prompts_per_step": 2, "group_size": 4, "steps": 5, "epochs_per_step": 2, "minibatches": 2,
        "run_dir": str(folder / name),
    }  # fmt: skip
    return grpo.Args(**{**settings, **changes})


def arguments(script: str, folder: Path, name: str = "run", **changes):
    """The small settings of a script by its name."""
    return {"sft": sft_args, "grpo": grpo_args}[script](folder, name, **changes)


def run(script: str, folder: Path, name: str = "run", **changes) -> Path:
    """Run a script on its small settings; the run directory."""
    args = arguments(script, folder, name, **changes)
    SCRIPTS[script].main(args)
    common.all_gather(None)  # rank 0 has written
    return Path(args.run_dir)


def lines(path: Path) -> list[dict]:
    """A .jsonl file, each line strictly JSON (no NaN, no Infinity)."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl without the measured times."""
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines(run_dir / "metrics.jsonl")]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The tensors of the final model."""
    return load_file(run_dir / "model" / "model.safetensors")


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors have the same names and bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_run(a: Path, b: Path) -> None:
    """Assert that two runs logged the same numbers and samples and ended in the same weights, bit for bit."""
    assert metrics(a) == metrics(b)
    samples = [(folder / "samples.jsonl").read_text() for folder in (a, b) if (folder / "samples.jsonl").exists()]
    assert samples in ([], samples[:1] * 2)
    assert same_weights(weights(a), weights(b))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (a, b)]
    assert [{**s, "seconds": 0} for s in summaries] == [{**summaries[0], "seconds": 0}] * 2


class Interrupted(Exception):
    """Stands for a kill."""


def interrupted(script: str, folder: Path, name: str, at_update: int, **changes) -> Path:
    """A run that dies before its optimizer step `at_update` (counted from 1): the run directory as it leaves it."""
    clip, updates = common.clip_gradients, []

    def clip_or_die(*args):
        updates.append(1)
        if len(updates) == at_update:
            raise Interrupted
        return clip(*args)

    args = arguments(script, folder, name, **changes)
    with patch.object(common, "clip_gradients", clip_or_die):
        try:
            SCRIPTS[script].main(args)
        except Interrupted:
            return Path(args.run_dir)
    raise AssertionError(f"the run has only {len(updates)} updates")


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Watched:
    """What one run did: `gradients` of each update, `samples` (stream, prompt) -> ids, the loaded `models`."""

    def __init__(self, script: str, args, reference: Path | None = None):
        """Run it; with `reference` the frozen model is read from there, so that it differs from the policy."""
        self.gradients: list[dict] = []
        self.samples: dict[tuple, list] = {}
        self.policy = self.reference = self.reference_at_first = None
        clip, generate, load = common.clip_gradients, common.HFSampler.generate, common.load_policy
        signature = inspect.signature(load)

        def watch_clip(model, *rest):
            self.gradients.append({name: full(p.grad) for name, p in model.named_parameters()})
            return clip(model, *rest)

        def watch_generate(sampler, prompt_ids, n, *rest, **named):
            out = generate(sampler, prompt_ids, n, *rest, **named)
            rows = [ids[:k] for ids, k in zip(out[0].tolist(), out[1].tolist(), strict=True)]
            for i, index in enumerate(named["indices"]):
                self.samples[named["stream"], named.get("greedy", False), index] = rows[i * n : (i + 1) * n]
            return out

        def watch_load(name, *rest, **named):
            given = signature.bind(name, *rest, **named)
            given.apply_defaults()
            if given.arguments["trained"]:
                self.policy = load(name, *rest, **named)
                return self.policy
            self.reference = load(str(reference or name), *rest, **named)
            self.reference_at_first = {n: full(p) for n, p in self.reference.named_parameters()}
            return self.reference

        with (
            patch.object(common, "clip_gradients", watch_clip),
            patch.object(common.HFSampler, "generate", watch_generate),
            patch.object(common, "load_policy", watch_load),
        ):
            SCRIPTS[script].main(args)
        common.all_gather(None)  # rank 0 has written
        self.run_dir = Path(args.run_dir)
        self.metrics = metrics(self.run_dir)


def shifted_policy(path: Path) -> Path:
    """The toy policy with a little noise on every weight, saved: a reference that differs from the policy."""
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return save(model, world.tokenizer(), path)


def toy_reward_model(path: Path, **changes) -> Path:
    """A reward model made from the toy policy, its score head drawn with a fixed seed, saved."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForSequenceClassification.from_pretrained(
            POLICY, **{"num_labels": 1, "dtype": torch.float32, **changes}
        )
        model.score.weight.data.normal_(0.0, 0.1)
    return save(model, world.tokenizer(), path)


def save(model: torch.nn.Module, tokenizer, path: Path) -> Path:
    """A directory that --model or --reward-model can name."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
