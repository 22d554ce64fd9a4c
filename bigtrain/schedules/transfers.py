"""Count the messages whose tensors a rank has in memory during each of its actions."""

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
"""The number of messages in transit, by stage and kind (RECV_F, SEND_F, RECV_B or SEND_B)."""


@lru_cache(maxsize=1024)
def transfers(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, rank: int
) -> tuple[InTransit, ...]:
    """Return the messages in transit during each action of a rank, with torch's order of messages.

    A receive occupies its buffer from its begin. A send occupies memory until the rank has waited
    for it. For large steps (see `orders.MAX_PLACED_ACTIONS`), torch would take long to place the
    messages. Then sends are derived from the order of actions, and receives are left out, as if
    they arrived when they are needed.

    Args:
        schedule: see `orders.schedule_orders`.
        pp: see `orders.schedule_orders`.
        stages_per_rank: see `orders.schedule_orders`.
        micro_batches: see `orders.schedule_orders`.
        rank: the pp rank.
    """
    actions = rank_order(schedule, pp, stages_per_rank, micro_batches, rank)
    if schedule == "1f1b":
        return tuple(_one_ahead(actions))
    if schedule == "naive":  # a rank waits for a gradient's send before its next send
        return tuple(_one_behind(actions, pp))
    if (
        schedule == "gpipe"
    ):  # a rank waits for sends only after its last forward and after its last backward pass
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
    """Return for each action of a rank the messages in transit at the start of a backward pass.

    In torch's 1F1B, the buffer for the next gradient is allocated while an output is being sent.
    After the gradient has arrived, the output is released, and the backward pass begins. The
    entry of an action is empty unless the action is a B after an F. Other schedules have no such
    moments, and the result is empty.

    Args:
        schedule: see `transfers`.
        pp: see `transfers`.
        stages_per_rank: see `transfers`.
        micro_batches: see `transfers`.
        rank: see `transfers`.
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
    """Yield the messages in transit during each action of torch's 1F1B.

    A sent gradient is released after the next gradient is computed, with an F in between. During
    warm-up, a sent output is released after the next output is computed. Later it is released
    before the next action.
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
    """Yield the sends in transit during each action, if ranks wait for sends late.

    A rank waits for the send of an output in the backward pass of its micro-batch, and for the
    sends of gradients at the end of the step.
    """
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
    """Yield the messages in transit during each action of the naive schedule.

    A rank waits for the send of a gradient before its next send. That send is of an output, or on
    the last rank of a gradient.
    """
    done: set[int] = set()
    for stage, kind, _ in actions:
        is_open = kind == "F" or stage == pp - 1
        yield {(stage, "SEND_B"): 1} if is_open and stage in done else {}
        if kind == "B":
            done.add(stage)


def _in_transit(row: EventRow) -> Iterator[InTransit]:
    """Yield the messages in transit during each action of a row of events.

    A sent tensor counts from the action that computes it until the rank has waited for the send.
    """
    events = [event for group in row for event in group]
    sent = {event for event in events if event.kind in ("SEND_F", "SEND_B")}
    in_transit: Counter[tuple[int, str]] = Counter()
    for stage, kind, number in events:
        if kind in ("RECV_F", "RECV_B"):
            in_transit[stage, kind] += 1
        elif kind in ("WAIT_SEND_F", "WAIT_SEND_B"):
            in_transit[stage, kind.removeprefix("WAIT_")] -= 1
        elif kind in get_args(ActionKind):
            # From here the received tensors are inputs of the action, which count as its memory.
            receive = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}.get(kind)
            if receive is not None and in_transit[stage, receive]:
                in_transit[stage, receive] -= 1
            yield {message: count for message, count in in_transit.items() if count}
            sends = {"F": "SEND_F", "B": "SEND_B", "I": "SEND_B"}.get(kind, "")
            if (stage, sends, number) in sent:
                in_transit[stage, sends] += 1
