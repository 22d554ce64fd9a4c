"""Measure memory: every tensor storage over a window of steps, and the peak of the process.

The tracker sees each storage when an operation makes it and when its last reference is dropped. It
does not see scratch space inside a kernel or the allocator's rounding. The peaks of the process and
of the accelerator's allocator include both.
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
    """Measures how far the process's peak resident memory exceeds that at construction.

    The figures are VmHWM and VmRSS of /proc/self/status, so it works on Linux only.
    """

    def __init__(self) -> None:
        # Tensors that reuse free memory of earlier work would not raise the resident memory.
        gc.collect()
        release_free_memory()
        # Reset VmHWM, which includes the peak of the imports, if the system allows it.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.base_bytes = proc_status_bytes("VmRSS")

    def bytes(self) -> int | None:
        """Return the peak in addition to `base_bytes`, in bytes; None if it is unknown."""
        peak = proc_status_bytes("VmHWM")
        if peak is None or self.base_bytes is None:
            return None
        return max(0, peak - self.base_bytes)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one accelerator, as the allocator of this process reports it, in bytes."""

    device: str
    peak_bytes: int
    """The peak of the bytes that tensors requested, less the bytes from before the run."""
    allocated_bytes: int
    """The peak of the allocator's blocks."""
    reserved_bytes: int
    """The peak of the memory that the allocator reserved."""
    capacity_bytes: int
    """The size of the device's memory."""


@dataclass(frozen=True)
class MemoryMeasurement:
    """The memory that one rank measured over the run so far, in bytes.

    The fields `allocated_bytes` to `alloc_retries` are sums over the rank's accelerators, and None
    on a CPU.
    """

    peak: Peak | None
    """The peak of tensors; None if tracking was off and the device has no counter. Like a forecast
    it covers all devices of the process. With several accelerators it is the sum of their peaks,
    which may occur at different moments, so the sum is an upper bound."""
    process_peak_bytes: int | None
    """The peak of the process's resident memory, less `process_base_bytes`; None if unknown."""
    allocated_bytes: int | None = None
    """The peak of the allocator's blocks. `peak` counts requested bytes, as forecasts do; blocks
    are rounded up and include the workspaces of kernels."""
    reserved_bytes: int | None = None
    """The peak of the memory that the caching allocator reserved."""
    capacity_bytes: int | None = None
    """The size of the accelerators' memory."""
    alloc_retries: int | None = None
    """The number of times that the allocator freed its cache and tried again."""
    process_base_bytes: int | None = None
    """The resident memory before the model was built; None if unknown."""
    devices: tuple[DeviceMemory, ...] = ()
    """The memory of each accelerator if the process uses several; otherwise empty."""
    curve: MemoryCurve | None = None
    """Memory over the last step to be tracked; None until this step has ended."""
    state: StatePeaks = StatePeaks()
    """The peaks of saves and of the resume."""


_MOMENT_S, _MOMENTS = 2e-4, 100
"""The seconds of one wait for gloo's thread after a tracked exchange, and the most such waits."""


