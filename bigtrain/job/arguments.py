"""The command-line options of the commands. All other settings are keys of a job."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from bigtrain.job.checkpoint_arguments import checkpoint_parser
from bigtrain.job.command_parser import CommandParser

TRAIN_HELP = """\
JOB is a YAML file or a name in configs/jobs (default: the job "default"). Any key of the job can
be set on the command line: optim.lr=3e-4, or OPTIM.LR 3e-4."""
JOB_HELP = 'JOB is a YAML file or a name in configs/jobs (default: the job "default").'


class TrainOptions(argparse.Namespace):
    """Options of `train.py` and `bigtrain train`."""

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
    """Read the arguments of train.py; options that launchers add are accepted and ignored.

    Args:
        arguments: the command line without the program's name.
        starts_ranks: accept the options of `bigtrain train`, which starts its ranks: `-n`,
            `--restarts`, `--min-ranks`.
        records: require `--record`, the folder that `bigtrain.verify.record` writes to, and accept
            `--trace` and `--no-dropout`.

    Raises:
        SystemExit: 2 for a wrong option or value, 0 after --help.
    """
    parser = CommandParser(
        prog="bigtrain train" if starts_ranks else "train.py",
        usage="%(prog)s [JOB] [options] [KEY=VALUE | KEY VALUE ...]",
        description="Train a model with a strategy, and report the memory it takes.",
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
        parser.error(f"{option} needs ranks that bigtrain starts itself. Add -n N")
    if options.resume is not None:
        rest += [f"checkpoint.resume={options.resume}"]
    if options.cap is not None:
        rest += [f"memory.cap={options.cap}"]
    options.overrides = rest
    return options


def _names_a_job(words: list[str]) -> bool:
    """Whether the first word names a job. Otherwise it is a key, whose value is the next word."""
    first = words[0]
    if "=" in first or first.startswith(("+", "-")):
        return False
    if _is_file(first):
        return True
    is_key = first.isupper() or (len(words) > 1 and first in _KEYS_ALONE)
    return "." not in first and not is_key


_KEYS_ALONE = ("device", "strategy")
"""The keys of a job outside its sections, which have no dot."""


def _one_job(parser: CommandParser, config: str | None, word: str) -> str:
    if config is not None:
        parser.error(f"--config {config} and {word} both name a job. Leave one of them out")
    return word


def add_train_options(parser: CommandParser, *, starts_ranks: bool) -> None:
    """Add the options of train.py to a parser.

    Args:
        parser: the parser, which is changed.
        starts_ranks: add the options of `bigtrain train` that start ranks, too.
    """
    if starts_ranks:
        parser.add_argument(
            "-n", "--num-ranks", type=int, metavar="N", help="start N ranks on this machine"
        )
        parser.add_argument(
            "--restarts",
            type=int,
            default=0,
            metavar="K",
            help="with -n: restart the ranks up to K times if one of them is lost",
        )
        parser.add_argument(
            "--min-ranks",
            type=int,
            metavar="M",
            help="with --restarts: continue with as few as M ranks if the others are lost",
        )
    parser.add_argument("--config", metavar="JOB", help="same as JOB")
    parser.add_argument(
        "--strategy",
        metavar="WORDS",
        help="presets (bigtrain strategies lists them) or YAML files joined by +, such as "
        "1f1b+fsdp, or auto to let the planner choose",
    )
    parser.add_argument("--plan", metavar="FILE", help="follow a plan file of bigtrain plan")
    parser.add_argument(
        "--resume", metavar="auto|PATH", help="continue from the newest checkpoint, or from PATH"
    )
    parser.add_argument("--cap", metavar="SIZE", help="limit each rank's memory, such as 2GiB")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the job and its predicted peak, and run nothing",
    )
    ignored = parser.add_argument_group("accepted from launchers and ignored")
    ignored.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    ignored.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    ignored.add_argument("--deepspeed_config", help=argparse.SUPPRESS)


class ComparisonOptions(argparse.Namespace):
    """Options of `bigtrain compare` and `bigtrain verify`."""

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
    """The number of plans to draw at random; 0 if strategies are named."""
    script: str | None = None
    """A user's script with its arguments, to verify instead of a job."""
    seed: int = 0


