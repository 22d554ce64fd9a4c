"""Differences between two checkpoints, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bigtrain.checkpoint.layout import PIECE_BYTES
from bigtrain.checkpoint.read import Checkpoint, FileTensor
from bigtrain.tensors.shards import Extent


@dataclass(frozen=True)
class StateDifference:
    """The difference of one tensor that both checkpoints have."""

    name: str
    """`model.NAME` or `optimizer.NAME.KEY`."""
    absolute: float
    """Largest absolute difference; infinite if a value is NaN in only one of them."""
    relative: float
    """`absolute`, divided by the largest magnitude of the tensor in either checkpoint."""
    elements: int
    """Number of elements that differ."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """Shapes in both. If they differ, values are not compared and differences are infinite."""
    dtypes: tuple[torch.dtype, torch.dtype]

    @property
    def equal(self) -> bool:
        """Whether both have the same values in the same type."""
        return not self.elements and self.dtypes[0] == self.dtypes[1]


def compare_states(first: Checkpoint, second: Checkpoint) -> Iterator[StateDifference]:
    """Yield the differences of the tensors that both have, in the first's order.

    Tensors are read in pieces, so that memory is bounded.
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
        a, b = (tensor.read([extent]).double() for tensor in (first, second))
        apart = (a != b) & ~(a.isnan() & b.isnan())
        differing += int(apart.sum())
        if bool(apart.any()):
            # Equal infinities are no difference; NaN in only one of the two is one.
            gap = torch.where(apart, (a - b).abs().nan_to_num(math.inf, math.inf), 0.0)
            largest = max(largest, float(gap.max()))
        sizes = torch.stack([a.abs(), b.abs()]).nan_to_num(0.0, 0.0)
        magnitude = max(magnitude, float(sizes.max()))
    relative = largest / magnitude if magnitude else math.inf if largest else 0.0
    return StateDifference(name, largest, relative, differing, shapes, dtypes)
