"""Where there is a disk, how much of it is free, and files on it that have no name."""

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
    """What one rank wants to put somewhere, and what it finds free there. Bytes."""

    node: str
    where: str
    """The file system's number, or `memory`: ranks with the same share what is free."""
    wanted: int
    free: int


@dataclass(frozen=True)
class SpaceShortage:
    """A place that cannot take what the ranks want to put there. Bytes."""

    node: str
    ranks: int
    wanted: int
    """By all these ranks together."""
    free: int


def find_shortage(needs: Iterable[SpaceRequest]) -> SpaceShortage | None:
    """The first place where the ranks together want more than is free, or None."""
    requests_of: dict[tuple[str, str], list[SpaceRequest]] = {}
    for need in needs:
        requests_of.setdefault((need.node, need.where), []).append(need)
    for (node, _), ranks in requests_of.items():
        needed, free = sum(need.wanted for need in ranks), min(need.free for need in ranks)
        if needed > free:
            return SpaceShortage(node, len(ranks), needed, free)
    return None


def anonymous_file(folder: str) -> IO[bytes]:
    """A file without a name from the first moment on: nothing is left behind, however this ends.

    Raises:
        ConfigError: the folder takes no file.
    """
    try:
        return tempfile.TemporaryFile(prefix="bigtrain-", dir=folder)
    except OSError as error:
        raise ConfigError(
            f"strategy.offload.path={folder} takes no file on {platform.node()}: {error}. "
            "Set it to a folder that is there and writable on every node."
        ) from None


def folder_problem(folder: str) -> str | None:
    """What is wrong with a folder that files are to be made in, with the fix; None if nothing."""
    path = Path(folder)
    if not path.exists():
        return f"does not exist. Run `mkdir -p {folder}`, or name another folder"
    if not path.is_dir():
        return "is not a folder. Name the folder that the files are to be made in"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"is not writable. Run `chmod u+wx {folder}`, or name another folder"
    return None


def scratch_folder() -> str:
    """The system's folder for temporary files; one that is on a disk, where there is one."""
    folder = tempfile.gettempdir()
    lasting = "/var/tmp"  # noqa: S108 - a file there is opened without a name
    if file_system(folder) in MEMORY_FILE_SYSTEMS and folder_problem(lasting) is None:
        return lasting
    return folder


def file_system(folder: str, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The kind of file system that a folder is on (ext4, tmpfs, ...); None where unknown."""
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
        if inside and len(point) >= length:  # of two on the same point, the later one is seen
            file_system_type, length = right.split()[0], len(point)
    return file_system_type


def free_disk_bytes(folder: str) -> int:
    """Bytes that this user may still write to the file system of a folder."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize
