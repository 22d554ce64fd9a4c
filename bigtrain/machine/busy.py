"""Whether others used this machine's cores during a run: its seconds say nothing of plans then."""

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
"""Of the machine's cores, from which on what others take of them is too much."""
TICK_S = 0.05
"""What a count of the kernel's ticks may be off by, beside the share."""


@dataclass(frozen=True)
class CpuUse:
    """A stretch of time of one process."""

    node: str
    elapsed: float
    """Seconds."""
    own: float
    """Seconds of the process, and of those it started and has waited for, on all cores together."""
    machine: float | None
    """The same of everything on the machine; None where it does not tell."""


class CpuClock:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._began = _now()

    def read(self) -> CpuUse:
        """Since it was made."""
        (elapsed, own, machine), (began, own_before, before) = _now(), self._began
        total = None if machine is None or before is None else machine - before
        return CpuUse(platform.node(), elapsed - began, own - own_before, total)


def others_cores(uses: Sequence[CpuUse]) -> float | None:
    """Cores that others than these processes took on the first one's node; None: nobody knows.

    Args:
        uses: of all ranks, of about the same stretch.
    """
    first = uses[0]
    if first.machine is None or first.elapsed <= 0:
        return None
    own = sum(use.own for use in uses if use.node == first.node)
    return max(0.0, first.machine - own - TICK_S) / first.elapsed


def is_busy(uses: Sequence[CpuUse]) -> bool:
    """Whether others took more than `BUSY_SHARE` of the cores of the first one's node."""
    return (others_cores(uses) or 0.0) > BUSY_SHARE * usable_cores()


def describe_others(cores: float | None) -> str:
    """What others took while something was measured; empty where that was next to nothing.

    Args:
        cores: see `others_cores`.
    """
    if (cores or 0.0) <= BUSY_SHARE * usable_cores():
        return ""
    return f"while other programs used {cores:.1f} of the {usable_cores()} cores"


def _now() -> tuple[float, float, float | None]:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time() + children.ru_utime + children.ru_stime
    return time.perf_counter(), own, _machine_seconds()


def _machine_seconds() -> float | None:
    """Seconds that the cores have worked since the machine was started (Linux)."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, *interrupts = ticks
    working = user + nice + system + sum(interrupts)
    return working / os.sysconf("SC_CLK_TCK") if working else None
