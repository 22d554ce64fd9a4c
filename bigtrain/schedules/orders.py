"""Pipeline schedules: the order in which each rank runs its forward and backward passes.

With several stages on a rank, the order is that of torch's table
(`torch.distributed.pipelining.schedules`). With one stage on a rank, it is the order of the papers,
which torch uses as well: GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from bigtrain.errors import ConfigError, did_you_mean

ActionKind = Literal["F", "B", "I", "W"]
"""Forward (F), whole backward (B), backward for a stage's inputs (I), and for its weights (W)."""
SINGLE_STAGE_SCHEDULES = ("naive", "gpipe", "1f1b")
"""Schedules with one stage on each rank."""
TORCH_SCHEDULES = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv_zero_bubble": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""Schedules with several stages on each rank, and the name of torch's class for each schedule."""
MAX_PLACED_ACTIONS = 512
"""The most forward passes, over all stages, for which forecasts let torch place the messages."""
V_SHAPED_SCHEDULES = ("zbv_zero_bubble", "dualpipev")
"""Schedules in which rank r has the stages r and 2 pp - 1 - r. In all other schedules rank r has
the stages r, r + pp, r + 2 pp, ..."""
STEADY_SCHEDULES = ("naive", "1f1b")
"""Schedules in which more micro-batches than ranks do not change the peak memory of any rank."""
SPLIT_BACKWARD_SCHEDULES = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
"""Schedules with separate backward passes for the inputs and for the weights."""
SCHEDULES = (*SINGLE_STAGE_SCHEDULES, *TORCH_SCHEDULES)


class Action(NamedTuple):
    """One forward or backward pass of a rank."""

    stage: int
    kind: ActionKind
    micro_batch: int


IN_FLIGHT_CHANGE: dict[ActionKind, int] = {"F": 1, "I": 0, "B": -1, "W": -1}
"""The change of the number of micro-batches in flight by an action of each kind."""
Orders = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in order."""


def stage_ranks(schedule: str, pp: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage.

    Args:
        schedule: one of `SCHEDULES`.
        pp: the number of ranks.
        stages_per_rank: the number of stages on each rank.
    """
    if schedule in V_SHAPED_SCHEDULES:
        return (*range(pp), *reversed(range(pp)))
    return tuple(stage % pp for stage in range(pp * stages_per_rank))


def check_schedule(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> None:
    """Refuse numbers of stages and micro-batches that a schedule cannot run, without torch.

    Args:
        schedule: the name of the schedule.
        pp: the number of ranks.
        stages_per_rank: the number of stages on each rank.
        micro_batches: the number of micro-batches of one step.

    Raises:
        ConfigError: the schedule is unknown or cannot run the numbers; the message has the numbers
            and the fix.
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
            f"strategy.cut: schedule={schedule} with mesh.pp={pp} runs a step in {rounds} equal "
            f"rounds, and {micro_batches} micro-batches are no multiple of {rounds}. Use "
            f"{micro_batches // rounds * rounds} micro-batches: change train.micro_batch_size or "
            "train.global_batch_size."
        )


@lru_cache(maxsize=256)
def schedule_orders(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> Orders:
    """Return the actions of each rank in a step.

    With `naive`, a micro-batch runs forward and backward through all stages before the next
    micro-batch begins.

    Args:
        schedule: one of `SCHEDULES`.
        pp: the number of ranks.
        stages_per_rank: 1 for `naive`, `gpipe` and `1f1b`; 2 for V-shaped schedules.
        micro_batches: the number of micro-batches of one step.

    Raises:
        ConfigError: see `check_schedule`.
    """
    return tuple(
        _rank_order(schedule, pp, stages_per_rank, micro_batches, rank) for rank in range(pp)
    )


@lru_cache(maxsize=1024)
def rank_order(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, rank: int
) -> tuple[Action, ...]:
    """Return the actions of one rank in a step, faster than `schedule_orders` returns all ranks'.

    Args:
        schedule: see `schedule_orders`.
        pp: see `schedule_orders`.
        stages_per_rank: see `schedule_orders`.
        micro_batches: see `schedule_orders`.
        rank: the pp rank.

    Raises:
        ConfigError: see `check_schedule`.
    """
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
    """Return the number of forward passes of each rank before its first backward pass.

    Args:
        schedule: one of `SINGLE_STAGE_SCHEDULES`.
        pp: the number of ranks.
        micro_batches: the number of micro-batches of one step.
    """
    return {
        "naive": (1,) * pp,
        "gpipe": (micro_batches,) * pp,
        "1f1b": tuple(min(micro_batches, pp - rank) for rank in range(pp)),
    }[schedule]


def _one_stage(stage: int, ahead: int, micro_batches: int) -> Iterator[Action]:
    """Yield `ahead` forward passes, then backward and forward passes in turns, then the rest."""
    for number in range(ahead):
        yield Action(stage, "F", number)
    for number in range(micro_batches):
        yield Action(stage, "B", number)
        if ahead + number < micro_batches:
            yield Action(stage, "F", ahead + number)


@lru_cache(maxsize=2)
def _torch_rows(name: str, pp: int, stages_per_rank: int, micro_batches: int) -> Any:
    """Return the order in which the runtime of torch's class computes, by rank.

    The constructor of the class also calls a method that places every send and receive. This takes
    seconds for 512 micro-batches and does not change the order, so the method is skipped. If torch
    renames the method, this is slower but still correct.
    """
    return pipeline_table(name, pp, stages_per_rank, micro_batches, sending=False).pipeline_order


def pipeline_table(
    name: str, pp: int, stages_per_rank: int, micro_batches: int, *, sending: bool
) -> Any:
    """Return torch's schedule object, made without a process group.

    Args:
        name: the name of the class in `torch.distributed.pipelining.schedules`.
        pp: the number of ranks.
        stages_per_rank: the number of stages on each rank.
        micro_batches: the number of micro-batches of one step.
        sending: whether torch also places the sends and receives.

    Raises:
        ConfigError: torch refuses these numbers.
    """
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
    """Yield torch's actions without idle slots, and overlapping pairs of actions in sequence."""
    for action in row:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _actions(action.sub_actions)
            continue
        kind = action.computation_type.value
        if kind not in IN_FLIGHT_CHANGE:
            raise ValueError(f"torch's schedule has the unknown action {action!r}")
        yield Action(action.stage_index, kind, action.microbatch_index)


def merge_split_backward(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return the order with whole backward passes: each I becomes a B, and each W is dropped."""
    return tuple(a._replace(kind="B") if a.kind == "I" else a for a in actions if a.kind != "W")
