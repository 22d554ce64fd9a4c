"""No pipeline schedule stands still by NCCL's rules for the order of messages."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from support.nccl import Begin, Communicator, Program, Wait, play

from bigtrain.errors import ConfigError
from bigtrain.schedules.events import EventRow, schedule_events
from bigtrain.schedules.orders import SCHEDULES, SINGLE_STAGE_SCHEDULES, stage_ranks

RANKS = (2, 3, 4, 8)
BATCHES = (1, 2, 3)
"""Micro-batches for each rank."""


def program(rank: int, row: EventRow, ranks: tuple[int, ...]) -> Program:
    """A rank's operations: messages of both directions are a group, others go by pairs of ranks."""
    operations: list[Begin | Wait] = []
    places: dict[Any, int] = {}
    for group in row:
        if group[0].kind in ("F", "B", "I", "W"):
            event = group[0]
            needed = event._replace(kind="RECV_F" if event.kind == "F" else "RECV_B")
            if needed in places:
                operations.append(Wait(places[needed]))
            continue
        if group[0].kind.startswith("WAIT"):
            sent = group[0]._replace(kind=group[0].kind.removeprefix("WAIT_"))
            operations.append(Wait(places[sent]))
            continue
        messages = []
        for event in group:
            other = ranks[event.stage + (1 if event.kind in ("SEND_F", "RECV_B") else -1)]
            messages.append((event, ("send" if "SEND" in event.kind else "receive", other)))
        if len({way for _, (way, _) in messages}) > 1:
            everyone = Communicator("all", tuple(range(max(ranks) + 1)))
            operations.append(Begin(everyone, tuple(message for _, message in messages)))
            places |= {event: len(operations) - 1 for event, _ in messages}
            continue
        for event, message in messages:
            pair = (min(rank, message[1]), max(rank, message[1]))
            operations.append(Begin(Communicator("pair", pair), (message,)))
            places[event] = len(operations) - 1
    return operations


def programs(
    schedule: str, pp: int, per_rank: int, micro_batches: int
) -> dict[tuple[int, str], Program]:
    """The programs of all ranks, after the exchange of all with which a run begins."""
    rows = schedule_events(schedule, pp, per_rank, micro_batches)
    ranks = tuple(stage_ranks(schedule, pp, per_rank))
    first = Begin(Communicator("all", tuple(range(pp))), kind="ALLREDUCE")
    found = {}
    for rank, row in enumerate(rows):
        rest = [Wait(o.place + 1) if isinstance(o, Wait) else o for o in program(rank, row, ranks)]
        found[rank, "main"] = [first, *rest]
    return found


def cases() -> list[tuple[str, int, int, int]]:
    """The schedules that can be, of up to 8 ranks and 32 micro-batches."""
    found = []
    for schedule, pp, batches in product(SCHEDULES, RANKS, BATCHES):
        single = schedule in SINGLE_STAGE_SCHEDULES
        for per_rank in (1,) if single else (2, 3):
            try:
                schedule_events(schedule, pp, per_rank, pp * batches)
            except ConfigError:
                continue
            found.append((schedule, pp, per_rank, pp * batches))
    return found


def test_every_schedule_ends() -> None:
    found = cases()
    assert len(found) >= 120
    assert {case[0] for case in found} == set(SCHEDULES)
    for case in found:
        assert not play(programs(*case)), case


@pytest.mark.parametrize("case", [("1f1b", 4, 1, 8), ("interleaved_1f1b", 4, 2, 8)])
def test_two_messages_in_the_wrong_order_stand_still(case: Any) -> None:
    broken = programs(*case)
    row = list(broken[1, "main"])
    begins = [n for n, o in enumerate(row) if isinstance(o, Begin) and o.messages]
    first, later = begins[0], begins[5]
    swapped = {first: later, later: first}
    row[first], row[later] = row[later], row[first]
    row = [Wait(swapped.get(o.place, o.place)) if isinstance(o, Wait) else o for o in row]
    assert play(broken | {(1, "main"): row})
