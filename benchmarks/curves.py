"""Plot metrics of one or several runs against the step.

python benchmarks/curves.py runs/a runs/b --metrics reward kl completions/mean_length --out docs/img/curve.png
"""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories, or metrics.jsonl files."""
    metrics: tuple[str, ...] = ("loss",)
    """One panel each."""
    out: Path = Path("curve.png")
    """The PNG to write."""
    title: str = ""
    """Stands above the panels."""
    smooth: int = 1
    """Running mean over so many steps, drawn over the raw values."""


def read(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(args: Args) -> None:
    figure, axes = plt.subplots(1, len(args.metrics), figsize=(4.2 * len(args.metrics), 3.2), squeeze=False)
    for axis, metric in zip(axes[0], args.metrics, strict=True):
        for color, run in enumerate(args.runs):
            points = [(line["step"], line[metric]) for line in read(run) if line.get(metric) is not None]
            steps, values = zip(*points, strict=True)
            raw = {"alpha": 0.3} if args.smooth > 1 else {"label": run.stem}
            axis.plot(steps, values, color=f"C{color}", marker="." if len(steps) < 12 else "", **raw)
            if args.smooth > 1:
                windows = [values[max(0, i - args.smooth + 1) : i + 1] for i in range(len(values))]
                axis.plot(steps, [sum(w) / len(w) for w in windows], color=f"C{color}", label=run.stem)
        axis.set(xlabel="step", title=metric)
        axis.grid(alpha=0.3)
    if len(args.runs) > 1:
        axes[0][0].legend()
    figure.suptitle(args.title)
    figure.tight_layout()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    print(args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
