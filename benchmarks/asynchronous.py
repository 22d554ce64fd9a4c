"""Replicas that step by themselves learn what synchronous ones learn: the digits, several seeds.

    python benchmarks/asynchronous.py --output benchmarks/results/asynchronous.json
    python benchmarks/asynchronous.py --strategies ddp local_sgd --seeds 0     # a minute

The job `digits` (LeNet, a global batch of 64) as `bigtrain train --config digits` runs it, with two
replicas each; where one serves, on three ranks. Its 10 epochs are 230 steps; 240 are a multiple of
the 8 and the 20 steps between two agreements of local_sgd and diloco. The mean over the seeds of
the share of held-out digits that are recognized has to be within `WITHIN` of that of ddp, or above
it; the exit status is 1 where it is not. Of a run with pushes it is kept how old they were.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from harness import keep, run_command

WITHIN = 0.01
"""One point of a hundred."""
CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "ddp": (2, "ddp", ()),
    "parameter_server": (3, "parameter_server", ()),
    "parameter_server_async": (3, "parameter_server_async", ()),
    "parameter_server_async, divide_rate": (
        3,
        "parameter_server_async",
        ("strategy.replicate.divide_rate=true",),
    ),
    "local_sgd": (2, "local_sgd", ()),
    "diloco": (2, "diloco", ()),
}
"""Ranks, strategy, and further words."""


def main() -> int:
    """Run what is asked for, print and keep it; 1 where one is further off than a point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--strategies", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each run")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if "ddp" not in options.strategies:
        parser.error("ddp is what the others are held against: name it, too")
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: [
                run(name, seed, options.steps, Path(folder), options.limit)
                for seed in options.seeds
            ]
            for name in options.strategies
        }
    means = {name: mean(row["top1"] for row in rows) for name, rows in runs.items()}
    within = {name: accuracy >= means["ddp"] - WITHIN for name, accuracy in means.items()}
    for name, accuracy in means.items():
        shortfall = "" if within[name] else f", more than {WITHIN} below ddp"
        print(f"{name}: top1 {accuracy:.4f}, mean of {len(options.seeds)} runs{shortfall}")
    keep(options.output, {"job": "digits", "within": WITHIN, "mean_top1": means, "runs": runs})
    return 0 if all(within.values()) else 1


def run(name: str, seed: int, steps: int, folder: Path, limit_s: float) -> dict[str, Any]:
    """One run: what its last validation gave, and how old its pushes were."""
    ranks, strategy, words = CASES[name]
    run_name = f"{name}-{seed}".replace(", ", "-")
    command = [
        *("train", "-n", str(ranks), "--config", "digits", "--strategy", strategy, *words),
        *(f"log.dir={folder}", f"log.name={run_name}", f"train.seed={seed}"),
        *(f"train.steps={steps}", "train.epochs=null"),
        *("checkpoint.at_end=false", "memory.track_steps=0", "memory.predict=false"),
    ]
    fault = run_command(command, limit_s)
    if fault is not None:
        raise SystemExit(f"{name}, seed {seed}: {fault}")
    last = read_lines(folder / run_name / "validation.jsonl")[-1]
    row = {"seed": seed, "ranks": ranks, "words": list(words), **last}
    log = folder / run_name / "pushes.jsonl"
    if log.exists():
        row |= ages([line for line in read_lines(log) if "worker" in line])
    print(f"{name}, seed {seed}: top1 {row['top1']:.4f}", flush=True)
    return row


def ages(pushes: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How many updates of others came between a pull and the push that was made of it."""
    staleness = [push["staleness"] for push in pushes]
    return {"mean_staleness": round(mean(staleness), 3), "most_staleness": max(staleness)}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one in each line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
