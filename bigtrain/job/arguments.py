"""The arguments of `train.py` and `bigtrain train`: few and frozen; the rest are keys of a job."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from bigtrain.job.command_parser import CommandParser

TRAIN_HELP = """\
JOB is a YAML file, or a name in configs/jobs; left out, the default job. Any key can be set on
the command line: optim.lr=3e-4, or OPTIM.LR 3e-4."""


OWN_CHECKPOINTS = "a checkpoint (step-N), a run's folder, or its checkpoints/"
"""Where the commands on checkpoints find one."""


class TrainOptions(argparse.Namespace):
    """What `train.py` and `bigtrain train` were given."""

    config: str | None
    strategy: str | None
    plan: str | None
    dry_run: bool
    num_ranks: int | None
    restarts: int
    min_ranks: int | None
    record: str
    trace: bool
    no_dropout: bool
    overrides: list[str]


def train_arguments(
    arguments: list[str], *, starts_ranks: bool = False, records: bool = False
) -> TrainOptions:
    """Read the arguments of train.py; what launchers add is accepted and ignored.

    Args:
        arguments: without the program's name.
        starts_ranks: also accept `-n`, which only `bigtrain train` has.
        records: demand `--record`, the folder that `bigtrain.verify.record` writes to; take
            `--trace` and `--no-dropout`.

    Raises:
        SystemExit: 2 for an unknown option, 0 after --help.
    """
    parser = CommandParser(
        prog="bigtrain train" if starts_ranks else "train.py",
        usage="%(prog)s [JOB] [options] [KEY=VALUE | KEY VALUE ...]",
        description="Train a model under a strategy, and show what memory it took.",
        epilog=TRAIN_HELP,
    )
    add_train_options(parser, starts_ranks=starts_ranks)
    if records:
        parser.add_argument("--record", required=True)
        parser.add_argument("--trace", action="store_true")
        parser.add_argument("--no-dropout", action="store_true")
    options, rest = parser.parse_known_args(arguments, namespace=TrainOptions())
    parser.refuse_unknown([word for word in rest if word.startswith("--")])
    if rest and _names_a_job(rest):
        options.config, rest = _one_job(parser, options.config, rest[0]), rest[1:]
    if starts_ranks and options.num_ranks is None and options.restarts + (options.min_ranks or 0):
        option = "--restarts" if options.restarts else "--min-ranks"
        parser.error(f"{option} is of ranks that bigtrain starts itself. Add -n N")
    if options.resume is not None:
        rest += [f"checkpoint.resume={options.resume}"]
    if options.cap is not None:
        rest += [f"memory.cap={options.cap}"]
    options.overrides = rest
    return options


def _names_a_job(words: list[str]) -> bool:
    """Whether the first word is a job's, and not a key whose value comes next."""
    first = words[0]
    if "=" in first or first.startswith(("+", "-")):
        return False
    if _is_file(first):
        return True
    is_key = first.isupper() or (len(words) > 1 and first in _KEYS_ALONE)
    return "." not in first and not is_key


_KEYS_ALONE = ("device", "strategy")
"""The keys of a job that stand in no section, so that no dot is in them."""


def _one_job(parser: CommandParser, config: str | None, word: str) -> str:
    if config is not None:
        parser.error(f"--config {config} and {word}: one job at a time")
    return word


def add_train_options(parser: CommandParser, *, starts_ranks: bool) -> None:
    """Add the frozen list of options; everything else is a key of the job."""
    if starts_ranks:
        parser.add_argument(
            "-n", "--num-ranks", type=int, metavar="N", help="start N ranks on this machine"
        )
        parser.add_argument(
            *("--restarts",),
            type=int,
            default=0,
            metavar="K",
            help="with -n: start the ranks again, up to K times, where one is lost",
        )
        parser.add_argument(
            *("--min-ranks",),
            type=int,
            metavar="M",
            help="with --restarts: go on with as few as M ranks where others are gone",
        )
    parser.add_argument("--config", metavar="JOB", help="the same as JOB")
    parser.add_argument(
        *("--strategy",),
        metavar="WORDS",
        help="names in configs/strategies and YAML files with + between them, or auto",
    )
    parser.add_argument("--plan", metavar="FILE", help="a plan.yaml to follow")
    parser.add_argument(
        "--resume", metavar="auto|PATH", help="continue from the newest checkpoint, or from PATH"
    )
    parser.add_argument(
        "--cap", metavar="SIZE", help="the most memory that a rank may take, such as 2GiB"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the job and the predicted peak, run nothing"
    )
    ignored = parser.add_argument_group("accepted from launchers and ignored")
    ignored.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    ignored.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    ignored.add_argument("--deepspeed_config", help=argparse.SUPPRESS)


