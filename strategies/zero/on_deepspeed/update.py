"""DeepSpeed's engine as an `Update`, and the engine's state under plain names.

Of each tensor a rank saves and loads only the flat slice that it updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.models.parameters import whole_shape
from bigtrain.optim.update import is_elementwise, optimizer_tensors, steps_on_device
from bigtrain.ranks.context import RunContext
from bigtrain.strategies.zero.on_deepspeed.build import BuiltEngine
from bigtrain.strategies.zero.on_deepspeed.shards import (
    FlatShards,
    OptimizerShards,
    PartitionedShards,
    ShardSlice,
)
from bigtrain.tensors.norms import local_norm
from bigtrain.tensors.shards import Extent, SavedTensor, StateTensor, read_whole


class DeepSpeedUpdate:
    """An `Update` by DeepSpeed's engine; see `bigtrain.optim.update.Update`.

    Args:
        built: the engine, and the objects that belong to it.
        context: the ranks that share the parameters.
        model: the user's model, with plain parameter names.
        stage: the stage of ZeRO: 1, 2 or 3.
    """

    def __init__(
        self, built: BuiltEngine, context: RunContext, model: nn.Module, stage: int
    ) -> None:
        self._built = built
        self.engine, self.zero = built.engine, built.engine.optimizer
        self._context, self._stage = context, stage
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self.shards: OptimizerShards = (PartitionedShards if stage == 3 else FlatShards)(
            self.zero, built
        )
        self.optimizer: torch.optim.Optimizer = self.zero.optimizer

    def step(self) -> None:
        """See `Update.step`."""
        self.engine.step()
        self.shards.clear()

    def norm(self) -> float:
        """Return the norm of the whole gradient, the same on every rank. Collective."""
        return math.sqrt(math.fsum(self._context.all_gather_numbers(self._own_square())))

    def _own_square(self) -> float:
        """Return the sum of the squares of this rank's gradients."""
        gradients = (self.shards.gradient(number) for number in range(len(self.shards.pieces)))
        return float(local_norm([g for g in gradients if g is not None])) ** 2

    def resident_tensors(self) -> Iterable[Tensor]:
        """See `Update.resident_tensors`."""
        yield from optimizer_tensors(self.optimizer)
        if self.zero.dtype != torch.float32:
            yield from self.shards.pieces

    def gradients(self) -> dict[str, StateTensor]:
        """See `Runner.gradients`: this rank's slices."""
        tensors = {}
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                gradient = self.shards.gradient(self.shards.piece_of[id(parameter)])
                if gradient is None:  # the loss depends on no parameter of this piece
                    gradient = torch.zeros_like(self._piece_of(parameter))
                tensors[name] = self._sharded(parameter, gradient)
        return tensors

    @torch.no_grad()
    def change_gradient(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the gradient of a parameter by a function of the whole gradient. Collective.

        Each rank gathers the gradient, and stores its own elements of the result.
        """
        parameter = self.parameters[name]
        gradient = self.shards.gradient(self.shards.piece_of[id(parameter)])
        flat_slice, shard = self.shards.slices.get(id(parameter)), torch.empty(0)
        whole_gradient = torch.zeros(whole_shape(parameter), device=self.shards.pieces[0].device)
        if flat_slice is not None and gradient is not None:
            shard = flat_slice.of(gradient)
            flat_slice.of_parameter(whole_gradient).copy_(shard)
        if self._context.dp_size > 1:
            dist.all_reduce(whole_gradient, group=self._context.dp_group)
        changed = change(whole_gradient)
        if flat_slice is not None and shard.numel():
            shard.copy_(flat_slice.of_parameter(changed))

    def _piece_of(self, parameter: nn.Parameter) -> Tensor:
        return self.shards.pieces[self.shards.piece_of[id(parameter)]].detach()

    def state(self) -> dict[str, StateTensor]:
        """See `Update.state`."""
        tensors = {}
        pieces = self.shards.pieces
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                continue
            piece = pieces[self.shards.piece_of[id(parameter)]]
            for key, value in sorted(self.optimizer.state.get(piece, {}).items()):
                if not isinstance(value, Tensor):
                    continue
                if value.dim() and value.shape == piece.shape:
                    tensors[f"{name}.{key}"] = self._sharded(parameter, value)
                else:
                    tensors[f"{name}.{key}"] = StateTensor.of(value)
        return tensors

    def masters(self) -> dict[str, StateTensor]:
        """See `Update.masters`: all parameters, because stage 3 leaves no values in the module."""
        tensors = {}
        pieces = self.shards.pieces
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                piece = pieces[self.shards.piece_of[id(parameter)]]
                tensors[name] = self._sharded(parameter, piece)
            elif self._stage < 3:
                tensors[name] = StateTensor.of(parameter, self._built.dtypes[name])
            else:
                tensors[name] = _frozen(parameter, self._built.dtypes[name])
        return tensors

    def _sharded(self, parameter: nn.Parameter, flat: Tensor) -> StateTensor:
        """Return this rank's elements of a parameter, from a tensor laid out like its piece."""
        flat_slice, shape = self.shards.slices.get(id(parameter)), whole_shape(parameter)
        if flat_slice is None:
            return StateTensor(torch.float32, shape, (), lambda: torch.empty(0))

        def values() -> Tensor:
            return flat_slice.of(flat.detach()).float()

        return StateTensor(torch.float32, shape, (_extent_of(flat_slice),), values)

    def load_state(self, name: str, key: str, saved: SavedTensor) -> None:
        """See `Update.load_state`."""
        parameter = self.parameters[name]
        piece = self.shards.pieces[self.shards.piece_of[id(parameter)]]
        slots = self.optimizer.state[piece]
        if is_elementwise(key, saved, whole_shape(parameter)):
            if key not in slots:
                slots[key] = torch.zeros_like(piece.detach())
            flat_slice = self.shards.slices.get(id(parameter))
            if flat_slice is not None:
                flat_slice.of(slots[key]).copy_(saved.read([_extent_of(flat_slice)]))
            return
        device = piece.device if steps_on_device(self.optimizer) else "cpu"
        slots[key] = read_whole(saved).to(device)

    def load_master(self, name: str, saved: SavedTensor) -> None:
        """See `Update.load_master`."""
        parameter = self.parameters[name]
        flat_slice = self.shards.slices.get(id(parameter))
        if flat_slice is not None:
            shard = saved.read([_extent_of(flat_slice)])
            self.shards.slice_of(self.shards.pieces, flat_slice).copy_(shard)
        elif not parameter.requires_grad and self._stage < 3:
            parameter.data.copy_(read_whole(saved))
        elif not parameter.requires_grad:
            part, extents = _part_of(parameter)
            part.copy_(saved.read(extents))

    def update_parameters(self) -> None:
        """Copy the loaded values from the flat pieces to the parameters. Collective."""
        with torch.no_grad():
            self.shards.update_parameters()

    def close(self) -> None:
        """See `Update.close`."""
        self.engine.destroy()
        self._built.closing.close()


def _extent_of(flat_slice: ShardSlice) -> Extent:
    return Extent(flat_slice.start, flat_slice.length)


def _frozen(parameter: Any, dtype: torch.dtype) -> StateTensor:
    part, extents = _part_of(parameter)
    return StateTensor(dtype, whole_shape(parameter), extents, partial(part.to, dtype))


def _part_of(parameter: Any) -> tuple[Tensor, tuple[Extent, ...]]:
    """Return this rank's elements of a frozen parameter under stage 3, and their positions."""
    part = parameter.ds_tensor.detach()
    start = part.numel() * dist.get_rank(group=parameter.ds_process_group)
    part = part[: max(0, min(part.numel(), parameter.ds_numel - start))]
    return part, (Extent(start, part.numel()),) if part.numel() else ()
