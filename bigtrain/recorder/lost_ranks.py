"""The spare ranks of a run, and those of them that it has lost.

If any other rank dies, all ranks end. If a spare rank dies, the hub tells the remaining ones, and
they continue.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_NEWS_S = 5.0
"""Seconds to wait for the hub's message about a dead rank: a broken exchange is noticed earlier."""


class LostRanks:
    """The spare and lost ranks of one run, as far as one rank knows them.

    Attributes:
        names: the names of all ranks, such as "worker 1"; empty if they have none.
        spare: the ranks that may be lost; none until `allow`.
        group: the process group of exchanges that survive their loss (see `RootExchange`).
        background_group: the same for the exchanges of another thread.
        long_exchanges: whether the main thread's exchanges may take hours now.
        tell: sends a message to the hub; None without a connection.
    """

    def __init__(self) -> None:
        self.names: Sequence[str] = ()
        self.spare: Sequence[int] = ()
        self.group: Any = None
        self.background_group: Any = None
        self.long_exchanges = False
        self.tell: Callable[..., None] | None = None
        self._lost: list[int] = []
        self._news = threading.Condition()

    def __deepcopy__(self, _memo: Any) -> LostRanks:
        return self

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that were lost, as far as this rank knows."""
        return tuple(self._lost)

    def allow(self, spare: Sequence[int], names: Sequence[str], *, tells: bool) -> None:
        """Make these ranks spare.

        Args:
            spare: their numbers.
            names: the names of all ranks.
            tells: whether this rank tells the hub; one of them does.
        """
        self.spare, self.names = tuple(spare), tuple(names)
        if tells and self.tell is not None:
            self.tell(kind="spare", ranks=list(spare), names=list(names))

    @contextmanager
    def long_timeout(self) -> Iterator[None]:
        """Let the main thread's exchanges take hours, for the length of a `with` block."""
        before, self.long_exchanges = self.long_exchanges, True
        try:
            yield
        finally:
            self.long_exchanges = before

    def take(self, rank: int, *, step: int, speaks: bool) -> None:
        """Record that a spare rank was lost.

        Args:
            rank: its number.
            step: the current step of this rank.
            speaks: whether this rank tells the user; one of them does.
        """
        with self._news:
            self._lost.append(rank)
            self._news.notify_all()
        if speaks:
            left = len(self.spare) - len(self._lost)
            sys.stderr.write(
                f"bigtrain: {rank_name(rank, self.names)} was lost in step {step}: it ended "
                f"without a message (killed by the system? see: dmesg | tail). {left} of "
                f"{len(self.spare)} workers continue without its samples\n"
            )
            sys.stderr.flush()

    def confirm(self, rank: int) -> bool:
        """Whether a rank was lost, after an exchange with it broke; waits for the hub's message."""
        if rank not in self.spare:
            return False
        with self._news:
            return self._news.wait_for(lambda: rank in self._lost, _NEWS_S)


def rank_name(rank: int, names: Sequence[str]) -> str:
    """Return the name of a rank: "server 1 (rank 3)", or "rank 3" if ranks have no names."""
    return f"{names[rank]} (rank {rank})" if rank < len(names) else f"rank {rank}"