class ComparisonOptions(argparse.Namespace):
    """What `bigtrain compare` and `bigtrain verify` were given."""

    job: str | None
    strategies: str
    num_ranks: int | None
    time_limit: float
    steps: int
    output: str | None
    as_json: bool
    overrides: list[str]
    cap: str | None = None
    largest: str | None = None
    picture: str | None = None
    optimizer: str = "sgd"
    fuzz: int = 0
    """Plans to draw; 0 where strategies are named."""
    script: str | None = None
    """A script of the user's own with its arguments, which is checked in place of a job."""
    seed: int = 0


SideOptions = TypeVar("SideOptions", bound=ComparisonOptions)


def compare_arguments(arguments: list[str]) -> ComparisonOptions:
    """Read the arguments of `bigtrain compare`.

    Raises:
        SystemExit: 2 for an unknown option, 0 after --help.
    """
    parser = _side_parser(
        "compare", "Run strategies side by side on one job: memory, time, losses."
    )
    parser.add_argument("--steps", type=int, default=8, help="steps of each run (default 8)")
    parser.add_argument("--cap", metavar="SIZE", help="the most memory that a rank may take")
    parser.add_argument(
        "--largest",
        metavar="KEY",
        help="find how far each strategy can raise a key (micro_batch_size, n_layer, ...)",
    )
    parser.add_argument("--picture", metavar="FILE", help="also write the bars as .svg or .png")
    return _side_options(parser, arguments, ComparisonOptions())


def verify_arguments(arguments: list[str]) -> ComparisonOptions:
    """Read the arguments of `bigtrain verify`.

    Raises:
        SystemExit: 2 for an unknown option, 0 after --help.
    """
    parser = _side_parser(
        "verify", "Compare strategies with one process on the same global batches."
    )
    parser.add_argument("--steps", type=int, default=3, help="steps that are compared (default 3)")
    parser.add_argument(
        "--optimizer",
        choices=("sgd", "job"),
        default="sgd",
        help="SGD lets every number be compared (default); the job's own lets losses be",
    )
    parser.add_argument(
        "--fuzz",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="draw N plans on at most -n ranks instead",
    )
    parser.add_argument(
        "--seed", type=int, default=argparse.SUPPRESS, help="of what --fuzz draws (default 0)"
    )
    parser.add_argument(
        "--script",
        metavar="'FILE ARGUMENTS'",
        help="a script that calls bigtrain.prepare: its first steps beside a plain torch loop",
    )
    options = _side_options(parser, arguments, ComparisonOptions())
    given = vars(options)
    if "seed" in given and "fuzz" not in given:
        parser.error("--seed is of what --fuzz draws: add --fuzz N, or set train.seed of the job")
    if "fuzz" in given and options.fuzz < 1:
        parser.error(f"--fuzz {options.fuzz}: at least 1 is needed")
    if options.script is not None and "fuzz" in given:
        parser.error("--fuzz draws plans for a job; leave --script out, or --fuzz")
    if options.fuzz and options.strategies != "all":
        parser.error("--fuzz draws the strategies; leave --strategy out, or --fuzz")
    return options


class SpeedupOptions(ComparisonOptions):
    """What `bigtrain speedup` was given."""

    cluster: str | None


