"""A model made to hold slices: parameters of this rank's shape, which its code sees as whole."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bigtrain.slicing import (
    rules_attention,
    rules_indexing,
    rules_loss,
    rules_norms,
    rules_products,
    rules_shapes,
)
from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.sliced_tensor import SlicedTensor
from bigtrain.slicing.slices import Slices

RULES = (
    rules_attention,
    rules_indexing,
    rules_loss,
    rules_norms,
    rules_products,
    rules_shapes,
)
"""The modules whose import fills the table of rules."""
_LAYOUTS = "_bigtrain_slices"


class SlicedModule(nn.Module):
    """What is put before a module's class: its sliced parameters and buffers come out as whole."""

    def __getattr__(self, name: str) -> Any:
        """A parameter, buffer or submodule; a sliced one as a `SlicedTensor`."""
        value = super().__getattr__(name)
        slices = self.__dict__[_LAYOUTS].get(name)
        # In shards it is read by who sharded it; the module's code runs while it is gathered.
        if slices is None or not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        sliced = SlicedTensor.of(value, slices, self.__dict__["_bigtrain_group"])
        sliced.gathers = name in self.__dict__["_bigtrain_gathered"]
        return sliced


@functools.cache
def _sliced_class(own: type[nn.Module]) -> type[nn.Module]:
    return type(own.__name__, (SlicedModule, own), {"__module__": own.__module__})


def slice_modules(
    model: nn.Module,
    slices: Mapping[str, Slices],
    group: SliceGroup,
    gathered: Collection[str] = (),
) -> None:
    """Let the modules of a model see their parameters as whole, whatever a rank holds of them.

    The parameters themselves are left as they are: see `slice_tensors`.

    Args:
        model: parameters have plain names; stages of a model have some of them.
        slices: by plain name, of parameters and buffers; those that are not here are passed over.
        group: the ranks.
        gathered: weights whose product is gathered at once, so that what follows has it whole.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        held = (*module._parameters, *module._buffers)
        own = {name: slices[prefix + name] for name in held if prefix + name in slices}
        if not own:
            continue
        if not isinstance(module, SlicedModule):
            module.__class__ = _sliced_class(type(module))
        module.__dict__[_LAYOUTS] = own
        module.__dict__["_bigtrain_group"] = group
        module.__dict__["_bigtrain_gathered"] = {n for n in own if prefix + n in gathered}


def sliced_tensors(model: nn.Module, slices: Mapping[str, Slices]) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a model that are sliced, by name, tied ones once."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in slices:
            yield name, tensor


@torch.no_grad()
def slice_tensors(model: nn.Module, slices: Mapping[str, Slices], group: SliceGroup) -> None:
    """Let whole parameters and buffers of a model be what this rank holds of them."""
    for name, tensor in sliced_tensors(model, slices):
        tensor.data = own_slices(tensor, slices[name], group)


def own_slices(whole: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """What a rank holds of a whole tensor, in memory of its own."""
    part = slices.local(whole.detach(), group.rank, group.size)
    return part.clone(memory_format=torch.contiguous_format)
