"""Find the strategies to compare, the number of ranks of each, and why some cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from bigtrain.assembly.make_plan import device_type_of, make_plan
from bigtrain.core.strategy import CutStrategy, Plan
from bigtrain.devices import device_count
from bigtrain.engine.setup import check_job, open_setup
from bigtrain.errors import ConfigError
from bigtrain.job.arguments import ComparisonOptions
from bigtrain.job.load import ONE_PROCESS, load_job
from bigtrain.job.schema import Job
from bigtrain.job.strategy_words import read_strategy, strategy_label, whole_strategies


@dataclass(frozen=True)
class ComparedStrategy:
    """One strategy of a comparison, with its job and plan."""

    strategy: str
    """The user's words: presets and files, joined by `+`."""
    label: str
    """The strategy's name in tables, and the name of its folder."""
    num_ranks: int
    job: Job | None
    """The job with this strategy; None if the strategy contradicts the job."""
    plan: Plan | None
    """The plan; None if the strategy cannot run."""
    refusal: str | None = None
    """The reason why the strategy cannot run, in one line."""


_FIRST = ("single", "ddp")


def count_strategies(number: int) -> str:
    """Return the number of strategies as text: "3 strategies, one after the other"."""
    return "1 strategy" if number == 1 else f"{number} strategies, one after the other"


def named_strategies(text: str) -> list[str]:
    """Return the strategies that the user lists.

    Args:
        text: names separated by commas, or `all` for every preset that is a whole strategy.

    Raises:
        ConfigError: the text contains no name, or contains a name twice.
    """
    if text == "all":  # single comes first, because other losses are compared with its losses
        names = whole_strategies()
        return sorted(names, key=lambda name: (name not in _FIRST, name != "single", name))
    names = [name.strip() for name in text.split(",") if name.strip()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"--strategy: {twice[0]} is named twice. Leave one of the two out.")
    if not names:
        raise ConfigError("--strategy names no strategy. Use --strategy ddp,zero2, or all.")
    return names


def ranks_to_start(wanted: int | None, device: str) -> int:
    """Return the number of ranks to start.

    Args:
        wanted: the user's number; None chooses a rank for each accelerator, or two on a CPU.
        device: the type of the device.

    Raises:
        ConfigError: the user's number is less than 1.
    """
    if wanted is None:
        return 2 if device == "cpu" else device_count()
    if wanted < 1:
        raise ConfigError(f"-n {wanted}: at least 1 rank is needed. Use -n 2")
    return wanted


def find_strategies(
    options: ComparisonOptions, extra: Sequence[str] = ()
) -> list[ComparedStrategy]:
    """Return every strategy with its plan, or with the reason why it has no plan.

    A strategy for a single process gets one rank, whatever number of ranks the others have.

    Args:
        options: the options of the command line.
        extra: more KEY=VALUE words of the job.

    Raises:
        ConfigError: the job itself cannot be read, its model or data is wrong, or a strategy's name
            is unknown.
    """
    words = [*options.overrides, *extra]
    base = load_job(options.job, None, words)
    _check_alone(load_job(options.job, "single", [*without_strategy(words), *ONE_PROCESS]))
    num_ranks = ranks_to_start(options.num_ranks, device_type_of(base))
    contenders: list[ComparedStrategy] = []
    for strategy in named_strategies(options.strategies):
        read_strategy(strategy, "--strategy")  # an unknown name is an error, not a row
        label = strategy_label(strategy)
        same_label = sum(contender.label.split("~")[0] == label for contender in contenders)
        label = f"{label}~{same_label + 1}" if same_label else label
        try:
            job = load_job(options.job, strategy, words)
        except ConfigError as error:  # other strategies may fit the job
            contenders.append(ComparedStrategy(strategy, label, num_ranks, None, None, str(error)))
        else:
            contenders.append(_planned(strategy, label, job, num_ranks))
    return contenders


def without_strategy(words: Sequence[str]) -> list[str]:
    """Return the KEY=VALUE words without those of the section `strategy`."""
    return [word for word in words if not word.startswith("strategy.")]


def _check_alone(job: Job) -> None:
    """Raise the ConfigError of a single process if no strategy can run the model or the data."""
    check_job(job)
    if not job.data.args.get("download"):
        open_setup(job, make_plan(job, 1, device_type_of(job)))


def _planned(strategy: str, label: str, job: Job, num_ranks: int) -> ComparedStrategy:
    device = device_type_of(job)
    try:
        return ComparedStrategy(strategy, label, num_ranks, job, make_plan(job, num_ranks, device))
    except ConfigError as error:
        refusal = str(error)
    if num_ranks > 1:
        with suppress(ConfigError):
            alone = make_plan(job, 1, device)
            cut = alone.techniques.get("cut")
            spans = isinstance(cut, CutStrategy) and cut.traits.is_distributed
            if alone.techniques["replicate"].name == "single" and not spans:
                return ComparedStrategy(strategy, label, 1, job, alone)
    return ComparedStrategy(strategy, label, num_ranks, job, None, refusal)
