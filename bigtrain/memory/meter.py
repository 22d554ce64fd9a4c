"""Measuring memory: every tensor storage over a window of steps, and the process's own peak.

The tracker sees each storage when an operation makes it and when its last reference goes, on
real and on fake tensors alike; what it cannot see (scratch space inside a kernel, the
allocator's rounding) is what the process peak and the CUDA allocator are read for.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bigtrain.devices import (
    allocator_peaks,
    capacity_bytes,
    is_accelerator,
    reset_peaks,
    start_kernels,
)
from bigtrain.memory.added_bytes import AddedBytes, StatePeak, StatePeaks
from bigtrain.memory.allocator import release_free_memory
from bigtrain.memory.cap import MemoryCap
from bigtrain.memory.host_memory import proc_status_bytes
from bigtrain.memory.timeline import Breakdown, MemoryCurve, MemoryKind, Peak, Phase
from bigtrain.memory.tracker import StorageTracker
from bigtrain.recorder.ring import FlightRecorder


class ProcessPeak:
    """The process's highest resident memory above what it had at the start (Linux; VmHWM)."""

    def __init__(self) -> None:
        # Tensors would lie in what forecasts have left free, and not be seen.
        gc.collect()
        release_free_memory()
        # Forget the peak of the imports; where that is not allowed, it stays in.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.base_bytes = proc_status_bytes("VmRSS")

    def bytes(self) -> int | None:
        """Peak above the base in bytes, or None where the system does not tell."""
        peak = proc_status_bytes("VmHWM")
        if peak is None or self.base_bytes is None:
            return None
        return max(0, peak - self.base_bytes)


@dataclass(frozen=True)
class DeviceMemory:
    """What the allocator of one device of a process counted. All bytes."""

    device: str
    peak_bytes: int
    """Requested by tensors."""
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int


@dataclass(frozen=True)
class MemoryMeasurement:
    """What one rank measured over the run so far. All bytes."""

    peak: Peak | None
    """None where tracking was off and the device counts nothing itself. Of all devices of the
    process together, as forecasts are: on several accelerators the sum of their peaks, which need
    not be at one moment, so that what all held at once is at most that."""
    process_peak_bytes: int | None
    allocated_bytes: int | None = None
    """On an accelerator: the most in the allocator's blocks. `peak` is of what tensors requested,
    as forecasts are; blocks are rounded up, and kernels have workspaces of their own."""
    reserved_bytes: int | None = None
    """On an accelerator: the most that the caching allocator took from the device."""
    capacity_bytes: int | None = None
    alloc_retries: int | None = None
    process_base_bytes: int | None = None
    """Resident memory before the model was built, above which the process's peak is counted."""
    devices: tuple[DeviceMemory, ...] = ()
    """Each accelerator, where the process has its stages on several."""
    curve: MemoryCurve | None = None
    """The last tracked step, from its beginning to its end."""
    state: StatePeaks = StatePeaks()
    """The highest moment of the saves, and of the resume."""


_MOMENT_S, _MOMENTS = 2e-4, 100
"""How long, and how often, a tracked exchange waits for gloo's thread."""


