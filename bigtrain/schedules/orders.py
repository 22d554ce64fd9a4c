"""Pipeline schedules: the order in which each rank works, what is in flight, who stands idle.

With several stages on a rank the order is torch's own table (torch 2.15,
`torch.distributed.pipelining.schedules`); with one it is the textbook's, which is torch's, too:
GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from bigtrain.errors import ConfigError, did_you_mean

ActionKind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; its part for the stage's inputs; its part for the weights."""
SINGLE_STAGE_SCHEDULES = ("naive", "gpipe", "1f1b")
"""With one stage on each rank."""
TORCH_SCHEDULES = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv_zero_bubble": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""With several, and torch's class."""
MAX_PLACED_ACTIONS = 512
"""Actions of a kind up to which torch's placing of sends and receives is asked for."""
V_SHAPED_SCHEDULES = ("zbv_zero_bubble", "dualpipev")
"""Rank r has the stages r and 2 pp - 1 - r; elsewhere it has r, r + pp, r + 2 pp, ..."""
STEADY_SCHEDULES = ("naive", "1f1b")
"""With which further micro-batches change no rank's peak, once there are some for each rank."""
SPLIT_BACKWARD_SCHEDULES = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
"""Those that compute the gradients of inputs and of weights apart."""
SCHEDULES = (*SINGLE_STAGE_SCHEDULES, *TORCH_SCHEDULES)


class Action(NamedTuple):
    """What a rank does next."""

    stage: int
    kind: ActionKind
    micro_batch: int


IN_FLIGHT_CHANGE: dict[ActionKind, int] = {"F": 1, "I": 0, "B": -1, "W": -1}
Orders = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in order."""


def stage_ranks(schedule: str, pp: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage."""
    if schedule in V_SHAPED_SCHEDULES:
        return (*range(pp), *reversed(range(pp)))
    return tuple(stage % pp for stage in range(pp * stages_per_rank))


