"""Measure how much each shortcut of the planner's search saves.

    python benchmarks/planner_shortcuts.py --output benchmarks/results/planner_shortcuts.json

Every case of `planner_search.py`, and a small model on two CPU ranks, is searched with all
shortcuts and once without each of them, in alternation: every round runs all of them once, each in
a process of its own on one thread. The table gives the CPU seconds of the search (of the process,
so that other programs on the machine count little), the medians over the rounds, the runs on fake
tensors, and whether the best plan stays the same. A shortcut that saves less than 10 % of a search
is not worth its code: those that were removed for that are in the results, at the commit named
there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import keep
from planner_search import CASES, question_of

from bigtrain.planner.ask import ask
from bigtrain.planner.bounds import PlanBounds
from bigtrain.planner.search import PlanSearch

SMALL_CASE = "gpt of 4 blocks on 2 CPU ranks"
CPU_CASES: dict[str, dict[str, Any]] = {
    SMALL_CASE: {
        "devices": 2,
        "batch": 32,
        "cluster": "cpu",
        "precision": "fp32",
        "args": {"num_layers": 4, "width": 256, "num_heads": 4, "sequence_length": 256},
    }
}
ALL_CASES = {**CPU_CASES, **CASES}


BOUNDS: Any = PlanBounds
SEARCH: Any = PlanSearch
RUNS: Any = importlib.import_module("bigtrain.prediction.fake_runs.runs")
"""What the functions below change in this process; `Any`, as they replace methods."""


def without_work_bound() -> None:
    """Search without the first bound: every candidate begins at 0 seconds."""
    BOUNDS.least_seconds = lambda *_: 0.0


def without_even_bound() -> None:
    """Search without the second bound; dominated slices cannot be compared by it either."""
    even_seconds = BOUNDS.even_seconds

    def ignored(*arguments: Any) -> float:
        even_seconds(*arguments)  # a candidate that cannot run is refused here
        return 0.0

    BOUNDS.even_seconds = ignored
    SEARCH._compare_slices = lambda *_: None


def without_cut_bound() -> None:
    """Search without the third bound: the cut for speed where every block keeps everything."""
    SEARCH._bound_cut_seconds = lambda *_: None


def without_dominated_slices() -> None:
    """Search every choice of slices to the end."""
    SEARCH._compare_slices = lambda *_: None


def without_other_ends() -> None:
    """Run all blocks again where only the loss differs."""
    RUNS.FakeRuns._with_other_ends = lambda *_: ()


SHORTCUTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "work bound (WORK_SLACK)": without_work_bound,
    "even bound (EVEN_SLACK)": without_even_bound,
    "cut bound (END_SLACK)": without_cut_bound,
    "dominated slices (DOMINANCE_SLACK)": without_dominated_slices,
    "ends of another loss (FakeRuns._with_other_ends)": without_other_ends,
}


def main() -> None:
    """Run all cases, or one case in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--without", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(ALL_CASES))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.case is not None:
        json.dump(measured(options.case, options.without), sys.stdout)
        return
    runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for round_number in range(options.rounds):
        for case in options.cases:
            for name in SHORTCUTS:
                command = [sys.executable, __file__, "--case", case, "--without", name]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                runs[case, name].append(json.loads(done.stdout))
                print(round_number, case, "|", name, runs[case, name][-1], flush=True)
    rows = [row_of(case, name, runs) for case, name in runs]
    for row in rows:
        print(line(row), flush=True)
    keep(options.output, {"rounds": options.rounds, "rows": rows})


def row_of(
    case: str, name: str, runs: dict[tuple[str, str], list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the medians of one search, and their ratio to the usual search."""

    def cpu_seconds(which: str) -> float:
        return float(statistics.median(run["cpu_seconds"] for run in runs[case, which]))

    searches, usual = runs[case, name], runs[case, ""]
    return {
        "case": case,
        "without": name,
        "cpu_seconds": cpu_seconds(name),
        "wall_seconds": statistics.median(run["wall_seconds"] for run in searches),
        "ratio": cpu_seconds(name) / cpu_seconds(""),
        "runs_on_fakes": searches[0]["runs_on_fakes"],
        "forecast": searches[0]["forecast"],
        "best_seconds": searches[0]["best_seconds"],
        "is_same_plan": searches[0]["best"] == usual[0]["best"],
    }


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return (
        f"{row['case']:32} without {row['without'] or '-':40} {row['cpu_seconds']:6.1f} s CPU "
        f"({row['ratio']:.2f}x), {row['runs_on_fakes']} runs on fakes, {row['forecast']} forecast, "
        f"{'same plan' if row['is_same_plan'] else 'ANOTHER PLAN'}"
    )


def measured(case: str, without: str) -> dict[str, Any]:
    """Search one case in this process."""
    question = question_of(ALL_CASES[case])
    SHORTCUTS[without]()
    count = 0

    def counted(record: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return record(*arguments, **options)

        return run

    RUNS.record_sections = counted(RUNS.record_sections)
    RUNS.record_split_backward = counted(RUNS.record_split_backward)
    cpu, wall = time.process_time(), time.perf_counter()
    planned = ask(question)
    best = planned.result.best[0]
    return {
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
        "runs_on_fakes": count,
        "forecast": planned.result.evaluated,
        "best_seconds": best.seconds.total,
        "best": f"{best.label} {best.candidate.axes} {best.candidate.rows}",
    }


if __name__ == "__main__":
    main()
