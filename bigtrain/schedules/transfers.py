"""What is on its way to or from a rank during each of its actions."""

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
"""Micro-batches whose wires are on their way: (stage, RECV_F | SEND_F | RECV_B | SEND_B)."""


@lru_cache(maxsize=1024)
def transfers(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, rank: int
) -> tuple[InTransit, ...]:
    """For each action of a rank what is on its way beside it, as torch places it.

    What is received lies in a buffer from when it is asked for; what is sent is kept until it is
    known to have arrived. Where torch's placing would take long it is foretold, and what is
    received is taken to come in time.
    """
    given = (schedule, pp, stages_per_rank, micro_batches)
    actions = rank_order(*given, rank)
    if schedule == "1f1b":
        return tuple(_one_ahead(actions))
    if schedule == "naive":  # the last stage hears of its gradient's arrival with the next output
        return tuple(_one_behind(actions, pp))
    if schedule == "gpipe":  # torch waits for what is sent at the end of each half
        kept = {"F": "SEND_F", "B": "SEND_B"}
        return tuple({(s, kept[k]): n} for s, k, n in actions)
    if schedule not in TORCH_SCHEDULES:
        return tuple({} for _ in actions)
    if pp * stages_per_rank * micro_batches > MAX_PLACED_ACTIONS:
        return tuple(_waited_late(actions, stage_ranks(schedule, pp, stages_per_rank)))
    return tuple(_in_transit(schedule_events(*given)[rank]))


@lru_cache(maxsize=1024)
def turns(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, rank: int
) -> tuple[InTransit, ...]:
    """For each action of a rank what is on its way just before it, and not beside it.

    In torch's 1F1B an output goes out while there is room already for the gradient that comes
    back: when that is there, the output is let go, and the backward pass begins. With all other
    schedules there are no such moments.
    """
    if schedule != "1f1b":
        return ()
    return tuple(_at_turns(rank_order(schedule, pp, stages_per_rank, micro_batches, rank)))


def _at_turns(actions: Sequence[Action]) -> Iterator[InTransit]:
    previous_kind: str | None = None
    backward_begun = False
    for stage, kind, _ in actions:
        is_turn = (previous_kind, kind) == ("F", "B")
        both = {(stage, "SEND_F"): 1, (stage, "RECV_B"): 1} if is_turn else {}
        yield {**both, (stage, "SEND_B"): 1} if is_turn and backward_begun else both
        previous_kind, backward_begun = kind, backward_begun or kind == "B"


def _one_ahead(actions: Sequence[Action]) -> Iterator[InTransit]:
    """In torch's 1F1B a gradient is let go when the next one is there, also while F comes first.

    An output is let go when the next one is there as long as nothing goes back, then at once.
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
    """Outputs are waited for at their micro-batch's backward pass, gradients never, as torch does.

    They keep them until the step is over.
    """
    in_transit: Counter[tuple[int, str]] = Counter()
    for stage, kind, _ in actions:
        yield {way: count for way, count in in_transit.items() if count}
        is_backward = kind in ("B", "I")
        if is_backward and in_transit[stage, "SEND_F"]:
            in_transit[stage, "SEND_F"] -= 1
        neighbour = stage + 1 if kind == "F" else stage - 1 if is_backward else -1
        if 0 <= neighbour < len(ranks) and ranks[neighbour] != ranks[stage]:
            in_transit[stage, "SEND_F" if kind == "F" else "SEND_B"] += 1


def _one_behind(actions: Sequence[Action], pp: int) -> Iterator[InTransit]:
    done: set[int] = set()
    for stage, kind, _ in actions:
        is_reported = kind == "F" or stage == pp - 1
        yield {(stage, "SEND_B"): 1} if is_reported and stage in done else {}
        if kind == "B":
            done.add(stage)


def _in_transit(row: EventRow) -> Iterator[InTransit]:
    """What is to be sent is there from when it is made: of a pair of actions, beside the second."""
    events = [event for group in row for event in group]
    sent = {event for event in events if event.kind in ("SEND_F", "SEND_B")}
    in_transit: Counter[tuple[int, str]] = Counter()
    for stage, kind, number in events:
        if kind in ("RECV_F", "RECV_B"):
            in_transit[stage, kind] += 1
        elif kind in ("WAIT_SEND_F", "WAIT_SEND_B"):
            in_transit[stage, kind.removeprefix("WAIT_")] -= 1
        elif kind in get_args(ActionKind):
            # Its own wires are the action's from now on.
            receive = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}.get(kind)
            if receive is not None and in_transit[stage, receive]:
                in_transit[stage, receive] -= 1
            yield {way: count for way, count in in_transit.items() if count}
            sends = {"F": "SEND_F", "B": "SEND_B", "I": "SEND_B"}.get(kind, "")
            if (stage, sends, number) in sent:
                in_transit[stage, sends] += 1