class MemoryMeter:
    """Measures one rank's memory over a run.

    Every storage is tracked during the first steps. Afterwards only counters of the process and of
    the allocator are read, which costs little.

    Args:
        device: the device of the tensors; see `add_devices` for a rank with several.
        track_steps: the number of steps during which every storage is tracked; 0 tracks nothing.
        cap: the job's limit. The meter makes the tracker enforce it on a CPU while storages are
            tracked, and the kernel afterwards.
    """

    def __init__(
        self,
        device: torch.device,
        track_steps: int = 3,
        cap: MemoryCap | None = None,
    ) -> None:
        self.device = device
        self.recorder = FlightRecorder()
        """Records steps, phases and peaks as well; a run replaces it by its own recorder."""
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
        self._saved_during_steps = False
        self._base_bytes: dict[torch.device, int] = {}
        """The bytes of tensors before the run, by accelerator."""
        self.add_devices([device])

    def add_devices(self, devices: Iterable[torch.device]) -> None:
        """Measure further accelerators; ignore CPUs and accelerators that are measured already.

        The allocator's peaks of each added accelerator are reset.
        """
        for device in devices:
            if is_accelerator(device) and device not in self._base_bytes:
                start_kernels(device)
                self._base_bytes[device] = reset_peaks(device)

    @property
    def tracking(self) -> bool:
        """Whether storages are still being tracked."""
        return self._tracker is not None

    def phase(self, phase: Phase) -> None:
        """Begin a phase of the step."""
        self.current = phase
        self.recorder.enter(phase)
        if self._tracker is not None:
            self._tracker.enter_phase(phase)

    def label(self, tensors: Iterable[Tensor | None], kind: MemoryKind) -> None:
        """Set the kind of memory of these tensors; do nothing if storages are not tracked."""
        if self._tracker is not None:
            self._tracker.label(tensors, kind)

    def label_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Set the kind of memory of parameters: "parameters" if trained, otherwise "frozen"."""
        if self._tracker is not None:
            for parameter in parameters:
                kind: MemoryKind = "parameters" if parameter.requires_grad else "frozen"
                self._tracker.label([parameter], kind)

    def window(self) -> AbstractContextManager[object]:
        """Return a context in which storages are tracked; it does nothing after the last step."""
        return self._tracker if self._tracker is not None else nullcontext()

    @contextmanager
    def step(self, number: int = 0) -> Iterator[None]:
        """A context for one optimizer step; the last of the tracked steps ends the tracking.

        Args:
            number: the number of the step, from 1.
        """
        start_tick = self._tracker.clock if self._tracker is not None else 0
        self.recorder.begin_step(number)
        self._note_saving_thread()
        with self.window():
            yield
        self.recorder.end_step()
        self._note_saving_thread()
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
        """Bytes of the tensors alive between steps; None if unknown.

        After the last tracked step they are the bytes that were alive at its end.
        """
        return (self._tracker.live_bytes if self._tracker is not None else self._resident) or None

    @contextmanager
    def resuming(self) -> Iterator[None]:
        """A context that measures the peak memory while a checkpoint is loaded."""
        added = AddedBytes()
        with added.counting():
            yield
        peak = self._state_peak(self._resident_bytes, added)
        self._state = replace(self._state, resume=peak)

    @contextmanager
    def saving(self) -> Iterator[AddedBytes]:
        """A context that measures the peak memory of a save.

        A thread that continues the save enters `counting` of the returned object itself.

        Bytes that a thread holds while steps run are added to the peak of a step. The two may
        occur at different moments, so the sum is an upper bound.
        """
        self._end_saving()
        self._saving, self._saved_during_steps = AddedBytes(), False
        with self._saving.counting():
            yield self._saving
        self._note_save(self._resident_bytes, self._saving)
        self._saving.restart()

    def _note_saving_thread(self) -> None:
        """Note whether a thread saves while this step runs."""
        self._saved_during_steps |= self._saving is not None and self._saving.active > 0

    def _end_saving(self) -> None:
        """Include in the peak of saves the bytes that a thread held after the last `saving`."""
        if self._saving is not None:
            base = self._resident_bytes
            if self._saved_during_steps and base is not None:
                base = self.peak_bytes()
            self._note_save(base, self._saving)

    def _note_save(self, base: int | None, added: AddedBytes) -> None:
        peak = self._state_peak(base, added)
        if peak is not None:
            self._state = replace(self._state, save=peak.or_higher(self._state.save))

    def _state_peak(self, base: int | None, added: AddedBytes) -> StatePeak | None:
        """Return the peak from resident and added bytes; None if the resident bytes are unknown."""
        if base is None:
            return None
        host = added.peak_bytes("cpu") if is_accelerator(self.device) else 0
        return StatePeak(base + added.peak_bytes(self.device.type), host)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """A context for an exchange; its end waits until gloo has released the exchange's storages.

        gloo's thread needs Python's GIL to release a tracked storage. Without the wait it releases
        the storage up to milliseconds later, and the measured peak varies from run to run. The wait
        ends after `_MOMENTS` times `_MOMENT_S` seconds at the latest.
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
        """A context for an exchange of views; its end waits until gloo has released the views.

        Without the wait, memory that the caller frees right after the exchange may stay alive; see
        `exchange`.

        Args:
            *exchanged: tensors that share storages with the exchanged views.
        """
        if self._tracker is None or self.device.type != "cpu":
            yield
            return
        storages = [tensor.untyped_storage() for tensor in exchanged]
        before = [_holders(storage) for storage in storages]
        yield
        for _ in range(_MOMENTS):
            if all(_holders(untyped) <= n for untyped, n in zip(storages, before, strict=True)):
                break
            time.sleep(_MOMENT_S)

    def peak_bytes(self) -> int | None:
        """Return the peak so far in bytes.

        On accelerators it is the peak of the bytes that tensors requested from the allocator, less
        the bytes from before the run. On a CPU it is the tracker's peak. The recorder gets the
        result as well. See `MemoryMeasurement.peak`.
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
        """Return all that was measured so far."""
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
                peak_bytes=device_peak.requested - self._base_bytes[device],
                allocated_bytes=device_peak.allocated,
                reserved_bytes=device_peak.reserved,
                capacity_bytes=capacity_bytes(device),
            )
            for device, device_peak in peaks.items()
        )
        return MemoryMeasurement(
            peak=_fill(peak or Peak("forward", Breakdown()), sum(d.peak_bytes for d in each)),
            process_peak_bytes=process,
            allocated_bytes=sum(d.allocated_bytes for d in each),
            reserved_bytes=sum(d.reserved_bytes for d in each),
            capacity_bytes=sum(d.capacity_bytes for d in each),
            alloc_retries=sum(device_peak.retries for device_peak in peaks.values()),
            process_base_bytes=base,
            devices=each if len(each) > 1 else (),
            curve=self._course,
            state=self._state,
        )


def _holders(storage: torch.UntypedStorage) -> int:
    """Return the number of references to a storage from tensors in Python and C++."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def _fill(peak: Peak, requested: int) -> Peak:
    """Change `temporary`, then `activations`, so that the parts sum to the requested bytes.

    Kernels' scratch space, which is not tracked, thereby counts as temporary.
    """
    breakdown = peak.breakdown
    temporary = breakdown.temporary + requested - breakdown.total
    if temporary >= 0:
        return replace(peak, breakdown=replace(breakdown, temporary=temporary))
    activations = max(0, breakdown.activations + temporary)
    return replace(peak, breakdown=replace(breakdown, temporary=0, activations=activations))
