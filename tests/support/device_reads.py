"""Count how often the host would wait for an accelerator, on a machine that has none.

Parameters, buffers and the batch are marked as device tensors, and so is the result of every
operation on a marked tensor. If the host reads a value of a marked tensor (as a number, a list, a
shape that depends on values, or a copy), it would have to wait until the accelerator's queue is
empty.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
}
TO_HOST = {Tensor.tolist, Tensor.numpy, Tensor.cpu}


class DeviceReads:
    """Within a `with` block, `places` collects the innermost line of bigtrain of each read."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.places: list[str] = []
        self._known: dict[int, StorageWeakRef] = {}
        self._modes = (_Operations(self), _Functions(self))
        for tensor in tensors:
            self.mark(tensor)

    def mark(self, tensor: Tensor) -> None:
        """Mark a tensor as a device tensor; results computed from it are marked too."""
        storage = _storage(tensor)
        # The weak reference keeps the address from being reused by another storage.
        self._known[storage._cdata] = StorageWeakRef(storage)

    def knows(self, tensors: Iterable[Any]) -> bool:
        return any(isinstance(t, Tensor) and _storage(t)._cdata in self._known for t in tensors)

    def note(self, kind: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/tests/" not in f.filename]
        inner = [f for f in frames if "/torch/" not in f.filename] or frames
        file = "/".join(inner[-1].filename.split("/")[-3:])
        self.places.append(f"{kind} at {file}:{inner[-1].lineno} {inner[-1].name}")

    def __enter__(self) -> DeviceReads:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


def _storage(tensor: Tensor) -> Any:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


class _Operations(TorchDispatchMode):
    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = self._reads.knows(tree_leaves((args, kwargs)))
        if mine and (func._schema.name in WAITING or _chooses(func, args)):
            self._reads.note(func._schema.name.removeprefix("aten::"))
        result = func(*args, **(kwargs or {}))
        if mine:
            written = (args, kwargs) if func._schema.is_mutable else ()
            for leaf in tree_leaves((result, written)):
                if isinstance(leaf, Tensor):
                    self._reads.mark(leaf)
        return result


def _chooses(func: Any, args: Any) -> bool:
    """Whether a mask selects elements: their number depends on values, so the host must wait."""
    name = func._schema.name.removeprefix("aten::").rstrip("_")
    return name in ("index", "index_put") and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


class _Functions(TorchFunctionMode):
    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TO_HOST and self._reads.knows(args[:1]):
            self._reads.note(func.__name__)
        return func(*args, **(kwargs or {}))
