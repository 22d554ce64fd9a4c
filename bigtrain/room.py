"""What is free for states that leave the device: on a file system, and in the host's memory."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bigtrain.errors import ConfigError
from bigtrain.units import format_bytes

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
"""File systems whose files are memory."""


@dataclass(frozen=True)
class Need:
    """What one rank wants to put somewhere, and what it finds free there. Bytes."""

    node: str
    where: str
    """The file system's number, or `memory`: ranks with the same share what is free."""
    wanted: int
    free: int


@dataclass(frozen=True)
class Shortage:
    """A place that cannot take what the ranks want to put there. Bytes."""

    node: str
    ranks: int
    wanted: int
    """By all these ranks together."""
    free: int


def find_shortage(needs: Iterable[Need]) -> Shortage | None:
    """The first place where the ranks together want more than is free, or None."""
    places: dict[tuple[str, str], list[Need]] = {}
    for need in needs:
        places.setdefault((need.node, need.where), []).append(need)
    for (node, _), ranks in places.items():
        wanted, free = sum(need.wanted for need in ranks), min(need.free for need in ranks)
        if wanted > free:
            return Shortage(node, len(ranks), wanted, free)
    return None


def nameless_file(folder: str) -> IO[bytes]:
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


def results_folder(wanted: str | None, name: str) -> Path:
    """Make a folder for results: the one that is wanted, or the next free `runs/NAME-NUMBER`.

    Raises:
        ConfigError: it cannot be made, or holds something.
    """
    try:
        if wanted is None:
            base = Path("runs")
            base.mkdir(exist_ok=True)
            return next_folder(base, f"{name}-")
        folder = Path(wanted)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--output {wanted} is not empty. Name another folder.")
        return folder
    except OSError as error:
        raise ConfigError(
            f"{wanted or 'runs'} cannot be written: {error}. Set --output FOLDER."
        ) from None


def folder_numbers(base: Path, prefix: str) -> list[int]:
    """The numbers of the folders PREFIX-NUMBER that there are."""
    ends = (path.name.removeprefix(prefix) for path in base.glob(f"{prefix}*"))
    return [int(end) for end in ends if end.isdigit()]


def next_folder(base: Path, prefix: str) -> Path:
    """Make the folder with the next free number."""
    number = max(folder_numbers(base, prefix), default=0) + 1
    while True:  # another run may take the number between the look and the making
        try:
            (base / f"{prefix}{number}").mkdir()
        except FileExistsError:
            number += 1
            continue
        return base / f"{prefix}{number}"


def folder_fault(folder: str) -> str | None:
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
    if file_system(folder) in IN_MEMORY and folder_fault(lasting) is None:
        return lasting
    return folder


def file_system(folder: str, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The kind of file system that a folder is on (ext4, tmpfs, ...); None where unknown."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    real = os.path.realpath(folder)
    found, length = None, -1
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= length:  # of two on the same point, the later one is seen
            found, length = right.split()[0], len(point)
    return found


def free_on_disk(folder: str) -> int:
    """Bytes that this user may still write to the file system of a folder."""
    told = os.statvfs(folder)
    return told.f_bavail * told.f_frsize


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that this process may still take; None where the system does not tell.

    The least of what the kernel calls available and what the limits of the process's control
    groups (versions 1 and 2, containers and job schedulers set them) leave.

    Args:
        root: above `proc` and `sys`.
    """
    found = [_available(root), *_cgroup_rooms(root)]
    known = [room for room in found if room is not None]
    return min(known) if known else None


def host_line(root: Path = Path("/")) -> str:
    """The host's memory in a few words: how much there is, and how much is free now."""
    whole = next((n for n in map(_total, _lines(root / "proc/meminfo")) if n), None)
    free = free_memory(root)
    if whole is None or free is None:
        return "host memory unknown"
    return f"host memory {format_bytes(whole)}, {format_bytes(free)} free now"


def _total(line: str) -> int | None:
    return int(line.split()[1]) * 1024 if line.startswith("MemTotal:") else None


def kernel_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has ended for want of memory since the system started."""
    for line in _lines(root / "proc/vmstat"):
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def _available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_rooms(root: Path) -> Iterable[int | None]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        # A group's parents limit it, too; in a container its own path may be mounted as the base.
        group = base / path.lstrip("/")
        while group != base:
            yield _group_room(group, *names)
            group = group.parent
        yield _group_room(base, *names)


def _group_room(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    most, used = _number(group / limit), _number(group / usage)
    if most is None or used is None:
        return None
    cached = 0
    for line in _lines(group / "memory.stat"):
        if line.startswith(f"{reclaimable} "):  # page cache that is dropped when memory is wanted
            cached = int(line.split()[1])
    return max(0, most - max(0, used - cached))


def _number(file: Path) -> int | None:
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
