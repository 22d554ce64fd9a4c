"""Ranks that were started with different jobs are refused before anything trains.

Every rank says what it was started with as a table of words. The tables go through the store at
which the ranks met, so no process group is needed, and two that would not even fit together can be
compared. All ranks compare theirs with rank 0's: at first a hash of it, the table where that is
another one.
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
"""What has to be the same on all ranks: the value of each key, as a user writes it."""
_SHOWN = 4
_LONGEST = 80


class Agreement:
    """Compares what the ranks of a run were started with.

    Args:
        store: of all ranks; None for a single process, which agrees with itself.
        rank: of this process.
        world_size: ranks of the run.
    """

    def __init__(self, store: Store | None = None, rank: int = 0, world_size: int = 1) -> None:
        self._store = store if world_size > 1 else None
        self._rank, self._world_size, self._turn = rank, world_size, 0

    def require(self, facts: Facts) -> None:
        """Compare a table with rank 0's. All ranks call it, as often as each other.

        Rank 0 waits until the others have agreed; where one has not, its error ends all ranks.

        Raises:
            ConfigError: on a rank whose table is not rank 0's; it names the keys and both values.
            LaunchError: a rank does not come.
        """
        if self._store is None:
            return
        self._turn += 1
        key = f"agreement/{self._turn}"
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
            reason = next(iter(str(error).splitlines()), "")
            raise LaunchError(
                f"rank {self._rank} waits for {awaited} to say what they were started with: "
                f"{reason} Look for what holds them up, or raise mesh.setup_timeout"
            ) from error
        raise ConfigError(_differences(facts, theirs, self._rank))

    def is_first(self, what: str) -> bool:
        """Whether no other rank has asked the same before."""
        return self._store is None or self._store.add(f"first/{what}", 1) == 1

    def close(self) -> None:
        """Let go of the store; ranks that come later agree."""
        self._store = None


def _differences(mine: Facts, theirs: Facts, rank: int) -> str:
    keys = [k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k)]
    said = [
        f"{key} is {_shown(mine.get(key))} on rank {rank} and {_shown(theirs.get(key))} on rank 0"
        for key in keys[:_SHOWN]
    ]
    more = [f"and {len(keys) - _SHOWN} more"] if len(keys) > _SHOWN else []
    return (
        f"the ranks were started differently: {'; '.join([*said, *more])}. Start all ranks with "
        "the same words, files and packages."
    )


def _shown(value: str | None) -> str:
    if value is None:
        return "not there"
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def in_words(value: Any) -> str:
    """A value of a job in words that are the same in every process: no address is in them."""
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
    """The keys of a job, each with the dots that lead to it, and their values in words."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = in_words(value)
    return found
