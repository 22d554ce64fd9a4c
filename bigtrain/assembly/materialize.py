"""Give the parameters and buffers of a model on the meta device their values on a device."""

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
    """Gives each parameter and buffer of a blueprint's model its values, once.

    A model that could not be built on the meta device is whole on every rank. The first call then
    sends the values of all its tensors from rank 0, and is collective.

    Args:
        blueprint: the blueprint of the model.
        context: this rank's context, with the device and the seed.
        precision: the precision of the run; "fp64" converts floating-point tensors to float64.
        low: the names of the parameters that are converted to bf16.
        slices: the slices of the model, of which only this rank's stay in memory; None if ranks
            hold whole tensors.
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
        """The names of tensors of which only this rank's slices were read."""
        whole = slices is not None or self._double
        self.saved_parts = None if whole else SavedParts(blueprint, self._done)
        """Reads parts of saved values; None if ranks hold slices of tensors or float64 values."""
        for name, parameter in blueprint.model.named_parameters():
            if name in self._low and parameter.is_meta:  # so that its shards get this dtype
                parameter.data = parameter.data.to(torch.bfloat16)

    def __call__(self, names: Collection[str]) -> None:
        """Give the tensors with these names their values, unless they have them already."""
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
                read=self._read_values,
            )
        else:
            blueprint.materialize(context.device, seed=context.seed, only=None)
            tensors = named_tensors(blueprint.model)
            for name in pending:
                self._finish(name, tensors[name])

    def _finish(self, name: str, tensor: Tensor) -> None:
        """Convert a tensor to its dtype, send it from rank 0 if needed, and drop other slices."""
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

    def _read_values(self, name: str, form: Tensor, saved: StateTensor) -> Tensor | None:
        """Read a saved tensor in the dtype of the run; of a sliced one, only this rank's slices.

        So a tensor that is bf16 or fp64 in the run is never whole in fp32.

        Args:
            name: the first name of the tensor.
            form: the whole tensor on the meta device.
            saved: the saved values.

        Returns:
            The values; None if they are to be read whole and in the dtype of `form`.
        """
        state, dtype = self._slices, self._dtype(name, form)
        if saved.read is None:
            return None
        if state is None or name not in state.by_name:
            values = torch.empty_like(form, dtype=dtype, device=self._context.device)
            copy_saved(saved, values)
            return values
        slices, rank, size = state.by_name[name], state.group.rank, state.group.size
        shape = slices.local_shape(form.shape, rank, size)
        values = torch.empty(shape, dtype=dtype, device=self._context.device)
        copy_saved(saved, values, slices.extents(form.shape, rank, size))
        self._read.add(name)
        return values

    def _dtype(self, name: str, form: Tensor) -> torch.dtype:
        """Return the dtype that a tensor has in the run."""
        if name in self._low:
            return torch.bfloat16
        return torch.float64 if self._double and form.is_floating_point() else form.dtype
