"""No pipeline schedule stands still by NCCL's rules for the order of messages."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.nccl import Begin, Communicator, HostWait, Program, Wait, play

from bigtrain.errors import ConfigError
from bigtrain.pipeline import schedule_loop
from bigtrain.pipeline.schedule_loop import HostPace, ScheduleLoop
from bigtrain.schedules.events import EventRow, StepEvent, schedule_events
from bigtrain.schedules.orders import SCHEDULES, SINGLE_STAGE_SCHEDULES, stage_ranks

RANKS = (2, 3, 4, 8)
BATCHES = (1, 2, 3)
"""Micro-batches for each rank."""


class Paced:
    """A row of a schedule as a rank runs it, with the waits of its host for its device."""

    def __init__(self, rank: int, row: EventRow, ranks: tuple[int, ...]) -> None:
        self.rank, self.ranks = rank, ranks
        self.operations: list[Begin | Wait | HostWait] = []
        self._places: dict[Any, int] = {}
        worker: Any = SimpleNamespace(stages={})
        transport: Any = self
        with patch.object(schedule_loop, "is_accelerator", lambda _device: True):
            pace = HostPace(torch.device("cpu"))
        loop = ScheduleLoop(row, worker, {}, transport, pace)
        stream = SimpleNamespace(record_event=self.end_of_micro_batch)
        with (
            patch.object(schedule_loop, "current_stream", lambda _device: stream),
            patch.object(loop, "_compute", self.compute),
            patch.object(loop, "_received", lambda _event: []),
        ):
            loop.run()

    def end_of_micro_batch(self) -> Any:
        wait = HostWait(len(self.operations))
        return SimpleNamespace(synchronize=lambda: self.operations.append(wait))

    def compute(self, event: StepEvent) -> list[Any]:
        needed = event._replace(kind="RECV_F" if event.kind == "F" else "RECV_B")
        if needed in self._places:
            self.operations.append(Wait(self._places[needed]))
        return []

    def wait(self, sent: StepEvent) -> None:
        self.operations.append(Wait(self._places[sent]))

    def begin(self, group: tuple[StepEvent, ...], _received: Any) -> None:
        """Messages of both directions are a group, others go by pairs of ranks."""
        messages = []
        for event in group:
            other = self.ranks[event.stage + (1 if event.kind in ("SEND_F", "RECV_B") else -1)]
            messages.append((event, ("send" if "SEND" in event.kind else "receive", other)))
        if len({way for _, (way, _) in messages}) > 1:
            everyone = Communicator("all", tuple(range(max(self.ranks) + 1)))
            self.operations.append(Begin(everyone, tuple(message for _, message in messages)))
            place = len(self.operations) - 1
            self._places |= {event: place for event, _ in messages}
            return
        for event, message in messages:
            pair = (min(self.rank, message[1]), max(self.rank, message[1]))
            self.operations.append(Begin(Communicator("pair", pair), (message,)))
            self._places[event] = len(self.operations) - 1


def later(operation: Begin | Wait | HostWait) -> Begin | Wait | HostWait:
    """The operation in a program to which one operation was added at the front."""
    if isinstance(operation, Begin):
        return operation
    return operation._replace(place=operation.place + 1)


def programs(
    schedule: str, pp: int, per_rank: int, micro_batches: int
) -> dict[tuple[int, str], Program]:
    """The programs of all ranks, after the exchange of all with which a run begins."""
    rows = schedule_events(schedule, pp, per_rank, micro_batches)
    ranks = tuple(stage_ranks(schedule, pp, per_rank))
    first = Begin(Communicator("all", tuple(range(pp))), kind="ALLREDUCE")
    found = {}
    for rank, row in enumerate(rows):
        rest = Paced(rank, row, ranks).operations
        found[rank, "main"] = [first, *(later(o) for o in rest)]
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
    paced = programs("1f1b", 4, 1, 8)
    assert all(any(isinstance(o, HostWait) for o in row) for row in paced.values())


def test_a_host_that_waits_for_what_it_has_not_queued_stands_still() -> None:
    broken = programs("1f1b", 2, 1, 4)
    row = list(broken[1, "main"])
    early = next(n for n, o in enumerate(row) if isinstance(o, Wait)) + 1
    row.insert(early, HostWait(len(row)))
    assert play(broken | {(1, "main"): row})


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
