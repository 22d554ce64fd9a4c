"""Run the plans of `bigtrain plan --frontier` on this machine, beside forecasts and rivals.

    python benchmarks/frontier.py --output benchmarks/results/frontier.json
    python benchmarks/frontier.py --job vit --points 6 --rivals torch_ddp,torch_fsdp2

A job is planned on two ranks of one thread each. Of the frontier, plans that are evenly spread in
memory are run, each as `bigtrain train --plan`, and with `--rivals` the loops of `rivals.py`. One
more plan is run: the fastest one that needs less memory than every rival. The runs alternate: each
round has every rival and every plan once, in the opposite order of the round before. Seconds of a
step are the median of the untracked steps of all rounds. Bytes are the tracked peak of the rank
with the highest: of a plan the highest of all rounds, of a rival the lowest. After the rounds,
`pages_bytes` are measured as in `overhead.py`, in runs of their own.

The summary names the rival with the least memory, the fastest one, and the plans that have less
memory than the former and take less time than the latter. `beaten_by` names a plan with fewer bytes
and seconds than this one, as measured. The figures are times: use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from harness import keep
from rivals import (
    RANKS,
    names_of,
    pages_of_plan,
    pages_of_rival,
    run_rival,
    timed,
    without_paths,
)

from bigtrain.compare.subprocess_runs import run_bigtrain
from bigtrain.job.load import load_job
from bigtrain.machine.cluster import Cluster
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

STEPS, TRACKED = 8, 2
LIMIT_S = 600.0
"""Seconds of a run, after which it is ended."""
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
Row = dict[str, Any]


@cache
def ranks_here() -> Cluster:
    """Return this machine as a cluster, with the same rates for all plans of this process."""
    return this_machine(RANKS)


def plans_of(samples: int, words: Sequence[str], at_bytes: int | None = None) -> PlannedAnswer:
    """Return the frontier of a job on this machine, or the plans below a peak.

    Args:
        samples: the samples of a step.
        words: the words of the job.
        at_bytes: the most bytes of a rank's predicted peak, as with `--at`; None for the frontier.
    """
    cluster = ranks_here()
    memory, _ = rank_limits(cluster, memory=None, cap=None)
    margins, _ = engine_margins(["torch"])
    limit, margins = limit_on_peaks(memory, margins, "--at ", at_bytes)
    question = Question(
        job=load_job(None, "single", [*words, "checkpoint.at_end=false"]),
        cluster=cluster,
        devices=RANKS,
        memory=limit,
        global_batch_size=samples,
        at_hand=True,
        frontier=at_bytes is None,
        peak_option="" if at_bytes is None else "--at ",
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


def least_peak(runs: Iterable[Sequence[Row]]) -> float:
    """Return the least peak of all runs without an error; infinity if there is none."""
    return min((run["peak_bytes"] for of in runs for run in without_errors(of)), default=math.inf)


def with_fastest_below(
    chosen: Sequence[EvaluatedPlan], front: Sequence[EvaluatedPlan], limit: float
) -> list[EvaluatedPlan]:
    """Add the fastest plan of the frontier whose predicted peak is below a limit in bytes."""
    fastest = next((plan for plan in front if plan.peak.bytes < limit), None)
    return [plan for plan in front if any(plan is one for one in (fastest, *chosen))]


def text_of(planned: PlannedAnswer, plan: EvaluatedPlan) -> str:
    """Return the text of a plan's file."""
    return plan_text(planned, plan, "bigtrain plan")


