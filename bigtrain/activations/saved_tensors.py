"""The objects in autograd's graph that represent the tensors that a block has saved.

`OffloadedTensor` is one tensor, `SavedStorage` the storage of one or more of them, `BlockPass` one
forward pass of one block. The graph references `OffloadedTensor`, which references the other two:
all are freed with the graph.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from bigtrain.errors import BigtrainError
from bigtrain.tensors.transfer import WaitFn

PendingRelease = tuple[Any, int, Tensor | None, WaitFn | None]
"""For a storage that is not needed any more: the location of its copy, its bytes, and the data and
the wait function of a copy in flight."""


class VersionedBase:
    """The version counter of a tensor that is not a view, and a weak reference to the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        # A twin without memory: it shares the version counter even after its data are replaced.
        self.twin = tensor.detach()
        self.twin.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


class SavedStorage:
    """A storage with saved tensors: it is on the device, offloaded, or both."""

    def __init__(self, tensor: Tensor, visit: BlockPass, leftovers: deque[PendingRelease]) -> None:
        self.data: Tensor | None = _whole_storage(tensor)
        """All bytes of the storage, as uint8; None while they are not on the device."""
        self.nbytes = self.data.numel()
        self.spot: Any = None
        self.wait: WaitFn | None = None
        self._key = tensor.untyped_storage()._cdata
        self._visit = weakref.ref(visit)
        self._roots: list[tuple[VersionedBase, int]] = []
        self._leftovers = leftovers

    def __del__(self) -> None:
        """Leave the release to the training thread: this may run in any thread, at any moment."""
        if self.spot is not None or self.wait is not None:
            data = self.data if self.wait is not None else None
            self._leftovers.append((self.spot, self.nbytes, data, self.wait))

    def made_in(self, visit: BlockPass) -> bool:
        """Whether this forward pass of a block was the first to save a tensor of the storage."""
        return self._visit() is visit

    @property
    def here(self) -> Tensor:
        """The saved bytes on the device.

        Raises:
            BigtrainError: the bytes are not on the device.
        """
        if self.data is None:
            raise BigtrainError("A saved activation is not on the device. Please report this.")
        return self.data

    def note(self, tensor: Tensor) -> VersionedBase:
        """Record a saved tensor of the storage; return the base whose version shows changes."""
        base = _base(tensor)
        for root, version in self._roots:
            if root.tensor() is base and version == tensor._version:
                return root
        root = VersionedBase(base)
        self._roots.append((root, tensor._version))
        return root

    def holds(self, tensor: Tensor) -> bool:
        """Whether this tensor's storage has not changed since it was saved."""
        base = _base(tensor)
        return any(r.tensor() is base and v == tensor._version for r, v in self._roots)

    def original(self) -> Tensor | None:
        """Return the original storage as bytes, if something else has kept it alive; else None."""
        for root, version in self._roots:
            tensor = root.tensor()
            same = tensor is not None and tensor._version == version
            if tensor is not None and same and tensor.untyped_storage()._cdata == self._key:
                return _whole_storage(tensor)
        return None


class BlockPass:
    """One forward pass of one block; the object lives as long as a tensor that it has saved."""

    def __init__(self, before: weakref.ref[BlockPass] | None) -> None:
        self.before = before
        self.backward_begun = False
        """Whether the block's backward pass has begun."""
        self.saved: list[weakref.ref[SavedStorage]] = []

    def save(self, record: SavedStorage) -> None:
        """Record that this pass saves a tensor of a storage."""
        if not any(ref() is record for ref in self.saved):
            self.saved.append(weakref.ref(record))

    def records(self) -> list[SavedStorage]:
        """Return the storages that are still needed, in the order of the backward pass."""
        return list(live_referents(reversed(self.saved)))


class ResidentTensor:
    """A saved tensor that stays on the device."""

    def __init__(self, tensor: Tensor) -> None:
        # Detached, because the history references this object: a saved output would never be freed.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def check(self) -> None:
        """Refuse a tensor that was changed in place after it was saved, as autograd does.

        Raises:
            BigtrainError: the tensor was changed.
        """
        _check(self.tensor._version, self._version, self.tensor.shape, self.tensor.dtype)


class OffloadedTensor:
    """A saved tensor whose storage may be offloaded."""

    def __init__(self, tensor: Tensor, record: SavedStorage, visit: BlockPass) -> None:
        self.record, self.visit = record, visit
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._root, self._version = record.note(tensor), tensor._version

    def check(self) -> None:
        """See `ResidentTensor.check`."""
        _check(self._root.twin._version, self._version, self._shape, self._dtype)

    def of(self, data: Tensor) -> Tensor:
        """Return the saved tensor, from all bytes of its storage."""
        whole = data[: data.numel() // self._dtype.itemsize * self._dtype.itemsize]
        return whole.view(self._dtype).as_strided(self._shape, self._stride, self._offset)


def _check(version: int, saved: int, shape: torch.Size, dtype: torch.dtype) -> None:
    if version != saved:
        raise BigtrainError(
            f"A tensor {tuple(shape)} of {dtype} that the backward pass needs was changed in place "
            f"after it was saved: it is at version {version} instead of {saved}. Make a new tensor "
            "there (`x = x + y` and not `x += y`, `inplace=False`)."
        )


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _whole_storage(tensor: Tensor) -> Tensor:
    """Return all bytes of a tensor's storage, as a tensor with the same version counter."""
    numbers = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.detach().as_strided((numbers,), (1,), 0).view(torch.uint8)


def untyped_storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, or None if the tensor has none."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse, functorch's wrappers
        return None


def live_referents(references: Iterable[weakref.ref[Any]]) -> Iterator[Any]:
    """Yield the objects of weak references that are still alive."""
    return (
        referent for referent in (reference() for reference in references) if referent is not None
    )
