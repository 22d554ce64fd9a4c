"""The flight recorder of one rank: its last events, readable while its main thread hangs.

The place of each event is made before the run, and writing one is an assignment: no lock that a
hanging thread could hold, and a few hundred nanoseconds. Exchanges are not written here: torch
records them in C++, for every backend, and they are read when a page is made.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from bigtrain.recorder.lost_ranks import LostRanks
from bigtrain.recorder.traffic_counter import TrafficCounter

EVENTS = 400
"""Events that are kept: with a dozen blocks, the last dozen passes."""
_FRAMES = 40

Event = tuple[float, str, str, int, int]
"""Seconds since 1970, phase, block or what else, micro-batch, step."""


class FlightRecorder:
    """The last events of one rank, and where it is now.

    Args:
        rank: of this process.
        world_size: ranks of the run.
    """

    folder: Path | None = None
    """Of the run; the page goes there as a file, too."""
    unit = "micro-batch"
    """What passes are counted in: a rank with several stages makes several of a micro-batch."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.phase, self.block, self.micro_batch = "build", "", 0
        self.step = 0
        """Counted from 1: the one that goes on, or was the last."""
        self.peak_bytes: int | None = None
        """The peak so far, where it is known."""
        self.exchanges: Callable[[], list[dict[str, Any]]] = list
        """Reads the exchanges that torch has recorded: `read_exchanges`, where there are any."""
        self.traffic = TrafficCounter()
        """Of the steps' exchanges, what is sent."""
        self.lost_ranks = LostRanks()
        """Which ranks the run may lose, and which it has lost."""
        self._counts = {"forward": 0, "backward": 0}
        self._events: list[Event | None] = [None] * EVENTS
        self._written = 0
        self._made = time.time()
        self._error: BaseException | None = None
        self._reading = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Modules hold it by their hooks; their copies in other processes begin with an empty one.
        return FlightRecorder, (self.rank, self.world_size)

    def __deepcopy__(self, _memo: Any) -> FlightRecorder:
        return self

    def note(self, what: str = "") -> None:
        """Write an event: this phase, this block, and what else there is to say."""
        written = self._written
        self._events[written % EVENTS] = (
            time.time(),
            self.phase,
            what or self.block,
            self.micro_batch,
            self.step,
        )
        self._written = written + 1

    def enter(self, phase: str) -> None:
        """Say which phase begins; passes of a step are counted."""
        self.phase, self.block = phase, ""
        if phase in self._counts:
            self._counts[phase] += 1
            self.micro_batch = self._counts[phase]
        self.note()

    def enter_block(self, name: str) -> None:
        """Say which block is computed from now on."""
        self.block = name
        self.note()

    def read_data(self, micro_batch: int) -> None:
        """Say that a micro-batch of the next step is read, counted from 1."""
        self.phase, self.block, self.micro_batch = "data", "", micro_batch
        self.note()

    def begin_step(self, step: int) -> None:
        """Say that a step begins, counted from 1."""
        self.step = step
        self._counts = dict.fromkeys(self._counts, 0)
        self.phase, self.block, self.micro_batch = "begin", "", 0
        self.note()

    def end_step(self) -> None:
        """Say that a step is done."""
        self.phase, self.block, self.micro_batch = "between", "", 0
        self.note()

    def lose(self, rank: int) -> None:
        """Take note that a spare rank was lost; rank 0 tells the user."""
        self.lost_ranks.take(rank, step=self.step, speaks=self.rank == 0)

    def fail(self, error: BaseException) -> None:
        """Keep what ended the main thread's work: from now on its stack is that of the error."""
        self._error = error

    @property
    def idle_s(self) -> float:
        """Seconds since the last event, or since there is this recorder."""
        last = self._events[(self._written - 1) % EVENTS]
        return time.time() - (self._made if last is None else last[0])

    def events(self) -> list[Event]:
        """The events that there are, the oldest first."""
        start = self._written % EVENTS
        return [e for e in self._events[start:] + self._events[:start] if e is not None]

    def stack(self) -> list[str]:
        """The main thread's Python stack, outermost first, as `file:line function`."""
        if self._error is not None:
            return _of_error(self._error)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return _of_frame(frame)

    def record(self) -> dict[str, Any]:
        """Everything this rank has to say, for JSON. From any thread."""
        stack = self.stack()
        try:
            with self._reading:  # torch's lock and Python's must not be taken in both orders
                exchanges = self.exchanges()
        except Exception as error:  # torch's own record changes from version to version
            exchanges = [{"unreadable": f"{type(error).__name__}: {error}"[:200]}]
        return {
            "rank": self.rank,
            "phase": self.phase,
            "block": self.block,
            "step": self.step,
            "micro_batch": self.micro_batch,
            "unit": self.unit,
            "idle_s": round(self.idle_s, 3),
            "peak_bytes": self.peak_bytes,
            "error": None if self._error is None else type(self._error).__name__,
            "stack": stack,
            "exchanges": exchanges,
            "events": self.events(),
        }


def _of_frame(frame: FrameType | None) -> list[str]:
    if frame is None:
        return []
    found = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return _lines(list(reversed(found)))


def _of_error(error: BaseException) -> list[str]:
    trace: TracebackType | None = error.__traceback__
    found = traceback.StackSummary.extract(traceback.walk_tb(trace), lookup_lines=False)
    return _lines(list(found))


def _lines(frames: list[traceback.FrameSummary]) -> list[str]:
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-_FRAMES:]]
