"""Linear layers of which each rank has some columns: their input, and its gradient on the way back.

The input is whole, or a stretch of the sequence on each rank, which is gathered. Its gradient is
partial on each rank. Where one product alone uses the input, the gradients are added up while that
of its weight is computed; where there are several (queries, keys, values), once for all of them.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Korthikanti et al. 2022 (arXiv
2205.05198), section 4.2.2.
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
    PendingExchange,
    SliceGroup,
    Uses,
    gathered_for_parts,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    to_all_and_uses,
)
from bigtrain.slicing.sliced_tensor import SlicedTensor, held, is_sliced
from bigtrain.slicing.slices import Slices


def column_linear(x: Any, weight: Tensor, bias: Tensor | None, group: SliceGroup) -> Tensor:
    """A linear layer's columns of this rank.

    Linear layers that follow each other on one input gather it once, in each direction.

    Args:
        x: (..., width), whole, or sliced on another dim than the last.
        weight: (own columns, width), plain.
        bias: (own columns,), plain.
        group: the ranks.

    Returns:
        (..., own columns), in the type of the autocast where there is one.
    """
    dtype = _autocast_dtype(x)
    if dtype is not None:
        weight, bias = weight.to(dtype), bias if bias is None else bias.to(dtype)
    found = _gathered_input(x, dtype) if is_sliced(x) else _whole_input(x, dtype, group)
    # In the backward pass a view's node says whether a gradient is wanted, and a leaf's does not.
    weight, bias = weight.view_as(weight), bias if bias is None else bias.view_as(bias)
    of_weight = weight.requires_grad and torch.is_grad_enabled()
    if isinstance(found.shared, _Again):
        found.shared.count += 1
        found.shared.of_weights += of_weight
    result: Tensor = _ColumnLinear.apply(found.whole, found.source, weight, bias, found.shared)
    return result


def forget_input(group: SliceGroup) -> None:
    """Let go of the gathered input of the latest products: another one begins."""
    group.inputs.clear()


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type that products are computed in where an autocast says so."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


class _Again(Uses):
    """The products of a gathered input, which gather it once more in the backward pass."""

    def __init__(self, slices: Slices, group: SliceGroup) -> None:
        super().__init__(group)
        self.slices = slices
        self.of_weights = 0
        """Products whose weight wants a gradient."""
        self._left = 0
        self._begun: PendingExchange | None = None
        self._whole: Tensor | None = None

    def begin(self, own: Tensor) -> None:
        """Begin to gather what each rank has, unless another product has done that."""
        if self._whole is None:
            self._begun = start_all_gather(own, self.slices, self.group)
            self._left = self.of_weights

    def whole(self) -> Tensor:
        """What was gathered; the last product lets it go."""
        whole = self._whole if self._begun is None else self._begun.wait()
        self._begun = None
        self._left -= 1
        self._whole = whole if self._left > 0 else None
        if whole is None:
            raise RuntimeError("a gathered input is asked for that was not begun")
        return whole


@dataclass(eq=False)
class _Input:
    """What products of one input share."""

    whole: Tensor
    """Its gradient is partial, and added up behind it."""
    source: Tensor
    """What this rank has of it, in the type of the products; its gradient is complete."""
    shared: Uses
    of: weakref.ref[Tensor] | None = None
    """The input itself: once the model lets go of it, no other product of it will come."""
    local: weakref.ref[Tensor] | None = None
    """What this rank holds of it, before any cast."""
    state: tuple[Any, ...] = ()
    """What else must be the same."""


def _whole_input(x: Tensor, dtype: torch.dtype | None, group: SliceGroup) -> _Input:
    source = x if dtype is None else _cast_once(x, dtype)
    whole, uses = to_all_and_uses(source, group)
    return _Input(whole, source, uses)


_CAST = "_bigtrain_cast"


def _cast_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another type: one for all products of it, as its gradient is added up once."""
    if x.grad_fn is None or x.dtype == dtype:
        return x.to(dtype)
    # No id of a node: its Python object is made anew when asked for, and ranks must not differ.
    state = (x._version, x.untyped_storage()._cdata, dtype)
    known, cast = getattr(x, _CAST, (None, None))
    if isinstance(cast, Tensor) and known == state and torch.is_grad_enabled():
        node = cast.grad_fn
        if node is not None and node.next_functions[0][0] is x.grad_fn:
            return cast
    cast = x.to(dtype)
    setattr(x, _CAST, (state, cast))
    return cast