SideOptions = TypeVar("SideOptions", bound=ComparisonOptions)


def compare_arguments(arguments: list[str]) -> ComparisonOptions:
    """Read the arguments of `bigtrain compare`.

    Raises:
        SystemExit: 2 for a wrong option or value, 0 after --help.
    """
    parser = _side_parser(
        "compare", "Run strategies on one job and compare their memory, time and losses."
    )
    parser.add_argument("--steps", type=int, default=8, help="steps of each run (default 8)")
    parser.add_argument("--cap", metavar="SIZE", help="limit each rank's memory, such as 2GiB")
    parser.add_argument(
        "--largest",
        metavar="KEY",
        help="find the largest value of a key (micro_batch_size, n_layer, ...) that each "
        "strategy can run",
    )
    parser.add_argument("--picture", metavar="FILE", help="also draw the table as .svg or .png")
    return _side_options(parser, arguments, ComparisonOptions())


def verify_arguments(arguments: list[str]) -> ComparisonOptions:
    """Read the arguments of `bigtrain verify`.

    Raises:
        SystemExit: 2 for a wrong option or value, 0 after --help.
    """
    parser = _side_parser(
        "verify", "Check that strategies compute the same numbers as one process."
    )
    parser.add_argument("--steps", type=int, default=3, help="steps to compare (default 3)")
    parser.add_argument(
        "--optimizer",
        choices=("sgd", "job"),
        default="sgd",
        help="sgd (default) compares every number, job (the job's own optimizer) the losses",
    )
    parser.add_argument(
        "--fuzz",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="verify N plans drawn at random, of at most -n ranks each",
    )
    parser.add_argument(
        "--seed", type=int, default=argparse.SUPPRESS, help="seed of --fuzz (default 0)"
    )
    parser.add_argument(
        "--script",
        metavar="'FILE ARGUMENTS'",
        help="verify the first steps of a script that calls bigtrain.prepare",
    )
    options = _side_options(parser, arguments, ComparisonOptions())
    typed = vars(options)
    if "seed" in typed and "fuzz" not in typed:
        parser.error("--seed is the seed of --fuzz. Add --fuzz N, or set train.seed=N of the job")
    if "fuzz" in typed and options.fuzz < 1:
        parser.error(f"--fuzz {options.fuzz}: at least 1 is needed. Use --fuzz 1")
    if options.script is not None and "fuzz" in typed:
        parser.error("--fuzz draws plans for a job, and --script names none. Leave one of them out")
    if options.fuzz and options.strategies != "all":
        parser.error("--fuzz draws strategies, and --strategy names some. Leave one of them out")
    return options


class SpeedupOptions(ComparisonOptions):
    """Options of `bigtrain speedup`."""

    cluster: str | None


def speedup_arguments(arguments: list[str]) -> SpeedupOptions:
    """Read the arguments of `bigtrain speedup`.

    Raises:
        SystemExit: 2 for a wrong option or value, 0 after --help.
    """
    parser = _side_parser(
        "speedup",
        "Measure computing and communication of a step, and tell whether more ranks pay off.",
        strategies="ddp",
        ranks="the most ranks to run (default: one for each GPU, or core)",
    )
    parser.add_argument("--steps", type=int, default=8, help="steps to time (default 8)")
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="predict with this cluster's rates, also for more ranks (default: this machine's)",
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the speedup as .svg or .png")
    return _side_options(parser, arguments, SpeedupOptions())


class PlanOptions(argparse.Namespace):
    """Options of `bigtrain plan`."""

    job: str | None
    devices: int | None
    memory: str | None
    cap: str | None
    cluster: str | None
    global_batch_size: int | None
    engines: str
    output: str | None
    picture: str | None
    frontier: bool
    at: str | None
    as_json: bool
    overrides: list[str]


