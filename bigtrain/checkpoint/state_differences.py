"""Differences between two checkpoints, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bigtrain.checkpoint.layout import PIECE_BYTES
from bigtrain.checkpoint.read import Checkpoint, FileTensor
from bigtrain.tensors.shards import Extent


@dataclass(frozen=True)
class StateDifference:
    """The difference of one tensor that both checkpoints have."""

    name: str
    """`model.NAME` or `optimizer.NAME.KEY`."""
    absolute: float
    """Largest absolute difference; infinite if a value is NaN in only one checkpoint."""
    relative: float
    """`absolute`, divided by the largest magnitude of the tensor in either checkpoint."""
    elements: int
    """Number of elements that differ."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """Shapes in both. If they differ, values are not compared and the differences are infinite."""
    dtypes: tuple[torch.dtype, torch.dtype]

    @property
    def equal(self) -> bool:
        """Whether both tensors have the same values and the same dtype."""
        return not self.elements and self.dtypes[0] == self.dtypes[1]


def compare_states(first: Checkpoint, second: Checkpoint) -> Iterator[StateDifference]:
    """Yield the difference of each tensor that both checkpoints have, in the order of `first`.

    Tensors are read in pieces, so that little memory is needed.
    """
    for name, tensor in first.tensors.items():
        if name in second.tensors:
            yield _difference(name, tensor, second.tensors[name])


def _difference(name: str, first: FileTensor, second: FileTensor) -> StateDifference:
    shapes, dtypes = (first.shape, second.shape), (first.dtype, second.dtype)
    elements = math.prod(first.shape)
    if first.shape != second.shape:
        return StateDifference(name, math.inf, math.inf, elements, shapes, dtypes)
    differing, largest, magnitude = 0, 0.0, 0.0
    length = PIECE_BYTES // 8
    for start in range(0, elements, length):
        extent = Extent(start, min(length, elements - start))
        a, b = _comparable(first.read([extent]), second.read([extent]))
        apart = (a != b) & ~(a.isnan() & b.isnan())
        # fp64 may round two different integers to one number.
        least = 1.0 if a.dtype == torch.int64 else 0.0
        a, b = (values if values.is_complex() else values.double() for values in (a, b))
        differing += int(apart.sum())
        if bool(apart.any()):
            # Equal infinities are no difference; NaN in only one of the two is one.
            gaps = (a - b).abs().nan_to_num(math.inf, math.inf).clamp(min=least)
            largest = max(largest, float(torch.where(apart, gaps, 0.0).max()))
        sizes = torch.stack([a.abs(), b.abs()]).nan_to_num(0.0, 0.0)
        magnitude = max(magnitude, float(sizes.max()))
    relative = largest / magnitude if magnitude else math.inf if largest else 0.0
    return StateDifference(name, largest, relative, differing, shapes, dtypes)


def _comparable(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors in one dtype that has all values of their dtypes.

    Integers stay integers: int64 has numbers that fp64 rounds.
    """
    tensors = first, second
    if any(tensor.is_complex() for tensor in tensors):
        dtype = torch.complex128
    elif any(tensor.is_floating_point() for tensor in tensors):
        dtype = torch.float64
    else:
        dtype = torch.int64
    return first.to(dtype), second.to(dtype)