def _gathered_input(x: SlicedTensor, dtype: torch.dtype | None) -> _Input:
    group, own = x.group, held(x)
    # Of what is made in inference mode nobody knows whether it was changed: it is gathered anew.
    version = None if own.is_inference() else own._version
    state = (version, x.slices, dtype, torch.is_grad_enabled())
    known: _Input
    for known in group.inputs:
        is_same = known.local is not None and known.local() is own and known.state == state
        if is_same and version is not None:
            return known
    forget_input(group)
    source = own if dtype is None else own.to(dtype)
    whole, inputs = gathered_for_parts(source, x.slices, group), group.inputs
    of: weakref.ref[Tensor] = weakref.ref(x, lambda _: inputs.clear())
    shared = _Again(x.slices, group)
    found = _Input(whole, source, shared, of, weakref.ref(own), state)
    inputs.append(found)
    return found


class _ColumnLinear(torch.autograd.Function):
    """A linear layer that keeps what this rank has of its input.

    Of the gradients of `whole` and of `source` it gives the first where others use the input, too,
    and the second, added up already, where it is alone.
    """

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, source: Tensor, weight: Tensor, bias: Tensor | None, shared: Uses
    ) -> Tensor:
        to_input, _, to_weight, _, _ = ctx.needs_input_grad
        # Of a whole input the alias: `source` may be given other data by whoever made it.
        kept = source if isinstance(shared, _Again) else whole
        ctx.save_for_backward(kept if to_weight else None, weight if to_input else None)
        ctx.shared = shared
        return F.linear(whole, weight, bias).detach()  # no view: it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        source, weight = ctx.saved_tensors
        to_input, _, needs_weight, needs_bias, _ = _wanted(ctx)
        shared: Uses = ctx.shared
        again = shared if isinstance(shared, _Again) else None
        rows = gradient.flatten(0, -2)
        to_whole = to_source = to_weight = to_bias = begun = None
        if needs_weight and again is not None:
            again.begin(source)
        if to_input:
            to_whole = (rows @ weight).view(*gradient.shape[:-1], -1)
        if to_whole is not None and shared.count == 1:
            begun, to_whole = _added_up(to_whole, shared), None
        if needs_weight:
            columns = source if again is None else again.whole()
            to_weight = rows.t() @ columns.flatten(0, -2)
            del columns
        if needs_bias:
            to_bias = rows.sum(0)
        if begun is not None:
            to_source = begun.wait()
        return to_whole, to_source, to_weight, to_bias, None


def _wanted(ctx: Any) -> list[bool]:
    """The gradients that this backward pass is for: a pipeline's may be for inputs alone."""
    nodes = [node for node, _ in ctx.next_functions]  # of what is no tensor there are none
    nodes += [None] * (len(ctx.needs_input_grad) - len(nodes))
    return [
        needed and (node is None or _is_reached(node))
        for needed, node in zip(ctx.needs_input_grad, nodes, strict=True)
    ]


def _is_reached(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except (
        RuntimeError
    ):  # of a leaf torch does not say it in `autograd.grad`, within a forward pass
        return True


def _added_up(partial: Tensor, shared: Uses) -> PendingExchange:
    if isinstance(shared, _Again):
        return start_reduce_scatter(partial, shared.slices, shared.group)
    return start_all_reduce(partial, shared.group)
