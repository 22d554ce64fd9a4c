"""Sliced tensors at the borders of a unit of fully_shard, whose hooks know plain tensors alone.

Those hooks put an autograd function of their own around a unit's inputs and a hook on its outputs.
They look for tensors in tuples and do not go through other objects: so while they are at work, a
sliced tensor is a pair of what this rank holds and of an object that says how it lies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bigtrain.slicing.sliced_tensor import SlicedTensor, is_sliced, local_of


class _Layout:
    """How a tensor lies on the ranks."""

    def __init__(self, sliced: SlicedTensor) -> None:
        self.slices, self.group, self.shape = sliced.slices, sliced.group, tuple(sliced.shape)


class _Apart(NamedTuple):
    """A sliced tensor taken apart."""

    local: Tensor
    layout: _Layout


def take_apart_at_boundaries(unit: nn.Module) -> None:
    """Let the hooks that a module has by now see plain tensors where sliced ones go in or out."""
    unit.register_forward_pre_hook(
        lambda _, args, kwargs: (_apart(args), _apart(kwargs)), prepend=True, with_kwargs=True
    )
    unit.register_forward_pre_hook(
        lambda _, args, kwargs: (_together(args), _together(kwargs)), with_kwargs=True
    )
    unit.register_forward_hook(lambda _, _args, output: _apart(output), prepend=True)
    unit.register_forward_hook(lambda _, _args, output: _together(output))


def _apart(value: Any) -> Any:
    return tree_map(
        lambda leaf: _Apart(local_of(leaf), _Layout(leaf)) if is_sliced(leaf) else leaf,
        value,
        is_leaf=is_sliced,
    )


def _together(value: Any) -> Any:
    return tree_map(
        lambda leaf: _sliced(leaf) if isinstance(leaf, _Apart) else leaf,
        value,
        is_leaf=lambda leaf: isinstance(leaf, _Apart),
    )


def _sliced(apart: _Apart) -> SlicedTensor:
    layout = apart.layout
    return SlicedTensor(apart.local, layout.slices, layout.group, layout.shape)
