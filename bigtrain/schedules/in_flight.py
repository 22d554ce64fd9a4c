"""Count the micro-batches in flight on each stage, from the order of actions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from bigtrain.schedules.orders import (
    IN_FLIGHT_CHANGE,
    SINGLE_STAGE_SCHEDULES,
    Action,
    check_schedule,
    forwards_ahead,
    merge_split_backward,
    schedule_orders,
)

SCHEDULES_WAITING_AT_HEAD = ("gpipe", "looped_bfs", "interleaved_zero_bubble")
"""Schedules in which the last stage has several micro-batches in flight. In all other schedules the
last stage runs the backward pass of each micro-batch immediately. The names are listed, because it
takes time to compute the order of a schedule."""


def peak_in_flight(actions: Sequence[Action]) -> dict[int, int]:
    """Return the largest number of micro-batches in flight, by stage.

    A micro-batch is in flight while the tensors that autograd saved for it are in memory. That is
    from F to B; with a split backward pass it is from F to W, because torch's I keeps the graph
    (`retain_graph=True`).

    Args:
        actions: the actions of one rank, in order.
    """
    in_flight = dict.fromkeys((stage for stage, _, _ in actions), 0)
    most = dict(in_flight)
    for stage, kind, _ in actions:
        in_flight[stage] += IN_FLIGHT_CHANGE[kind]
        if in_flight[stage] > most[stage]:
            most[stage] = in_flight[stage]
    return most


@lru_cache(maxsize=16384)
def in_flight_by_stage(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, *, splits: bool
) -> tuple[int, ...]:
    """Return the most micro-batches that each stage has in flight in a step.

    Args:
        schedule: see `schedule_orders`.
        pp: see `schedule_orders`.
        stages_per_rank: see `schedule_orders`.
        micro_batches: see `schedule_orders`.
        splits: see `Plan.splits_backward`.

    Raises:
        ConfigError: see `check_schedule`.
    """
    if schedule in SINGLE_STAGE_SCHEDULES:
        check_schedule(schedule, pp, stages_per_rank, micro_batches)
        return forwards_ahead(schedule, pp, micro_batches)
    in_flight: dict[int, int] = {}
    for actions in schedule_orders(schedule, pp, stages_per_rank, micro_batches):
        in_flight |= peak_in_flight(actions if splits else merge_split_backward(actions))
    return tuple(in_flight[stage] for stage in range(pp * stages_per_rank))


@lru_cache(maxsize=16384)
def in_flight_at_peak(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, *, splits: bool, later: bool
) -> tuple[int, ...]:
    """Return the micro-batches in flight on each stage at the peak of its rank.

    The peak is the first moment at which the sum over all stages of the rank is largest.

    Args:
        schedule: see `schedule_orders`.
        pp: see `schedule_orders`.
        stages_per_rank: see `schedule_orders`.
        micro_batches: see `schedule_orders`.
        splits: see `Plan.splits_backward`.
        later: whether only moments after the first backward pass of every stage of the rank
            count.

    Raises:
        ConfigError: see `check_schedule`.
    """
    if schedule in SINGLE_STAGE_SCHEDULES:
        check_schedule(schedule, pp, stages_per_rank, micro_batches)
        ahead = forwards_ahead(schedule, pp, micro_batches)
        # After the first backward pass one less is in flight, if no forward pass follows.
        return tuple(n - (later and n == micro_batches) for n in ahead)
    at_peak: dict[int, int] = {}
    for actions in schedule_orders(schedule, pp, stages_per_rank, micro_batches):
        counts = dict.fromkeys((stage for stage, _, _ in actions), 0)
        waiting = set(counts) if later else set()
        most, total, counts_then = -1, 0, dict(counts)
        for stage, kind, _ in actions if splits else merge_split_backward(actions):
            change = IN_FLIGHT_CHANGE[kind]
            counts[stage] += change
            total += change
            if change < 0:
                waiting.discard(stage)
            if total > most and not waiting:
                most, counts_then = total, dict(counts)
        at_peak |= counts_then
    return tuple(at_peak[stage] for stage in range(pp * stages_per_rank))
