"""Detect whether other programs used this machine's cores during a run, and distorted its times."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigtrain.machine.rates import usable_cores

BUSY_SHARE = 0.1
"""The machine is busy if other programs use more than this share of the cores."""
TICK_S = 0.05
"""CPU seconds by which the kernel's count of ticks may be too high."""


@dataclass(frozen=True)
class CpuUse:
    """The CPU time that one process and its machine used during an interval."""

    node: str
    """The name of the machine."""
    elapsed: float
    """The length of the interval in seconds."""
    process: float
    """CPU seconds of the process and its finished child processes, summed over all cores."""
    machine: float | None
    """CPU seconds of all processes on the machine; None if the system does not report them."""


class CpuClock:
    """Measures the CPU use since the clock's construction."""

    def __init__(self) -> None:
        self._began = _now()

    def read(self) -> CpuUse:
        """Return the CPU use since the clock's construction."""
        (elapsed, process, machine), (began, process_before, before) = _now(), self._began
        total = None if machine is None or before is None else machine - before
        return CpuUse(platform.node(), elapsed - began, process - process_before, total)


def others_cores(uses: Sequence[CpuUse]) -> float | None:
    """Return how many cores other processes used on average on the node of the first rank.

    Args:
        uses: the CPU use of each rank during about the same interval, that of the first rank first.
            Processes that are not in the list count as others.

    Returns:
        The number of cores; None if the system does not report the CPU time of all processes, or if
        the interval has no length.
    """
    first = uses[0]
    if first.machine is None or first.elapsed <= 0:
        return None
    process = sum(use.process for use in uses if use.node == first.node)
    return max(0.0, first.machine - process - TICK_S) / first.elapsed


def is_busy(uses: Sequence[CpuUse]) -> bool:
    """Return whether others used more than `BUSY_SHARE` of the cores of the first rank's node.

    See `others_cores`. The node is assumed to have as many cores as this machine.
    """
    return (others_cores(uses) or 0.0) > BUSY_SHARE * usable_cores()


def describe_others(cores: float | None) -> str:
    """Return words that end a warning about a measurement; empty if the machine was not busy.

    Args:
        cores: the result of `others_cores`.
    """
    if (cores or 0.0) <= BUSY_SHARE * usable_cores():
        return ""
    return f"while other programs used {cores:.1f} of the {usable_cores()} cores"


def _now() -> tuple[float, float, float | None]:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = time.process_time() + children.ru_utime + children.ru_stime
    return time.perf_counter(), process, _machine_seconds()


def _machine_seconds() -> float | None:
    """Return the CPU seconds of all cores since the machine was booted; None if unknown."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, *interrupts = ticks
    working = user + nice + system + sum(interrupts)
    return working / os.sysconf("SC_CLK_TCK") if working else None
