"""JSON files in the user's cache folder: figures of this machine that later runs use again.

They are in $XDG_CACHE_HOME/bigtrain (if it is not set: ~/.cache/bigtrain). Each file holds one
object; its keys name the hardware and versions that an entry belongs to, so that machines which
share a home folder share the files.

A cache never makes a run fail: a file that cannot be read is left alone, one that is damaged is
reported once and replaced, and one that cannot be written costs the next process the measurement.
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
"""Seconds that a process waits to add an entry. After that it leaves its entry out."""


def cache_folder() -> Path:
    """The folder of bigtrain's caches; it need not exist."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # the XDG specification: a relative path is to be ignored
        folder = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(folder) / "bigtrain"


@dataclass(frozen=True)
class Cache:
    """One file of the cache folder.

    Processes that change it wait for each other at a lock file. On a file system without locks
    the last writer wins; the file is replaced as a whole, so that no reader sees half of one.
    """

    name: str
    """The file's name without `.json`."""
    indent: int | None = 1
    """The indentation of the JSON text. None writes one line, for files that nobody reads."""

    @property
    def path(self) -> Path:
        """The file, which need not exist."""
        return cache_folder() / f"{self.name}.json"

    def read(self) -> dict[str, Any]:
        """The entries by key; empty if there is no file, or none that can be read."""
        try:
            return read_cache(self.path)
        except UnreadableError:
            return {}

    @contextlib.contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Hold the lock of the file.

        Args:
            timeout: the seconds to wait for another process.

        Raises:
            OSError: the lock file cannot be made, or another process holds it for too long.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(self.path.with_suffix(".lock"), timeout):
            yield

    def change(self, edit: Callable[[dict[str, Any]], None]) -> None:
        """Read the entries, edit them, and replace the file. The caller holds the lock.

        A file that the system does not let this process read is not replaced.
        """
        with contextlib.suppress(OSError, UnreadableError):
            entries = read_cache(self.path)
            edit(entries)
            write_cache(self.path, entries, self.indent)

    def update(self, edit: Callable[[dict[str, Any]], None]) -> None:
        """Do `change` under the lock; nothing if the lock is not free in `LOCK_TIMEOUT_S`."""
        with contextlib.suppress(OSError), self.locked(LOCK_TIMEOUT_S):
            self.change(edit)


def device_fingerprint(kind: str) -> dict[str, Any]:
    """The hardware and the version of torch that figures of a device belong to, as JSON values.

    The number of GPUs and of threads is not in it: one rank's tensors are the same for any.

    Args:
        kind: 'cuda', 'xpu' or 'cpu'.
    """
    names = [cpu_name()] if kind == "cpu" else sorted(set(device_names()))
    return {"device": kind, "names": names, "torch": str(torch.__version__)}


@contextlib.contextmanager
def lock_file(path: Path, timeout: float) -> Iterator[None]:
    """Hold a lock on a file, which the system releases when the process ends, however it ends.

    A file system without locks is treated as one on which every lock is free.

    Args:
        path: the lock file, which is made.
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
