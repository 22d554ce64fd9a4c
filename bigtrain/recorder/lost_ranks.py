"""Which ranks a run can do without, and which of them it has lost.

Any other rank's death ends all ranks. Those that are spare are only missed: the hub tells the ones
that are left, and they go on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_NEWS_S = 5.0
"""An exchange that broke is heard of before the hub's word of the rank that died."""


class LostRanks:
    """Of one run, as one rank knows it.

    Attributes:
        names: of all ranks, such as "worker 1"; empty where they have none.
        spare: the ranks that may be lost; none until `allow`.
        group: the process group of the exchanges that go on without them (see `RootExchange`).
        beside: the same for another thread.
        patient: whether these exchanges may take hours now.
        tell: says a message to the hub; None where there is no connection.
    """

    def __init__(self) -> None:
        self.names: Sequence[str] = ()
        self.spare: Sequence[int] = ()
        self.group: Any = None
        self.beside: Any = None
        self.patient = False
        self.tell: Callable[..., None] | None = None
        self._lost: list[int] = []
        self._news = threading.Condition()

    def __deepcopy__(self, _memo: Any) -> LostRanks:
        return self

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that were lost, as far as this one has heard."""
        return tuple(self._lost)

    def allow(self, spare: Sequence[int], names: Sequence[str], *, tells: bool) -> None:
        """From now on these ranks may be lost.

        Args:
            spare: their numbers.
            names: of all ranks.
            tells: whether this rank is the one to tell the hub.
        """
        self.spare, self.names = tuple(spare), tuple(names)
        if tells and self.tell is not None:
            self.tell(kind="spare", ranks=list(spare), names=list(names))

    @contextmanager
    def in_patience(self) -> Iterator[None]:
        """Let the main thread's exchanges take hours, for the length of a `with` block."""
        before, self.patient = self.patient, True
        try:
            yield
        finally:
            self.patient = before

    def take(self, rank: int, *, step: int, speaks: bool) -> None:
        """Take note that a spare rank was lost.

        Args:
            rank: which.
            step: the one that goes on, as this rank counts.
            speaks: whether this rank is the one to tell the user.
        """
        with self._news:
            self._lost.append(rank)
            self._news.notify_all()
        if speaks:
            left = len(self.spare) - len(self._lost)
            sys.stderr.write(
                f"bigtrain: {rank_name(rank, self.names)} was lost in step {step}: it ended "
                f"without a message (killed by the system? see: dmesg | tail). {left} of "
                f"{len(self.spare)} workers go on; its share of each batch is not seen any more\n"
            )
            sys.stderr.flush()

    def confirm(self, rank: int) -> bool:
        """Whether a spare rank, an exchange with which broke, was lost; waits for the news."""
        if rank not in self.spare:
            return False
        with self._news:
            return self._news.wait_for(lambda: rank in self._lost, _NEWS_S)


def rank_name(rank: int, names: Sequence[str]) -> str:
    """For example "server 1 (rank 3)", or "rank 3" where ranks have no names."""
    return f"{names[rank]} (rank {rank})" if rank < len(names) else f"rank {rank}"
