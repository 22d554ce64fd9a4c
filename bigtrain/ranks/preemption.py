"""Signals that make all ranks save and stop at the end of the current step.

Schedulers announce the end of a run by SIGTERM (pre-emption, `scancel JOB`) or by a signal that the
user chooses (`sbatch --signal=B:USR1@60`). A person sends SIGINT (Ctrl-C). The signal may arrive at
one rank or at all ranks.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from bigtrain.ranks.context import RunContext
from bigtrain.ranks.exit_status import REQUEUE_STATUS

SAME_S = 2.0
"""A signal within this many seconds of the first counts as the same signal.

Schedulers signal the launcher and its ranks, and the launcher forwards the signal to the ranks.
"""
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_SAID_TO_A_PERSON = (
    "\nCtrl-C: the run ends after this step and saves its state. Press Ctrl-C again to end it now."
)


@dataclass(frozen=True)
class Highest:
    """The highest of the numbers that the ranks passed to `PreemptionNotice.agreed`."""

    figure: float
    """The highest number."""
    rank: int
    """The lowest rank with that number."""
    is_equal: bool
    """Whether every rank has the same number."""

    @classmethod
    def of(cls, figures: Sequence[float]) -> Highest | None:
        """Return the highest of the ranks' numbers, in the order of ranks; None if all are below 0.

        A number below 0 means that the rank has none.
        """
        figure = max(figures)
        if figure < 0:
            return None
        return cls(figure, figures.index(figure), min(figures) == figure)


class PreemptionNotice:
    """Record SIGTERM, SIGUSR1 and SIGINT in a `with` block; a second signal ends the process.

    Args:
        context: the context of this rank.
        every: the ranks exchange their signals in one of this many calls of `agreed`.

    Example:
        with PreemptionNotice(context) as notice:
            for batch in loader:
                engine.step(batch)
                if notice.agreed():
                    break
    """

    def __init__(self, context: RunContext, every: int = 1) -> None:
        self._context, self._calls = context, 0
        self.every = every
        """The ranks exchange their signals in one of this many calls of `agreed`. More than 1 means
        that they do not wait for each other."""
        self._noted = 0
        self._handled_at = self._arrived_at = float("inf")
        self._before: dict[int, Any] = {}
        self.signal_name = ""
        """The name of the signal, the same on every rank; empty before the ranks know of one."""
        self.highest: Highest | None = None
        """The highest number that a rank passed to `agreed`; None before the first exchange, and if
        no rank passed one."""

    def agreed(self, figure: float | None = None) -> bool:
        """Return whether any rank has received a signal, the same on all ranks. Collective.

        The exchange is from host to host, so that it does not wait for an accelerator.

        Args:
            figure: a number, at least 0, that is sent in the same exchange for `highest`.
        """
        self._calls += 1
        if self._calls % self.every:
            return bool(self.signal_name)
        return self.heard(self._context.all_gather_rows(self.own(figure)))

    def own(self, figure: float | None = None) -> tuple[float, float]:
        """Return the numbers that this rank sends to the others, for an exchange of the caller.

        Args:
            figure: see `agreed`.
        """
        return float(self._noted), -1.0 if figure is None else float(figure)

    def heard(self, rows: Sequence[Sequence[float]]) -> bool:
        """Return whether any rank has received a signal.

        Args:
            rows: the result of `own` of each rank, in the order of ranks.
        """
        number = int(max(row[0] for row in rows))
        self.highest = Highest.of([row[1] for row in rows])
        if number:
            self.signal_name = signal.Signals(number).name
        return bool(self.signal_name)

    @property
    def exit_status(self) -> int:
        """The exit status after the state was saved: 130 for Ctrl-C, else 75, to be requeued."""
        return 128 + signal.SIGINT if self.signal_name == "SIGINT" else REQUEUE_STATUS

    def is_second(self) -> bool:
        """Return whether a signal that has just arrived is a second signal.

        The thread that reads signals calls this, because a blocked main thread handles no signal.
        """
        self._arrived_at = min(self._arrived_at, time.monotonic())
        return time.monotonic() - self._arrived_at > SAME_S

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Record a signal; end the process at a second signal."""
        now = time.monotonic()
        is_first = not self._noted
        self._noted, self._handled_at = self._noted or number, min(self._handled_at, now)
        if now - self._handled_at > SAME_S:
            raise SystemExit(128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM))
        if is_first and number == signal.SIGINT and self._context.is_main:
            # The interrupted code may be writing to the stream.
            with contextlib.suppress(OSError, RuntimeError):
                sys.stderr.write(f"{_SAID_TO_A_PERSON}\n")

    def __enter__(self) -> PreemptionNotice:
        if threading.current_thread() is threading.main_thread():
            for number in PREEMPTION_SIGNALS:
                if number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # a shell ignores SIGINT for its background jobs
                self._before[number] = signal.signal(number, self)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)
