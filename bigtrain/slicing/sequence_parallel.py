"""Sequence parallelism: between the products of a layer each rank has a stretch of the sequence.

Where a product's parts would be added up on all ranks (all-reduce), each rank gets its stretch of
the sum (reduce-scatter): norms, residuals and dropout act on stretches. The next product's input
is gathered, in the backward pass once more, so that a stretch is all that is kept of it: `columns`.

Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models
(arXiv 2205.05198), section 4.2: `summed_in_parts` is g-bar, `gathered_for_parts` g.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bigtrain.slicing.exchange import SliceGroup, summed, summed_in_parts
from bigtrain.slicing.sliced_tensor import SlicedTensor
from bigtrain.slicing.slices import Slices


def stretches(whole: Tensor, group: SliceGroup, dim: int | None = None) -> Slices | None:
    """How a tensor of this shape lies along the sequence, where the group slices that; None: whole.

    A tensor of less than three dims, or with fewer places than ranks, is whole.

    Args:
        whole: (batch, sequence, width), or with more dims.
        group: the ranks.
        dim: the sequence, where it is not the group's `sequence_dim`.
    """
    chosen = group.sequence_dim if dim is None else dim
    if group.sequence_dim is None or chosen is None or whole.dim() < 3:
        return None
    chosen %= whole.dim()
    length = whole.shape[chosen]
    if chosen == whole.dim() - 1 or length < group.size:
        return None
    return Slices.even(chosen, length)


def total(
    partial: Tensor, group: SliceGroup, dim: int | None = None, rows: tuple[int, ...] = ()
) -> Any:
    """The sum of partial tensors: whole, or in the stretches of `stretches`.

    Args:
        partial: (batch, sequence, width), or with more dims.
        group: the ranks.
        dim: see `stretches`.
        rows: what the first dim of a matrix is made of, where that is known.
    """
    if rows and group.sequence_dim is not None:
        return total(partial.view(*rows, -1), group, dim).flatten(0, len(rows) - 1)
    slices = stretches(partial, group, dim)
    if slices is None:
        return summed(partial, group)
    return SlicedTensor.of(summed_in_parts(partial, slices, group), slices, group)
