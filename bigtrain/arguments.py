"""The arguments of `train.py` and `bigtrain train`: few and frozen; the rest are keys of a job."""

from __future__ import annotations

import argparse

TRAIN_HELP = """\
One job is one YAML file; configs/jobs/default.yaml is used when none is named. Any key can be
set on the command line: optim.lr=3e-4, or OPTIM.LR 3e-4."""


class TrainOptions(argparse.Namespace):
    """What `train.py` and `bigtrain train` were given."""

    config: str | None
    strategy: str | None
    plan: str | None
    dry_run: bool
    num_ranks: int | None
    overrides: list[str]


def train_arguments(arguments: list[str], *, starts_ranks: bool = False) -> TrainOptions:
    """Read the arguments of train.py; what launchers add is accepted and ignored.

    Args:
        arguments: without the program's name.
        starts_ranks: also accept `-n`, which only `bigtrain train` has.

    Raises:
        SystemExit: 2 for an unknown option, 0 after --help.
    """
    parser = argparse.ArgumentParser(
        prog="bigtrain train" if starts_ranks else "train.py",
        usage="%(prog)s [options] [KEY=VALUE | KEY VALUE ...]",
        description="Train a model under a strategy, and show what memory it took.",
        epilog=TRAIN_HELP,
        allow_abbrev=False,
    )
    add_train_options(parser, starts_ranks=starts_ranks)
    options, rest = parser.parse_known_args(arguments, namespace=TrainOptions())
    for word in rest:
        if word.startswith("--"):
            parser.error(f"there is no option {word}; keys of the job are given as KEY=VALUE")
    if options.resume is not None:
        rest += [f"checkpoint.resume={options.resume}"]
    options.overrides = rest
    return options


def add_train_options(parser: argparse.ArgumentParser, *, starts_ranks: bool) -> None:
    """Add the frozen list of options; everything else is a key of the job."""
    if starts_ranks:
        parser.add_argument(
            "-n", "--num-ranks", type=int, metavar="N", help="start N ranks on this machine"
        )
    parser.add_argument("--config", metavar="JOB", help="a YAML file, or a name in configs/jobs")
    parser.add_argument(
        "--strategy", metavar="NAME", help="a name in configs/strategies, or a YAML file"
    )
    parser.add_argument("--plan", metavar="FILE", help="a plan.yaml to follow")
    parser.add_argument(
        "--resume", metavar="auto|PATH", help="continue from the newest checkpoint, or from PATH"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the job and the predicted peak, run nothing"
    )
    ignored = parser.add_argument_group("accepted from launchers and ignored")
    ignored.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    ignored.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    ignored.add_argument("--deepspeed_config", help=argparse.SUPPRESS)
