"""Atomic replacement of files, and caches that are rebuilt when they are damaged.

A file is written as a draft in the target's folder and then renamed. The writing process locks its
draft. The system releases the lock when the process ends, for whatever reason. So the next writer
in the folder recognizes abandoned drafts, and removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from bigtrain.errors import UnreadableError
from bigtrain.files.parse import read_json_object

_MARK = ".draft-"
_OWN = re.compile(r"\..+\.draft-[a-z0-9_]{8}")
_UNLOCKED = re.compile(
    r"\.text-[0-9a-f]{24}\.bin\.[a-z0-9_]{8}|(rates|blocks|residuals)-[a-z0-9_]{8}"
)
"""The names of drafts that versions up to 1.0 write, without a lock."""
_OLD_S = 86400
"""The seconds after which a draft without a lock counts as abandoned."""
_OTHER_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SAID: set[str] = set()
"""The paths of damaged caches that this process has reported."""


@contextlib.contextmanager
def replacing_file(target: Path) -> Iterator[BinaryIO]:
    """Open a draft for writing that replaces a file when the `with` block ends without an error.

    Abandoned drafts in the same folder are removed first.

    Args:
        target: the file to replace. Its folder is made if it is missing.

    Raises:
        OSError: the file cannot be written. The draft is removed, and `target` is unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    remove_left_drafts(target.parent)
    descriptor, draft = _locked_draft(target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()  # a full disk raises here, before the old file is replaced
            os.replace(draft, target)  # while the draft is locked, so that nobody removes it
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _locked_draft(target: Path) -> tuple[int, str]:
    while True:
        descriptor, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}{_MARK}")
        with contextlib.suppress(OSError):  # the file system may have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_same(descriptor, draft):
            return descriptor, draft
        # Before the draft was locked, another process has taken it for abandoned and removed it.
        os.close(descriptor)


def remove_left_drafts(folder: Path) -> None:
    """Remove the drafts of ended processes from a folder; errors are ignored."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if _OWN.fullmatch(entry.name) or _UNLOCKED.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_left(entry)


def _remove_left(entry: os.DirEntry[str]) -> None:
    if not entry.is_file(follow_symlinks=False):
        return
    if not _OWN.fullmatch(entry.name) and entry.stat().st_mtime > time.time() - _OLD_S:
        return
    descriptor = os.open(entry.path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: another process writes
        if _is_same(descriptor, entry.path):
            os.unlink(entry.path)
    finally:
        os.close(descriptor)


def _is_same(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def read_cache(path: Path) -> dict[str, Any]:
    """Return the entries of a cache file; an empty dict if the file is missing or damaged.

    Rank 0 reports a damaged file on standard error, once per process. The next `write_cache`
    replaces the file.

    Args:
        path: the path of a file with a JSON object.

    Raises:
        UnreadableError: the file exists, but the system refuses to read it. The caller must not
            replace it.
    """
    try:
        return read_json_object(path)
    except UnreadableError as error:
        if error.missing:
            return {}
        if error.system:
            raise
        say_damaged(path, error.reason)
        return {}


def say_damaged(path: Path, reason: str) -> None:
    """Report a damaged cache on standard error, once per process and on rank 0 only.

    Args:
        path: the path of the cache.
        reason: the reason why the cache cannot be read.
    """
    others = any(os.environ.get(name, "0") != "0" for name in _OTHER_RANKS)
    if not others and str(path) not in _SAID:
        _SAID.add(str(path))
        sys.stderr.write(
            f"bigtrain: {path} is damaged ({reason}): its entries are ignored and made anew\n"
        )


def write_cache(path: Path, values: Mapping[str, Any], indent: int | None = None) -> None:
    """Replace the entries of a cache file.

    Args:
        path: the path of the file.
        values: the entries, as JSON values.
        indent: see `json.dumps`.

    Raises:
        OSError: the file cannot be written. It still has its old entries.
    """
    text = json.dumps(values, indent=indent)
    with replacing_file(path) as file:
        file.write(text.encode())
