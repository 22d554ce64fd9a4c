"""Column-parallel linear layers: each rank computes some of the output features.

The input is whole or, with sequence parallelism, gathered from sequence shards. Each rank computes
a partial gradient of the input. If only one linear layer uses the input, the partial gradients are
summed over the ranks while the weight's gradient is computed. If several layers use the input
(queries, keys, values), each rank adds up their partial gradients, and the ranks' results are then
summed once.

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
    UseCount,
    copied_with_uses,
    gathered_with_partial_grad,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from bigtrain.slicing.sliced_tensor import SlicedTensor, is_sliced, local_of
from bigtrain.slicing.slices import Slices


def column_linear(x: Any, weight: Tensor, bias: Tensor | None, group: SliceGroup) -> Tensor:
    """Return this rank's output features of a linear layer.

    Consecutive linear layers on one input gather the input once in the forward pass and once in
    the backward pass.

    Args:
        x: (..., width), whole, or sliced along any dim but the last.
        weight: (local columns, width), a plain tensor.
        bias: (local columns,), a plain tensor; or None.
        group: the ranks.

    Returns:
        (..., local columns), in autocast's dtype under autocast.
    """
    dtype = _autocast_dtype(x)
    if dtype is not None:
        weight, bias = weight.to(dtype), bias if bias is None else bias.to(dtype)
    inputs = _gathered_input(x, dtype) if is_sliced(x) else _whole_input(x, dtype, group)
    # In the backward pass a view's node shows whether its gradient is needed; a leaf's does not.
    weight, bias = weight.view_as(weight), bias if bias is None else bias.view_as(bias)
    of_weight = weight.requires_grad and torch.is_grad_enabled()
    if isinstance(inputs.shared, _RegatheredInput):
        inputs.shared.count += 1
        inputs.shared.of_weights += of_weight
    result: Tensor = _ColumnLinear.apply(inputs.whole, inputs.source, weight, bias, inputs.shared)
    return result


def forget_input(group: SliceGroup) -> None:
    """Drop the gathered input of the latest linear layers, before another product starts."""
    group.inputs.clear()


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes products; None if autocast does not apply."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


class _RegatheredInput(UseCount):
    """The linear layers on one gathered input, which gather it again in the backward pass."""

    def __init__(self, slices: Slices, group: SliceGroup) -> None:
        super().__init__(group)
        self.slices = slices
        self.of_weights = 0
        """Number of linear layers whose weight needs a gradient."""
        self._left = 0
        self._begun: PendingExchange | None = None
        self._whole: Tensor | None = None

    def begin(self, part: Tensor) -> None:
        """Start to gather the input, unless an earlier layer has gathered it."""
        if self._whole is None:
            self._begun = start_all_gather(part, self.slices, self.group)
            self._left = self.of_weights

    def whole(self) -> Tensor:
        """Return the gathered input; the last layer that needs the input drops it.

        Raises:
            RuntimeError: `begin` was not called.
        """
        gathered = self._whole if self._begun is None else self._begun.wait()
        self._begun = None
        self._left -= 1
        self._whole = gathered if self._left > 0 else None
        if gathered is None:
            raise RuntimeError("begin() was not called before whole()")
        return gathered


@dataclass(eq=False)
class _Input:
    """State that the linear layers on one input share."""

    whole: Tensor
    """The whole input. Its gradient is partial; the node behind it sums the ranks' gradients."""
    source: Tensor
    """The input, or this rank's part of a sliced one, in the layers' dtype. Its gradient is already
    summed."""
    shared: UseCount
    of: weakref.ref[Tensor] | None = None
    """The sliced input: once the model drops it, no other layer can use the gathered input."""
    local: weakref.ref[Tensor] | None = None
    """This rank's part of the input, before any cast."""
    state: tuple[Any, ...] = ()
    """The remaining settings that must be equal for another layer to share this input."""


def _whole_input(x: Tensor, dtype: torch.dtype | None, group: SliceGroup) -> _Input:
    source = x if dtype is None else _cast_once(x, dtype)
    copied, uses = copied_with_uses(source, group)
    return _Input(copied, source, uses)


_CAST = "_bigtrain_cast"


def _cast_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor once for all layers that use it, so that its gradient is summed once."""
    if x.grad_fn is None or x.dtype == dtype:
        return x.to(dtype)
    # The state has no id of the node: Python makes a new object for it at each access, so whether
    # two ids are equal could differ between ranks.
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
    group, local = x.group, local_of(x)
    # Inference tensors have no version counter, so a change would go unnoticed: gather again.
    version = None if local.is_inference() else local._version
    state = (version, x.slices, dtype, torch.is_grad_enabled())
    known: _Input
    for known in group.inputs:
        is_same = known.local is not None and known.local() is local and known.state == state
        if is_same and version is not None:
            return known
    forget_input(group)
    source = local if dtype is None else local.to(dtype)
    gathered, inputs = gathered_with_partial_grad(source, x.slices, group), group.inputs
    of: weakref.ref[Tensor] = weakref.ref(x, lambda _: inputs.clear())
    shared = _RegatheredInput(x.slices, group)
    gathered_input = _Input(gathered, source, shared, of, weakref.ref(local), state)
    inputs.append(gathered_input)
    return gathered_input


class _ColumnLinear(torch.autograd.Function):
    """A linear layer that saves this rank's part of a sliced input, not the gathered whole.

    If other layers use the input as well, the backward pass returns the partial gradient of the
    whole input. Otherwise it returns the gradient summed over the ranks: of a whole input, or of
    this rank's part of a sliced one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        whole_input: Tensor,
        source: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shared: UseCount,
    ) -> Tensor:
        to_input, _, to_weight, _, _ = ctx.needs_input_grad
        # For a whole input `whole_input` is saved: the owner of `source` may set other data on it.
        saved = source if isinstance(shared, _RegatheredInput) else whole_input
        ctx.save_for_backward(saved if to_weight else None, weight if to_input else None)
        ctx.shared = shared
        return F.linear(
            whole_input, weight, bias
        ).detach()  # not a view: it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        source, weight = ctx.saved_tensors
        to_input, _, needs_weight, needs_bias, _ = _wanted(ctx)
        shared: UseCount = ctx.shared
        again = shared if isinstance(shared, _RegatheredInput) else None
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
    """Return which gradients are needed: zero-bubble schedules may ask for the input's alone."""
    nodes = [node for node, _ in ctx.next_functions]  # arguments that are not tensors have no node
    nodes += [None] * (len(ctx.needs_input_grad) - len(nodes))
    return [
        needed and (node is None or _is_reached(node))
        for needed, node in zip(ctx.needs_input_grad, nodes, strict=True)
    ]


def _is_reached(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch raises this for a leaf in `autograd.grad`
        return True


def _added_up(partial: Tensor, shared: UseCount) -> PendingExchange:
    if isinstance(shared, _RegatheredInput):
        return start_reduce_scatter(partial, shared.slices, shared.group)
    return start_all_reduce(partial, shared.group)
