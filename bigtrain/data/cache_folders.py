"""Folders for large caches of data, and the room that they leave on a disk."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bigtrain.files.drafts import remove_left_drafts
from bigtrain.units import format_bytes

_LEFT_FREE = 1 << 30
"""Bytes that a cache leaves free on a disk, at most a twentieth of the disk."""


def cache_folders() -> Iterator[Path]:
    """Yield folders for the cache: the user's cache folder, then one in the temporary folder."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")
    if os.path.isabs(chosen):  # the XDG specification says to ignore a relative one
        yield Path(chosen) / "bigtrain"
    elif os.path.isabs(home):
        yield Path(home) / ".cache" / "bigtrain"
    temporary = Path(tempfile.gettempdir()) / f"bigtrain-{os.getuid()}"
    if not temporary.exists() or temporary.stat().st_uid == os.getuid():
        yield temporary  # anyone can create it: one of another user is not trusted


def check_room(folder: Path, size: int) -> None:
    """Refuse a folder on a disk that the cache would nearly fill.

    Raises:
        OSError: there is too little space, or the free space is unknown.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    remove_left_drafts(folder)
    stats = os.statvfs(folder)
    free, whole = (blocks * stats.f_frsize for blocks in (stats.f_bavail, stats.f_blocks))
    left = min(_LEFT_FREE, whole // 20)
    if size + left > free:
        kept = f", of which {format_bytes(left)} must stay free" if size <= free else ""
        raise OSError(errno.ENOSPC, f"{format_bytes(free)} are free{kept}")
