"""Run a script's defaults on several seeds and print a table: held-out metrics before and after, steps, seconds.

    python benchmarks/toy_seeds.py grpo.py --out benchmarks/results/grpo_toy          # seeds 1 2 3
    python benchmarks/toy_seeds.py sft.py --seeds 1 --out benchmarks/results/sft_toy

Writes OUT/seed_N.jsonl (metrics.jsonl of each run) and OUT/table.md. The run directories stay in runs/.
"""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

SHOWN = ("eval/sampled_accuracy", "eval/greedy_accuracy", "eval/mean_length", "eval/loss", "eval/pass@4")


@dataclass
class Args:
    script: tyro.conf.Positional[str]
    """The script, by its file name."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """One run each."""
    out: Path = Path("benchmarks/results/runs")
    """Where curves and table go."""
    flags: str = ""
    """More flags for the script, in one string."""


def main(args: Args) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    lines, stamp = [], time.strftime("%Y%m%d-%H%M%S")
    for seed in args.seeds:
        run = Path(f"runs/seeds/{Path(args.script).stem}-{stamp}-{seed}")
        command = [sys.executable, args.script, "--seed", str(seed), "--run-dir", str(run), *args.flags.split()]
        subprocess.run(command, check=True)
        shutil.copy(run / "metrics.jsonl", args.out / f"seed_{seed}.jsonl")
        summary = json.loads((run / "summary.json").read_text())
        environment = json.loads((run / "environment.json").read_text())
        names = [n for n in SHOWN if n in summary["after"]]
        if not lines:
            said = " ".join([args.script, args.flags]).strip()
            where = f"{environment['cpus']} CPU cores, {environment['threads']} thread(s)"
            torch = environment["versions"]["torch"]
            lines += [
                f"`python {said}` with each `--seed`, commit {environment['commit'][:10]}, {where}, torch {torch}:\n"
            ]
            lines += ["| seed | " + " | ".join(n.removeprefix("eval/") for n in names) + " | steps | seconds |"]
            lines += ["|---" * (len(names) + 3) + "|"]
        cells = [f"{summary['before'][n]:.3f} → {summary['after'][n]:.3f}" for n in names]
        lines += [f"| {seed} | " + " | ".join(cells) + f" | {summary['steps']} | {summary['seconds']:.0f} |"]
    (args.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Args))
