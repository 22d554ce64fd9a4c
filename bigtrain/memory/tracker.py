"""Record the lifetime of tensor storages with a dispatch mode that sees every operation."""

from __future__ import annotations

import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from bigtrain.memory.program_buffers import buffers_announced
from bigtrain.memory.timeline import MemoryKind, Phase, Span, Timeline

_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


class TellingMode(Protocol):
    """A dispatch mode that reports each operation it runs, such as `fake_mode.FakeMode`."""

    on_operation: Callable[[Any, Any, Any, Any], None] | None
    """Called after each operation with its function, arguments, keyword arguments and result."""


@dataclass(slots=True)
class _Record:
    nbytes: int
    birth: int
    death: int | None = None
    kind: MemoryKind | None = None


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the lifetime of every storage that operations make while the mode is entered.

    A storage is counted once, however many views it has. The mode may be entered and left many
    times; storages that are freed in between are recorded as freed.

    Args:
        fake: whether to count only fake tensors; otherwise only real tensors are counted.
        device_type: the type of the devices whose storages are counted; None counts all.
        limit_bytes: the most bytes that may be alive at once, per rank; None sets no limit. The
            operation that exceeds it raises torch.OutOfMemoryError after it has run.
        inside: (operation, arguments, result) -> the bytes of workspace that the operation takes
            while it runs; None counts no workspaces.
    """

    def __init__(
        self,
        *,
        fake: bool = False,
        device_type: str | None = None,
        limit_bytes: int | None = None,
        inside: Callable[[Any, Any, Any], int] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._device_type = device_type
        self._limit_bytes = limit_bytes
        self._inside = inside
        self._watching = ExitStack()
        self.on_operation: Callable[[Any, Any, Any, Any], None] | None = None
        """See `TellingMode.on_operation`; called after the tracker has recorded the operation."""
        self.clock = 0
        """The current tick. Each change of a storage or phase is at a tick of its own."""
        self.times = array("d", [time.perf_counter()])
        """The time of each tick of the clock, in seconds."""
        self.live_bytes = 0
        """The bytes of the recorded storages that are alive, per rank."""
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
        """Run the operation and record the storages that it returns."""
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types if kind not in _PLAIN):
            # A DTensor and similar subclasses have no storage. They decompose the operation, and
            # the mode is called again with plain tensors.
            return NotImplemented
        # Return early, because torch calls this more often than all other operations together.
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if self._fake else func(*args)
        known = len(self._records)
        result = func(*args, **(kwargs or {}))
        self._seen(func, args, kwargs or {}, result)
        if self._limit_bytes is not None:
            self._check_limit(known)
        return result

    def _seen(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        if self._inside is not None:
            self._pass_through(self._inside(func, args, result))
        if self.on_operation is not None:
            self.on_operation(func, args, kwargs, result)

    def _pass_through(self, nbytes: int) -> None:
        """Count the workspace that an operation took and released."""
        if not nbytes:
            return
        self._tick()
        record = _Record(nbytes, self.clock)
        self._tick()
        record.death = self.clock
        self._records.append(record)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + nbytes)

    @contextmanager
    def behind(self, mode: TellingMode) -> Iterator[None]:
        """A context that records the operations which a mode for fake tensors reports.

        This is faster than to enter the tracker as a second mode.
        """
        before, mode.on_operation = mode.on_operation, self._seen
        try:
            with _resizes_told(self._resized), buffers_announced(self._buffer):
                yield
        finally:
            mode.on_operation = before

    def _buffer(self, buffer: Tensor) -> None:
        known = len(self._records)
        self._see(buffer)
        self._check_limit(known)

    def _see(self, tensor: Tensor) -> None:
        # DTensor computes shapes on fake tensors during a real run; they take no memory.
        if isinstance(tensor, FakeTensor) == self._fake:
            self._note(tensor)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: the mode is active while a compiled block runs, not while torch compiles it.

        torch calls this method of a dispatch mode.
        """
        return True

    def _check_limit(self, known: int) -> None:
        """Drop the storages recorded after the first `known` ones if the limit is exceeded.

        Raises:
            torch.OutOfMemoryError: the limit is exceeded.
        """
        if self._limit_bytes is None or self.live_bytes <= self._limit_bytes:
            return
        refused = {id(record): record.nbytes for record in self._records[known:]}
        self._live = {k: entry for k, entry in self._live.items() if id(entry[0]) not in refused}
        del self._records[known:]
        requested = sum(refused.values())
        self.live_bytes -= requested
        raise torch.OutOfMemoryError(f"tried to allocate {requested} bytes")

    def __enter__(self) -> StorageTracker:
        self._watching.enter_context(_resizes_told(self._resized))
        self._watching.enter_context(buffers_announced(self._buffer))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._watching.close()

    def lives(self, storage: int) -> bool:
        """Return whether the storage whose `_cdata` is `storage` is recorded and alive."""
        return storage in self._live

    def birth_of(self, tensor: Tensor) -> int:
        """Return the tick at which a tensor's storage was made.

        A storage that is not recorded yet is recorded as made now.
        """
        return self._note(tensor).birth

    def enter_phase(self, phase: Phase) -> None:
        """Begin a phase, unless it is the current one."""
        if self._phases[-1][1] != phase:
            self._tick()
            self._phases.append((self.clock, phase))

    def mark(self) -> int:
        """Make a tick at which no storage is made or freed, and return it.

        It separates the storages made before it from those made after it.
        """
        self._tick()
        return self.clock

    def label(self, tensors: Iterable[Tensor | None], kind: MemoryKind) -> None:
        """Set the kind of these tensors' storages; record storages that are not recorded yet."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for part in _parts(tensor):
                    self._note(part).kind = kind

    def _note(self, tensor: Tensor) -> _Record:
        # The property `device` of a fake tensor would call every active mode.
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if self._device_type not in (None, device.type) or device.type == "meta":
            return _Record(0, self.clock)  # tensors on the host in a run on a GPU; meta tensors
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
            self._record_death(key)  # resized by an operation: counts as a new storage
        return self._enter(storage, None)

    def _enter(self, storage: torch.UntypedStorage, kind: MemoryKind | None) -> _Record:
        key: int = storage._cdata
        nbytes = storage.nbytes()
        self._tick()
        record = _Record(nbytes, self.clock, kind=kind)
        self._records.append(record)
        self._live[key] = (record, weakref.ref(storage, lambda _: self._record_death(key)))
        self.live_bytes += nbytes
        if self._limit_bytes is None or self.live_bytes <= self._limit_bytes:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return record

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Record a resized storage as a new storage: FSDP frees parameters by a resize to zero."""
        known = self._live.get(storage._cdata)
        if known is not None:
            self._record_death(storage._cdata)
            count = len(self._records)
            self._enter(storage, known[0].kind)
            self._check_limit(count)

    def _record_death(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry is not None:
            self._tick()
            entry[0].death = self.clock
            self.live_bytes -= entry[0].nbytes

    def _tick(self) -> None:
        self.clock += 1
        self.times.append(time.perf_counter())

    def timeline(self) -> Timeline:
        """Return the timeline of all storages recorded so far, each with its kind.

        A storage without a label is an activation if it outlives the forward pass that made it, a
        buffer if it outlives the whole step (communication buckets, caches), and temporary
        otherwise.
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
        """Stop recording when storages are freed; the records remain."""
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
) -> MemoryKind:
    next_boundary = next((stop for stop in step_ends if stop > birth), None)
    if next_boundary is not None and (death > next_boundary or death >= end):
        return "buffers"
    for start, stop in forwards:
        if start <= birth < stop:
            return "activations" if death >= stop else "temporary"
    return "temporary"


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors with a tensor's data on this rank (a DTensor's local shard)."""
    local = getattr(tensor, "_local_tensor", None)
    return [local] if isinstance(local, Tensor) else [tensor]