def plan_arguments(arguments: list[str]) -> PlanOptions:
    """Read the arguments of `bigtrain plan`.

    Raises:
        SystemExit: 2 for a wrong option or value, 0 after --help.
    """
    parser = CommandParser(
        prog="bigtrain plan",
        usage="%(prog)s [JOB] [options] [KEY=VALUE | KEY VALUE ...]",
        description="Find the fastest plan that fits the memory. No GPU is needed.",
        epilog=JOB_HELP,
    )
    parser.add_argument("--config", metavar="JOB", help="same as JOB")
    parser.add_argument(
        "-n",
        "--num-ranks",
        "--devices",
        dest="devices",
        type=int,
        metavar="N",
        help="devices, one rank each (default: one node)",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory of a device (default: the cluster's)"
    )
    parser.add_argument(
        "--cap", metavar="SIZE", help="limit each rank's memory, as train --cap does"
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="a name in configs/clusters or a YAML file (default: this machine)",
    )
    parser.add_argument(
        "--global-batch-size",
        type=int,
        metavar="B",
        help="samples of an optimizer step, over all ranks",
    )
    parser.add_argument(
        "--engines",
        default="torch,deepspeed",
        metavar="A,B",
        help="libraries to choose from: torch, deepspeed, fairscale (default torch,deepspeed)",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="where to write the best plan (default plan.yaml)"
    )
    parser.add_argument(
        "--picture", metavar="FILE", help="draw memory against time as .svg or .png"
    )
    parser.add_argument(
        "--frontier",
        action="store_true",
        help="show the plans from the least time to the least memory",
    )
    parser.add_argument(
        "--at", metavar="SIZE", help="the fastest plan whose predicted peak is at most this"
    )
    parser.add_argument(
        "--json",
        dest="as_json",
        action="store_true",
        help="print one JSON document on standard output",
    )
    options, rest = parser.parse_known_args(arguments, namespace=PlanOptions())
    if options.memory is not None and options.cap is not None:
        parser.error("--memory and --cap both limit a rank's memory. Leave one of them out")
    options.job, options.overrides = _job_and_words(parser, options.config, rest)
    return options


class FitOptions(argparse.Namespace):
    """Options of `bigtrain fit`."""

    name: str
    devices: int
    cluster: str | None
    memory: str | None
    lora: int
    qlora: bool
    length: int | None
    global_batch_size: int | None
    micro_batch_size: int | None
    engines: str
    every_plan: bool
    as_json: bool
    overrides: list[str]


def fit_arguments(arguments: list[str]) -> FitOptions:
    """Read the arguments of `bigtrain fit`.

    Raises:
        SystemExit: 2 for a wrong option or value, 0 after --help.
    """
    parser = CommandParser(
        prog="bigtrain fit",
        usage="%(prog)s NAME [options] [KEY=VALUE | KEY VALUE ...]",
        description="Whether a model can be fine-tuned on these devices: full, LoRA and QLoRA. "
        "Only its configuration is read.",
        epilog="Any key of a job can be set, too: optim.name=adamw_8bit.",
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="a folder with a config.json, OWNER/NAME on the Hub, timm:NAME, a built-in name, or "
        "package.module:Class",
    )
    parser.add_argument(
        "-n",
        "--num-ranks",
        "--devices",
        dest="devices",
        type=int,
        default=1,
        metavar="N",
        help="devices, one rank each (default 1)",
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="a name in configs/clusters or a YAML file (default: this machine's GPUs; without any "
        "a100-node)",
    )
    _add_fit_sizes(parser)
    options, rest = parser.parse_known_args(arguments, namespace=FitOptions())
    parser.refuse_unknown(rest)
    options.overrides = _joined(parser, rest)
    return options


def _add_fit_sizes(parser: CommandParser) -> None:
    """Add the options of `bigtrain fit` apart from the model and its devices."""
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory of a device (default: the cluster's)"
    )
    parser.add_argument(
        "--lora", type=int, default=16, metavar="R", help="rank of the adapters (default 16)"
    )
    parser.add_argument("--qlora", action="store_true", help="only QLoRA")
    _add_batch_options(parser)
    parser.add_argument(
        "--engines",
        default="torch",
        metavar="A,B",
        help="libraries to choose from: torch, deepspeed, fairscale (default torch)",
    )
    parser.add_argument(
        "--every-plan",
        action="store_true",
        help="search pipelines and tensor slices, too, if replicas fit (takes a minute or more)",
    )
    parser.add_argument(
        "--json",
        dest="as_json",
        action="store_true",
        help="print one JSON document on standard output",
    )


def _add_batch_options(parser: CommandParser) -> None:
    """Add the options of `bigtrain fit` for the samples of a step."""
    parser.add_argument(
        "--length",
        type=int,
        metavar="L",
        help="tokens of a sample (default 2048, or the model's positions if it has fewer)",
    )
    parser.add_argument(
        "--global-batch-size",
        type=int,
        metavar="B",
        help="samples of an optimizer step, over all ranks (default 16, or one for each device)",
    )
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        metavar="B",
        help="samples of a rank in one pass (default: the planner chooses)",
    )