class MemoryMeter:
    """One rank's memory over a run: tracked for the first steps, then only the cheap counters.

    Args:
        device: where the tensors live; see `add_devices`.
        track_steps: steps during which every storage is tracked; 0 tracks nothing.
        cap: what keeps the job's limit; on a CPU it is on the tensors while they are tracked.
    """

    def __init__(
        self,
        device: torch.device,
        track_steps: int = 3,
        cap: MemoryCap | None = None,
    ) -> None:
        self.device = device
        self.recorder = FlightRecorder()
        """Is told of steps, phases and peaks, too; a run's own takes its place."""
        self.process = ProcessPeak()
        self._steps_left = track_steps
        self._cap = cap
        self._tracker: StorageTracker | None = None
        if track_steps > 0:
            limit = cap.tensor_limit if cap is not None else None
            self._tracker = StorageTracker(device_type=device.type, limit_bytes=limit)
        elif cap is not None:
            cap.limit_process(0)
        self._tracked: Peak | None = None
        self._course: MemoryCurve | None = None
        self.current: Phase = "build"
        """The phase that the run is in."""
        self._resident = 0
        self._state = StatePeaks()
        self._saving: AddedBytes | None = None
        self._beside_steps = False
        self._base_bytes: dict[torch.device, int] = {}
        """What each accelerator's tensors were before the run."""
        self.add_devices([device])

    def add_devices(self, devices: Iterable[torch.device]) -> None:
        """Measure these accelerators, too, from now on: the run lays parts of the model there."""
        for device in devices:
            if is_accelerator(device) and device not in self._base_bytes:
                start_kernels(device)
                self._base_bytes[device] = reset_peaks(device)

    @property
    def tracking(self) -> bool:
        """Whether storages are being tracked now."""
        return self._tracker is not None

    def phase(self, phase: Phase) -> None:
        """Say what is being done from now on; outside the window it is only remembered."""
        self.current = phase
        self.recorder.enter(phase)
        if self._tracker is not None:
            self._tracker.enter_phase(phase)

    def label(self, tensors: Iterable[Tensor | None], kind: MemoryKind) -> None:
        """Say what kind these tensors are; nothing happens outside the window."""
        if self._tracker is not None:
            self._tracker.label(tensors, kind)

    def window(self) -> AbstractContextManager[object]:
        """Track what happens inside, while the window is open."""
        return self._tracker if self._tracker is not None else nullcontext()

    @contextmanager
    def step(self, number: int = 0) -> Iterator[None]:
        """One optimizer step, counted from 1; the last of the window closes it."""
        start_tick = self._tracker.clock if self._tracker is not None else 0
        self.recorder.begin_step(number)
        self._note_beside()
        with self.window():
            yield
        self.recorder.end_step()
        self._note_beside()
        if self._tracker is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                timeline = self._tracker.timeline()
                self._tracked, self._resident = timeline.peak(), self._tracker.live_bytes
                self._course = timeline.curve(start_tick, self._tracker.times)
                if self._cap is not None:
                    self._cap.limit_process(self._tracker.live_bytes)
                self._tracker.close()
                self._tracker = None

    @property
    def _resident_bytes(self) -> int | None:
        """What stays from step to step, as the last one that was tracked left it."""
        return (self._tracker.live_bytes if self._tracker is not None else self._resident) or None

    @contextmanager
    def resuming(self) -> Iterator[None]:
        """Around taking over a checkpoint: its highest moment is measured."""
        added = AddedBytes()
        with added.counting():
            yield
        peak = self._state_peak(self._resident_bytes, added)
        self._state = replace(self._state, resume=peak)

    @contextmanager
    def saving(self) -> Iterator[AddedBytes]:
        """Around a save: its highest moment is measured; what goes on in a thread counts itself.

        What a thread holds while steps run is added to the highest moment of a step: the two need
        not be at once, so that what was held at once is at most that.
        """
        self._end_saving()
        self._saving, self._beside_steps = AddedBytes(), False
        with self._saving.counting():
            yield self._saving
        self._note_save(self._resident_bytes, self._saving)
        self._saving.restart()

    def _note_beside(self) -> None:
        """Whether a thread saves while this step runs."""
        self._beside_steps |= self._saving is not None and self._saving.active > 0

    def _end_saving(self) -> None:
        """Take account of what a thread has held since the last save began."""
        if self._saving is not None:
            base = self._resident_bytes
            if self._beside_steps and base is not None:
                base = self.peak_bytes()
            self._note_save(base, self._saving)

    def _note_save(self, base: int | None, added: AddedBytes) -> None:
        peak = self._state_peak(base, added)
        if peak is not None:
            self._state = replace(self._state, save=peak.or_higher(self._state.save))

    def _state_peak(self, base: int | None, added: AddedBytes) -> StatePeak | None:
        """What was there and what was added; None where nobody knows what was there."""
        if base is None:
            return None
        host = added.peak_bytes("cpu") if is_accelerator(self.device) else 0
        return StatePeak(base + added.peak_bytes(self.device.type), host)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around an exchange whose own storages all go with it: wait until gloo's thread agrees.

        Of a storage that is tracked, that thread lets go only when Python lets it: in one run at
        once, in the next one milliseconds later, when other things are there as well.
        """
        tracker = self._tracker
        before = tracker.live_bytes if tracker is not None else 0
        yield
        if tracker is not None and self.device.type == "cpu":
            for _ in range(_MOMENTS):
                if tracker.live_bytes <= before:
                    break
                time.sleep(_MOMENT_S)

    @contextmanager
    def exchanging(self, *exchanged: Tensor) -> Iterator[None]:
        """Around an exchange of views of tensors that stay: wait until gloo's thread drops them.

        See `exchange`: it would keep memory that is given up right after the exchange.
        """
        if self._tracker is None or self.device.type != "cpu":
            yield
            return
        storages = [tensor.untyped_storage() for tensor in exchanged]
        before = [_holders(storage) for storage in storages]
        yield
        for _ in range(_MOMENTS):
            if all(_holders(one) <= n for one, n in zip(storages, before, strict=True)):
                break
            time.sleep(_MOMENT_S)

    def peak_bytes(self) -> int | None:
        """The peak so far in bytes: requested of accelerators, the tracked one on a CPU.

        See `MemoryMeasurement.peak`.
        """
        peak = self._tracked.bytes if self._tracked else None
        if self._base_bytes:
            bases = self._base_bytes.items()
            peak = sum(allocator_peaks(d).requested - base for d, base in bases)
        elif self._tracker is not None:
            peak = self._tracker.peak_bytes
        self.recorder.peak_bytes = peak
        return peak

    def measured(self) -> MemoryMeasurement:
        """Everything measured so far."""
        peak = self._tracker.timeline().peak() if self._tracker is not None else self._tracked
        process, base = self.process.bytes(), self.process.base_bytes
        self._end_saving()
        if not self._base_bytes:
            also = {"process_base_bytes": base, "curve": self._course, "state": self._state}
            return MemoryMeasurement(peak, process, **also)  # type: ignore[arg-type]
        peaks = {device: allocator_peaks(device) for device in self._base_bytes}
        each = tuple(
            DeviceMemory(
                device=str(device),
                peak_bytes=found.requested - self._base_bytes[device],
                allocated_bytes=found.allocated,
                reserved_bytes=found.reserved,
                capacity_bytes=capacity_bytes(device),
            )
            for device, found in peaks.items()
        )
        return MemoryMeasurement(
            peak=_fill(peak or Peak("forward", Breakdown()), sum(d.peak_bytes for d in each)),
            process_peak_bytes=process,
            allocated_bytes=sum(d.allocated_bytes for d in each),
            reserved_bytes=sum(d.reserved_bytes for d in each),
            capacity_bytes=sum(d.capacity_bytes for d in each),
            alloc_retries=sum(found.retries for found in peaks.values()),
            process_base_bytes=base,
            devices=each if len(each) > 1 else (),
            curve=self._course,
            state=self._state,
        )


def _holders(storage: torch.UntypedStorage) -> int:
    """How many tensors, of Python's or not, hold a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def _fill(peak: Peak, requested: int) -> Peak:
    """Let the parts sum to what was requested: kernels' scratch space is temporary."""
    breakdown = peak.breakdown
    temporary = breakdown.temporary + requested - breakdown.total
    if temporary >= 0:
        return replace(peak, breakdown=replace(breakdown, temporary=temporary))
    activations = max(0, breakdown.activations + temporary)
    return replace(peak, breakdown=replace(breakdown, temporary=0, activations=activations))
