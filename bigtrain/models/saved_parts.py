"""Read parts of the saved values of a described model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from bigtrain.models.blueprint import Blueprint
from bigtrain.tensors.shards import Extent, copy_saved


class SavedParts:
    """Reads parts of saved values, for techniques that shard parameters before they have values.

    Args:
        blueprint: the blueprint of the model.
        done: names of the tensors that have their values. `copy` adds the names of the tensors that
            it reads.
    """

    def __init__(self, blueprint: Blueprint, done: set[str]) -> None:
        self._blueprint, self._done = blueprint, done

    def cover(self, names: Collection[str]) -> bool:
        """Whether each of these tensors has a saved value that can be read in parts."""
        if not self._blueprint.deferred:
            return False
        saved = [self._blueprint.saved_value(name) for name in names]
        return all(value is not None and value.read is not None for value in saved)

    def copy(self, name: str, target: Tensor, extents: Sequence[Extent]) -> None:
        """Copy some elements of a tensor's saved value into `target`.

        Args:
            name: the name of the tensor in the model.
            target: the tensor that is changed, of any dtype and on any device.
            extents: the elements of the whole tensor that `target` contains.

        Raises:
            ValueError: the tensor has no saved value.
        """
        saved = self._blueprint.saved_value(name)
        if saved is None:
            raise ValueError(f"{name} has no saved value")
        copy_saved(saved, target, extents)
        self._done.add(name)

    def put(self, name: str, values: Tensor) -> None:
        """Let a parameter of the model have its values in the memory of `values`.

        `values` has the parameter's shape. It may be on any device, of any dtype, and smaller in
        memory than its shape, for a technique that frees it at once.
        """
        self._blueprint.put(name, values)
