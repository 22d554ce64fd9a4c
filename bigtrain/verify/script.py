"""`bigtrain verify --script FILE`: verify a user's training script with each strategy.

The script runs unchanged. The script's call of `bigtrain.prepare` reads the strategy and the number
of steps from the environment (`engine.prepare.VERIFY_VARIABLE`). The engine compares each of these
steps with a plain torch loop on rank 0, and then ends the script.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bigtrain.compare.contenders import named_strategies
from bigtrain.compare.subprocess_runs import run_bigtrain
from bigtrain.devices import device_count
from bigtrain.engine.prepare import VERIFY_VARIABLE
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import is_regular
from bigtrain.job.arguments import ComparisonOptions
from bigtrain.job.load import job_from_keys
from bigtrain.ranks.launch import start_ranks
from bigtrain.report.folders import results_folder

Row = dict[str, Any]
_REFUSAL = "bigtrain.errors.ConfigError: "
"""The beginning of the last line that Python prints for an uncaught ConfigError."""


def check_script(options: ComparisonOptions) -> int:
    """Run the script with each strategy, and print the differences from a plain torch loop.

    Args:
        options: the options of the command line.

    Returns:
        The exit status: 0 if a strategy passed and none differed or failed; otherwise 1. A strategy
        that the user named and that was refused counts as failed.

    Raises:
        ConfigError: the script does not exist, a strategy is unknown, or the command line also has
            a job or keys of a job.
    """
    file, *arguments = shlex.split(options.script or "")
    if not is_regular(file):
        raise ConfigError(f"--script {file}: there is no such file.")
    if options.overrides or options.job is not None:
        raise ConfigError(
            "--script: the script passes its job to bigtrain.prepare. Leave JOB and KEY=VALUE out."
        )
    names = named_strategies(options.strategies)
    for name in names:
        job_from_keys(name, {})  # raises ConfigError for an unknown name, before any run
    ranks = options.num_ranks or max(2, device_count())
    folder = results_folder(options.output, "verify")
    progress = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    rows: list[Row] = []
    for number, name in enumerate(names, start=1):
        words = ["-n", str(1 if name == "single" else ranks), file, *arguments]
        rows.append(_run(name, words, folder, options))
        text = rows[-1]["reason"] or f"loss {rows[-1]['loss']:.1e}, norm {rows[-1]['norm']:.1e}"
        progress.print(f"{number}/{len(names)} {name}: {rows[-1]['verdict']}, {text}")
    text = json.dumps({"script": options.script, "steps": options.steps, "rows": rows}, indent=1)
    (folder / "verify.json").write_text(f"{text}\n", "utf-8")
    if options.as_json:
        sys.stdout.write(f"{text}\n")
    else:
        _show(rows, options, folder)
    is_named = options.strategies != "all"
    bad = ("differs", "failed", "refused") if is_named else ("differs", "failed")
    passed = any(row["verdict"] == "pass" for row in rows)
    return 1 if not passed or any(row["verdict"] in bad for row in rows) else 0


def _run(name: str, words: Sequence[str], folder: Path, options: ComparisonOptions) -> Row:
    report = folder / f"{name.replace('/', '-')}.json"
    request = {"strategy": name, "steps": options.steps, "report": str(report.resolve())}
    ended = run_bigtrain(
        words,
        report.with_suffix(".log"),
        options.time_limit,
        {VERIFY_VARIABLE: json.dumps(request)},
        module="bigtrain.verify.script",
    )
    row: Row = {"strategy": name, "verdict": "pass", "reason": None, "loss": None, "norm": None}
    result = read_json_object(report) if is_regular(report) else None
    if result is None:
        reason = ended.reason
        if reason is None:
            reason = f"it ended before {options.steps} steps of an engine of bigtrain.prepare"
        verdict = "refused" if ended.status == 2 or _REFUSAL in reason else "failed"
        reason = reason.removeprefix(_REFUSAL)
        return row | {"verdict": verdict, "reason": reason}
    steps = result["steps"]
    row |= {"loss": _largest(steps, "loss"), "norm": _largest(steps, "norm")}
    if result["difference"] is not None:
        row |= {"verdict": "differs", "reason": result["difference"]}
    elif result["note"] is not None:
        row |= {"verdict": "refused", "reason": f"not compared: {result['note']}"}
    return row


def _largest(steps: Sequence[Row], key: str) -> float:
    """Return the largest relative difference of a figure from that of the plain loop."""
    pairs = [(step[key], step[f"plain_{key}"]) for step in steps]
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=0.0)


def _show(rows: Sequence[Row], options: ComparisonOptions, folder: Path) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=120)
    title = f"Largest relative differences from a plain torch loop, {options.steps} steps"
    table = Table(title=title, title_justify="left")
    table.add_column("strategy", no_wrap=True)
    for heading in ("loss", "norm"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        figures = ("" if row[key] is None else f"{row[key]:.1e}" for key in ("loss", "norm"))
        table.add_row(row["strategy"], *figures, row["verdict"])
    console.print(table)
    for row in rows:
        if row["reason"] is not None:
            line = f"{row['strategy']}: {row['verdict']}: {row['reason']}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    line = f"dropout was off; results: {folder / 'verify.json'}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def main(arguments: list[str]) -> int:
    """Start the ranks of a script, and return the exit status.

    Args:
        arguments: `-n N FILE ARGUMENTS`.
    """
    _, number, file, *rest = arguments
    try:
        return start_ranks(int(number), rest, Path(file))
    except BigtrainError as error:
        sys.stderr.write(f"bigtrain: {error}\n")
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
