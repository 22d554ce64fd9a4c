"""Folders on disks, their free space, and files without a name."""

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
"""File systems whose files are memory."""


@dataclass(frozen=True)
class SpaceRequest:
    """The bytes that one rank wants to store in a place, and those that it finds free there."""

    node: str
    where: str
    """The file system's number, or `memory`: ranks with the same one share the free space."""
    wanted: int
    free: int


@dataclass(frozen=True)
class SpaceShortage:
    """A place with less free space than the ranks want to store there. Bytes."""

    node: str
    ranks: int
    wanted: int
    """The sum over all these ranks."""
    free: int


def find_shortage(needs: Iterable[SpaceRequest]) -> SpaceShortage | None:
    """The first place where the ranks want more space than is free, or None."""
    requests_of: dict[tuple[str, str], list[SpaceRequest]] = {}
    for need in needs:
        requests_of.setdefault((need.node, need.where), []).append(need)
    for (node, _), ranks in requests_of.items():
        needed, free = sum(need.wanted for need in ranks), min(need.free for need in ranks)
        if needed > free:
            return SpaceShortage(node, len(ranks), needed, free)
    return None


def anonymous_file(folder: str) -> IO[bytes]:
    """Open a file that never has a name: nothing is left behind, however the process ends.

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
    """Why files cannot be made in a folder, with the fix; None if they can."""
    path = Path(folder)
    if not path.exists():
        return f"does not exist. Run `mkdir -p {folder}`, or name another folder"
    if not path.is_dir():
        return "is not a folder. Name a folder"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"is not writable. Run `chmod u+wx {folder}`, or name another folder"
    return None


def scratch_folder() -> str:
    """The system's folder for temporary files, preferably one on a disk."""
    folder = tempfile.gettempdir()
    lasting = "/var/tmp"  # noqa: S108 - a file there is opened without a name
    if file_system(folder) in MEMORY_FILE_SYSTEMS and folder_problem(lasting) is None:
        return lasting
    return folder


def file_system(folder: str, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The type of a folder's file system (ext4, tmpfs, ...); None if unknown."""
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
        if inside and len(point) >= length:  # of two at one mount point the later one is visible
            file_system_type, length = right.split()[0], len(point)
    return file_system_type


def free_disk_bytes(folder: str) -> int:
    """The free bytes of a folder's file system, for this user."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize
