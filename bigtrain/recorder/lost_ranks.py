"""The spare ranks of a run, and the spare ranks that it has lost.

If a spare rank dies, the hub (`bigtrain.ranks.failure_hub`) sends a message to the remaining ranks,
and they continue. If any other rank dies, all ranks end.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_NEWS_S = 5.0
"""Seconds to wait for the hub's message about a dead rank. The other ranks notice a broken exchange
before the message comes."""


class LostRanks:
    """The spare and lost ranks of one run, as far as one rank knows them.

    Attributes:
        names: the names of all ranks, such as "worker 1"; empty if ranks have no names.
        spare: the ranks that may be lost; empty until `allow` is called.
        group: the process group of exchanges that survive the loss of ranks (see `RootExchange`);
            None until ranks are spare.
        background_group: the process group of such exchanges in a background thread.
        long_exchanges: whether the main thread's current exchanges may take hours.
        tell: sends a message to the hub; None if the rank has no connection to the hub.
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
        """Make these ranks the spare ranks of the run.

        Args:
            spare: the numbers of the spare ranks.
            names: the names of all ranks.
            tells: whether this rank sends the spare ranks to the hub; exactly one rank does.
        """
        self.spare, self.names = tuple(spare), tuple(names)
        if tells and self.tell is not None:
            self.tell(kind="spare", ranks=list(spare), names=list(names))

    @contextmanager
    def long_timeout(self) -> Iterator[None]:
        """Let the main thread's exchanges take hours inside a `with` block."""
        before, self.long_exchanges = self.long_exchanges, True
        try:
            yield
        finally:
            self.long_exchanges = before

    def take(self, rank: int, *, step: int, speaks: bool) -> None:
        """Record that a spare rank was lost.

        Args:
            rank: the lost rank.
            step: the current step of this rank.
            speaks: whether this rank prints a message for the user; exactly one rank does.
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
        """Return whether a rank was lost, after an exchange with it broke.

        If the rank is spare, wait up to `_NEWS_S` seconds for the hub's message about its loss.
        """
        if rank not in self.spare:
            return False
        with self._news:
            return self._news.wait_for(lambda: rank in self._lost, _NEWS_S)


def rank_name(rank: int, names: Sequence[str]) -> str:
    """Return the name of a rank: "server 1 (rank 3)", or "rank 3" if ranks have no names."""
    return f"{names[rank]} (rank {rank})" if rank < len(names) else f"rank {rank}"
