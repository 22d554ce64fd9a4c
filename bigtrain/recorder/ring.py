"""The flight recorder of one rank: its last events, readable while its main thread hangs.

The buffer for events is allocated before the run, and recording one is an assignment, which takes a
few hundred nanoseconds and no lock that a hanging thread could hold. Exchanges are not recorded
here: torch records them in C++, for every backend, and they are read when a page is made.
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
"""The number of events that are stored: with a dozen blocks, those of the last dozen passes."""
_FRAMES = 40

Event = tuple[float, str, str, int, int]
"""Seconds since 1970, phase, block or a description, micro-batch, step."""


class FlightRecorder:
    """The last events of one rank, and where it is now.

    Args:
        rank: the rank of this process.
        world_size: ranks of the run.
    """

    folder: Path | None = None
    """The folder of the run, where the page is also written."""
    unit = "micro-batch"
    """The name of a counted pass: a rank with several stages does several for a micro-batch."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.phase, self.block, self.micro_batch = "build", "", 0
        self.step = 0
        """The number of the current or last step, from 1."""
        self.peak_bytes: int | None = None
        """The peak so far, if it is known."""
        self.exchanges: Callable[[], list[dict[str, Any]]] = list
        """Reads torch's record of exchanges: `read_exchanges`; an empty list for one process."""
        self.traffic = TrafficCounter()
        """Counts the bytes that steps exchange."""
        self.lost_ranks = LostRanks()
        """The ranks that the run may lose, and those that it has lost."""
        self._counts = {"forward": 0, "backward": 0}
        self._events: list[Event | None] = [None] * EVENTS
        self._written = 0
        self._made = time.time()
        self._error: BaseException | None = None
        self._reading = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Hooks of modules refer to it; a copy of a module in another process has an empty one.
        return FlightRecorder, (self.rank, self.world_size)

    def __deepcopy__(self, _memo: Any) -> FlightRecorder:
        return self

    def note(self, event: str = "") -> None:
        """Record an event with the current phase.

        Args:
            event: a description; empty for the current block.
        """
        written = self._written
        self._events[written % EVENTS] = (
            time.time(),
            self.phase,
            event or self.block,
            self.micro_batch,
            self.step,
        )
        self._written = written + 1

    def enter(self, phase: str) -> None:
        """Record that a phase begins; the passes of a step are counted."""
        self.phase, self.block = phase, ""
        if phase in self._counts:
            self._counts[phase] += 1
            self.micro_batch = self._counts[phase]
        self.note()

    def enter_block(self, name: str) -> None:
        """Record that the computation of a block begins."""
        self.block = name
        self.note()

    def read_data(self, micro_batch: int) -> None:
        """Record that a micro-batch of the next step is read, counted from 1."""
        self.phase, self.block, self.micro_batch = "data", "", micro_batch
        self.note()

    def begin_step(self, step: int) -> None:
        """Record that a step begins, counted from 1."""
        self.step = step
        self._counts = dict.fromkeys(self._counts, 0)
        self.phase, self.block, self.micro_batch = "begin", "", 0
        self.note()

    def end_step(self) -> None:
        """Record that a step has ended."""
        self.phase, self.block, self.micro_batch = "between", "", 0
        self.note()

    def lose(self, rank: int) -> None:
        """Record that a spare rank was lost; rank 0 tells the user."""
        self.lost_ranks.take(rank, step=self.step, speaks=self.rank == 0)

    def fail(self, error: BaseException) -> None:
        """Record the error that ended the main thread's work: `stack` is that of the error then."""
        self._error = error

    @property
    def idle_s(self) -> float:
        """Seconds since the last event, or since the recorder was made."""
        last = self._events[(self._written - 1) % EVENTS]
        return time.time() - (self._made if last is None else last[0])

    def events(self) -> list[Event]:
        """Return the stored events, the oldest first."""
        start = self._written % EVENTS
        return [e for e in self._events[start:] + self._events[:start] if e is not None]

    def stack(self) -> list[str]:
        """Return the main thread's Python stack as `FILE:LINE FUNCTION`, the outermost first."""
        if self._error is not None:
            return _of_error(self._error)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return _of_frame(frame)

    def record(self) -> dict[str, Any]:
        """Return this rank's record as JSON values. Any thread may call it."""
        stack = self.stack()
        try:
            with self._reading:  # two threads would take torch's and Python's lock in both orders
                exchanges = self.exchanges()
        except Exception as error:  # the format of torch's record differs between versions
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
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return _lines(list(reversed(stack)))


def _of_error(error: BaseException) -> list[str]:
    trace: TracebackType | None = error.__traceback__
    stack = traceback.StackSummary.extract(traceback.walk_tb(trace), lookup_lines=False)
    return _lines(list(stack))


def _lines(frames: list[traceback.FrameSummary]) -> list[str]:
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-_FRAMES:]]
