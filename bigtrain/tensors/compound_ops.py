"""Functions of many operations that run on fake tensors as a single operation.

A run on fake tensors spends its time in calls, not in arithmetic. A function that every layer calls
with the same shapes is measured once. Later calls make its result alone, and count the memory and
the bytes of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from bigtrain.memory.tracker import StorageTracker
from bigtrain.tensors.fake_mode import VIEWS, FakeMode
from bigtrain.tensors.op_cost import REPEAT_COUNT, bytes_touched

_LIBRARY = torch.library.Library("bigtrain", "FRAGMENT")  # type: ignore[no-untyped-call]


class CompoundCost(NamedTuple):
    """The cost of one call of a compound operation."""

    workspace: int
    """The peak bytes of the storages that it makes, without its result."""
    steps: tuple[tuple[float, int], ...]
    """For each operation in it (bytes that one call reads and writes, number of calls)."""


class CompoundOp:
    """A function of a tensor and numbers, as a single operation on fake tensors.

    Args:
        schema: the name and the signature of the operation; see `torch.library.Library.define`.
        run: the function. It multiplies no matrices, and its result is a new, contiguous tensor.
        like: (numbers) -> the shape and the dtype of the result.
    """

    def __init__(
        self,
        schema: str,
        run: Callable[..., Tensor],
        like: Callable[..., tuple[Sequence[int], torch.dtype]],
    ) -> None:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
        self.func: Any = getattr(torch.ops.bigtrain, name).default
        self._run = run
        self._costs: dict[object, CompoundCost] = {}

        def fake(tensor: Tensor, *numbers: Any) -> Tensor:
            shape, dtype = like(*numbers)
            return tensor.new_empty(shape, dtype=dtype)

        torch.library.register_fake(f"bigtrain::{name}", fake, lib=_LIBRARY)
        _COMPOUNDS[self.func] = self

    def runs_on(self, tensor: Tensor) -> bool:
        """Whether a call with this tensor can be a single operation."""
        return (
            not torch.compiler.is_compiling()
            and isinstance(tensor, FakeTensor)
            and isinstance(tensor.fake_mode, FakeMode)
        )

    def __call__(self, tensor: Tensor, *numbers: Any) -> Tensor:
        """Return the result of the function; the first such call measures its cost.

        Args:
            tensor: a tensor for which `runs_on` is true.
            numbers: the other arguments.
        """
        key = _key((tensor, *numbers))
        if key not in self._costs:
            # Not in the operation itself: there, torch no longer divides composite operations.
            with _disable_current_modes(), torch.no_grad():
                self._costs[key] = self._measured(tensor, numbers)
        result: Tensor = self.func(tensor, *numbers)
        return result

    def cost(self, args: Sequence[Any]) -> CompoundCost:
        """Return the cost of a call that was made with these arguments."""
        return self._costs[_key(args)]

    def _measured(self, like: Any, numbers: Sequence[Any]) -> CompoundCost:
        mode, tracker = FakeMode(), StorageTracker(fake=True)
        steps: list[tuple[float, int]] = []

        def note(func: Any, args: Any, kwargs: Any, result: Any) -> None:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if not made or func is torch.ops.aten.empty_strided.default:
                return
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            nbytes = 0.0 if func in VIEWS else float(bytes_touched(inputs, made))
            steps.append((nbytes, REPEAT_COUNT.get()))

        shape, stride, dtype, device = like.shape, like.stride(), like.dtype, like.fake_device
        with mode, tracker.behind(mode):
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            tracker.on_operation = note
            result = self._run(tensor, *numbers)
            left = tracker.live_bytes
        del result
        return CompoundCost(tracker.peak_bytes - left, tuple(steps))


_COMPOUNDS: dict[Any, CompoundOp] = {}


def _key(args: Sequence[Any]) -> tuple[object, ...]:
    tensor, *numbers = args
    return tensor.fake_device, tensor.shape, tensor.stride(), tensor.dtype, *numbers


def compound_cost(func: Any, args: Sequence[Any]) -> CompoundCost | None:
    """Return the cost of a compound operation; None for any other operation."""
    compound = _COMPOUNDS.get(func)
    return None if compound is None else compound.cost(args)
