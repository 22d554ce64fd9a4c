"""Refuse ranks that were started with different jobs, before the run trains.

Every rank has a table of its job's keys, and compares it with rank 0's table through the rendezvous
store. A process group is not needed: ranks with different jobs might fail to create one. The ranks
compare a hash of the tables first, and the tables only if the hashes differ.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from bigtrain.errors import ConfigError, LaunchError

Facts = Mapping[str, str]
"""By key, the values that must be the same on all ranks, as text."""
_SHOWN = 4
_LONGEST = 80


class Agreement:
    """Compares the jobs that the ranks of a run were started with.

    Args:
        store: a store that all ranks share; None for a single process, which always agrees.
        rank: the rank of this process.
        world_size: the number of ranks of the run.
    """

    def __init__(self, store: Store | None = None, rank: int = 0, world_size: int = 1) -> None:
        self._store = store if world_size > 1 else None
        self._rank, self._world_size, self._round = rank, world_size, 0

    def require(self, facts: Facts) -> None:
        """Compare a table of values with rank 0's. Collective: all ranks call it equally often.

        Rank 0 waits until all other ranks have agreed. If a rank does not agree, its error ends all
        ranks.

        Args:
            facts: the values of this rank.

        Raises:
            ConfigError: this rank's table differs from rank 0's; the message contains the keys and
                both values.
            LaunchError: another rank did not call this within the timeout of the store.
        """
        if self._store is None:
            return
        self._round += 1
        key = f"agreement/{self._round}"
        text = json.dumps(dict(facts), sort_keys=True)
        own_hash = hashlib.sha256(text.encode()).hexdigest()
        try:
            if self._rank == 0:
                self._store.set(f"{key}/facts", text)
                self._store.set(key, own_hash)
                self._store.wait([f"{key}/all"])
                return
            if self._store.get(key).decode() == own_hash:
                if self._store.add(f"{key}/agree", 1) == self._world_size - 1:
                    self._store.set(f"{key}/all", "")
                return
            theirs = json.loads(self._store.get(f"{key}/facts"))
        except RuntimeError as error:
            awaited = "rank 0" if self._rank else "the others"
            reason = next(iter(str(error).splitlines()), "").rstrip(".")
            raise LaunchError(
                f"rank {self._rank} waited in vain for the job of {awaited}: {reason}. Check why "
                "they are late, or raise mesh.setup_timeout"
            ) from error
        raise ConfigError(_differences(facts, theirs, self._rank))

    def is_first(self, event: str) -> bool:
        """Whether this call is the first of all ranks for an event; always true without a store."""
        return self._store is None or self._store.add(f"first/{event}", 1) == 1

    def close(self) -> None:
        """Release the store. Later calls of `require` compare nothing."""
        self._store = None


def _differences(mine: Facts, theirs: Facts, rank: int) -> str:
    keys = [k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k)]
    parts = [
        f"{key} is {_shown(mine.get(key))} on rank {rank} and {_shown(theirs.get(key))} on rank 0"
        for key in keys[:_SHOWN]
    ]
    more = [f"and {len(keys) - _SHOWN} more"] if len(keys) > _SHOWN else []
    return (
        f"the ranks were started differently: {'; '.join([*parts, *more])}. Start all ranks with "
        "the same words, files and packages."
    )


def _shown(value: str | None) -> str:
    if value is None:
        return "not there"
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def in_words(value: Any) -> str:
    """Return a value of a job as text that is equal in every process: without addresses."""
    if value is None or isinstance(value, bool | int | float | str):
        return "null" if value is None else str(value)
    if isinstance(value, Mapping):
        pairs = (f"{key}: {in_words(inner)}" for key, inner in value.items())
        return "{" + ", ".join(sorted(pairs)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(in_words, value)) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(in_words, value))) + "}"
    if isinstance(value, torch.dtype | torch.device | PurePath | Enum):
        return str(value)
    if isinstance(value, functools.partial):
        return f"{in_words(value.func)} with {in_words(value.keywords)}"
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{getattr(value, '__module__', type(value).__module__)}.{name}"


def flattened(tree: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Return the dotted keys of a job and their values as text.

    Args:
        tree: the job, or a section of it.
        above: the dotted prefix of the section's keys.
    """
    table: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            table |= flattened(value, f"{above}{key}.")
        else:
            table[f"{above}{key}"] = in_words(value)
    return table
