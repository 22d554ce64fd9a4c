"""Sliced tensors that enter or leave a unit of fully_shard, whose hooks handle only plain tensors.

The hooks of fully_shard apply an autograd function to a unit's inputs and register a hook on its
outputs. They find tensors in tuples and similar containers, but not in other objects. So while the
hooks run, a tuple of this rank's local tensor and the layout replaces a sliced tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bigtrain.slicing.sliced_tensor import SlicedTensor, is_sliced, local_of


class _Layout:
    """The slices that this rank has of a tensor, the group of ranks, and the whole shape."""

    def __init__(self, sliced: SlicedTensor) -> None:
        self.slices, self.group, self.shape = sliced.slices, sliced.group, tuple(sliced.shape)


class _Unwrapped(NamedTuple):
    """A sliced tensor as its local tensor and its layout."""

    local: Tensor
    layout: _Layout


def unwrap_at_boundaries(unit: nn.Module) -> None:
    """Let the existing forward hooks of a module get plain tensors in place of sliced tensors."""
    unit.register_forward_pre_hook(
        lambda _, args, kwargs: (_unwrap(args), _unwrap(kwargs)), prepend=True, with_kwargs=True
    )
    unit.register_forward_pre_hook(
        lambda _, args, kwargs: (_wrap(args), _wrap(kwargs)), with_kwargs=True
    )
    unit.register_forward_hook(lambda _, _args, output: _unwrap(output), prepend=True)
    unit.register_forward_hook(lambda _, _args, output: _wrap(output))


def _unwrap(value: Any) -> Any:
    return tree_map(
        lambda leaf: _Unwrapped(local_of(leaf), _Layout(leaf)) if is_sliced(leaf) else leaf,
        value,
        is_leaf=is_sliced,
    )


def _wrap(value: Any) -> Any:
    return tree_map(
        lambda leaf: _wrapped(leaf) if isinstance(leaf, _Unwrapped) else leaf,
        value,
        is_leaf=lambda leaf: isinstance(leaf, _Unwrapped),
    )


def _wrapped(pair: _Unwrapped) -> SlicedTensor:
    layout = pair.layout
    return SlicedTensor(pair.local, layout.slices, layout.group, layout.shape)
