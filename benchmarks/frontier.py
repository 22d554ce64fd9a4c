"""Run the plans of `bigtrain plan --frontier` on this machine, beside their forecasts.

    python benchmarks/frontier.py --output benchmarks/results/frontier.json
    python benchmarks/frontier.py --job vit --points 6

A job is planned on two ranks of one thread each. Of the frontier, plans that are evenly spread in
memory are run, each as `bigtrain train --plan`. The runs alternate: each round has every plan once,
in the opposite order of the round before. Seconds of a step are the median of the untracked steps
of all rounds, bytes the highest tracked peak of a rank. The figures are times: use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import keep

from bigtrain.compare.subprocess_runs import run_bigtrain
from bigtrain.job.load import load_job
from bigtrain.planner.ask import (
    PlannedAnswer,
    Question,
    ask,
    engine_margins,
    limit_on_peaks,
    rank_limits,
)
from bigtrain.planner.command import this_machine
from bigtrain.planner.evaluate import EvaluatedPlan
from bigtrain.planner.show import plan_figures, plan_text, recompute_summary

RANKS, STEPS, TRACKED = 2, 8, 2
_IMAGES = "data.args={input_shape: [3, 224, 224], num_classes: 1000}"
JOBS: dict[str, tuple[int, Sequence[str]]] = {
    "gpt": (
        16,
        [
            "model.name=gpt",
            "model.args={num_layers: 8, width: 768, num_heads: 12, sequence_length: 128}",
            "data.name=synthetic",
            "data.args={kind: language}",
        ],
    ),
    "vit": (8, ["model.name=timm:vit_small_patch16_224", "data.name=synthetic", _IMAGES]),
    "convnext": (8, ["model.name=timm:convnext_tiny", "data.name=synthetic", _IMAGES]),
}
"""By name: the samples of a step, and the words of the job."""


def frontier_of(name: str) -> PlannedAnswer:
    """Return the frontier of a job on this machine."""
    samples, words = JOBS[name]
    cluster = this_machine(RANKS)
    memory, _ = rank_limits(cluster, memory=None, cap=None)
    margins, _ = engine_margins(["torch"])
    limit, margins = limit_on_peaks(memory, margins, "", None)
    question = Question(
        job=load_job(None, "single", [*words, "checkpoint.at_end=false"]),
        cluster=cluster,
        devices=RANKS,
        memory=limit,
        global_batch_size=samples,
        at_hand=True,
        frontier=True,
        margins=margins,
    )
    return ask(question)


def spread(front: Sequence[EvaluatedPlan], count: int) -> list[EvaluatedPlan]:
    """Return so many plans of a frontier with its ends, evenly spread in memory."""
    if len(front) <= count:
        return list(front)
    high, low = front[0].peak.bytes, front[-1].peak.bytes
    wanted = [high * (low / high) ** (n / (count - 1)) for n in range(count)]
    nearest = {min(range(len(front)), key=lambda n: abs(front[n].peak.bytes - w)) for w in wanted}
    return [front[n] for n in sorted(nearest)]


def run_plan(planned: PlannedAnswer, plan: EvaluatedPlan, words: Sequence[str]) -> dict[str, Any]:
    """Run a plan; return its peak in bytes and the seconds of its untracked steps."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(plan_text(planned, plan, "bigtrain plan"))
        command = ["train", "-n", str(RANKS), "--plan", str(path), *words, f"train.steps={STEPS}"]
        command += [f"memory.track_steps={TRACKED}", f"log.dir={folder}", "log.name=run"]
        command += ["checkpoint.at_end=false"]
        outcome = run_bigtrain(command, Path(folder) / "log", 600, {"OMP_NUM_THREADS": "1"})
        if outcome.reason is not None:
            return {"error": outcome.reason}
        run = Path(folder) / "run"
        memory = json.loads((run / "memory.json").read_text())
        lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "step_seconds" in row]
    seconds = [row["step_seconds"] for row in steps if row["step"] > TRACKED + 1]
    process = max(rank["process_peak_bytes"] for rank in memory["ranks"])
    return {"peak_bytes": memory["peak_bytes"], "seconds": seconds, "process_peak_bytes": process}


def measured(name: str, points: int, rounds: int) -> dict[str, Any]:
    """Run plans of a job's frontier; return their figures as JSON values."""
    planned = frontier_of(name)
    chosen, (_, words) = spread(planned.result.front, points), JOBS[name]
    found: list[list[dict[str, Any]]] = [[] for _ in chosen]
    for turn in range(rounds):
        order = list(enumerate(chosen))
        for number, plan in order if turn % 2 == 0 else reversed(order):
            found[number].append(run_plan(planned, plan, words))
    rows = []
    for plan, runs in zip(chosen, found, strict=True):
        figures = plan_figures(planned, plan)
        row: dict[str, Any] = {
            "plan": plan.label,
            "mesh": plan.candidate.axes,
            "micro_batch": [plan.candidate.rows, plan.candidate.micro_batches],
            "recomputed": recompute_summary(plan),
            "predicted_peak_bytes": figures["peak_bytes"],
            "predicted_step_seconds": figures["step_seconds"],
        }
        errors = [run["error"] for run in runs if "error" in run]
        if errors:
            row["error"] = errors[0]
        else:
            row["peak_bytes"] = max(run["peak_bytes"] for run in runs)
            row["process_peak_bytes"] = max(run["process_peak_bytes"] for run in runs)
            row["step_seconds"] = statistics.median(s for run in runs for s in run["seconds"])
        rows.append(row)
        print(line(row), flush=True)
    return {
        "job": name,
        "plans_of_the_frontier": len(planned.result.front),
        "search_seconds": planned.result.seconds,
        "rows": rows,
    }


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    head = f"{row['plan']} {row['micro_batch']} recomputed {row['recomputed']}: "
    if "error" in row:
        return f"{head}{row['error']}"
    peak, seconds = row["peak_bytes"], row["step_seconds"]
    return (
        f"{head}{peak / 2**20:.1f} MiB (predicted {row['predicted_peak_bytes'] / peak - 1:+.2%}), "
        f"{seconds:.3f} s (predicted {row['predicted_step_seconds'] / seconds - 1:+.1%})"
    )


def main() -> None:
    """Measure the frontiers of some jobs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", choices=list(JOBS), action="append")
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures = []
    for name in options.job or JOBS:
        figures.append(measured(name, options.points, options.rounds))
        keep(options.output, {"jobs": figures})


if __name__ == "__main__":
    main()