def speedup_arguments(arguments: list[str]) -> SpeedupOptions:
    """Read the arguments of `bigtrain speedup`.

    Raises:
        SystemExit: 2 for an unknown option, 0 after --help.
    """
    parser = _side_parser(
        "speedup",
        "Measure what ranks compute and exchange in a step, and say whether more of them pay.",
        strategies="ddp",
        ranks="the most ranks (default: GPUs, or cores)",
    )
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed (default 8)")
    parser.add_argument(
        *("--cluster",),
        metavar="FILE",
        help="predict by these figures, also for more ranks (default: this machine's)",
    )
    parser.add_argument("--picture", metavar="FILE", help="the speed-up as .svg or .png")
    return _side_options(parser, arguments, SpeedupOptions())


class PlanOptions(argparse.Namespace):
    """What `bigtrain plan` was given."""

    job: str | None
    devices: int | None
    memory: str | None
    cap: str | None
    cluster: str | None
    global_batch_size: int | None
    engines: str
    output: str | None
    picture: str | None
    as_json: bool
    overrides: list[str]


def plan_arguments(arguments: list[str]) -> PlanOptions:
    """Read the arguments of `bigtrain plan`.

    Raises:
        SystemExit: 2 for an unknown option, 0 after --help.
    """
    parser = CommandParser(
        prog="bigtrain plan",
        usage="%(prog)s [JOB] [options] [KEY=VALUE | KEY VALUE ...]",
        description="Find the fastest plan that fits: nothing is run, and no device is needed.",
        epilog="JOB is a YAML file, or a name in configs/jobs; left out, the default job.",
    )
    parser.add_argument("--config", metavar="JOB", help="the same as JOB")
    parser.add_argument(
        *("-n", "--num-ranks", "--devices"),
        dest="devices",
        type=int,
        metavar="N",
        help="ranks (default: one node)",
    )
    parser.add_argument("--memory", metavar="SIZE", help="of a device (default: the cluster's)")
    parser.add_argument("--cap", metavar="SIZE", help="what a rank may take, as train's --cap")
    parser.add_argument(
        "--cluster", metavar="FILE", help="a name in configs/clusters, or a file (default: here)"
    )
    parser.add_argument("--global-batch-size", type=int, metavar="B", help="samples of a step")
    parser.add_argument(
        "--engines",
        default="torch,deepspeed",
        metavar="A,B",
        help="who may do it (default torch,deepspeed; fairscale is the third)",
    )
    parser.add_argument("--output", metavar="FILE", help="the best plan (default plan.yaml)")
    parser.add_argument("--picture", metavar="FILE", help="memory against time as .svg or .png")
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="one JSON document on standard output"
    )
    options, rest = parser.parse_known_args(arguments, namespace=PlanOptions())
    if options.memory is not None and options.cap is not None:
        parser.error("--memory and --cap both say what a rank may take; give one of them")
    options.job, options.overrides = _job_and_words(parser, options.config, rest)
    return options


