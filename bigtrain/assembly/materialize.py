"""Materialising a described model: values for its parameters and buffers, on the device."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from bigtrain.job.schema import Precision
from bigtrain.models.blueprint import Blueprint
from bigtrain.models.parameters import named_tensors, names_of
from bigtrain.models.saved_parts import SavedParts
from bigtrain.ranks.context import RunContext
from bigtrain.slicing.install import local_slices
from bigtrain.slicing.state import SlicedState
from bigtrain.tensors.shards import StateTensor, copy_saved


class Materializer:
    """Gives parameters and buffers of a blueprint their values, each once.

    A model that could not be described on the meta device is whole on every rank; rank 0 sends its
    values at the first call.

    Args:
        blueprint: the model.
        context: the device, the seed and the ranks.
        precision: fp64 makes float64 of every floating-point tensor.
        low: names of the parameters that become bf16.
        slices: the slices of the model; only those of this rank stay in memory.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        context: RunContext,
        precision: Precision,
        low: Collection[str] = (),
        slices: SlicedState | None = None,
    ) -> None:
        self._blueprint, self._context = blueprint, context
        self._double = precision == "fp64"
        self._low = frozenset(low)
        self._slices = slices
        self._done: set[str] = set()
        self._read: set[str] = set()
        """Names of tensors of which only this rank's slices were read."""
        whole = slices is not None or self._double
        self.saved_parts = None if whole else SavedParts(blueprint, self._done)
        """Reads parts of saved values; None if ranks hold slices of tensors, or in float64."""
        for name, parameter in blueprint.model.named_parameters():
            if name in self._low and parameter.is_meta:  # shards of it get this dtype
                parameter.data = parameter.data.to(torch.bfloat16)

    def __call__(self, names: Collection[str]) -> None:
        """Give the tensors of these names their values, unless they have them."""
        blueprint, context = self._blueprint, self._context
        pending = names if blueprint.deferred else names_of(blueprint.model)
        pending = [name for name in pending if name not in self._done]
        if not pending:
            return
        self._done.update(pending)
        if blueprint.deferred:
            blueprint.materialize(
                context.device,
                seed=context.seed,
                only=pending,
                finish=self._finish,
                read=None if self._slices is None else self._read_slices,
            )
        else:
            blueprint.materialize(context.device, seed=context.seed, only=None)
            tensors = named_tensors(blueprint.model)
            for name in pending:
                self._finish(name, tensors[name])

    def _finish(self, name: str, tensor: Tensor) -> None:
        """Cast to the run's precision, send from rank 0 if needed, and keep this rank's slices."""
        blueprint, context = self._blueprint, self._context
        if self._double and tensor.is_floating_point():
            tensor.data = tensor.data.double()
        if not blueprint.deferred and context.world_size > 1:
            dist.broadcast(tensor.detach(), src=0)
        if name in self._low:
            tensor.data = tensor.data.to(torch.bfloat16)
        if self._slices is not None and name in self._slices.by_name and name not in self._read:
            slices = self._slices.by_name[name]
            tensor.data = local_slices(tensor, slices, self._slices.group)

    def _read_slices(self, name: str, form: Tensor, saved: StateTensor) -> Tensor | None:
        """Read this rank's slices of a saved value; None if it is not sliced, or read as a whole.

        Args:
            name: the first name of the tensor.
            form: the whole tensor on the meta device.
            saved: its saved value.
        """
        state = self._slices
        if state is None or name not in state.by_name or saved.read is None:
            return None
        slices, rank, size = state.by_name[name], state.group.rank, state.group.size
        shape = slices.local_shape(form.shape, rank, size)
        values = torch.empty(shape, dtype=form.dtype, device=self._context.device)
        copy_saved(saved, values, slices.extents(form.shape, rank, size))
        self._read.add(name)
        return values
