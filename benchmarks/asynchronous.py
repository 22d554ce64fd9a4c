"""Compare the accuracy of replicas that step independently with that of synchronous ones.

    python benchmarks/asynchronous.py --output benchmarks/results/asynchronous.json
    python benchmarks/asynchronous.py --strategies ddp local_sgd --seeds 0     # a minute

Each run is the job `digits` (LeNet, a global batch of 64) as `bigtrain train --config digits` runs
it, with two replicas, and a third rank where a strategy has a server. Its 10 epochs are 230 steps;
240 steps are a multiple of the 8 and the 20 steps between two synchronizations of local_sgd and
diloco. The share of held-out digits that are recognized, as a mean over the seeds, must be at most
`WITHIN` below that of ddp; otherwise the exit status is 1. For strategies with pushes the result
also has their staleness.
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
    """Run the selected strategies and print the results; return 1 if one is too far below ddp."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--strategies", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each run")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if "ddp" not in options.strategies:
        parser.error("the others are compared with ddp: name it, too")
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
    """Return the last validation of one run, and the staleness of its pushes."""
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
    """Return the staleness: updates by other workers between a pull and the following push."""
    staleness = [push["staleness"] for push in pushes]
    return {"mean_staleness": round(mean(staleness), 3), "most_staleness": max(staleness)}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one per line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