class CheckOptions(argparse.Namespace):
    """Options of `bigtrain check`."""

    job: str | None
    strategy: str | None
    num_ranks: int
    peak: str | None
    against: str | None
    save: str | None
    as_json: bool
    overrides: list[str]


def peak_check_arguments(arguments: list[str]) -> CheckOptions:
    """Read the arguments of `bigtrain check`.

    Raises:
        SystemExit: 2 for a wrong option or value, 0 after --help.
    """
    parser = CommandParser(
        prog="bigtrain check",
        usage="%(prog)s [JOB] --peak SIZE [options] [KEY=VALUE | KEY VALUE ...]",
        description="Exit with 1 if a job's predicted peak is above a limit. Nothing is run.",
        epilog=JOB_HELP,
    )
    parser.add_argument("--config", metavar="JOB", help="same as JOB")
    parser.add_argument(
        "--strategy", metavar="WORDS", help="presets or YAML files joined by +, such as 1f1b+fsdp"
    )
    parser.add_argument(
        "-n", "--num-ranks", type=int, default=1, metavar="N", help="ranks of the job (default 1)"
    )
    parser.add_argument(
        "--peak", metavar="SIZE", help="the most that a rank's tensors may take, such as 22GiB"
    )
    parser.add_argument(
        "--against",
        metavar="FILE",
        help="say what grew since the forecast in FILE; without --peak its peak is the limit",
    )
    parser.add_argument("--save", metavar="FILE", help="write the forecast to FILE")
    parser.add_argument(
        "--json",
        dest="as_json",
        action="store_true",
        help="print one JSON document on standard output",
    )
    options, rest = parser.parse_known_args(arguments, namespace=CheckOptions())
    if options.peak is None and options.against is None and options.save is None:
        parser.error("there is no limit to check. Add --peak SIZE, such as --peak 22GiB")
    if options.num_ranks < 1:
        parser.error(f"-n {options.num_ranks}: at least 1 is needed. Use -n 1")
    options.job, options.overrides = _job_and_words(parser, options.config, rest)
    return options


class ExplainOptions(argparse.Namespace):
    """Options of `bigtrain explain`."""

    file: str
    model: str | None
    devices: int | None
    cluster: str | None
    memory: str | None
    as_json: bool
    overrides: list[str]