def checkpoint_parser() -> CommandParser:
    """The frozen options of `bigtrain checkpoint` and of what it does."""
    parser = CommandParser(
        prog="bigtrain checkpoint",
        description="Look at a checkpoint, check it, make one, take one apart, compare two.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, summary: str) -> CommandParser:
        made = actions.add_parser(name, help=summary, description=summary)
        made.add_argument(
            "--json", dest="as_json", action="store_true", help="one JSON document, on stdout"
        )
        return made

    inspect = action("inspect", "what is in a checkpoint")
    inspect.add_argument("path", metavar="PATH", help=OWN_CHECKPOINTS)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    verify = action("verify", "compare every file with its hashes; status 1 where one is damaged")
    verify.add_argument("path", metavar="PATH", help=OWN_CHECKPOINTS)
    made = action("convert", "make a checkpoint of another library's, or of an older one")
    made.add_argument("source", metavar="SOURCE", help="see docs/checkpoints.md")
    made.add_argument("target", metavar="TARGET", help="step-N, or the folder that is to have it")
    made.add_argument("--step", type=int, metavar="N", help="optimizer steps done")
    made.add_argument("--samples", type=int, metavar="N", help="samples seen: where data go on")
    made.add_argument(
        *("--tie",),
        action="append",
        default=[],
        metavar="NAME=OTHER",
        help="NAME is tied to OTHER, and left out: lm_head.weight=transformer.wte.weight",
    )
    made.add_argument("--key", metavar="NAME", help="of the model in a trainer's file: ema, nets.g")
    made.add_argument(
        "--strip", metavar="PREFIX", help="take tensors whose names begin with it, without it"
    )
    export = action("export", "write the tensors into one file")
    export.add_argument("path", metavar="PATH", help=OWN_CHECKPOINTS)
    export.add_argument("output", metavar="OUT", help="a .safetensors, or .pt for torch.load")
    export.add_argument(
        "--part", choices=("model", "optimizer"), default="model", help="(default model)"
    )
    export.add_argument(
        "--dtype", choices=("fp64", "fp32", "fp16", "bf16"), help="of floats (default: as saved)"
    )
    diff = action("diff", "the largest differences of two checkpoints, by tensor")
    diff.add_argument("first", metavar="A", help=OWN_CHECKPOINTS)
    diff.add_argument("second", metavar="B", help=OWN_CHECKPOINTS)
    diff.add_argument(
        "--exit-code", action="store_true", help="status 1 where they differ, as git diff has it"
    )
    return parser


def _side_parser(
    command: str,
    description: str,
    strategies: str = "all",
    ranks: str = "ranks of each run (default: GPUs, or 2)",
) -> CommandParser:
    words = "as train's --strategy, with commas between them"
    parser = CommandParser(
        prog=f"bigtrain {command}",
        usage="%(prog)s [JOB] [options] [KEY=VALUE | KEY VALUE ...]",
        description=description,
        epilog="JOB is a YAML file, or a name in configs/jobs; left out, the default job.",
    )
    parser.add_argument("--config", metavar="JOB", help="the same as JOB")
    parser.add_argument(
        *("--strategy", "--strategies"),
        dest="strategies",
        default=strategies,
        metavar="A,B+C",
        help=f"{words}, or all (default)" if strategies == "all" else f"{words} (default ddp)",
    )
    parser.add_argument("-n", "--num-ranks", type=int, metavar="N", help=ranks)
    parser.add_argument(
        "--time-limit", type=float, default=600.0, metavar="S", help="seconds a run (default 600)"
    )
    parser.add_argument("--output", metavar="DIR", help=f"folder (default runs/{command}-NUMBER)")
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="one JSON document on standard output"
    )
    return parser


def _side_options(parser: CommandParser, arguments: list[str], options: SideOptions) -> SideOptions:
    _, rest = parser.parse_known_args(arguments, namespace=options)
    for name, least in (("steps", 1), ("time_limit", 1)):
        if getattr(options, name) < least:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} {getattr(options, name):g}: at least {least} is needed")
    options.job, options.overrides = _job_and_words(parser, options.config, rest)
    return options


def _job_and_words(
    parser: CommandParser, config: str | None, rest: list[str]
) -> tuple[str | None, list[str]]:
    """The job, named with or without --config, and the overrides as KEY=VALUE."""
    parser.refuse_unknown(rest)
    job, words = config, list(rest)
    if words and _names_a_job(words):
        job = _one_job(parser, config, words.pop(0))
    return job, _joined(parser, words)


def _joined(parser: CommandParser, words: list[str]) -> list[str]:
    """Every override as KEY=VALUE; a whole strategy is named elsewhere."""
    remaining, overrides = list(words), []
    while remaining:
        word = remaining.pop(0)
        if "=" not in word:
            if not remaining:
                parser.error(f"{word} has no value. Write {word.lower()}=VALUE")
            word = f"{word.lower() if word.isupper() else word}={remaining.pop(0)}"
        if word.startswith("strategy="):
            fix = f"Write --strategy {word[9:]}"
            if parser.prog.endswith(" plan"):
                fix = "bigtrain plan chooses it; leave it out"
            parser.error(f"{word} would be every row's strategy. {fix}")
        overrides.append(word)
    return overrides


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) or "/" in word


READERS: dict[str, Callable[[list[str]], argparse.Namespace]] = {
    "plan": plan_arguments,
    "compare": compare_arguments,
    "verify": verify_arguments,
    "checkpoint": lambda arguments: checkpoint_parser().parse_args(arguments),
}
"""Of the commands whose options stand here: reads them, or ends with 2, or with 0 after --help."""
