"""The flight recorder of one rank: its last events, readable while the main thread hangs.

The buffer for events is allocated before the run. To record an event is an assignment, which takes
a few hundred nanoseconds and no lock that a hanging thread could hold. Collectives are not recorded
here: torch records them in C++, and they are read when a page is made (see `exchanges`).
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
"""The number of stored events. A model with a dozen blocks fills them in about 30 passes."""
_FRAMES = 40

Event = tuple[float, str, str, int, int]
"""Seconds since 1970, phase, name of a block or a description, micro-batch, step."""


class FlightRecorder:
    """Records the last events of one rank, and its current phase, block and step.

    Args:
        rank: the rank of this process.
        world_size: the number of ranks of the run.
    """

    folder: Path | None = None
    """The folder of the run, into which a page is written; None if the run has no folder."""
    unit = "micro-batch"
    """The word on a page for what `enter` counts in a step; "pass" if a rank has several stages."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.phase, self.block, self.micro_batch = "build", "", 0
        self.step = 0
        """The number of the current or last step, from 1."""
        self.peak_bytes: int | None = None
        """The peak memory of this rank so far, in bytes; None if unknown."""
        self.exchanges: Callable[[], list[dict[str, Any]]] = list
        """Returns torch's record of exchanges: `read_exchanges`, or `list` (no exchanges) in a run
        of one process."""
        self.traffic = TrafficCounter()
        """Counts the bytes that steps exchange."""
        self.lost_ranks = LostRanks()
        """The ranks that the run may lose, and the ranks that it has lost."""
        self._counts = {"forward": 0, "backward": 0}
        self._events: list[Event | None] = [None] * EVENTS
        self._written = 0
        self._made = time.time()
        self._error: BaseException | None = None
        self._reading = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Hooks of modules refer to the recorder. A copy of a module in another process gets an
        # empty recorder.
        return FlightRecorder, (self.rank, self.world_size)

    def __deepcopy__(self, _memo: Any) -> FlightRecorder:
        return self

    def note(self, event: str = "") -> None:
        """Record an event with the time and the current phase, micro-batch and step.

        Args:
            event: a description; if it is empty, the name of the current block is recorded.
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
        """Record that a phase begins; count the forward and backward passes of a step."""
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
        """Record that a micro-batch of the next step is being read.

        Args:
            micro_batch: the number of the micro-batch in the step, from 1.
        """
        self.phase, self.block, self.micro_batch = "data", "", micro_batch
        self.note()

    def begin_step(self, step: int) -> None:
        """Record that a step begins.

        Args:
            step: the number of the step, from 1.
        """
        self.step = step
        self._counts = dict.fromkeys(self._counts, 0)
        self.phase, self.block, self.micro_batch = "begin", "", 0
        self.note()

    def end_step(self) -> None:
        """Record that a step has ended."""
        self.phase, self.block, self.micro_batch = "between", "", 0
        self.note()

    def lose(self, rank: int) -> None:
        """Record that a spare rank was lost; on rank 0 print a message for the user as well."""
        self.lost_ranks.take(rank, step=self.step, speaks=self.rank == 0)

    def fail(self, error: BaseException) -> None:
        """Record the error that ended the main thread's work.

        Afterwards `stack` returns the frames of the error's traceback.
        """
        self._error = error

    @property
    def idle_s(self) -> float:
        """Seconds since the last event, or since the construction if there is no event."""
        last = self._events[(self._written - 1) % EVENTS]
        return time.time() - (self._made if last is None else last[0])

    def events(self) -> list[Event]:
        """Return the stored events, the oldest first."""
        start = self._written % EVENTS
        return [e for e in self._events[start:] + self._events[:start] if e is not None]

    def stack(self) -> list[str]:
        """Return the innermost frames of the main thread's Python stack, the outermost first.

        Each frame is a string `FILE:LINE FUNCTION`.
        """
        if self._error is not None:
            return _of_error(self._error)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return _of_frame(frame)

    def record(self) -> dict[str, Any]:
        """Return this rank's record as a dict of JSON values. Any thread may call this method."""
        stack = self.stack()
        try:
            with self._reading:  # two threads would take torch's and Python's locks in two orders
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
