"""Process sets: subsets of the ranks that exchange tensors among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigtrain.errors import ConfigError, LaunchError
from bigtrain.hvd.channel import Channel, open_channel
from bigtrain.hvd.session import rank, session, size


class ProcessSet:
    """A set of ranks, for `init` or `add_process_set`.

    Args:
        ranks: the ranks, numbered among all ranks of the run.

    Raises:
        ConfigError: the argument is not a list of numbers, or contains a number twice.
    """

    process_set_id: int | None = None
    """The number of the set; None until it is connected, 0 for the set of all ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        if not isinstance(ranks, (list, tuple, range, set, frozenset)) or not all(
            type(n) is int for n in ranks
        ):
            raise ConfigError(
                f"hvd.ProcessSet: {ranks!r} is not a list of ranks, and communicators of MPI are "
                "not taken. Give their numbers: hvd.ProcessSet([0, 1])"
            )
        if len(set(ranks)) < len(list(ranks)):
            raise ConfigError(
                f"hvd.ProcessSet: a rank occurs twice in {list(ranks)}. Name each once."
            )
        self.ranks: list[int] | None = sorted(ranks)
        self._channel: Channel | None = None

    def size(self) -> int | None:
        """Return the number of ranks; None if the set is not connected."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the index of this process in the set, from 0; None if the set is not connected.

        Raises:
            ConfigError: this process is not in the set.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        return self._checked().index(rank())

    def included(self) -> bool | None:
        """Whether this process is in the set; None for the set of all ranks before `init`.

        Raises:
            LaunchError: `init` was not called, and the set has ranks.
        """
        return None if self.ranks is None else rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def _checked(self) -> list[int]:
        ranks = self.ranks or []
        if rank() not in ranks:
            raise ConfigError(
                f"hvd: rank {rank()} is not in process set {self.process_set_id} of ranks {ranks}. "
                "Ask process_set.included() first."
            )
        return ranks

    def connect(self, number: int, ranks: Sequence[int]) -> None:
        """Connect the set. Collective among all ranks of the run.

        Args:
            number: the id of the set.
            ranks: the ranks of the set, ascending.
        """
        self.ranks, self.process_set_id = list(ranks), number
        self._channel = open_channel(ranks)

    def disconnect(self) -> None:
        """Disconnect the set. It may be connected again."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self.process_set_id = None

    def channel(self) -> Channel:
        """Return the channel for the set's exchanges.

        Raises:
            ConfigError: the set is not connected, or this process is not in it.
            LaunchError: `init` was not called.
        """
        session.opened()
        if self._channel is None:
            raise ConfigError(
                f"hvd: {self} is not connected. Call hvd.add_process_set(process_set) on every "
                "rank first, or give it to hvd.init(process_sets=[...])."
            )
        self._checked()
        return self._channel


class _AllRanks(ProcessSet):
    """The set of all ranks, which `init` connects."""

    def __init__(self) -> None:
        super().__init__([])
        self.ranks = None

    def channel(self) -> Channel:
        session.opened()
        if self._channel is None:
            raise LaunchError("hvd: the ranks are not connected yet. Call hvd.init() first.")
        return self._channel


global_process_set = _AllRanks()
_sets: dict[int, ProcessSet] = {}


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Connect some ranks, and return their set. Collective among all ranks of the run.

    Args:
        process_set: a set, or the ranks of a new one.

    Raises:
        ConfigError: there are no ranks, a rank is not of this run, or another set has the same
            ranks.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks or []
    if not ranks or ranks[0] < 0 or ranks[-1] >= size():
        raise ConfigError(
            f"hvd.add_process_set: ranks {ranks}, and there are 0 to {size() - 1}. Name some of "
            "them."
        )
    for known in (global_process_set, *_sets.values()):
        if known.ranks == ranks:
            raise ConfigError(
                f"hvd.add_process_set: process set {known.process_set_id} has the ranks {ranks} "
                "already. Use that one."
            )
    number = 1 + max(_sets, default=0)
    added.connect(number, ranks)
    _sets[number] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Disconnect a set, and return whether it was connected. Every rank has to call this.

    The set of all ranks is not disconnected; the result is then False.
    """
    number = process_set.process_set_id
    if number is None or _sets.pop(number, None) is None:
        return False
    process_set.disconnect()
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of every connected set by its id; 0 is the set of all ranks."""
    session.opened()
    ranks_by_id = {0: list(range(size()))}
    return ranks_by_id | {
        number: list(process_set.ranks or []) for number, process_set in _sets.items()
    }


def forget_process_sets() -> None:
    """Disconnect every set, that of all ranks included."""
    for process_set in (global_process_set, *_sets.values()):
        process_set.disconnect()
    global_process_set.ranks = None
    _sets.clear()


def set_of(process_set: Any) -> ProcessSet:
    """Check the argument `process_set` of an exchange, and return it.

    Raises:
        ConfigError: the argument is not a process set.
    """
    if isinstance(process_set, ProcessSet):
        return process_set
    raise ConfigError(
        f"hvd: process_set={process_set!r} is no process set. Give what hvd.add_process_set returns"
    )
