"""Every critic-free method on the toy task with the same number of samples: one table and one PNG.

    python benchmarks/critic_free.py --out benchmarks/results/critic_free        # 10 methods x 3 seeds, two at a time

Writes OUT/METHOD_seedN.jsonl (metrics.jsonl of each run), OUT/table.md and the PNG. Accuracy is held-out and sampled on
--eval-prompts problems; "to 0.85" is the first evaluation, every 10 steps, at which it is reached.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt

METHODS = {
    **{v: ["grpo.py", "--variant", v] for v in ("grpo", "dr_grpo", "dapo", "cispo", "gspo")},
    **{b: ["rloo_remax.py", "--baseline", b] for b in ("rloo", "remax", "reinforce++", "mean", "none")},
}
ACCURACY = "eval/sampled_accuracy"


@dataclass
class Args:
    out: Path = Path("benchmarks/results/critic_free")
    """Where curves and table go."""
    png: Path = Path("docs/img/critic_free.png")
    """The plot."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """One run of each method for each."""
    steps: int = 80
    """Rollouts of 16 prompts x 8 samples."""
    eval_prompts: int = 200
    """Held-out problems of each evaluation."""
    parallel: int = 2
    """Runs at a time."""


def run(method: str, seed: int, args: Args) -> dict:
    """One run: its summary and its curve."""
    folder = args.out / f"run_{method}_{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    flags = ["--steps", str(args.steps), "--seed", str(seed), "--eval-every", "10", "--run-dir", str(folder)]
    command = [sys.executable, *METHODS[method], *flags, "--eval-prompts", str(args.eval_prompts)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    shutil.copy(folder / "metrics.jsonl", args.out / f"{method}_seed{seed}.jsonl")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    commit = json.loads((folder / "environment.json").read_text())["commit"]
    shutil.rmtree(folder)
    curve = [(0, summary["before"][ACCURACY])] + [(line["step"], line[ACCURACY]) for line in lines if ACCURACY in line]
    curve.append((lines[-1]["step"], summary["after"][ACCURACY]))
    seconds = [line["seconds/step"] for line in lines]
    reached = next((step for step, accuracy in curve if accuracy >= 0.85), None)
    return {
        "curve": curve, "after": summary["after"], "kl": lines[-1].get("kl"), "commit": commit,
        "reached": reached, "seconds": sum(seconds[:reached]) if reached else None,
    }  # fmt: skip


def main(args: Args) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [(method, seed) for method in METHODS for seed in args.seeds]
    with ThreadPoolExecutor(args.parallel) as pool:
        results = dict(zip(jobs, pool.map(lambda job: run(*job, args), jobs), strict=True))
    lines = ["| method | sampled accuracy | min | greedy | mean length | trained samples to 0.85 | seconds to 0.85 |"]
    lines += ["|---" * 7 + "|"]
    figure, axis = plt.subplots(figsize=(8, 5))
    for color, method in enumerate(METHODS):
        found = [results[method, seed] for seed in args.seeds]
        accuracy = [r["after"][ACCURACY] for r in found]
        greedy = statistics.mean(r["after"]["eval/greedy_accuracy"] for r in found)
        length = statistics.mean(r["after"]["eval/mean_length"] for r in found)
        reached = [r["reached"] for r in found]
        all_reached = all(r is not None for r in reached)
        samples = f"{statistics.mean(reached) * 128:.0f}" if all_reached else "not on all seeds"
        seconds = f"{statistics.mean(r['seconds'] for r in found):.0f}" if all_reached else "-"
        mean = f"{statistics.mean(accuracy):.3f}"
        lines += [
            f"| `{method}` | {mean} | {min(accuracy):.3f} | {greedy:.3f} | {length:.1f} | {samples} | {seconds} |"
        ]
        for r in found:
            label = method if r is found[0] else None
            axis.plot(*zip(*r["curve"], strict=True), color=f"C{color}", label=label, alpha=0.7)
    axis.set(xlabel="step (128 samples each)", ylabel="held-out sampled accuracy")
    axis.axhline(0.85, color="grey", linewidth=0.5)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    args.png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.png, dpi=110)
    commit = results[jobs[0]]["commit"]
    lines += [f"\nCommit {commit and commit[:10]}, {len(args.seeds)} seeds, {args.steps} steps, 1 thread a run."]
    (args.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Args))
