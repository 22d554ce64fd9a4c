"""Give a model this rank's slices as parameters, while its code still sees whole tensors."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bigtrain.errors import ConfigError, as_word
from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.rules import (
    attention,
    indexing,
    loss,
    norms,
    products,
    shapes,
)
from bigtrain.slicing.sliced_tensor import SlicedTensor, as_operand
from bigtrain.slicing.slices import Slices

RULES = (
    attention,
    indexing,
    loss,
    norms,
    products,
    shapes,
)
"""The modules whose import fills the table of rules."""
_LAYOUTS, _GROUP = "_bigtrain_slices", "_bigtrain_slice_group"


class _Table(dict[str, Any]):
    """A module's parameters or buffers by name; a look-up wraps a sliced one in `SlicedTensor`.

    Iteration, as an optimizer or a checkpoint uses it, returns this rank's plain tensors.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        slices: Mapping[str, Slices],
        group: SliceGroup,
        gathered: Collection[str],
    ) -> None:
        super().__init__(tensors)
        self._slices, self._group, self._gathered = slices, group, gathered

    def __getitem__(self, name: str) -> Any:
        value, slices = super().__getitem__(name), self._slices.get(name)
        # Between the passes fully_shard puts its sharded DTensors here.
        if slices is None or not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        sliced = SlicedTensor.of(value, slices, self._group)
        sliced.gathers = name in self._gathered
        return sliced

    def get(self, name: str, default: Any = None) -> Any:
        """Return `self[name]`, or the default if there is no such name."""
        return self[name] if name in self else default  # noqa: SIM401 - `get` would call itself


class SlicedModule(nn.Module):
    """Mixed into the class of each module that has sliced tensors."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; for a sliced buffer, store this rank's slices of the new value.

        Raises:
            ConfigError: the new value has another shape than the sliced buffer.
        """
        slices = self.__dict__.get(_LAYOUTS, {}).get(name)
        is_plain = slices is None or not isinstance(value, Tensor)
        if not is_plain and not isinstance(value, (nn.Parameter, DTensor)):
            if value.dim() <= slices.dim or value.shape[slices.dim] != slices.total:
                raise ConfigError(
                    f"strategy.slice: {type(self).__name__}.{name} is sliced, {slices.total} long "
                    f"in dim {slices.dim}, and is set to a tensor of {list(value.shape)}. Keep the "
                    "module whole: strategy.slice.keep=[NAME]."
                )
            value = as_operand(value, slices, self.__dict__[_GROUP])
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the module and its tensors; the copy has the same group of ranks."""
        group = self.__dict__[_GROUP]
        memo[id(group)] = group
        custom_copy = getattr(super(), "__deepcopy__", None)
        if custom_copy is not None:
            return custom_copy(memo)
        copied: Any = type(self).__new__(type(self))
        memo[id(self)] = copied
        state = copy.deepcopy(super().__reduce_ex__(4)[2], memo)
        copied.__setstate__(state)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled.

        Raises:
            ConfigError: always.
        """
        del protocol
        raise ConfigError(
            f"strategy.slice: {type(self).__name__} holds this rank's slices and is not pickled. "
            "Save the checkpoint of the run, or the module's state_dict()."
        )


_sliced_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _sliced_class(module_class: type[nn.Module]) -> type[nn.Module]:
    if module_class not in _sliced_classes:
        names: dict[str, Any] = {
            "__module__": module_class.__module__,
            "__qualname__": module_class.__qualname__,
        }
        if issubclass(module_class, nn.RNNBase):  # cuDNN's flat weights cannot be views of slices
            names["flatten_parameters"] = lambda _: None
        _sliced_classes[module_class] = type(
            module_class.__name__, (SlicedModule, module_class), names
        )
    return _sliced_classes[module_class]


def slice_modules(
    model: nn.Module,
    slices: Mapping[str, Slices],
    group: SliceGroup,
    gathered: Collection[str] = (),
) -> None:
    """Let the code of a model's modules see whole parameters where this rank holds slices.

    The parameters themselves are not changed: see `slice_tensors`.

    Args:
        model: a model with plain parameter names, or a pipeline stage of one.
        slices: by plain name, the slices of parameters and buffers; names that the model lacks are
            skipped. One of the names of a tied tensor is enough.
        group: the ranks.
        gathered: names of weights whose product is gathered immediately, so that the following
            operations see a whole tensor.

    Raises:
        ConfigError: a tensor has fewer parts than there are ranks, or two of its names have
            different slices.
    """
    by_tensor = _by_tensor(model, slices, group.size)
    gathered_ids = {id(tensor) for name, tensor in _named_tensors(model) if name in gathered}
    for module in model.modules():
        tensors = (*module._parameters.items(), *module._buffers.items())
        module_slices = {
            name: by_tensor[id(t)] for name, t in tensors if t is not None and id(t) in by_tensor
        }
        if not module_slices:
            continue
        if not isinstance(module, SlicedModule):
            module.__class__ = _sliced_class(type(module))
        gathered_names = {name for name, t in tensors if id(t) in gathered_ids}
        for table in ("_parameters", "_buffers"):
            module.__dict__[table] = _Table(
                module.__dict__[table], module_slices, group, gathered_names
            )
        module.__dict__[_LAYOUTS], module.__dict__[_GROUP] = module_slices, group


def _by_tensor(model: nn.Module, slices: Mapping[str, Slices], size: int) -> dict[int, Slices]:
    """Return the slices of each tensor, by its id."""
    by_tensor: dict[int, tuple[str, Slices]] = {}
    for name, tensor in _named_tensors(model):
        if name not in slices:
            continue
        slices_of_name = slices[name]
        if slices_of_name.most_ranks < size:
            fix = as_word("strategy.slice.keep", [name.rpartition(".")[0] or name])
            raise ConfigError(
                f"strategy.slice: {name} can be sliced over {slices_of_name.most_ranks} ranks at "
                f"most, and mesh.tp={size}. Keep it whole: {fix}."
            )
        first_name, first_slices = by_tensor.setdefault(id(tensor), (name, slices_of_name))
        if first_slices != slices_of_name:
            raise ConfigError(
                f"strategy.slice: {first_name} and {name} are one tensor, and are sliced in two "
                f"ways: {first_slices} and {slices_of_name}. Give both the same slices."
            )
    return {key: slices_of_name for key, (_, slices_of_name) in by_tensor.items()}


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers under all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def sliced_tensors(model: nn.Module, slices: Mapping[str, Slices]) -> Iterator[tuple[str, Tensor]]:
    """Yield the sliced parameters and buffers of a model by name, a tied tensor once."""
    seen = set()
    for name, tensor in _named_tensors(model):
        if name in slices and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


@torch.no_grad()
def slice_tensors(model: nn.Module, slices: Mapping[str, Slices], group: SliceGroup) -> None:
    """Replace the data of whole parameters and buffers by copies of this rank's slices."""
    for name, tensor in sliced_tensors(model, slices):
        tensor.data = local_slices(tensor, slices[name], group)


def local_slices(whole: Tensor, slices: Slices, group: SliceGroup) -> Tensor:
    """Return a contiguous copy of this rank's slices of a whole tensor."""
    part = slices.local(whole.detach(), group.rank, group.size)
    return part.clone(memory_format=torch.contiguous_format)
