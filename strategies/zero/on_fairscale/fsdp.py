"""Stage 3 on fairscale: FullyShardedDataParallel around each block and around the whole model.

fairscale makes the CUDA streams that it gathers and reduces in only where there is a GPU, so
it is refused on a CPU. Every parameter is sharded by itself and not as one long vector for each
block: so a rank's part of a parameter is a stretch of it, padded at the end, and the whole state
is gathered tensor by tensor under plain names.
Memory: 16P/N bytes and the parameters of the block in use; gradients are reduced to stretches after
every micro-batch. bf16 is autocast on fp32 parameters, gathered in fp32.
Constraints: CUDA; fp32 parameters; an optimizer that treats each element by itself.

Source: fairscale 0.4.13, nn/data_parallel/fully_sharded_data_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.traits import Traits
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.errors import CheckpointError, ConfigError
from bigtrain.memory.timeline import scale_timeline
from bigtrain.models.blocks import independent_blocks
from bigtrain.models.names import names_of
from bigtrain.optim.partitioned import ELEMENTWISE_OPTIMIZERS
from bigtrain.optim.update import MakeOptimizer, is_elementwise, steps_on_device
from bigtrain.strategies.fairscale_adapter import plain_name, whole_size
from bigtrain.strategies.zero.on_fairscale.engine import (
    FairscaleEngine,
    OwnedUpdate,
    ShardedGradients,
)
from bigtrain.strategies.zero.on_fairscale.memory import reduce_gradients
from bigtrain.tensors.source import TensorSource
from bigtrain.units import MIB


class FairscaleFSDP(FairscaleEngine):
    """fairscale's FullyShardedDataParallel, block by block."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return replace(super().traits, materializes=True)

    def check(self, plan: Plan) -> None:
        """Refuse, as `Strategy.check` does."""
        super().check(plan)
        if plan.device_type != "cuda":
            raise ConfigError(
                "fairscale's FullyShardedDataParallel (strategy.replicate.stage=3 engine=fairscale)"
                f" needs CUDA, and the device is {plan.device_type}. Use --strategy fsdp."
            )
        if plan.precision == "fp64":
            raise ConfigError(
                "fairscale's FullyShardedDataParallel takes fp32 parameters, and "
                "train.precision=fp64 makes others. Use --strategy fsdp."
            )

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Every state in shards, and the parameters whole while they are used.

        The whole parameters are an upper bound of those of the root and of one block, as a
        profile does not know the blocks.
        """
        if plan.dp == 1:
            return forecast
        ranks, states = plan.dp, forecast.states
        bucket_size = self.bucket_size or 25 * MIB
        first = reduce_gradients(profile.passes["first"], ranks, bucket_size)
        return replace(
            forecast.with_passes(first=first),
            states=replace(
                states,
                parameters=states.parameters + states.parameters // ranks,
                optimizer=states.optimizer // ranks,
            ),
            step=scale_timeline(forecast.step, 1 / ranks),
            gradients=forecast.gradients // ranks,
        )

    def apply(self, assembly: Assembly) -> None:
        """Fill in and shard one block after the other, then what is in none."""
        model, context = assembly.model, assembly.context
        if assembly.plan.dp == 1:
            assembly.materialize(names_of(model))
            return
        _refuse_whole_optimizers(assembly.make_optimizer)
        from fairscale.nn.data_parallel import FullyShardedDataParallel

        def shard(unit: nn.Module) -> nn.Module:
            # The pre-hook of what is inside is called when its parameters are whole.
            unit.register_forward_pre_hook(_tell_owner(assembly))
            wrapped: nn.Module = FullyShardedDataParallel(
                unit,
                process_group=context.group(),
                process_group_reduce_scatter=context.group(),  # and no second communicator
                # A root that stays whole after an evaluation would miss what is loaded then.
                disable_reshard_on_root=False,
                flatten_parameters=False,
                bucket_cap_mb=(self.bucket_size or 25 * MIB) // MIB,
                compute_device=context.device,
                # Autocast keeps bf16 copies of all parameters until the forward pass is over.
                clear_autocast_cache=assembly.plan.precision == "bf16",
            )
            return wrapped

        places = {id(module): name for name, module in model.named_modules()}
        wrapped = {}
        for _, unit in independent_blocks(model):
            path = places[id(unit)]
            assembly.materialize([f"{path}.{name}" for name in names_of(unit)])
            wrapped[path] = shard(unit)
        assembly.materialize(names_of(model))
        # Put in place when all is filled in: from here on the names are fairscale's.
        for path, module in wrapped.items():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, module)
        assembly.module = shard(model)
        assembly.update = FlatShardUpdate(assembly)
        assembly.runner = FullyShardedRunner


class FlatShardUpdate(OwnedUpdate):
    """The job's optimizer on a stretch of every parameter, in one dimension."""

    def __init__(self, assembly: Assembly) -> None:
        self._group = assembly.context.group()
        self._rank, self._ranks = assembly.context.rank, assembly.context.world_size
        self.parameters = {n: p for n, p in plain_names(assembly.model) if p.requires_grad}
        self.optimizer = assembly.make_optimizer(list(self.parameters.values()))

    def step(self) -> None:
        """See `Update.step`."""
        self.optimizer.step()

    def gradients(self) -> dict[str, TensorSource]:
        """See `OwnedUpdate.gradients`."""
        return {
            name: self.source(parameter.grad, parameter)
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }

    def state(self) -> dict[str, TensorSource]:
        """See `Update.state`."""
        sources = {}
        for name, parameter in self.parameters.items():
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    sources[f"{name}.{key}"] = self.source(value, parameter)
        return sources

    def source(self, value: Tensor, parameter: nn.Parameter) -> TensorSource:
        """The whole tensor of which `value` is the stretch, or `value` where it is a number."""
        if value.shape != parameter.shape or not value.dim():
            return TensorSource(value.dtype, tuple(value.shape), lambda: value.detach())
        size = whole_size(parameter)

        def read() -> Tensor:
            pieces = [torch.empty_like(value) for _ in range(self._ranks)]
            dist.all_gather(pieces, value.detach().contiguous(), group=self._group)
            return torch.cat(pieces)[: size.numel()].view(size)

        return TensorSource(value.dtype, tuple(size), read)

    def stretch(self, value: Tensor, parameter: Tensor) -> Tensor:
        """The part of a whole tensor that this rank has, zeros after its end."""
        length = parameter.numel()
        result = torch.zeros(length, dtype=value.dtype, device=parameter.device)
        own_part = value.reshape(-1)[self._rank * length : (self._rank + 1) * length]
        result[: own_part.numel()].copy_(own_part)
        return result

    def load_state(self, name: str, key: str, value: Tensor) -> None:
        """See `Update.load_state`."""
        parameter = self.parameters[name]
        if is_elementwise(key, value, whole_size(parameter)):
            self.optimizer.state[parameter][key] = self.stretch(value, parameter)
            return
        device = parameter.device if steps_on_device(self.optimizer) else value.device
        self.optimizer.state[parameter][key] = value.to(device, copy=True)


