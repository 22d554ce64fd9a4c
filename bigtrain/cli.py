"""The command line, `bigtrain COMMAND`. The module of a command is imported when it is named.

Only the parser is imported here; everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import contextlib
import platform
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from bigtrain.job.command_parser import CommandParser

if TYPE_CHECKING:
    from bigtrain.job.arguments import TrainOptions

COMMANDS = {
    "init": "write a first model, data source, job and test to edit",
    "train": "train a model under a strategy",
    "plan": "find the fastest plan that fits, without running anything",
    "fit": "whether a model can be fine-tuned on some devices: full, LoRA, QLoRA",
    "check": "exit with 1 if a job's predicted peak is above a limit, for continuous integration",
    "explain": "what a file of DeepSpeed, Accelerate, axolotl or TRL asks for, and a better plan",
    "compare": "run strategies side by side: memory by part, time, losses",
    "speedup": "whether more ranks pay: compute and communication, measured and predicted",
    "verify": "check that strategies compute the same numbers as one process",
    "checkpoint": "inspect, verify, convert, export, compare checkpoints",
    "strategies": "list the strategies, or explain one",
    "doctor": "check this machine: devices, libraries, launchers, speed",
}
SCRIPTS = {"train": "train.py", "record": "verify/record.py", "pace": "speedup/measure.py"}
"""The script that the ranks of a command run, relative to this file."""


def main(arguments: list[str] | None = None) -> int:
    """The `bigtrain` command; returns the exit status."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:  # before a command has begun
        return 128 + signal.SIGINT


def _main(arguments: list[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = CommandParser(
        prog="bigtrain",
        description="Name a strategy; the same model trains to the same numbers in less memory.",
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    commands.add_parser("record", add_help=False)  # a part of verify
    commands.add_parser("pace", add_help=False)  # a part of speedup
    options, rest = parser.parse_known_args(arguments)
    if options.command in SCRIPTS:
        return _on_ranks(options.command, rest)
    return _guarded(options.command, rest)


def _versions() -> str:
    """The versions that a bug report should name: bigtrain, torch, Python."""
    versions = []
    for name in ("bigtrain", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return ", ".join([*versions, f"Python {platform.python_version()}"])


_PLACES = {
    "plan": "planner.command",
    "fit": "fit.command",
    "check": "report.check",
    "explain": "explain.command",
    "compare": "compare.command",
    "speedup": "speedup.command",
    "verify": "verify.command",
    "checkpoint": "checkpoint.command",
    "init": "job.starter",
    "doctor": "doctor.command",
    "strategies": "compare.list_strategies",
}
"""The module of each command that runs in this process; a command imports no other's."""


def _main_of(command: str) -> Callable[[list[str]], int]:
    run: Callable[..., int] = import_module(f"bigtrain.{_PLACES[command]}").main
    if command == "checkpoint":
        from bigtrain.hub.export import export_folder, merged_checkpoint

        return partial(run, export_folder=export_folder, merge_state=merged_checkpoint)
    return run


def _guarded(command: str, arguments: list[str]) -> int:
    """Run a command in this process; its failures are shown as those of a run are."""
    from bigtrain.job.arguments import READERS
    from bigtrain.ranks.exit_status import run_guarded

    if command in READERS:  # --help and wrong words are answered before torch is loaded
        READERS[command](arguments)
    run = _main_of(command)
    for number in (signal.SIGTERM, signal.SIGHUP):  # runs that were started are ended, too
        signal.signal(number, _stop)
    return run_guarded(lambda: run(arguments))


def _stop(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _on_ranks(command: str, arguments: list[str]) -> int:
    """Run the script of a command in this process, or with `-n N` in N ranks."""
    from bigtrain.job.arguments import train_arguments
    from bigtrain.ranks.exit_status import run_guarded

    options = train_arguments(arguments, starts_ranks=True, records=command != "train")
    return run_guarded(lambda: _start(command, options, _of_ranks(arguments)))


def _start(command: str, options: TrainOptions, words: list[str]) -> int:
    """Refuse a wrong job before torch is loaded; then run it."""
    from bigtrain.job.load import load_job
    from bigtrain.ranks.launch import as_first_of, check_shares, start_ranks

    ranks = options.num_ranks
    if options.strategy != "auto":  # the planner makes that job
        job = load_job(options.config, options.strategy, options.overrides, plan=options.plan)
        if ranks is not None:
            check_shares(job, ranks)
    if ranks is not None and not options.dry_run:
        script = Path(__file__).parent / SCRIPTS[command]
        return start_ranks(
            ranks, words, script, restarts=options.restarts, min_ranks=options.min_ranks
        )
    from bigtrain import train
    from bigtrain.speedup import measure
    from bigtrain.verify import record

    run = {"train": train.main, "record": record.main, "pace": measure.main}[command]
    if ranks is None:
        return run(words)
    with as_first_of(ranks):
        return run(words)


def _of_ranks(arguments: list[str]) -> list[str]:
    """The arguments without those that say how ranks are started; the ranks get these."""
    words_of_ranks: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("-n", "--num-ranks", "--restarts", "--min-ranks"):
            rest.pop(0)
        elif not re.fullmatch(r"(--(num-ranks|restarts|min-ranks)=|-n=?)-?\d+", word):
            words_of_ranks.append(word)
    return words_of_ranks


if __name__ == "__main__":
    sys.exit(main())
