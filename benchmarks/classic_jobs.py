"""Train the classic jobs under every strategy, on small data sets in the real formats.

    python benchmarks/classic_jobs.py --output benchmarks/results/classic_jobs.json \
        --picture docs/classic_jobs.svg
    python benchmarks/classic_jobs.py --only mnist --strategies ddp   # a minute

LeNet, ResNet-18 and DeepLabV3 are trained from the files that `small_datasets.py` writes, on two
ranks each, as the commands in docs/jobs.md do. Every job must reach its stated figure on the
held-out images; otherwise the exit status is 1. DeepLabV3 takes most of the time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import keep, run_command
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from small_datasets import write_small

from bigtrain.report.plot_style import plot_style

STRATEGIES: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero2": (),
    # As many micro-batches as the others have ranks, so that BatchNorm sees the same samples.
    "1f1b": ("train.accumulation_steps=2",),
}
COLOURS = ("#0072B2", "#E69F00", "#009E73")
"""Of the palette of Okabe and Ito."""
WIDTHS = (4.0, 2.4, 1.0)
"""Of the lines: those that lie on each other are all seen."""
WINDOW = 10
"""Steps over which a drawn training loss is averaged."""


@dataclass(frozen=True)
class ClassicJob:
    """A job of configs/jobs on small data: the changed keys, and the figure to reach."""

    title: str
    figure: str
    """Of the validation; more is better."""
    stated: float
    words: tuple[str, ...]


JOBS = {
    "mnist": ClassicJob("LeNet-5, small MNIST", "top1", 0.97, ("train.eval_every=23",)),
    "cifar10": ClassicJob(
        "ResNet-18, small CIFAR-10",
        "top1",
        0.85,
        (
            *("train.epochs=8", "train.global_batch_size=64", "train.eval_every=31"),
            *("optim.lr=0.05", "optim.base_batch_size=64", "optim.warmup_steps=20"),
            *("train.precision=fp32", "data.args.augment=false"),
        ),
    ),
    "voc": ClassicJob(
        "DeepLabV3-ResNet50, small VOC",
        "mean_iou",
        0.5,
        (
            *("model.name=deeplabv3_resnet50", "model.args.aux_loss=true"),
            *("data.args.size=64", "data.args.scale=[0.8,1.25]", "optim.lr=0.03"),
            *("train.steps=250", "train.eval_every=25"),
        ),
    ),
}


def main() -> int:
    """Run the selected jobs, write and draw the curves; return 1 if a figure is not reached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    strategies = list(STRATEGIES)
    parser.add_argument("--strategies", nargs="+", choices=strategies, default=strategies)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each run")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--from", dest="kept", type=Path, help="draw an output again, run nothing")
    options = parser.parse_args()
    if options.kept is not None:
        runs: dict[str, Any] = json.loads(options.kept.read_text("utf-8"))["runs"]
    else:
        with tempfile.TemporaryDirectory() as folder:
            runs = run_all(options.only, options.strategies, Path(folder), options.limit)
        keep(options.output, {"runs": runs})
    if options.picture is not None:
        draw(options.picture, runs)
    return 0 if all(row["reached"] for rows in runs.values() for row in rows.values()) else 1


def run_all(
    names: Sequence[str], strategies: Sequence[str], folder: Path, limit_s: float
) -> dict[str, dict[str, Any]]:
    """Run each job under each strategy; return `runs[job][strategy]`."""
    runs: dict[str, dict[str, Any]] = {}
    for name in names:
        write_small(name, folder / name)
        runs[name] = {}
        for strategy in strategies:
            row = run(name, strategy, folder, limit_s)
            runs[name][strategy] = row
            last, job = row["validation"][-1], JOBS[name]
            print(
                f"{name} under {strategy}: {job.figure} {last[job.figure]:.4f} after "
                f"{last['step']} steps (stated: {job.stated}), {row['seconds']:.0f} s",
                flush=True,
            )
    return runs


def run(name: str, strategy: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run a job on two ranks; return the losses of its steps and its validations."""
    job, run_name = JOBS[name], f"{name}-{strategy}"
    command = [
        *("train", "-n", "2", "--config", name, "--strategy", strategy),
        *(f"data.path={folder / name}", f"log.dir={folder}", f"log.name={run_name}"),
        *("checkpoint.at_end=false", "memory.track_steps=0", "memory.predict=false"),
        *(*job.words, *STRATEGIES[strategy]),
    ]
    fault = run_command(command, limit_s)
    if fault is not None:
        raise SystemExit(f"{name} under {strategy}: {fault}")
    steps = read_lines(folder / run_name / "metrics.jsonl")
    validation = read_lines(folder / run_name / "validation.jsonl")
    return {
        "words": [*job.words, *STRATEGIES[strategy]],
        "figure": job.figure,
        "stated": job.stated,
        "reached": validation[-1][job.figure] >= job.stated,
        "seconds": round(sum(step["step_seconds"] for step in steps), 1),
        "losses": [round(step["loss"], 4) for step in steps],
        "validation": validation,
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one per line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def draw(path: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Draw a column for each job: its held-out figure, and its training loss below."""
    with plot_style():
        figure = Figure(figsize=(3.4 * len(runs), 5.0), layout="constrained")
        for column, (name, rows) in enumerate(runs.items(), start=1):
            above = figure.add_subplot(2, len(runs), column)
            below = figure.add_subplot(2, len(runs), len(runs) + column, sharex=above)
            draw_job(above, below, JOBS[name], rows)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_job(above: Axes, below: Axes, job: ClassicJob, rows: dict[str, Any]) -> None:
    """Draw the curves of one job, a colour for each strategy."""
    for colour, width, (strategy, row) in zip(COLOURS, WIDTHS, rows.items(), strict=False):
        steps = [validation["step"] for validation in row["validation"]]
        reached = [validation[job.figure] for validation in row["validation"]]
        label = f"{strategy}: {reached[-1]:.3f}"
        above.plot(steps, reached, color=colour, linewidth=width, label=label)
        losses = row["losses"]
        means = [
            sum(losses[max(0, n - WINDOW) : n]) / len(losses[max(0, n - WINDOW) : n])
            for n in range(1, len(losses) + 1)
        ]
        below.plot(range(1, len(means) + 1), means, color=colour, linewidth=width)
    label = f"stated: {job.stated:.2f}"
    above.axhline(job.stated, color="#808080", linestyle="--", linewidth=1, label=label)
    above.set_ylim(0, 1)
    above.set_title(job.title, loc="left", fontsize=9)
    above.set_ylabel(f"{job.figure}, held out")
    above.legend(frameon=False, fontsize=8, loc="lower right")
    below.set_ylim(bottom=0)
    below.set_ylabel(f"training loss, mean of {WINDOW} steps")
    below.set_xlabel("step", loc="left")


if __name__ == "__main__":
    sys.exit(main())
