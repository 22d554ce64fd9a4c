"""DeepSpeed's engine seen as one update, and its state read and written by plain names.

Reading a tensor puts the stretches of all ranks together; writing one takes this rank's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
from bigtrain.tensors.source import TensorSource


class DeepSpeedUpdate:
    """DeepSpeed's engine as an `Update`; see `bigtrain.optim.update.Update`.

    Args:
        built: the engine.
        context: the ranks that share the parameters.
        model: with plain names.
        stage: 1, 2 or 3.
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
        """The norm of the whole gradient, the same on every rank. Collective."""
        return math.sqrt(math.fsum(self._context.all_gather_numbers(self._own_square())))

    def _own_square(self) -> float:
        """The squares of this rank's gradients, added up."""
        gradients = (self.shards.gradient(number) for number in range(len(self.shards.pieces)))
        return float(local_norm([g for g in gradients if g is not None])) ** 2

    def resident_tensors(self) -> Iterable[Tensor]:
        """See `Update.resident_tensors`."""
        yield from optimizer_tensors(self.optimizer)
        if self.zero.dtype != torch.float32:
            yield from self.shards.pieces

    def gradients(self) -> dict[str, TensorSource]:
        """See `Runner.gradients`."""
        sources = {}
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                gradient = self.shards.gradient(self.shards.piece_of[id(parameter)])
                if gradient is None:  # nothing of this piece takes part in the loss
                    gradient = torch.zeros_like(self._piece_of(parameter))
                sources[name] = self._source(parameter, _stretches_of(gradient))
        return sources

    def _piece_of(self, parameter: nn.Parameter) -> Tensor:
        return self.shards.pieces[self.shards.piece_of[id(parameter)]].detach()

    def state(self) -> dict[str, TensorSource]:
        """See `Update.state`."""
        sources = {}
        pieces = self.shards.pieces
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                continue
            piece = pieces[self.shards.piece_of[id(parameter)]]
            for key, value in sorted(self.optimizer.state.get(piece, {}).items()):
                if not isinstance(value, Tensor):
                    continue
                if value.dim() and value.shape == piece.shape:
                    sources[f"{name}.{key}"] = self._source(parameter, _stretches_of(value))
                else:
                    kind = (value.dtype, tuple(value.shape))
                    sources[f"{name}.{key}"] = TensorSource(*kind, value.detach().clone)
        return sources

    def masters(self) -> dict[str, TensorSource]:
        """See `Update.masters`: all parameters, as stage 3 leaves nothing in the module."""
        sources = {}
        pieces = self.shards.pieces
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                piece = pieces[self.shards.piece_of[id(parameter)]]
                sources[name] = self._source(parameter, _stretches_of(piece))
            else:
                shape = shape_of(parameter)
                sources[name] = TensorSource(torch.float32, shape, self._frozen(parameter))
        return sources

    def _frozen(self, parameter: nn.Parameter) -> Callable[[], Tensor]:
        def read() -> Tensor:
            if self._stage < 3:
                return parameter.detach().float()
            part, start = _part_of(parameter)
            return self._whole(part.float(), start, shape_of(parameter))

        return read

    def _source(
        self, parameter: nn.Parameter, part: Callable[[ShardSlice], Tensor]
    ) -> TensorSource:
        stretch, shape = self.shards.slices.get(id(parameter)), shape_of(parameter)

        def read() -> Tensor:
            if stretch is None:
                return self._whole(None, 0, shape)
            return self._whole(part(stretch).detach(), stretch.start, shape)

        return TensorSource(torch.float32, shape, read)

    def _whole(self, part: Tensor | None, start: int, shape: tuple[int, ...]) -> Tensor:
        """The stretches of all ranks put together, bit for bit. Collective."""
        size = math.prod(shape)
        # As integers: adding zeros to them changes no bit, not even the sign of a zero.
        bits = torch.zeros(size, dtype=torch.int32, device=self._context.device)
        if part is not None:
            placed = part.to(self._context.device, torch.float32).contiguous()
            bits[start : start + part.numel()] = placed.view(torch.int32)
        if self._context.dp_size > 1:
            dist.all_reduce(bits, group=self._context.dp_group)
        whole: Tensor = bits.view(torch.float32).view(shape)
        return whole

    def load_state(self, name: str, key: str, value: Tensor) -> None:
        """See `Update.load_state`."""
        parameter = self.parameters[name]
        piece = self.shards.pieces[self.shards.piece_of[id(parameter)]]
        slots = self.optimizer.state[piece]
        if is_elementwise(key, value, shape_of(parameter)):
            if key not in slots:
                slots[key] = torch.zeros_like(piece.detach())
            stretch = self.shards.slices.get(id(parameter))
            if stretch is not None:
                mine = value.reshape(-1)[stretch.start : stretch.start + stretch.length]
                flat = slots[key].view(-1)
                flat[stretch.offset : stretch.offset + stretch.length].copy_(mine)
            return
        device = piece.device if steps_on_device(self.optimizer) else value.device
        slots[key] = value.to(device, copy=True)

    def load_master(self, name: str, value: Tensor) -> None:
        """See `Update.load_master`."""
        parameter = self.parameters[name]
        stretch = self.shards.slices.get(id(parameter))
        if stretch is not None:
            mine = value.reshape(-1)[stretch.start : stretch.start + stretch.length]
            self.shards.slice_of(self.shards.pieces, stretch).copy_(mine)
        elif not parameter.requires_grad and self._stage < 3:
            parameter.data.copy_(value)
        elif not parameter.requires_grad:
            part, start = _part_of(parameter)
            part.copy_(value.reshape(-1)[start : start + part.numel()])

    def update_parameters(self) -> None:
        """Let the parameters follow what was loaded. Collective."""
        with torch.no_grad():
            self.shards.update_parameters()

    def close(self) -> None:
        """See `Update.close`."""
        self.engine.destroy()
        self._built.closing.close()


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """The shape of a parameter, whether it is whole now or in shards."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _stretches_of(flat: Tensor) -> Callable[[ShardSlice], Tensor]:
    """Reads a stretch of a flat tensor."""

    def read(stretch: ShardSlice) -> Tensor:
        return flat.detach().view(-1)[stretch.offset : stretch.offset + stretch.length]

    return read


def _part_of(parameter: Any) -> tuple[Tensor, int]:
    """What this rank has of a frozen parameter under stage 3, and where that begins."""
    part = parameter.ds_tensor.detach()
    start = part.numel() * dist.get_rank(group=parameter.ds_process_group)
    return part[: max(0, min(part.numel(), parameter.ds_numel - start))], start
