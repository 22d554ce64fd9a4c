"""What a stretch of work holds in tensors beside those that were there before it.

The tracker knows every storage from the run's beginning, and is closed after the first steps. A
save or a resume comes later, or earlier, and may go on in a thread: this counts only what it makes
itself, at no cost to what runs beside it.
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
    """The highest moment of a save or of a resume on one rank, measured or predicted. All bytes."""

    bytes: int
    """Of tensors on the device: those that were there before, and what it adds."""
    host_bytes: int = 0
    """Beside an accelerator: what it adds on the host. On a CPU that is in `bytes`."""

    def or_higher(self, other: StatePeak | None) -> StatePeak:
        """The higher of both, of either kind of bytes."""
        if other is None:
            return self
        return StatePeak(max(self.bytes, other.bytes), max(self.host_bytes, other.host_bytes))


@dataclass(frozen=True)
class StatePeaks:
    """Of the saves and of the resume of one rank; None where there was none, or it is not known."""

    save: StatePeak | None = None
    resume: StatePeak | None = None


class AddedBytes:
    """Bytes of the storages that operations make inside `counting`, by type of device.

    A storage that is seen first as an operation's argument was there before, and is not counted.
    What is made in one thread may go in another.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a storage may go while another is counted
        self._seen: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._live: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()
        self.active = 0
        """In how many threads it is being counted."""

    def peak_bytes(self, device_type: str) -> int:
        """The most that was held at once on devices of a type since the last `restart`."""
        return self._peak[device_type]

    def restart(self) -> None:
        """Begin anew with what is held now as the peak."""
        with self._lock:
            self._peak = Counter(self._live)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what this thread makes inside."""
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
    """Tells of the tensors that operations of this thread take and return."""

    def __init__(self, see: Callable[[Tensor, bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = see

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and tell of its tensors."""
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # see `StorageTracker`: its plain tensors come by themselves
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._tell(leaf, False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._tell(leaf, True)
        return result