def check_schedule(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> None:
    """Refuse what a schedule cannot do: torch's own conditions, before torch is loaded.

    Raises:
        ConfigError: with the numbers, and those that would do.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"strategy.cut: schedule={schedule!r} is none of {', '.join(SCHEDULES)}"
            f"{did_you_mean(schedule, SCHEDULES)}"
        )
    required = (
        1 if schedule in SINGLE_STAGE_SCHEDULES else 2 if schedule in V_SHAPED_SCHEDULES else None
    )
    if required is not None and stages_per_rank != required:
        raise ConfigError(
            f"strategy.cut: schedule={schedule} has {required} stage{'s' * (required > 1)} on each "
            f"rank, not {stages_per_rank}. Use stages_per_rank={required}, or another schedule: "
            "interleaved_1f1b takes any number."
        )
    least = {"1f1b": pp, "dualpipev": 2 * pp}.get(schedule, 1)
    if micro_batches < least:
        raise ConfigError(
            f"strategy.cut: schedule={schedule} with mesh.pp={pp} needs at least {least} "
            f"micro-batches in a step, and there are {micro_batches}. Use a smaller "
            "train.micro_batch_size, or schedule=gpipe."
        )
    rounds = max(1, micro_batches // pp)
    if schedule.startswith("interleaved") and micro_batches % rounds:
        raise ConfigError(
            f"strategy.cut: schedule={schedule} with mesh.pp={pp} deals {micro_batches} "
            f"micro-batches to {rounds} rounds, and that leaves a remainder. Use "
            f"{micro_batches // rounds * rounds} micro-batches: change train.micro_batch_size or "
            "train.global_batch_size."
        )


@lru_cache(maxsize=256)
def schedule_orders(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> Orders:
    """What each rank does in a step.

    `naive` lets a micro-batch through all stages and back before the next one begins.

    Args:
        schedule: one of `SCHEDULES`.
        pp: number of ranks.
        stages_per_rank: 1 for `naive`, `gpipe` and `1f1b`; 2 for those shaped like a V.
        micro_batches: of one step.

    Raises:
        ConfigError: see `check_schedule`.
    """
    given = (schedule, pp, stages_per_rank, micro_batches)
    return tuple(_rank_order(*given, rank) for rank in range(pp))


@lru_cache(maxsize=1024)
def rank_order(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, rank: int
) -> tuple[Action, ...]:
    """What one rank does in a step: see `schedule_orders`, which takes longer for many ranks."""
    return _rank_order(schedule, pp, stages_per_rank, micro_batches, rank)


def _rank_order(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, rank: int
) -> tuple[Action, ...]:
    check_schedule(schedule, pp, stages_per_rank, micro_batches)
    if schedule in TORCH_SCHEDULES:
        rows = _torch_rows(TORCH_SCHEDULES[schedule], pp, stages_per_rank, micro_batches)
        return tuple(_actions(rows[rank]))
    ahead = forwards_ahead(schedule, pp, micro_batches)
    return tuple(_one_stage(rank, ahead[rank], micro_batches))


def forwards_ahead(schedule: str, pp: int, micro_batches: int) -> tuple[int, ...]:
    """For each rank its forward passes before the first backward pass, one stage on each."""
    return {
        "naive": (1,) * pp,
        "gpipe": (micro_batches,) * pp,
        "1f1b": tuple(min(micro_batches, pp - rank) for rank in range(pp)),
    }[schedule]


def _one_stage(stage: int, ahead: int, micro_batches: int) -> Iterator[Action]:
    """First `ahead` forwards, then backward and forward in turns, then what is left."""
    for number in range(ahead):
        yield Action(stage, "F", number)
    for number in range(micro_batches):
        yield Action(stage, "B", number)
        if ahead + number < micro_batches:
            yield Action(stage, "F", ahead + number)


@lru_cache(maxsize=2)
def _torch_rows(name: str, pp: int, stages_per_rank: int, micro_batches: int) -> Any:
    """The table that torch's class makes, which is the order in which its runtime computes.

    Its constructor wants stages only for how many there are. What it does next, placing every
    send and receive, takes seconds for 512 micro-batches and changes no order: it is left out.
    (Were the method that does it renamed, this would be slower, and as right.)
    """
    return pipeline_table(name, pp, stages_per_rank, micro_batches, sending=False).pipeline_order


def pipeline_table(
    name: str, pp: int, stages_per_rank: int, micro_batches: int, *, sending: bool
) -> Any:
    """Torch's own schedule object, made without ranks; with `sending` its exchanges as well."""
    from torch.distributed.pipelining import schedules

    parent: Any = getattr(schedules, name)
    skip = {"_prepare_schedule_with_comms": lambda self, *args, **kwargs: None}  # noqa: ARG005
    table: Any = type(name, (parent,), {} if sending else skip)
    stages = [
        SimpleNamespace(
            group_size=pp,
            group_rank=0,
            num_stages=pp * stages_per_rank,
            stage_index=number * pp,
            submod=None,
        )
        for number in range(stages_per_rank)
    ]
    try:
        return table(stages, micro_batches)
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"strategy.cut: torch's {name} refuses mesh.pp={pp} with {stages_per_rank} stages on "
            f"each rank and {micro_batches} micro-batches: {error}. Use schedule=gpipe."
        ) from error


def _actions(row: Sequence[Any]) -> Iterator[Action]:
    """Ours for torch's: without the idle places, and pairs that may overlap one after another."""
    for action in row:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _actions(action.sub_actions)
            continue
        kind = action.computation_type.value
        if kind not in IN_FLIGHT_CHANGE:
            raise ValueError(f"torch's schedule has an action {action!r}, which is not known here")
        yield Action(action.stage_index, kind, action.microbatch_index)


def merge_split_backward(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The same where backward passes stay whole: I is all of one, and W is nothing."""
    return tuple(a._replace(kind="B") if a.kind == "I" else a for a in actions if a.kind != "W")
