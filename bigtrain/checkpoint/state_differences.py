"""How far two checkpoints are apart, tensor by tensor."""

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
    """Of one tensor that is in both."""

    name: str
    """`model.NAME` or `optimizer.NAME.KEY`."""
    absolute: float
    """The largest; infinite where a value is a number in one of them alone."""
    relative: float
    """That, over the largest magnitude that the tensor has in either."""
    elements: int
    """How many differ."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """Where they are not equal, nothing is compared and the differences are infinite."""
    dtypes: tuple[torch.dtype, torch.dtype]

    @property
    def equal(self) -> bool:
        """Whether it has the same values in the same type."""
        return not self.elements and self.dtypes[0] == self.dtypes[1]


def compare_states(first: Checkpoint, second: Checkpoint) -> Iterator[StateDifference]:
    """The differences of all tensors that both have, in the order of the first; in pieces."""
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
            # Infinities that are equal are no difference; a NaN beside a number is one.
            gap = torch.where(apart, (a - b).abs().nan_to_num(math.inf, math.inf), 0.0)
            largest = max(largest, float(gap.max()))
        sizes = torch.stack([a.abs(), b.abs()]).nan_to_num(0.0, 0.0)
        magnitude = max(magnitude, float(sizes.max()))
    relative = largest / magnitude if magnitude else math.inf if largest else 0.0
    return StateDifference(name, largest, relative, differing, shapes, dtypes)