def explain_arguments(arguments: list[str]) -> ExplainOptions:
    """Read the arguments of `bigtrain explain`.

    Raises:
        SystemExit: 2 for a wrong option or value, 0 after --help.
    """
    parser = CommandParser(
        prog="bigtrain explain",
        usage="%(prog)s FILE [MODEL] [options] [KEY=VALUE | KEY VALUE ...]",
        description="Say what a configuration of DeepSpeed, Accelerate, axolotl or TRL asks for, "
        "what it takes, what is wrong with it, and which plan is better. Nothing is run.",
        epilog="FILE is a DeepSpeed JSON, or a YAML of Accelerate, axolotl or TRL. MODEL is a "
        "folder with a config.json, hf:OWNER/NAME, a built-in name or package.module:Class; it may "
        "be left out if the file names one.",
    )
    parser.add_argument(
        "-n",
        "--num-ranks",
        "--devices",
        dest="devices",
        type=int,
        metavar="N",
        help="devices, one rank each (default: as many as the file says)",
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="a name in configs/clusters or a YAML file (default: this machine's GPUs, or "
        "h100-node if it has none)",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory of a device (default: the cluster's)"
    )
    parser.add_argument(
        "--json",
        dest="as_json",
        action="store_true",
        help="print one JSON document on standard output",
    )
    options, rest = parser.parse_known_args(arguments, namespace=ExplainOptions())
    parser.refuse_unknown(rest)
    if options.devices is not None and options.devices < 1:
        parser.error(f"--devices {options.devices}: at least 1 is needed. Use --devices 1")
    if not rest or "=" in rest[0]:
        parser.error("there is no file. Write bigtrain explain FILE MODEL")
    options.file, options.model = rest.pop(0), None
    if rest and "=" not in rest[0]:
        options.model = rest.pop(0)
    options.overrides = _joined(parser, rest)
    return options


def _side_parser(
    command: str,
    description: str,
    strategies: str = "all",
    ranks: str = "ranks of each run (default: one for each GPU, or 2)",
) -> CommandParser:
    words = "strategies separated by commas, each as in train --strategy"
    parser = CommandParser(
        prog=f"bigtrain {command}",
        usage="%(prog)s [JOB] [options] [KEY=VALUE | KEY VALUE ...]",
        description=description,
        epilog=JOB_HELP,
    )
    parser.add_argument("--config", metavar="JOB", help="same as JOB")
    parser.add_argument(
        "--strategy",
        "--strategies",
        dest="strategies",
        default=strategies,
        metavar="A,B+C",
        help=f"{words} (default all)" if strategies == "all" else f"{words} (default ddp)",
    )
    parser.add_argument("-n", "--num-ranks", type=int, metavar="N", help=ranks)
    parser.add_argument(
        "--time-limit",
        type=float,
        default=600.0,
        metavar="S",
        help="stop a run after S seconds (default 600)",
    )
    parser.add_argument(
        "--output", metavar="DIR", help=f"where to write results (default runs/{command}-NUMBER)"
    )
    parser.add_argument(
        "--json",
        dest="as_json",
        action="store_true",
        help="print one JSON document on standard output",
    )
    return parser


def _side_options(parser: CommandParser, arguments: list[str], options: SideOptions) -> SideOptions:
    _, rest = parser.parse_known_args(arguments, namespace=options)
    for name, least in (("steps", 1), ("time_limit", 1)):
        if getattr(options, name) < least:
            option = f"--{name.replace('_', '-')}"
            parser.error(
                f"{option} {getattr(options, name):g}: at least {least} is needed. "
                f"Use {option} {least}"
            )
    options.job, options.overrides = _job_and_words(parser, options.config, rest)
    return options


def _job_and_words(
    parser: CommandParser, config: str | None, rest: list[str]
) -> tuple[str | None, list[str]]:
    """Return the job, named with or without --config, and the overrides as KEY=VALUE."""
    parser.refuse_unknown(rest)
    job, words = config, list(rest)
    if words and _names_a_job(words):
        job = _one_job(parser, config, words.pop(0))
    return job, _joined(parser, words)


def _joined(parser: CommandParser, words: list[str]) -> list[str]:
    """Return the overrides as KEY=VALUE words; refuse `strategy=WORDS` among them."""
    remaining, overrides = list(words), []
    while remaining:
        word = remaining.pop(0)
        if "=" not in word:
            if not remaining:
                parser.error(f"{word} has no value. Write {word.lower()}=VALUE")
            word = f"{word.lower() if word.isupper() else word}={remaining.pop(0)}"
        if word.startswith("strategy="):
            fix = f"Write --strategy {word[9:]}"
            if parser.prog.endswith((" plan", " fit")):
                fix = f"Leave it out: {parser.prog} chooses the strategy"
            if parser.prog.endswith(" check"):
                parser.error(f"{word} is an option. {fix}")
            if parser.prog.endswith(" explain"):
                parser.error(f"{word}: the file names the strategy. Leave it out")
            parser.error(f"{word} would be the strategy of every row. {fix}")
        overrides.append(word)
    return overrides


def _is_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) or "/" in word


READERS: dict[str, Callable[[list[str]], argparse.Namespace]] = {
    "plan": plan_arguments,
    "check": peak_check_arguments,
    "fit": fit_arguments,
    "explain": explain_arguments,
    "compare": compare_arguments,
    "verify": verify_arguments,
    "checkpoint": lambda arguments: checkpoint_parser().parse_args(arguments),
}
"""By command, the function that reads its options. It raises `SystemExit` if they are wrong."""
