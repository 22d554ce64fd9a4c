"""Sequence parallelism: between the products of a layer each rank has a stretch of the sequence.

Where a product's parts would be added up on all ranks (all-reduce), each rank gets its stretch of
the sum (reduce-scatter): norms, residuals and dropout act on stretches. The next product's input
is gathered, in the backward pass once more, so that a stretch is all that is kept of it.

Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models
(arXiv 2205.05198), section 4.2: `summed_in_parts` is g-bar, `gathered_for_parts` g.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bigtrain.slicing.exchange import (
    SliceGroup,
    all_gather,
    gathered_for_parts,
    summed,
    summed_in_parts,
)
from bigtrain.slicing.sliced_tensor import SlicedTensor, held
from bigtrain.slicing.slices import Slices


def total(
    partial: Tensor, group: SliceGroup, dim: int | None = None, rows: tuple[int, ...] = ()
) -> Any:
    """The sum of partial tensors: whole, or sliced on the sequence where the group wants that.

    A tensor of less than three dims, or with fewer places than ranks, is whole.

    Args:
        partial: (batch, sequence, width), or with more dims.
        group: the ranks.
        dim: the sequence, where it is not the group's `sequence_dim`.
        rows: what the first dim of a matrix is made of, where that is known.
    """
    if rows and group.sequence_dim is not None:
        return total(partial.view(*rows, -1), group, dim).flatten(0, len(rows) - 1)
    chosen = group.sequence_dim if dim is None else dim
    if group.sequence_dim is None or chosen is None or partial.dim() < 3:
        return summed(partial, group)
    chosen = chosen % partial.dim()
    length = partial.shape[chosen]
    if chosen == partial.dim() - 1 or length < group.size:
        return summed(partial, group)
    slices = Slices.even(chosen, length)
    return SlicedTensor.of(summed_in_parts(partial, slices, group), slices, group)


def column_linear(x: SlicedTensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer's columns of this rank, of an input sliced on another dim than its last.

    Linear layers that follow each other on one input gather it once, in each direction.

    Args:
        x: (..., width).
        weight: (own columns, width), plain.
        bias: (own columns,), plain.

    Returns:
        (..., own columns), in the type of the autocast where there is one.
    """
    dtype = _autocast_dtype(x)
    if dtype is not None:
        weight, bias = weight.to(dtype), bias if bias is None else bias.to(dtype)
    found = _gathered_input(x, dtype)
    if weight.requires_grad and torch.is_grad_enabled():
        found.again.uses += 1
    result: Tensor = _ColumnLinear.apply(found.whole, found.own, weight, bias, found.again)
    return result


def forget_input(group: SliceGroup) -> None:
    """Let go of the input of the latest products: another one begins."""
    group.inputs.clear()


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type that products are computed in where an autocast says so."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


class _Again:
    """A gathered input once more, in the backward pass: for all products of it together."""

    def __init__(self, slices: Slices, group: SliceGroup) -> None:
        self._slices, self._group = slices, group
        self.uses = 0
        """Products whose weight wants a gradient."""
        self._left = 0
        self._whole: Tensor | None = None

    def whole(self, own: Tensor) -> Tensor:
        """The whole of what each rank has: gathered by the first product, let go by the last."""
        if self._whole is None:
            self._whole, self._left = all_gather(own, self._slices, self._group), self.uses
        whole = self._whole
        self._left -= 1
        if self._left <= 0:
            self._whole = None
        return whole


@dataclass(eq=False)
class _Input:
    """What products of one input share."""

    of: weakref.ref[Tensor]
    """The input itself: once the model lets go of it, no other product of it will come."""
    local: weakref.ref[Tensor]
    """What this rank holds of it."""
    state: tuple[Any, ...]
    """What else must be the same."""
    own: Tensor
    """The same in the type of the products, without its graph."""
    whole: Tensor
    again: _Again


def _gathered_input(x: SlicedTensor, dtype: torch.dtype | None) -> _Input:
    group, own = x.group, held(x)
    state = (own._version, x.slices, dtype, torch.is_grad_enabled())
    for known in group.inputs:
        if known.local() is own and known.state == state:
            return known  # type: ignore[no-any-return]
    forget_input(group)
    cast = own if dtype is None else own.to(dtype)
    whole = gathered_for_parts(cast, x.slices, group)
    inputs = group.inputs
    of: weakref.ref[Tensor] = weakref.ref(x, lambda _: inputs.clear())
    again = _Again(x.slices, group)
    inputs.append(_Input(of, weakref.ref(own), state, cast.detach(), whole, again))
    return inputs[0]  # type: ignore[no-any-return]


class _ColumnLinear(torch.autograd.Function):
    """A linear layer that keeps this rank's stretch of its input, and gathers it again."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, again: _Again
    ) -> Tensor:
        to_input, _, to_weight, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(own if to_weight else None, weight if to_input else None)
        ctx.again = again
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own, weight = ctx.saved_tensors
        to_input = to_weight = to_bias = None
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            to_input = (rows @ weight).unflatten(0, gradient.shape[:-1])
        if ctx.needs_input_grad[2]:
            to_weight = rows.t() @ ctx.again.whole(own).flatten(0, -2)
        if ctx.needs_input_grad[3]:
            to_bias = rows.sum(0)
        return to_input, None, to_weight, to_bias, None