class FullyShardedRunner(ShardedGradients):
    """The plain loop, whose weights are read and written as stretches of parameters."""

    def state(self) -> dict[str, TensorSource]:
        """See `Runner.state`."""
        update = self._stretches()
        sources = {}
        for name, tensor in self._tensors().items():
            if isinstance(tensor, nn.Parameter):
                sources[f"model.{name}"] = update.source(tensor.data, tensor)
            else:
                kind = (tensor.dtype, tuple(tensor.shape))
                sources[f"model.{name}"] = TensorSource(*kind, tensor.detach)
        return sources | {f"optimizer.{key}": source for key, source in update.state().items()}

    def load_state(self, read: Callable[[str], Tensor], names: Iterable[str]) -> None:
        """See `Runner.load_state`."""
        update, tensors, stored = self._stretches(), self._tensors(), sorted(set(names))
        wanted = {f"model.{name}" for name in tensors}
        missing = sorted(wanted.symmetric_difference(n for n in stored if n.startswith("model.")))
        if missing:
            raise CheckpointError(
                f"the checkpoint does not fit this model: {missing[0]} is in one of them only. "
                "Use the model.name and model.args it was saved with."
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                value, size = read(f"model.{name}"), whole_size(tensor)
                if value.shape != size:
                    raise CheckpointError(
                        f"{name} has shape {tuple(value.shape)} in the checkpoint and "
                        f"{tuple(size)} in the model. Use the model.args it was saved with."
                    )
                is_parameter = isinstance(tensor, nn.Parameter)
                tensor.copy_(update.stretch(value, tensor) if is_parameter else value)
        for full in (name for name in stored if name.startswith("optimizer.")):
            name, _, key = full.removeprefix("optimizer.").rpartition(".")
            if name not in update.parameters:
                raise CheckpointError(f"the checkpoint has a state for {name!r}, the model has not")
            update.load_state(name, key, read(full))

    def _stretches(self) -> FlatShardUpdate:
        if not isinstance(self._update, FlatShardUpdate):
            raise TypeError("FullyShardedRunner runs on a StretchUpdate only")
        return self._update

    def _tensors(self) -> Mapping[str, Tensor]:
        """Parameters, under each of their names, and the buffers that are saved."""
        tensors: dict[str, Tensor] = dict(plain_names(self.module, remove_duplicate=False))
        for path, module in self.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    tensors[plain_name(f"{path}.{name}".lstrip("."))] = buffer
        return tensors


def plain_names(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters under the names that they had before fairscale wrapped the blocks."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield plain_name(name), parameter


def _tell_owner(assembly: Assembly) -> Callable[..., None]:
    def own(module: nn.Module, _inputs: Any) -> None:
        assembly.meter.label(module.parameters(), "parameters")

    return own


def _refuse_whole_optimizers(make_optimizer: MakeOptimizer) -> None:
    kind = type(make_optimizer([nn.Parameter(torch.zeros(1))])).__name__
    if kind not in ELEMENTWISE_OPTIMIZERS:
        raise ConfigError(
            f"fairscale's FullyShardedDataParallel gives the optimizer stretches of parameters, "
            f"and {kind} may need whole ones. Use --strategy zero1_torch."
        )
