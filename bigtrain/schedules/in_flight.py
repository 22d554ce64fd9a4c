"""How many micro-batches a stage holds at once, from the order of its actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

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
    most: dict[int, int] = {}
    for _, current in held_after(actions):
        most = {stage: max(most.get(stage, 0), count) for stage, count in current.items()}
    return most


def held_after(actions: Sequence[Action]) -> Iterator[tuple[Action, dict[int, int]]]:
    """Each action of a rank, and how many micro-batches each of its stages holds after it."""
    held = dict.fromkeys((stage for stage, _, _ in actions), 0)
    for action in actions:
        held[action.stage] += IN_FLIGHT_CHANGE[action.kind]
        yield action, dict(held)


@lru_cache(maxsize=16384)
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


@lru_cache(maxsize=16384)
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
    at_peak: dict[int, int] = {}
    for actions in schedule_orders(schedule, pp, stages_per_rank, micro_batches):
        waiting = {action.stage for action in actions} if later else set()
        most, counts_then = -1, dict.fromkeys((action.stage for action in actions), 0)
        for action, held in held_after(actions if splits else merge_split_backward(actions)):
            if IN_FLIGHT_CHANGE[action.kind] < 0:
                waiting.discard(action.stage)
            if not waiting and sum(held.values()) > most:
                most, counts_then = sum(held.values()), held
        at_peak |= counts_then
    return tuple(at_peak[stage] for stage in range(pp * stages_per_rank))
