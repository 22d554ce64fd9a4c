"""Check folders and their free space, and open files without a name."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bigtrain.errors import ConfigError

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
"""Types of file systems that store their files in memory."""


@dataclass(frozen=True)
class SpaceRequest:
    """The bytes that one rank wants to store on a file system or in memory, and the free bytes."""

    node: str
    where: str
    """The file system's device number, or `memory`. Ranks of a node with the same value share the
    free space."""
    wanted: int
    """The bytes that the rank wants to store."""
    free: int
    """The bytes that the rank finds free."""


@dataclass(frozen=True)
class SpaceShortage:
    """A node's file system or memory with less free space than its ranks want to store there."""

    node: str
    ranks: int
    """The number of ranks that share the free space."""
    wanted: int
    """The bytes that all these ranks want to store together."""
    free: int
    """The free bytes."""


def find_shortage(needs: Iterable[SpaceRequest]) -> SpaceShortage | None:
    """Return the first file system or memory with too little free space for its ranks, or None."""
    requests_of: dict[tuple[str, str], list[SpaceRequest]] = {}
    for need in needs:
        requests_of.setdefault((need.node, need.where), []).append(need)
    for (node, _), ranks in requests_of.items():
        needed, free = sum(need.wanted for need in ranks), min(need.free for need in ranks)
        if needed > free:
            return SpaceShortage(node, len(ranks), needed, free)
    return None


def anonymous_file(folder: str) -> IO[bytes]:
    """Open a temporary file without a name, which vanishes however the process ends.

    Raises:
        ConfigError: no file can be made in the folder.
    """
    try:
        return tempfile.TemporaryFile(prefix="bigtrain-", dir=folder)
    except OSError as error:
        raise ConfigError(
            f"strategy.offload.path={folder}: no file can be made on {platform.node()}: {error}. "
            "Set it to a folder that exists and is writable on every node."
        ) from None


def folder_problem(folder: str) -> str | None:
    """Return why files cannot be made in a folder, with the fix; None if they can be made.

    The text is the rest of a sentence about the folder: "does not exist. Run ...".
    """
    path = Path(folder)
    if not path.exists():
        return f"does not exist. Run `mkdir -p {folder}`, or name another folder"
    if not path.is_dir():
        return "is not a folder. Name a folder"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"is not writable. Run `chmod u+wx {folder}`, or name another folder"
    return None


def scratch_folder() -> str:
    """Return the system's folder for temporary files, or /var/tmp if that folder is in memory."""
    folder = tempfile.gettempdir()
    lasting = "/var/tmp"  # noqa: S108 - a file there is opened without a name
    if file_system(folder) in MEMORY_FILE_SYSTEMS and folder_problem(lasting) is None:
        return lasting
    return folder


def file_system(folder: str, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of a folder's file system (ext4, tmpfs, ...); None if it is unknown.

    Args:
        folder: the folder; it need not exist.
        mounts: the list of mounts to read.
    """
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    real = os.path.realpath(folder)
    file_system_type, length = None, -1
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # The later of two file systems at one mount point hides the earlier.
        if inside and len(point) >= length:
            file_system_type, length = right.split()[0], len(point)
    return file_system_type


def free_disk_bytes(folder: str) -> int:
    """Return the bytes that this user can still store on a folder's file system."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize
