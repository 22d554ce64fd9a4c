"""Memory of the host and of this process, and OOM kills, read from Linux's /proc and cgroups."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bigtrain.units import format_bytes


def proc_status_bytes(field: str) -> int | None:
    """Return a size from /proc/self/status, in bytes; None if the file or the field is missing."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of host memory that this process may still take; None if unknown.

    The result is the minimum of two numbers: the memory that the kernel calls available, and the
    memory that the limits of the process's control groups leave. Containers and job schedulers set
    these limits; both versions of control groups are read.

    Args:
        root: the folder that contains `proc` and `sys`.
    """
    limits = [_available(root), *_cgroup_free_bytes(root)]
    known_limits = [room for room in limits if room is not None]
    return min(known_limits) if known_limits else None


def host_memory_line(root: Path = Path("/")) -> str:
    """Return a line that describes the host's memory: its size and its free bytes."""
    total = next((n for n in map(_total, _lines(root / "proc/meminfo")) if n), None)
    free = free_host_bytes(root)
    if total is None or free is None:
        return "host memory unknown"
    return f"host memory {format_bytes(total)}, {format_bytes(free)} free now"


def _total(line: str) -> int | None:
    return int(line.split()[1]) * 1024 if line.startswith("MemTotal:") else None


def oom_kill_count(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for lack of memory since it was booted.

    The result is 0 if the number is unknown.
    """
    for line in _lines(root / "proc/vmstat"):
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def _available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_free_bytes(root: Path) -> Iterable[int | None]:
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
        # The limits of a group's parents apply to it as well. In a container the group itself may
        # be mounted at the base.
        group = base / path.lstrip("/")
        while group != base:
            yield _group_free_bytes(group, *names)
            group = group.parent
        yield _group_free_bytes(base, *names)


def _group_free_bytes(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    limit_bytes, used = _number(group / limit), _number(group / usage)
    if limit_bytes is None or used is None:
        return None
    cached = 0
    for line in _lines(group / "memory.stat"):
        if line.startswith(
            f"{reclaimable} "
        ):  # page cache that the kernel drops when memory is needed
            cached = int(line.split()[1])
    return max(0, limit_bytes - max(0, used - cached))


def _number(file: Path) -> int | None:
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
