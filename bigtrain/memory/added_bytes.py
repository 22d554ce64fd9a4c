"""Count the bytes of tensors that a save or a resume adds to those of the run.

`StorageTracker` follows every storage from the beginning of a run, and is closed after the first
steps. A save usually happens after that, and may run in a thread of its own. `AddedBytes` therefore
counts only the storages that the save or the resume makes, and does not slow down other threads.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class StatePeak:
    """The peak of a save or of a resume on one rank, measured or predicted, in bytes."""

    bytes: int
    """The bytes of tensors on the device, including those that existed before."""
    host_bytes: int = 0
    """The bytes that a save or a resume adds on the host of an accelerator; 0 on a CPU, where
    `bytes` includes them."""

    def or_higher(self, other: StatePeak | None) -> StatePeak:
        """Return the maximum of two peaks for each kind of bytes; this peak if `other` is None."""
        if other is None:
            return self
        return StatePeak(max(self.bytes, other.bytes), max(self.host_bytes, other.host_bytes))


@dataclass(frozen=True)
class StatePeaks:
    """The peaks of a rank's saves and resume; None if there was none or the peak is unknown."""

    save: StatePeak | None = None
    resume: StatePeak | None = None


class AddedBytes:
    """Counts the bytes of storages that operations make inside `counting`, by type of device.

    A storage that first appears as an operation's argument existed before, and is not counted.
    Storages made in one thread may be freed in another thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # counting a storage may free another in the same thread
        self._seen: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._live: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()
        self.active = 0
        """The number of threads that are inside `counting`."""

    def peak_bytes(self, device_type: str) -> int:
        """Return the most bytes alive at once on devices of this type since the last `restart`."""
        return self._peak[device_type]

    def restart(self) -> None:
        """Reset the peak to the counted bytes that are alive."""
        with self._lock:
            self._peak = Counter(self._live)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the storages that this thread makes in a `with` block."""
        self.active += 1
        try:
            with _Watch(self._see):
                yield
        finally:
            self.active -= 1

    def _see(self, tensor: Tensor, is_new: bool) -> None:  # noqa: FBT001 - of one caller
        if tensor.is_meta:
            return
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, quantised
            return
        key, nbytes = storage._cdata, storage.nbytes() if is_new else 0
        device_type = tensor.device.type
        with self._lock:
            if key in self._seen:
                return
            gone = weakref.ref(storage, lambda _: self._forget(key, device_type))
            self._seen[key] = nbytes, gone
            self._live[device_type] += nbytes
            self._peak[device_type] = max(self._peak[device_type], self._live[device_type])

    def _forget(self, key: int, device_type: str) -> None:
        with self._lock:
            nbytes, _ = self._seen.pop(key, (0, None))
            self._live[device_type] -= nbytes


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the tensors that operations of this thread take and return."""

    def __init__(self, see: Callable[[Tensor, bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = see

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and report its tensors."""
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the subclass repeats the operation on its plain tensors
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._report(leaf, False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._report(leaf, True)
        return result
