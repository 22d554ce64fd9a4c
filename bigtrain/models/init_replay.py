"""Recorded operations on meta tensors, which can be replayed on the CPU.

Only the operations that a chosen tensor depends on are replayed. Storages are tracked, and not
tensors: an argument is recorded as (storage, dtype, size, stride, offset). So views need no replay,
and a Parameter is the same as the tensor from which it was made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")


class CannotDefer(BaseException):
    """Raised if a constructor does something that cannot be replayed; the message has the reason.

    It is no `Exception`, so that an `except Exception` in the constructor does not catch it.
    """


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The key of a tensor's storage, and the tensor's view of the storage (offset in elements)."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call that made or changed storages; meta tensors in its arguments are replaced by specs."""

    function: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    fresh: tuple[TensorSpec | None, ...]
    """For each output in order, its spec if its storage is new, otherwise None."""
    reads: tuple[int, ...]
    """Keys of the storages on whose contents the result depends, including storages that the call
    writes only in part."""
    overwritten: int | None
    """The key of a storage that the call overwrites completely; None without one."""
    random: bool
    default_dtype: torch.dtype

    @property
    def touches(self) -> Iterator[int]:
        """The keys of the storages that a replay of this call reads, makes or overwrites."""
        yield from self.reads
        yield from (spec.storage for spec in self.fresh if spec)
        if self.overwritten is not None:
            yield self.overwritten


@dataclass
class InitRecording:
    """The operations in order, and an index from each storage to the operations that wrote it."""

    operations: list[RecordedCall] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)
    # Storages are kept alive, because another storage could get the key of a freed one.
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def adopt(self, tensor: torch.Tensor) -> bool:
        """Record the storage of an output; return whether it is new."""
        storage = tensor.untyped_storage()
        return self.storages.setdefault(storage._cdata, storage) is storage

    def spec(self, tensor: torch.Tensor) -> TensorSpec:
        """Describe a meta tensor.

        Raises:
            CannotDefer: the tensor's storage was not recorded, or the tensor is lazily conjugated
                or negated.
        """
        key = tensor.untyped_storage()._cdata
        if key not in self.storages:
            raise CannotDefer("it uses a tensor on meta that was made elsewhere")
        if tensor.is_conj() or tensor.is_neg():
            raise CannotDefer("it uses a lazily conjugated or negated tensor")
        return TensorSpec(
            key, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def append(self, operation: RecordedCall, writes: Sequence[int]) -> None:
        """Add an operation.

        Args:
            operation: the operation.
            writes: keys of the storages that it wrote.
        """
        for storage in dict.fromkeys(writes):
            self.writers.setdefault(storage, []).append(len(self.operations))
        self.operations.append(operation)

    def closure(self, storage: int) -> list[int]:
        """Return the indices, in order, of the operations on which a storage's content depends."""
        needed: set[int] = set()
        pending = [(storage, len(self.operations))]
        while pending:
            key, before = pending.pop()
            writers = self.writers.get(key, [])
            position = bisect_left(writers, before)
            if not position or writers[position - 1] in needed:
                continue
            # The last writer is enough: a writer that keeps earlier content is also a reader.
            last = writers[position - 1]
            needed.add(last)
            pending += [(read, last) for read in self.operations[last].reads]
        return sorted(needed)

    def is_random(self, closure: Sequence[int]) -> bool:
        """Whether any of the operations with these indices draws random numbers."""
        return any(self.operations[index].random for index in closure)

    @torch.no_grad()
    def replay(
        self, storage: int, closure: Sequence[int], seed_of: Callable[[int], int]
    ) -> torch.UntypedStorage:
        """Run the operations of a closure on the CPU, and return the content of a storage.

        Memory that no operation writes contains zeros. The state of torch's default generator
        changes; the caller restores it.

        Args:
            storage: the key of the storage.
            closure: the result of `closure` for this storage.
            seed_of: returns the seed of a random operation, given its index.
        """
        storages: dict[int, torch.UntypedStorage] = {}
        last_use = {key: index for index in closure for key in self.operations[index].touches}
        for index in closure:
            if self.operations[index].random:
                torch.default_generator.manual_seed(seed_of(index))
            self._run(self.operations[index], storages)
            for key in [k for k in storages if k != storage and last_use[k] == index]:
                del storages[key]
        return self._storage(storages, storage, blank=True)

    def _run(self, operation: RecordedCall, real: dict[int, torch.UntypedStorage]) -> None:
        def thaw(leaf: Any) -> Any:
            if not isinstance(leaf, TensorSpec):
                return leaf
            blank = leaf.storage != operation.overwritten
            return view_storage(self._storage(real, leaf.storage, blank=blank), leaf)

        args, kwargs = tree_map(thaw, (operation.args, operation.kwargs))
        with _default_dtype(operation.default_dtype):
            outputs = tree_leaves(operation.function(*args, **kwargs))
        for spec, output in zip(operation.fresh, outputs, strict=False):
            if spec is None:
                continue
            if (output.stride(), output.storage_offset()) != (spec.stride, spec.offset):
                # A CPU kernel's output may have other strides than the meta tensor, for which the
                # recorded views were made.
                laid_out = view_storage(self._storage(real, spec.storage, blank=True), spec)
                laid_out.copy_(output)
            else:
                real[spec.storage] = output.untyped_storage()

    def _storage(
        self, real: dict[int, torch.UntypedStorage], key: int, *, blank: bool
    ) -> torch.UntypedStorage:
        if key not in real:
            make = torch.zeros if blank else torch.empty
            memory = make(self.storages[key].nbytes(), dtype=torch.uint8, device=CPU)
            real[key] = memory.untyped_storage()
        return real[key]


def view_storage(storage: torch.UntypedStorage, spec: TensorSpec) -> torch.Tensor:
    """Return the tensor that a spec describes, over another storage."""
    empty = torch.empty(0, dtype=spec.dtype, device=storage.device)
    return empty.set_(storage, spec.offset, spec.size, spec.stride)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if before is dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
