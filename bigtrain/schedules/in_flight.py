"""How many micro-batches a stage holds at once, from the order of its actions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from bigtrain.schedules.orders import (
    IN_FLIGHT_CHANGE,
    Action,
    merge_split_backward,
    schedule_orders,
)


def peak_in_flight(actions: Sequence[Action]) -> dict[int, int]:
    """The most micro-batches that each stage of a rank holds saved tensors of at one moment.

    One is held from its F to its B, or to its W: torch's I keeps the graph (`retain_graph=True` in
    `stage_backward_input`) with all that it has saved.
    """
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    for stage, kind, _ in actions:
        held[stage] = held.get(stage, 0) + IN_FLIGHT_CHANGE[kind]
        most[stage] = max(most.get(stage, 0), held[stage])
    return most


@lru_cache(maxsize=1024)
def in_flight_by_stage(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, *, splits: bool
) -> tuple[int, ...]:
    """For each stage the most micro-batches that it has in flight in a step.

    Args:
        schedule: see `schedule_orders`.
        pp: see `schedule_orders`.
        stages_per_rank: see `schedule_orders`.
        micro_batches: see `schedule_orders`.
        splits: see `Plan.splits_backward`.
    """
    held: dict[int, int] = {}
    for actions in schedule_orders(schedule, pp, stages_per_rank, micro_batches):
        held |= peak_in_flight(actions if splits else merge_split_backward(actions))
    return tuple(held[stage] for stage in range(pp * stages_per_rank))


@lru_cache(maxsize=1024)
def in_flight_at_peak(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, *, splits: bool, later: bool
) -> tuple[int, ...]:
    """For each stage those that it has in flight when the stages of its rank have most together.

    Args:
        schedule: see `schedule_orders`.
        pp: see `schedule_orders`.
        stages_per_rank: see `schedule_orders`.
        micro_batches: see `schedule_orders`.
        splits: see `Plan.splits_backward`.
        later: only moments at which every stage of the rank has made its gradients.
    """
    found: dict[int, int] = {}
    for actions in schedule_orders(schedule, pp, stages_per_rank, micro_batches):
        held = dict.fromkeys((stage for stage, _, _ in actions), 0)
        waiting = set(held) if later else set()
        most, then = -1, dict(held)
        for stage, kind, _ in actions if splits else merge_split_backward(actions):
            held[stage] += IN_FLIGHT_CHANGE[kind]
            if IN_FLIGHT_CHANGE[kind] < 0:
                waiting.discard(stage)
            if not waiting and sum(held.values()) > most:
                most, then = sum(held.values()), dict(held)
        found |= then
    return tuple(found[stage] for stage in range(pp * stages_per_rank))


def in_flight_together(actions: Sequence[Action]) -> int:
    """The same over all stages of a rank: pairs of a stage and a micro-batch, at one moment."""
    return max(accumulate(IN_FLIGHT_CHANGE[action.kind] for action in actions), default=0)
