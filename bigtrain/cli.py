"""The `bigtrain` command line: `bigtrain COMMAND [options]`.

Only the argument parser is imported here. A command's module, which may load torch, is imported
when that command runs.
"""

from __future__ import annotations

import contextlib
import gc
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
"""By command, the script that its ranks run, as a path relative to this file's folder."""


def main(arguments: list[str] | None = None) -> int:
    """Run the `bigtrain` command and return its exit status.

    Args:
        arguments: the command line without the program's name; None reads `sys.argv`.

    Raises:
        SystemExit: 2 for a wrong command or option, 0 after --help and --version.
    """
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
    commands.add_parser("record", add_help=False)  # internal: verify runs it
    commands.add_parser("pace", add_help=False)  # internal: speedup runs it
    options, rest = parser.parse_known_args(arguments)
    if options.command in SCRIPTS:
        return _on_ranks(options.command, rest)
    return _guarded(options.command, rest)


def _versions() -> str:
    """Return the versions that a bug report should name: of bigtrain, torch and Python."""
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
"""The module, below `bigtrain`, of each command that runs in this process."""


def _main_of(command: str) -> Callable[[list[str]], int]:
    gc.disable()  # the collector takes a sixth of the time of these imports, and finds nothing
    run: Callable[..., int] = import_module(f"bigtrain.{_PLACES[command]}").main
    gc.freeze()
    gc.enable()
    if command == "checkpoint":
        from bigtrain.hub.export import export_folder, merged_checkpoint

        return partial(run, export_folder=export_folder, merge_state=merged_checkpoint)
    return run


def _guarded(command: str, arguments: list[str]) -> int:
    """Run a command in this process and return its exit status; `run_guarded` prints failures."""
    from bigtrain.job.arguments import READERS
    from bigtrain.ranks.exit_status import run_guarded

    if command in READERS:  # --help and wrong options exit before torch is loaded
        READERS[command](arguments)
    run = _main_of(command)
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the runs it started end, too
        signal.signal(number, _stop)
    status = run_guarded(lambda: run(arguments))
    gc.freeze()  # so that Python does not look for cycles among millions of objects as it exits
    return status


def _stop(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _on_ranks(command: str, arguments: list[str]) -> int:
    """Run the script of a command in this process, or in N ranks with `-n N`."""
    from bigtrain.job.arguments import train_arguments
    from bigtrain.memory.allocator import start_with_allocator
    from bigtrain.ranks.exit_status import run_guarded

    options = train_arguments(arguments, starts_ranks=True, records=command != "train")
    if options.num_ranks is None and not options.dry_run:
        start_with_allocator()
    return run_guarded(lambda: _start(command, options, _of_ranks(arguments)))


def _start(command: str, options: TrainOptions, words: list[str]) -> int:
    """Refuse a wrong job before torch is loaded; then run it."""
    from bigtrain.job.load import load_job
    from bigtrain.ranks.launch import as_first_of, check_shares, start_ranks

    ranks = options.num_ranks
    if options.strategy != "auto":  # for auto the planner makes the job
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
    """Return the arguments for the ranks: all except `-n`, `--restarts` and `--min-ranks`."""
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
