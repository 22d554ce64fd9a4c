"""`bigtrain doctor`: report the parts of the machine, how to install missing ones, and its speed.

With `--check` the command runs the checks of `bigtrain.doctor.checks` instead.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from bigtrain.doctor.check_runs import LIMIT_S, chosen_checks, run_check, write_figures
from bigtrain.doctor.probes import examine_machine, examine_rates
from bigtrain.doctor.rules import CheckedRun
from bigtrain.doctor.show import show_checks, show_machine
from bigtrain.errors import ConfigError
from bigtrain.job.command_parser import CommandParser


def main(arguments: list[str]) -> int:
    """Run `bigtrain doctor` and return the exit status.

    The status is 1 if torch has no gloo, without which ranks cannot communicate at all, if no
    strategy can run, or if a check failed; otherwise it is 0.

    Raises:
        ConfigError: a check is unknown, or the folder of the output does not exist.
    """
    if "--check" in arguments:
        return _check([word for word in arguments if word != "--check"])
    parser = CommandParser(
        prog="bigtrain doctor",
        description="Show what this machine has, what it lacks, and how fast it is.",
    )
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="one JSON document on standard output"
    )
    measuring = parser.add_mutually_exclusive_group()
    measuring.add_argument("--no-rates", action="store_true", help="leave the rates out")
    measuring.add_argument(
        "--again", action="store_true", help="measure the rates even if they are cached"
    )
    measuring.add_argument(  # only for the help text: `_check` reads its own options
        "--check", action="store_true", help="run what bigtrain promises, each checked by a rule"
    )
    options = parser.parse_args(arguments)
    report = examine_machine()
    if not options.no_rates:
        report["rates"] = examine_rates(again=options.again)
    if options.as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        show_machine(report)
    return 0 if report["backends"]["gloo"] and report["strategies"]["run"] else 1


def _check(arguments: list[str]) -> int:
    """Run the checks, and return the exit status: 1 if a check failed, otherwise 0."""
    parser = CommandParser(
        prog="bigtrain doctor --check",
        description="Run what bigtrain promises on this machine, each run checked by a rule.",
    )
    parser.add_argument("--only", metavar="NAMES", help="some of the checks, separated by commas")
    parser.add_argument("--output", default="check.json", help="the file for all figures")
    parser.add_argument(
        "--time-limit",
        metavar="SECONDS",
        type=float,
        default=LIMIT_S,
        help="the seconds that one check may take (default: %(default).0f)",
    )
    options = parser.parse_args(arguments)
    if not options.time_limit > 0:
        limit = f"{options.time_limit:g}"
        raise ConfigError(
            f"--time-limit {limit}: a number above 0 is needed. Use --time-limit {LIMIT_S:.0f}."
        )
    checks = list(chosen_checks(options.only))
    if not Path(options.output).resolve().parent.is_dir():
        raise ConfigError(f"--output {options.output}: there is no such folder. Make it first.")
    progress = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    runs: dict[str, CheckedRun] = {}
    with tempfile.TemporaryDirectory(prefix="bigtrain-check-") as folder:
        for number, check in enumerate(checks, start=1):
            run = run_check(check, runs, Path(folder), options.time_limit)
            runs[check.name] = run
            # The file is written after each check, because the next one may crash the machine.
            write_figures(Path(options.output), runs.values())
            progress.print(f"{number}/{len(checks)} {run.name}: {run.verdict}. {run.explanation}")
    show_checks(list(runs.values()), options.output)
    return 1 if any(run.verdict == "failed" for run in runs.values()) else 0
