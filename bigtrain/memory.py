"""Measuring memory: every tensor storage over a window of steps, and the process's own peak.

The tracker sees each storage when an operation makes it and when its last reference goes, on
real and on fake tensors alike; what it cannot see (scratch space inside a kernel, the
allocator's rounding) is what the process peak and the CUDA allocator are read for.
"""

from __future__ import annotations

import os
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from bigtrain.timeline import Breakdown, Course, Kind, Peak, Phase, Span, Timeline


@dataclass(slots=True)
class _Record:
    nbytes: int
    birth: int
    death: int | None = None
    kind: Kind | None = None


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the life of every storage that operations make while the mode is entered.

    Storages are counted once, whatever views they have. The mode may be entered and left many
    times; storages that die in between are noticed.

    Args:
        fake: count fake tensors, and only those.
        device_type: count what is on such devices only; None counts everything.
    """

    def __init__(self, *, fake: bool = False, device_type: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._device_type = device_type
        self._watching = ExitStack()
        self.clock = 0
        self.times = array("d", [time.perf_counter()])
        """When each tick of the clock was, in seconds."""
        self.live_bytes = 0
        self.peak_bytes = 0
        """The highest `live_bytes` so far, per rank."""
        self._records: list[_Record] = []
        self._live: dict[int, tuple[_Record, weakref.ref[Any]]] = {}
        self._phases: list[tuple[int, Phase]] = [(0, "build")]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and note the storages of what it returns."""
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            # A DTensor and its like have no memory of their own: let them take the operation
            # apart, and see the plain tensors that it is then done with.
            return NotImplemented
        if func is torch.ops.prim.device.default:  # asked more often than all else together
            return args[0].fake_device if self._fake else func(*args)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # DTensor works out shapes on fake tensors in the midst of a real run.
            if isinstance(leaf, Tensor) and isinstance(leaf, FakeTensor) == self._fake:
                self._note(leaf)
        return result

    def __enter__(self) -> StorageTracker:
        self._watching.enter_context(_resizes_told(self._resized))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._watching.close()

    def lives(self, storage: int) -> bool:
        """Whether a storage, by its `_cdata`, is alive."""
        return storage in self._live

    def enter_phase(self, phase: Phase) -> None:
        """Say what is being done from now on."""
        if self._phases[-1][1] != phase:
            self._tick()
            self._phases.append((self.clock, phase))

    def own(self, tensors: Iterable[Tensor | None], kind: Kind) -> None:
        """Say what kind the storages of these tensors are, known to the tracker or not."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for part in _parts(tensor):
                    self._note(part).kind = kind

    def _note(self, tensor: Tensor) -> _Record:
        if self._device_type not in (None, tensor.device.type) or tensor.is_meta:
            return _Record(0, self.clock)  # the host's part of a run on a GPU; a mere shape
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, quantised, functorch wrappers
            return _Record(0, self.clock)
        key: int = storage._cdata
        known = self._live.get(key)
        if known is not None:
            record = known[0]
            if record.nbytes == storage.nbytes():
                return record
            self._bury(key)  # resized by an operation: another life begins
        return self._enter(storage, None)

    def _enter(self, storage: torch.UntypedStorage, kind: Kind | None) -> _Record:
        key: int = storage._cdata
        nbytes = storage.nbytes()
        self._tick()
        record = _Record(nbytes, self.clock, kind=kind)
        self._records.append(record)
        self._live[key] = (record, weakref.ref(storage, lambda _: self._bury(key)))
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return record

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Sharded parameters come and go so: their storage stays, its size becomes zero."""
        known = self._live.get(storage._cdata)
        if known is not None:
            self._bury(storage._cdata)
            self._enter(storage, known[0].kind)

    def _bury(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry is not None:
            self._tick()
            entry[0].death = self.clock
            self.live_bytes -= entry[0].nbytes

    def _tick(self) -> None:
        self.clock += 1
        self.times.append(time.perf_counter())

    def timeline(self) -> Timeline:
        """Everything recorded so far, each storage with its kind.

        What nobody owns is an activation where it outlives the forward pass that made it, a
        buffer where it outlives the whole step (communication buckets, caches), and
        temporary otherwise.
        """
        end = self.clock + 1
        forward_ends, step_ends = self._boundaries()
        spans = []
        for record in self._records:
            death = record.death if record.death is not None else end
            kind = record.kind or _infer(record.birth, death, forward_ends, step_ends, end)
            spans.append(Span(record.nbytes, kind, record.birth, death))
        return Timeline(tuple(spans), tuple(self._phases))

    def _boundaries(self) -> tuple[list[tuple[int, int]], list[int]]:
        forwards, step_ends = [], []
        ends = [start for start, _ in self._phases[1:]] + [self.clock + 1]
        for (start, phase), stop in zip(self._phases, ends, strict=True):
            if phase == "forward":
                forwards.append((start, stop))
            if phase in ("step", "build"):
                step_ends.append(stop)
        return forwards, step_ends

    def close(self) -> None:
        """Stop noticing deaths; what is recorded stays."""
        self._live.clear()


@contextmanager
def _resizes_told(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `tell` after each resize of a storage from Python, which no dispatch mode sees."""
    plain = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        result = plain(storage, size)
        tell(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


def _infer(
    birth: int, death: int, forwards: list[tuple[int, int]], step_ends: list[int], end: int
) -> Kind:
    closes = next((stop for stop in step_ends if stop > birth), None)
    if closes is not None and (death > closes or death >= end):
        return "buffers"
    for start, stop in forwards:
        if start <= birth < stop:
            return "activations" if death >= stop else "temporary"
    return "temporary"


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's data on this rank (a DTensor's local shard)."""
    local = getattr(tensor, "_local_tensor", None)
    return [local] if isinstance(local, Tensor) else [tensor]


class ProcessPeak:
    """The process's highest resident memory above what it had at the start (Linux; VmHWM)."""

    def __init__(self) -> None:
        # Forget the peak of the imports; where that is not allowed, it stays in.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.base_bytes = status_bytes("VmRSS")

    def bytes(self) -> int | None:
        """Peak above the base in bytes, or None where the system does not tell."""
        peak = status_bytes("VmHWM")
        if peak is None or self.base_bytes is None:
            return None
        return max(0, peak - self.base_bytes)


def status_bytes(field: str) -> int | None:
    """A size from this process's /proc/self/status, in bytes; None where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


@dataclass(frozen=True)
class Measured:
    """What one rank measured over the run so far. All bytes."""

    peak: Peak | None
    """None where tracking was off and the device counts nothing itself."""
    process_peak_bytes: int | None
    reserved_bytes: int | None = None
    """CUDA only: the most that the caching allocator took from the device."""
    capacity_bytes: int | None = None
    alloc_retries: int | None = None
    process_base_bytes: int | None = None
    """Resident memory before the model was built, above which the process's peak is counted."""
    course: Course | None = None
    """The last tracked step, from its beginning to its end."""


class Meter:
    """One rank's memory over a run: tracked for the first steps, then only the cheap counters.

    Args:
        device: where the tensors live.
        track_steps: steps during which every storage is tracked; 0 tracks nothing.
    """

    def __init__(self, device: torch.device, track_steps: int = 3) -> None:
        self.device = device
        self.process = ProcessPeak()
        self._steps_left = track_steps
        self._tracker: StorageTracker | None = None
        if track_steps > 0:
            self._tracker = StorageTracker(device_type=device.type)
        self._tracked: Peak | None = None
        self._course: Course | None = None
        self.current: Phase = "build"
        """The phase that the run is in."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def tracking(self) -> bool:
        """Whether storages are being tracked now."""
        return self._tracker is not None

    def phase(self, phase: Phase) -> None:
        """Say what is being done from now on; outside the window it is only remembered."""
        self.current = phase
        if self._tracker is not None:
            self._tracker.enter_phase(phase)

    def own(self, tensors: Iterable[Tensor | None], kind: Kind) -> None:
        """Say what kind these tensors are; nothing happens outside the window."""
        if self._tracker is not None:
            self._tracker.own(tensors, kind)

    def window(self) -> AbstractContextManager[object]:
        """Track what happens inside, while the window is open."""
        return self._tracker if self._tracker is not None else nullcontext()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step; the last of the window closes it."""
        began = self._tracker.clock if self._tracker is not None else 0
        with self.window():
            yield
        if self._tracker is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                recorded = self._tracker.timeline()
                self._tracked = recorded.peak()
                self._course = recorded.course(began, self._tracker.times)
                self._tracker.close()
                self._tracker = None

    def peak_bytes(self) -> int | None:
        """The peak so far in bytes: the allocator's on CUDA, the tracked one on CPU."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        if self._tracker is not None:
            return self._tracker.peak_bytes
        return self._tracked.bytes if self._tracked else None

    def measured(self) -> Measured:
        """Everything measured so far."""
        peak = self._tracker.timeline().peak() if self._tracker is not None else self._tracked
        process, base = self.process.bytes(), self.process.base_bytes
        if self.device.type != "cuda":
            return Measured(peak, process, process_base_bytes=base, course=self._course)
        stats = torch.cuda.memory_stats(self.device)
        allocated = int(stats.get("allocated_bytes.all.peak", 0))
        return Measured(
            peak=_fill(peak or Peak("forward", Breakdown()), allocated),
            process_peak_bytes=process,
            reserved_bytes=int(stats.get("reserved_bytes.all.peak", 0)),
            capacity_bytes=int(torch.cuda.get_device_properties(self.device).total_memory),
            alloc_retries=int(stats.get("num_alloc_retries", 0)),
            process_base_bytes=base,
            course=self._course,
        )


def _fill(peak: Peak, allocated: int) -> Peak:
    """Let the parts sum to what the allocator counted: kernels' scratch space is temporary."""
    parts = peak.breakdown
    temporary = parts.temporary + allocated - parts.total
    if temporary >= 0:
        return replace(peak, breakdown=replace(parts, temporary=temporary))
    activations = max(0, parts.activations + temporary)
    return replace(peak, breakdown=replace(parts, temporary=0, activations=activations))


def capacity_bytes(device: torch.device) -> int | None:
    """What the device has: a GPU's memory, or the host's for the CPU. None where unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return pages * size