def run_plan(plan: str, words: Sequence[str], steps: int, tracked: int, limit_s: float) -> Row:
    """Run a plan, given as the text of its file; see `rivals.run_rival`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(plan)
        command = ["train", "-n", str(RANKS), "--plan", str(path), *words, f"train.steps={steps}"]
        command += [f"memory.track_steps={tracked}", f"log.dir={folder}", "log.name=run"]
        command += ["checkpoint.at_end=false"]
        outcome = run_bigtrain(command, Path(folder) / "log", limit_s, {"OMP_NUM_THREADS": "1"})
        if outcome.reason is not None:
            return {"error": without_paths(outcome.reason)}
        run = Path(folder) / "run"
        memory = json.loads((run / "memory.json").read_text())
        lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "step_seconds" in row]
    return {
        "peak_bytes": memory["peak_bytes"],
        "process_peak_bytes": max(rank["process_peak_bytes"] for rank in memory["ranks"]),
        "seconds": [row["step_seconds"] for row in rows],
        "losses": [row["loss"] for row in rows],
    }


def figures_of(runs: Sequence[Row], pages: Row, pick: Callable[[list[int]], int]) -> Row:
    """Return the figures of a plan or a rival, or the error of a run.

    Args:
        runs: its runs, one of each round.
        pages: its run that measured pages.
        pick: returns the peak that counts of those of all runs.
    """
    if errors := [run["error"] for run in (*runs, pages) if "error" in run]:
        return {"error": errors[0]}
    return {
        "peak_bytes": pick([run["peak_bytes"] for run in runs]),
        "step_seconds": timed((run["seconds"] for run in runs), TRACKED),
        "pages_bytes": pages["pages_bytes"],
        "peaks_of_rounds": [run["peak_bytes"] for run in runs],
        "first_loss": runs[0]["losses"][0],
    }


def plan_row(planned: PlannedAnswer, plan: EvaluatedPlan, runs: Sequence[Row], pages: Row) -> Row:
    """Return the row of a plan: forecasts, figures, and the relative errors of the forecasts."""
    predicted, row = plan_figures(planned, plan), figures_of(runs, pages, max)
    head = {
        "plan": plan.label,
        "mesh": plan.candidate.axes,
        "micro_batch": [plan.candidate.rows, plan.candidate.micro_batches],
        "recomputed": recompute_summary(plan),
        "predicted_peak_bytes": predicted["peak_bytes"],
        "predicted_step_seconds": predicted["step_seconds"],
    }
    if "error" not in row:
        row["process_peak_bytes"] = max(run["process_peak_bytes"] for run in runs)
        row["bytes_error"] = predicted["peak_bytes"] / row["peak_bytes"] - 1
        row["seconds_error"] = predicted["step_seconds"] / row["step_seconds"] - 1
    return head | row


def measured(name: str, points: int, rounds: int, rivals: Sequence[str]) -> Row:
    """Run plans of a job's frontier, and rivals; return their figures as JSON values."""
    samples, words = JOBS[name]
    planned = plans_of(samples, words)
    front = planned.result.front
    found: dict[int | str, list[Row]] = {
        rival: [run_rival(rival, words, samples, STEPS, TRACKED, LIMIT_S)] for rival in rivals
    }
    chosen = with_fastest_below(spread(front, points), front, least_peak(found.values()))
    texts = [text_of(planned, plan) for plan in chosen]
    plans = range(len(chosen))
    found |= {plan: [run_plan(texts[plan], words, STEPS, TRACKED, LIMIT_S)] for plan in plans}
    contestants: list[int | str] = [*rivals, *plans]
    for turn in range(1, rounds):
        for one in contestants if turn % 2 == 0 else reversed(contestants):
            if isinstance(one, int):
                run = run_plan(texts[one], words, STEPS, TRACKED, LIMIT_S)
            else:
                run = run_rival(one, words, samples, STEPS, TRACKED, LIMIT_S)
            found[one].append(run)
    rows, rival_rows = [], []
    for number, plan in enumerate(chosen):
        pages = pages_of_plan(texts[number], words, LIMIT_S)
        rows.append(plan_row(planned, plan, found[number], pages))
    mark_beaten(rows)
    for row in rows:
        print(line(row), flush=True)
    for rival in rivals:
        pages = pages_of_rival(rival, words, samples, LIMIT_S)
        rival_rows.append({"rival": rival, **figures_of(found[rival], pages, min)})
        print(rival_line(rival_rows[-1]), flush=True)
    figures = {
        "job": name,
        "plans_of_the_frontier": len(planned.result.front),
        "search_seconds": planned.result.seconds,
        "rows": rows,
        "rivals": rival_rows,
    }
    if rivals:
        figures["summary"] = summary_of(rows, rival_rows)
        print(json.dumps(figures["summary"]), flush=True)
    return figures


