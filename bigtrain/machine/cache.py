"""JSON files in the user's cache folder: figures of this machine that later runs use again.

The folder is $XDG_CACHE_HOME/bigtrain, or ~/.cache/bigtrain if the variable is not set. Each file
contains one object. The object's keys describe the hardware and the versions to which an entry
belongs, so that machines which share a home folder can share the files.

A cache never makes a run fail. A file that cannot be read is left alone. A damaged file is reported
once and replaced. If a file cannot be written, the next process has to measure again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigtrain.devices import device_names
from bigtrain.errors import UnreadableError
from bigtrain.files.drafts import read_cache, write_cache
from bigtrain.machine.rates import cpu_name

LOCK_TIMEOUT_S = 5.0
"""Seconds that a process waits for the lock to add an entry. Then it gives up."""


def cache_folder() -> Path:
    """Return the folder of bigtrain's caches, which need not exist."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # the XDG specification demands to ignore a relative path
        folder = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(folder) / "bigtrain"


@dataclass(frozen=True)
class Cache:
    """One file of the cache folder.

    Processes that change the file wait for each other at a lock file. On a file system without
    locks the last writer wins. The file is replaced as a whole, so that no reader sees half a file.
    """

    name: str
    """The file's name without `.json`."""
    indent: int | None = 1
    """The indentation of the JSON text. None writes one line, for files that only programs read."""

    @property
    def path(self) -> Path:
        """The path of the file, which need not exist."""
        return cache_folder() / f"{self.name}.json"

    def read(self) -> dict[str, Any]:
        """Return the entries by key; empty if the file is missing or cannot be read."""
        try:
            return read_cache(self.path)
        except UnreadableError:
            return {}

    @contextlib.contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """A context that holds the lock of the file.

        Args:
            timeout: the seconds to wait for another process.

        Raises:
            OSError: the lock file cannot be made, or another process holds it for too long.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(self.path.with_suffix(".lock"), timeout):
            yield

    def change(self, edit: Callable[[dict[str, Any]], None]) -> None:
        """Read the entries, edit them, and replace the file. The caller must hold the lock.

        If the file cannot be read or written, nothing happens.

        Args:
            edit: changes the entries in place.
        """
        with contextlib.suppress(OSError, UnreadableError):
            entries = read_cache(self.path)
            edit(entries)
            write_cache(self.path, entries, self.indent)

    def update(self, edit: Callable[[dict[str, Any]], None]) -> None:
        """Change the entries under the lock; see `change`.

        Do nothing if the lock is not free within `LOCK_TIMEOUT_S` seconds.
        """
        with contextlib.suppress(OSError), self.locked(LOCK_TIMEOUT_S):
            self.change(edit)


def device_fingerprint(kind: str) -> dict[str, Any]:
    """Return the hardware and the version of torch to which figures belong, as JSON values.

    The numbers of GPUs and of threads are left out, because one rank's tensors do not depend on
    them.

    Args:
        kind: the type of the device: 'cuda', 'xpu' or 'cpu'.
    """
    names = [cpu_name()] if kind == "cpu" else sorted(set(device_names()))
    return {"device": kind, "names": names, "torch": str(torch.__version__)}


@contextlib.contextmanager
def lock_file(path: Path, timeout: float) -> Iterator[None]:
    """A context that holds a lock on a file.

    The system releases the lock if the process ends, however it ends. On a file system without
    locks every lock is free.

    Args:
        path: the lock file, which is made if it is missing.
        timeout: the seconds to wait for another process.

    Raises:
        OSError: the file cannot be made, or another process holds the lock for too long.
    """
    with path.open("a") as file:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                    break  # no locks on this file system
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.02)
        yield
