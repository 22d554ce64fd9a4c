"""`bigtrain compare`: run the same job with several strategies, each in separate processes."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from bigtrain.compare.contenders import ComparedStrategy, count_strategies, find_strategies
from bigtrain.compare.html_page import write_page
from bigtrain.compare.largest import find_largest, first_value, job_key_of, words_for
from bigtrain.compare.pictures import write_bars
from bigtrain.compare.rows import (
    TRACKED_STEPS,
    ComparisonRow,
    Status,
    largest_loss_difference,
)
from bigtrain.compare.subprocess_runs import QuietRun, RunOutcome
from bigtrain.compare.table import comparison_table, notes, progress_line
from bigtrain.errors import ConfigError
from bigtrain.job.arguments import ComparisonOptions, compare_arguments
from bigtrain.machine.versions import hardware_and_versions
from bigtrain.report.folders import results_folder


def main(arguments: list[str]) -> int:
    """Run `bigtrain compare`: run the job with each strategy, then show the results in a table.

    Args:
        arguments: the command's arguments.

    Returns:
        The exit status: 0 if at least one strategy ran, 1 if none ran, 130 after Ctrl-C.

    Raises:
        ConfigError: the arguments or the job are wrong, or no strategy can run.
    """
    options = compare_arguments(arguments)
    capped = [f"memory.cap={options.cap}"] if options.cap is not None else []
    contenders = find_strategies(options, capped)
    _check(options, contenders)
    folder = results_folder(options.output, "compare")
    progress = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    progress.print(f"{count_strategies(len(contenders))}; results in {folder}")
    rows: list[ComparisonRow] = []
    stopped = False
    try:
        for number, contender in enumerate(contenders, start=1):
            rows.append(_row(contender, options, folder))
            progress.print(f"{number}/{len(contenders)} {progress_line(rows[-1])}")
    except KeyboardInterrupt:
        stopped = True
        progress.print(f"stopped: {len(rows)} of {len(contenders)} strategies are done")
    command = shlex.join(["bigtrain", "compare", *arguments])
    document = _document(command, options, contenders, rows, stopped=stopped)
    (folder / "compare.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    write_page(folder / "report.html", document, rows)
    if options.picture is not None:
        write_bars(Path(options.picture), document["title"], rows)
    _show(options, document, rows, folder)
    if stopped:
        return 130
    return 0 if any(row.status == "ok" or row.largest for row in rows) else 1


def _check(options: ComparisonOptions, contenders: list[ComparedStrategy]) -> None:
    """Raise ConfigError before the first run if no strategy can run or an option is wrong."""
    able = [c for c in contenders if c.plan is not None]
    if not able:
        first = contenders[0]
        raise ConfigError(f"none of these strategies can run. {first.label}: {first.refusal}")
    if options.picture is not None and Path(options.picture).suffix not in (".svg", ".png"):
        raise ConfigError(f"--picture {options.picture}: name a file that ends in .svg or .png.")
    if options.largest is not None and able[0].job is not None and able[0].plan is not None:
        first_value(job_key_of(options.largest), able[0].job, able[0].plan)


def _row(contender: ComparedStrategy, options: ComparisonOptions, folder: Path) -> ComparisonRow:
    """Run a strategy and return its row; with `--largest` the row of its largest run."""
    if contender.plan is None or contender.job is None:
        return ComparisonRow(contender.label, contender.num_ranks, "refused", contender.refusal)
    if options.largest is not None:
        return _largest_row(contender, options, folder, options.largest)
    words = [
        f"train.steps={options.steps}",
        f"memory.track_steps={min(TRACKED_STEPS, options.steps)}",
    ]
    ended = _run(contender, options, folder, contender.label, words)
    if ended.reason is not None:
        return ComparisonRow(contender.label, contender.num_ranks, _status(ended), ended.reason)
    return _read(contender, folder, contender.label)


def _read(contender: ComparedStrategy, folder: Path, label: str) -> ComparisonRow:
    """Return the row of a run that ended without an error."""
    try:
        return ComparisonRow.of_run(contender.label, contender.num_ranks, folder / label)
    except (OSError, ValueError, KeyError, IndexError) as error:
        reason = f"it ended without an error and left no figures: {type(error).__name__}: {error}"
        return ComparisonRow(contender.label, contender.num_ranks, "failed", reason)


def _largest_row(
    contender: ComparedStrategy, options: ComparisonOptions, folder: Path, name: str
) -> ComparisonRow:
    """Find the largest value of a key that runs, and return the row of the run with this value."""
    key, plan, job = job_key_of(name), contender.plan, contender.job
    if plan is None or job is None:
        raise ValueError("a strategy that cannot run has no key to raise")

    def fault(value: int) -> str | None:
        label = f"{contender.label}-{value}"
        steps = [f"train.steps={TRACKED_STEPS + 1}", f"memory.track_steps={TRACKED_STEPS}"]
        words = [*words_for(key, value, plan), *steps]
        return _run(contender, options, folder, label, words).reason

    value, reason = find_largest(fault, first_value(key, job, plan))
    if value is None:
        row = ComparisonRow(contender.label, contender.num_ranks, "failed", reason)
    else:
        row = _read(contender, folder, f"{contender.label}-{value}")
    return row.with_largest(value, reason)


def _run(
    contender: ComparedStrategy,
    options: ComparisonOptions,
    folder: Path,
    label: str,
    words: list[str],
) -> RunOutcome:
    """Train a few steps in a new process that writes to the folder `label`."""
    run = QuietRun(
        command="train",
        strategy=contender.strategy,
        num_ranks=contender.num_ranks,
        folder=folder / label,
        words=[*options.overrides, *words],
        job=options.job,
        options=[] if options.cap is None else ["--cap", options.cap],
    )
    return run.run(options.time_limit)


def _status(ended: RunOutcome) -> Status:
    if ended.timed_out:
        return "time limit"
    if ended.out_of_memory:
        return "out of memory"
    return "refused" if ended.status == 2 else "failed"


def _document(
    command: str,
    options: ComparisonOptions,
    contenders: list[ComparedStrategy],
    rows: list[ComparisonRow],
    *,
    stopped: bool,
) -> dict[str, Any]:
    """Return the content of compare.json."""
    job = next(c.job for c in contenders if c.job is not None)
    ranks, difference = max(c.num_ranks for c in contenders), largest_loss_difference(rows)
    return {
        "title": f"{job.model.name} on {ranks} rank{'s' if ranks > 1 else ''}",
        "command": command,
        "date": datetime.now(timezone.utc).astimezone().isoformat(timespec="minutes"),
        "job": job.model_dump(mode="json", exclude={"strategy"}),
        "num_ranks": ranks,
        "steps": options.steps,
        "cap": options.cap,
        "largest": job_key_of(options.largest) if options.largest else None,
        "stopped": stopped,
        "surroundings": hardware_and_versions(),
        "loss_difference": None if difference is None else asdict(difference),
        "rows": [row.as_json() for row in rows],
    }


def _show(
    options: ComparisonOptions, document: dict[str, Any], rows: list[ComparisonRow], folder: Path
) -> None:
    """Print the table, or with `--json` the document."""
    if options.as_json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
        return
    console = Console() if sys.stdout.isatty() else Console(width=175)
    console.print(comparison_table(rows, document["title"], options.largest, console.width))
    for line in [*notes(rows), f"results: {folder / 'report.html'}"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