def without_errors(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose runs have succeeded."""
    return [row for row in rows if "error" not in row]


def mark_beaten(rows: Sequence[Row]) -> None:
    """Add to each row the plan that takes the least time of those that beat it in both figures."""
    done = without_errors(rows)
    for row in done:
        better = [
            other
            for other in done
            if other["peak_bytes"] < row["peak_bytes"]
            and other["step_seconds"] < row["step_seconds"]
        ]
        best = min(better, key=lambda other: float(other["step_seconds"]), default=None)
        row["beaten_by"] = None if best is None else done.index(best)
        row["beaten_by_plan"] = None if best is None else best["plan"]


def summary_of(rows: Sequence[Row], rival_rows: Sequence[Row]) -> Row:
    """Compare the plans with the rival of the least memory, and with the fastest."""
    plans, others = without_errors(rows), without_errors(rival_rows)
    if not plans or not others:
        return {"error": "no plan or no rival has run"}
    least = min(others, key=lambda row: int(row["peak_bytes"]))
    fastest = min(others, key=lambda row: float(row["step_seconds"]))
    ahead = [
        {
            "plan": row["plan"],
            "micro_batch": row["micro_batch"],
            "recomputed": row["recomputed"],
            "of_the_least_memory": row["peak_bytes"] / least["peak_bytes"],
            "of_the_least_pages": row["pages_bytes"] / least["pages_bytes"],
            "of_the_least_time": row["step_seconds"] / fastest["step_seconds"],
        }
        for row in plans
        if row["peak_bytes"] < least["peak_bytes"] and row["step_seconds"] < fastest["step_seconds"]
    ]
    losses = [row["first_loss"] for row in (*plans, *others)]
    return {
        "rival_with_least_memory": least["rival"],
        "least_rival_peak_bytes": least["peak_bytes"],
        "fastest_rival": fastest["rival"],
        "fastest_rival_step_seconds": fastest["step_seconds"],
        "plans_with_less_of_both": ahead,
        "criterion_met": bool(ahead),
        "plans_beaten_by_another": sum(row["beaten_by"] is not None for row in plans),
        "largest_bytes_error": max(abs(row["bytes_error"]) for row in plans),
        "largest_seconds_error": max(abs(row["seconds_error"]) for row in plans),
        "first_losses_differ_by": max(losses) / min(losses) - 1,
        "failed": [row.get("plan", row.get("rival")) for row in (*rows, *rival_rows) if _bad(row)],
    }


def _bad(row: Mapping[str, Any]) -> bool:
    return "error" in row


def line(row: Row) -> str:
    """Return a plan's row as a line of text."""
    head = f"{row['plan']} {row['micro_batch']} recomputed {row['recomputed']}: "
    if _bad(row):
        return f"{head}{row['error']}"
    beaten = "" if row["beaten_by"] is None else f"; beaten by {row['beaten_by_plan']}"
    return (
        f"{head}{row['peak_bytes'] / 2**20:.1f} MiB (predicted {row['bytes_error']:+.2%}), "
        f"{row['step_seconds']:.3f} s (predicted {row['seconds_error']:+.1%}), "
        f"pages {row['pages_bytes'] / 2**20:.0f} MiB{beaten}"
    )


def rival_line(row: Row) -> str:
    """Return a rival's row as a line of text."""
    if _bad(row):
        return f"{row['rival']}: {row['error']}"
    return (
        f"{row['rival']}: {row['peak_bytes'] / 2**20:.1f} MiB, {row['step_seconds']:.3f} s, "
        f"pages {row['pages_bytes'] / 2**20:.0f} MiB"
    )


def main() -> None:
    """Measure the frontiers of some jobs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", choices=list(JOBS), action="append")
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rivals", type=names_of, default="all", help="all, none, or names")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures = []
    for name in options.job or JOBS:
        figures.append(measured(name, options.points, options.rounds, options.rivals))
        keep(options.output, {"jobs": figures})


if __name__ == "__main__":
    main()
