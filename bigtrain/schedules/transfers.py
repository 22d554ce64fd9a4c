"""Micro-batches whose tensors a rank is sending or receiving during each of its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import get_args

from bigtrain.schedules.events import EventRow, schedule_events
from bigtrain.schedules.orders import (
    MAX_PLACED_ACTIONS,
    TORCH_SCHEDULES,
    Action,
    ActionKind,
    rank_order,
    stage_ranks,
)

InTransit = Mapping[tuple[int, str], int]
"""How many micro-batches are in transit, by (stage, RECV_F | SEND_F | RECV_B | SEND_B)."""


@lru_cache(maxsize=1024)
def transfers(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, rank: int
) -> tuple[InTransit, ...]:
    """Return the messages in transit during each action of a rank, as torch places them.

    A receive occupies its buffer from its begin; a send occupies memory until it has been waited
    for. Where torch's placing would take long, sends are derived from the order, and receives are
    assumed to arrive when they are needed.
    """
    actions = rank_order(schedule, pp, stages_per_rank, micro_batches, rank)
    if schedule == "1f1b":
        return tuple(_one_ahead(actions))
    if schedule == "naive":  # a rank waits for a gradient before its next send
        return tuple(_one_behind(actions, pp))
    if (
        schedule == "gpipe"
    ):  # sends are waited for after the last forward, and after the last backward
        sends = {"F": "SEND_F", "B": "SEND_B"}
        return tuple({(s, sends[k]): n} for s, k, n in actions)
    if schedule not in TORCH_SCHEDULES:
        return tuple({} for _ in actions)
    if pp * stages_per_rank * micro_batches > MAX_PLACED_ACTIONS:
        return tuple(_waited_late(actions, stage_ranks(schedule, pp, stages_per_rank)))
    return tuple(_in_transit(schedule_events(schedule, pp, stages_per_rank, micro_batches)[rank]))


@lru_cache(maxsize=1024)
def backward_starts(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, rank: int
) -> tuple[InTransit, ...]:
    """Return the messages in transit just before each action, when it has not begun.

    In torch's 1F1B an output is sent while the buffer of the gradient that returns is allocated
    already: once the gradient has arrived the output is released, and the backward pass begins.
    No other schedule has such moments.
    """
    if schedule != "1f1b":
        return ()
    return tuple(
        _at_backward_starts(rank_order(schedule, pp, stages_per_rank, micro_batches, rank))
    )


def _at_backward_starts(actions: Sequence[Action]) -> Iterator[InTransit]:
    previous_kind: str | None = None
    backward_begun = False
    for stage, kind, _ in actions:
        is_backward_start = (previous_kind, kind) == ("F", "B")
        both = {(stage, "SEND_F"): 1, (stage, "RECV_B"): 1} if is_backward_start else {}
        yield {**both, (stage, "SEND_B"): 1} if is_backward_start and backward_begun else both
        previous_kind, backward_begun = kind, backward_begun or kind == "B"


def _one_ahead(actions: Sequence[Action]) -> Iterator[InTransit]:
    """In torch's 1F1B a gradient is released once the next one is computed, with an F between.

    During warm-up an output is released once the next one is computed, later before the next
    action.
    """
    previous_kind: str | None = None
    backward_begun = False
    for stage, kind, _ in actions:
        if backward_begun:
            yield {(stage, "SEND_B"): 1}
        else:
            yield {(stage, "SEND_F"): 1} if kind == previous_kind == "F" else {}
        previous_kind, backward_begun = kind, backward_begun or kind == "B"


def _waited_late(actions: Sequence[Action], ranks: Sequence[int]) -> Iterator[InTransit]:
    """Outputs are waited for at their micro-batch's backward pass, gradients at the step's end."""
    in_transit: Counter[tuple[int, str]] = Counter()
    for stage, kind, _ in actions:
        yield {message: count for message, count in in_transit.items() if count}
        is_backward = kind in ("B", "I")
        if is_backward and in_transit[stage, "SEND_F"]:
            in_transit[stage, "SEND_F"] -= 1
        neighbour = stage + 1 if kind == "F" else stage - 1 if is_backward else -1
        if 0 <= neighbour < len(ranks) and ranks[neighbour] != ranks[stage]:
            in_transit[stage, "SEND_F" if kind == "F" else "SEND_B"] += 1


def _one_behind(actions: Sequence[Action], pp: int) -> Iterator[InTransit]:
    """A gradient is waited for before the next send: of an output, on the last rank a gradient."""
    done: set[int] = set()
    for stage, kind, _ in actions:
        is_open = kind == "F" or stage == pp - 1
        yield {(stage, "SEND_B"): 1} if is_open and stage in done else {}
        if kind == "B":
            done.add(stage)


def _in_transit(row: EventRow) -> Iterator[InTransit]:
    """An output occupies memory from its forward pass until its send has been waited for."""
    events = [event for group in row for event in group]
    sent = {event for event in events if event.kind in ("SEND_F", "SEND_B")}
    in_transit: Counter[tuple[int, str]] = Counter()
    for stage, kind, number in events:
        if kind in ("RECV_F", "RECV_B"):
            in_transit[stage, kind] += 1
        elif kind in ("WAIT_SEND_F", "WAIT_SEND_B"):
            in_transit[stage, kind.removeprefix("WAIT_")] -= 1
        elif kind in get_args(ActionKind):
            # The action's recording has its own inputs from here.
            receive = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}.get(kind)
            if receive is not None and in_transit[stage, receive]:
                in_transit[stage, receive] -= 1
            yield {message: count for message, count in in_transit.items() if count}
            sends = {"F": "SEND_F", "B": "SEND_B", "I": "SEND_B"}.get(kind, "")
            if (stage, sends, number) in sent:
                in_transit[stage, sends] += 1
