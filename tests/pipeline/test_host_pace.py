"""A host does not queue a pipeline's step far ahead of its device.

The device here is the slowest there can be: it runs what is queued only when the host waits for it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from bigtrain.errors import ConfigError
from bigtrain.pipeline import schedule_loop
from bigtrain.pipeline.schedule_loop import HostPace, ScheduleLoop
from bigtrain.schedules.events import EventRow, StepEvent, forward_events, schedule_events
from bigtrain.schedules.orders import SCHEDULES, SINGLE_STAGE_SCHEDULES, stage_ranks


class Device:
    """Counts the micro-batches that are queued and not over."""

    def __init__(self) -> None:
        self.queued: list[int] = []
        """One entry for each micro-batch of which a pass or message is queued."""
        self.ended = self.over = self.waits = 0
        self.most = 0

    def begin(self) -> None:
        self.queued.append(len(self.queued))
        self.most = max(self.most, len(self.queued) - self.over)

    def record_event(self) -> Any:
        self.ended += 1
        return SimpleNamespace(synchronize=lambda place=self.ended: self.run_to(place))

    def run_to(self, place: int) -> None:
        self.waits += 1
        self.over = max(self.over, place)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(schedule_loop, "is_accelerator", lambda _device: True)
    monkeypatch.setattr(schedule_loop, "current_stream", lambda _device: made)
    return made


def make_loop(row: EventRow, device: Device, pace: HostPace) -> ScheduleLoop:
    """A loop whose passes and messages only tell the device."""
    worker: Any = SimpleNamespace(stages={})
    loop = ScheduleLoop(row, worker, {}, MagicMock(), pace)
    seen: set[int] = set()

    def note(micro_batch: int) -> None:
        if micro_batch not in seen:
            seen.add(micro_batch)
            device.begin()

    def compute(event: StepEvent) -> list[Any]:
        note(event.micro_batch)
        return []

    def received(event: StepEvent) -> list[Any]:
        note(event.micro_batch)  # its memory is allocated
        return []

    loop._compute, loop._received = compute, received  # type: ignore[method-assign]
    return loop


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_more_are_queued_than_the_schedule_has_in_flight_and_one(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = 0
    for pp, per_rank, batches in [(2, 1, 16), (4, 1, 16), (2, 2, 16), (4, 2, 32)]:
        if (per_rank == 1) is not (schedule in SINGLE_STAGE_SCHEDULES):
            continue
        try:
            rows = schedule_events(schedule, pp, per_rank, batches)
        except ConfigError:
            continue
        for row in rows:
            found += 1
            device = Device()
            monkeypatch.setattr(schedule_loop, "is_accelerator", lambda _device: True)
            monkeypatch.setattr(schedule_loop, "current_stream", lambda _device, d=device: d)
            loop = make_loop(row, device, HostPace(torch.device("cpu")))
            loop.run()
            assert len(device.queued) == device.ended == batches
            assert device.most <= loop.in_flight + 1
            assert device.waits == max(0, batches - loop.in_flight - 1)
    assert found


def test_1f1b_has_as_many_in_flight_as_stages_follow() -> None:
    worker: Any = SimpleNamespace(stages={})
    pace = HostPace(torch.device("cpu"))
    rows = schedule_events("1f1b", 4, 1, 16)
    loops = [ScheduleLoop(row, worker, {}, MagicMock(), pace) for row in rows]
    assert [loop.in_flight for loop in loops] == [4, 4, 3, 2]  # and one that is being received


def test_loops_of_a_rank_share_the_limit(device: Device) -> None:
    pace = HostPace(torch.device("cpu"))
    row = forward_events(stage_ranks("1f1b", 2, 1))[0]
    for _ in range(9):  # nine predictions, each by a loop of its own
        make_loop(row, device, pace).run()
    assert device.most == 2


def test_a_failed_step_leaves_nothing_behind(device: Device) -> None:
    pace = HostPace(torch.device("cpu"))
    for _ in range(5):
        pace.begin(2)  # and the step fails in a pass
    pace.clear()
    row = schedule_events("1f1b", 2, 1, 8)[0]
    loop = make_loop(row, device, pace)
    loop.run()
    assert device.waits == 8 - loop.in_flight - 1


def test_a_cpu_waits_for_nothing() -> None:
    pace = HostPace(torch.device("cpu"))
    device = Device()
    make_loop(schedule_events("gpipe", 2, 1, 8)[0], device, pace).run()
    assert (device.ended, device.waits) == (0, 0)
