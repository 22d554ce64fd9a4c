"""Measure how close a pipeline on two ranks comes to the ideal, and its micro-batches in flight.

    python benchmarks/pipeline.py --output benchmarks/results/pipeline.json

A GPT of 8 blocks, 512 wide, runs on micro-batches of 4 x 128 tokens, in fp32, with one thread a
process. One process with the same micro-batches and two stages alternate, `--rounds` times; the
time of a round is the median of its steps without the first ones. With T for one process and t for
p stages the efficiency is T / (p t). GPipe (Huang et al. 2019, arXiv 1811.06965, section 2.3)
predicts m / (m + p - 1) for m micro-batches; `share` is the efficiency divided by that.

In flight: the most micro-batches whose activations a stage holds, by the schedule (GPipe m, 1F1B at
most p - stage), next to the tracked activations at the peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import run_command, surroundings

from bigtrain.schedules.in_flight import peak_in_flight
from bigtrain.schedules.orders import schedule_orders

JOB = [
    # The loss with whole logits, as when the published figures were taken.
    "model.chunked_loss=false",
    *("model.name=gpt", "model.args.num_layers=8", "model.args.width=512"),
    *("model.args.num_heads=8", "model.args.sequence_length=128"),
    *("data.name=synthetic", "data.args.kind=language", "data.args.vocabulary=256"),
    *("train.micro_batch_size=4", "optim.warmup_steps=0", "train.eval_every=0"),
    *("checkpoint.at_end=false", "memory.track_steps=2"),
]
WARM = 2
"""Steps that are tracked, and make the optimizer's state."""


def run(strategy: str, ranks: int, micro_batches: int, steps: int, limit_s: float) -> Any:
    """Return the seconds of a step and each rank's memory.json, or the reason of a failure."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["train", "-n", str(ranks)]
        command += ["--strategy", strategy, *JOB, f"train.steps={steps + WARM}"]
        command += [f"train.global_batch_size={4 * micro_batches}", "log.every=1"]
        command += [f"log.dir={folder}", "log.name=run"]
        failed = run_command(command, limit_s)
        if failed:
            raise SystemExit(f"{strategy}, {micro_batches} micro-batches: {failed}")
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
        memory = json.loads((Path(folder) / "run/memory.json").read_text())
    seconds = [json.loads(line)["step_seconds"] for line in lines[WARM:]]
    return statistics.median(seconds), memory["ranks"]


def efficiency(options: argparse.Namespace, schedule: str, micro_batches: int) -> dict[str, Any]:
    """Measure one process and two stages, in alternation."""
    alone, both = [], []
    for _ in range(options.rounds):
        alone.append(run("single", 1, micro_batches, options.steps, options.limit)[0])
        both.append(run(schedule, 2, micro_batches, options.steps, options.limit)[0])
    reached = [single_seconds / (2 * two) for single_seconds, two in zip(alone, both, strict=True)]
    bound = micro_batches / (micro_batches + 1)
    return {
        "schedule": schedule,
        "micro_batches": micro_batches,
        "one_process_seconds": statistics.median(alone),
        "two_stages_seconds": statistics.median(both),
        "efficiency": statistics.median(reached),
        "bound": bound,
        "share": statistics.median(reached) / bound,
        "shares": [value / bound for value in reached],
    }


def flights(options: argparse.Namespace, schedule: str) -> list[dict[str, Any]]:
    """Return the micro-batches that each stage holds, of 2, 4 and 8."""
    figures = []
    for micro_batches in (2, 4, 8):
        _, ranks = run(schedule, 2, micro_batches, 1, options.limit)
        orders = schedule_orders(schedule, 2, 1, micro_batches)
        for rank, actions in zip(ranks, orders, strict=True):
            (in_flight,) = peak_in_flight(actions).values()
            figures.append(
                {
                    "schedule": schedule,
                    "micro_batches": micro_batches,
                    "stage": rank["rank"],
                    "in_flight": in_flight,
                    "activation_bytes": rank["breakdown"]["activations"],
                    "peak_bytes": rank["peak_bytes"],
                    "predicted_peak_bytes": rank["predicted_peak_bytes"],
                }
            )
    return figures


def tables(result: dict[str, Any]) -> str:
    """Return both tables as Markdown."""
    lines = [
        "| schedule | micro-batches | one process | two stages | efficiency | m/(m+1) | share |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["efficiency"]:
        lines.append(
            f"| {row['schedule']} | {row['micro_batches']} | {row['one_process_seconds']:.2f} s | "
            f"{row['two_stages_seconds']:.2f} s | {row['efficiency']:.3f} | {row['bound']:.3f} | "
            f"{row['share']:.3f} |"
        )
    lines += [
        "",
        "| schedule | micro-batches | stage | in flight | activations | peak | predicted |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["in_flight"]:
        sizes = ("activation_bytes", "peak_bytes", "predicted_peak_bytes")
        cells = " | ".join(f"{row[size] / 2**20:.1f}" for size in sizes)
        lines.append(
            f"| {row['schedule']} | {row['micro_batches']} | {row['stage']} | "
            f"{row['in_flight']} | {cells} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro-batches", default="2,4,8,16")
    parser.add_argument("--schedules", default="gpipe,1f1b")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one run")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {**surroundings(), "in_flight": [], "efficiency": []}
    for schedule in options.schedules.split(","):
        result["in_flight"] += flights(options, schedule)
        for micro_batches in map(int, options.micro_batches.split(",")):
            row = efficiency(options, schedule, micro_batches)
            print(row, file=sys.stderr, flush=True)
            result["efficiency"].append(row)
            if options.output:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(tables(result))


if __name__ == "__main__":
    main()
