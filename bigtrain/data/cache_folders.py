"""Folders for large caches of data, and a check of the free space on their disks."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bigtrain.files.drafts import remove_left_drafts
from bigtrain.units import format_bytes

_LEFT_FREE = 1 << 30
"""Bytes of a disk that must stay free; on a small disk, a twentieth of its size is enough."""


def cache_folders() -> Iterator[Path]:
    """Yield the folders in which a cache may be written, the preferred folder first.

    The first is in the user's cache folder ($XDG_CACHE_HOME, or ~/.cache), the second in the
    temporary folder. The folders need not exist.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")
    if os.path.isabs(chosen):  # the XDG specification says to ignore a relative path
        yield Path(chosen) / "bigtrain"
    elif os.path.isabs(home):
        yield Path(home) / ".cache" / "bigtrain"
    temporary = Path(tempfile.gettempdir()) / f"bigtrain-{os.getuid()}"
    if not temporary.exists() or temporary.stat().st_uid == os.getuid():
        yield temporary  # any user can create it: a folder of another user is not trusted


def check_room(folder: Path, size: int) -> None:
    """Check that the disk of a folder has room for a cache.

    The folder is created if it does not exist. Drafts of processes that have ended are removed.

    Args:
        folder: the folder of the cache.
        size: bytes of the cache.

    Raises:
        OSError: the cache would leave too little space free, or the free space is unknown.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    remove_left_drafts(folder)
    stats = os.statvfs(folder)
    free, whole = (blocks * stats.f_frsize for blocks in (stats.f_bavail, stats.f_blocks))
    left = min(_LEFT_FREE, whole // 20)
    if size + left > free:
        kept = f", of which {format_bytes(left)} must stay free" if size <= free else ""
        raise OSError(errno.ENOSPC, f"{format_bytes(free)} are free{kept}")
