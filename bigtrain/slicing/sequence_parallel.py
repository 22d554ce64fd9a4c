"""Sequence parallelism: between linear layers each rank has a shard of the sequence.

Where partial products would be summed on all ranks (all-reduce), each rank receives its sequence
shard of the sum (reduce-scatter); norms, residuals and dropout act on shards. The input of the next
linear layer is gathered, and gathered again in the backward pass, so that only the shard is saved:
see `column_parallel`.

Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models
(arXiv 2205.05198), section 4.2: `summed_and_scattered` is g-bar, `gathered_with_partial_grad` g.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bigtrain.slicing.exchange import SliceGroup, summed, summed_and_scattered
from bigtrain.slicing.sliced_tensor import SlicedTensor
from bigtrain.slicing.slices import Slices


def sequence_slices(whole: Tensor, group: SliceGroup, dim: int | None = None) -> Slices | None:
    """Return how a tensor is sharded along the sequence, or None if it stays whole.

    A tensor stays whole if the group does not shard sequences, if the tensor has fewer than three
    dims, if its sequence dim is its last dim, or if the sequence is shorter than the number of
    ranks.

    Args:
        whole: (batch, sequence, width), or with more dims.
        group: the ranks.
        dim: the sequence dim; None for the group's `sequence_dim`.
    """
    chosen = group.sequence_dim if dim is None else dim
    if group.sequence_dim is None or chosen is None or whole.dim() < 3:
        return None
    chosen %= whole.dim()
    length = whole.shape[chosen]
    if chosen == whole.dim() - 1 or length < group.size:
        return None
    return Slices.even(chosen, length)


def sum_partials(
    partial: Tensor, group: SliceGroup, dim: int | None = None, rows: tuple[int, ...] = ()
) -> Any:
    """Return the sum of partial tensors, whole or sharded as `sequence_slices` returns.

    Args:
        partial: (batch, sequence, width), or with more dims; or a matrix.
        group: the ranks.
        dim: see `sequence_slices`.
        rows: the lengths of the dims from which the first dim of a matrix was flattened; empty if
            they are not known.
    """
    if rows and group.sequence_dim is not None:
        return sum_partials(partial.view(*rows, -1), group, dim).flatten(0, len(rows) - 1)
    slices = sequence_slices(partial, group, dim)
    if slices is None:
        return summed(partial, group)
    return SlicedTensor.of(summed_and_scattered(partial, slices, group), slices, group)
