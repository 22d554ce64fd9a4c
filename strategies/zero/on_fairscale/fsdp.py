"""Stage 3 on fairscale: FullyShardedDataParallel around each block and around the whole model.

fairscale gathers and reduces in CUDA streams, which it creates only on a GPU. So a CPU is
refused. Every parameter is sharded by itself, not in one long vector for each block. So a rank has
a flat slice of each parameter, padded at the end, and the whole state is gathered tensor by tensor
under plain names.
Memory: 16P/N bytes and the parameters of the block that computes; gradients are reduced to slices
after every micro-batch. bf16 is autocast on fp32 parameters, gathered in fp32.
Constraints: CUDA; fp32 parameters; an elementwise optimizer.

Source: fairscale 0.4.13, nn/data_parallel/fully_sharded_data_parallel.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.core.state import check_shapes, load_optimizer
from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.traits import SECOND_BACKWARD, Traits
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.errors import ConfigError
from bigtrain.memory.timeline import scale_timeline
from bigtrain.models.blocks import independent_blocks
from bigtrain.models.parameters import names_of
from bigtrain.optim.update import is_elementwise, steps_on_device
from bigtrain.optim.whole import WholeOptimizer
from bigtrain.strategies.fairscale_adapter import plain_name, whole_size
from bigtrain.strategies.zero.on_fairscale.engine import (
    FairscaleEngine,
    OwnedUpdate,
    ShardedGradients,
)
from bigtrain.strategies.zero.on_fairscale.memory import bucket_mib, reduce_gradients
from bigtrain.tensors.shards import Extent, SavedTensor, StateTensor, read_whole
from bigtrain.units import MIB


class FairscaleFSDP(FairscaleEngine):
    """fairscale's FullyShardedDataParallel, block by block."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return replace(
            super().traits,
            materializes=True,
            optimizer_sees="elements",
            cannot_hold=super().traits.cannot_hold
            | SECOND_BACKWARD
            | {"gradient_hooks", "accumulate_hooks", "writes", "scalars", "strided", "empty"},
        )

    def check(self, plan: Plan) -> None:
        """See `Strategy.check`: refuse CPUs and fp64, too."""
        super().check(plan)
        if plan.device_type != "cuda":
            raise ConfigError(
                "fairscale's FullyShardedDataParallel (strategy.replicate.stage=3 engine=fairscale)"
                f" needs CUDA, and the device is {plan.device_type}. Use --strategy fsdp."
            )
        if plan.precision == "fp64":
            raise ConfigError(
                "fairscale's FullyShardedDataParallel takes fp32 parameters, and the job has "
                "train.precision=fp64. Use --strategy fsdp."
            )

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Shard all states, and add gathered parameters.

        All parameters are added: an upper bound for the parameters of the root and of one block.
        """
        if plan.dp == 1:
            return forecast
        ranks, states = plan.dp, forecast.states
        first = reduce_gradients(profile.passes["first"], ranks, bucket_mib(self) * MIB)
        return replace(
            forecast.with_passes(first=first),
            states=replace(
                states,
                parameters=states.parameters + states.parameters // ranks,
                frozen=states.frozen + states.frozen // ranks,
                optimizer=states.optimizer // ranks,
            ),
            step=scale_timeline(forecast.step, 1 / ranks),
            gradients=forecast.gradients // ranks,
        )

    def apply(self, assembly: Assembly) -> None:
        """Give each block its values and shard it, then do the same for the other layers."""
        model, context = assembly.model, assembly.context
        if assembly.plan.dp == 1:
            assembly.materialize(names_of(model))
            return
        _refuse_whole_optimizers(assembly)
        from fairscale.nn.data_parallel import FullyShardedDataParallel

        def shard(unit: nn.Module) -> nn.Module:
            # The inner module's pre-hook is called after its parameters are gathered.
            unit.register_forward_pre_hook(_label_gathered(assembly))
            wrapped: nn.Module = FullyShardedDataParallel(
                unit,
                process_group=context.group(),
                process_group_reduce_scatter=context.group(),  # no second communicator
                # A root that stays gathered after an evaluation would ignore values loaded later.
                disable_reshard_on_root=False,
                flatten_parameters=False,
                bucket_cap_mb=bucket_mib(self),
                compute_device=context.device,
                # Otherwise autocast holds bf16 copies of all parameters until the end of the
                # forward pass.
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
        # Replaced last, because fairscale's wrappers change the names of parameters.
        for path, module in wrapped.items():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, module)
        assembly.module = shard(model)
        assembly.update = FlatShardUpdate(assembly)
        assembly.runner = FullyShardedRunner


class FlatShardUpdate(OwnedUpdate):
    """An `Update` with the job's optimizer on a flat slice of every parameter."""

    def __init__(self, assembly: Assembly) -> None:
        self._group = assembly.context.group()
        self._rank, self._ranks = assembly.context.rank, assembly.context.world_size
        self.parameters = {n: p for n, p in plain_names(assembly.model) if p.requires_grad}
        whole_optimizer = WholeOptimizer.of(assembly.make_optimizer, self.parameters)
        self.optimizer = whole_optimizer.put_on({n: [p] for n, p in self.parameters.items()})

    def step(self) -> None:
        """See `Update.step`."""
        self.optimizer.step()

    def gradients(self) -> dict[str, StateTensor]:
        """See `OwnedUpdate.gradients`."""
        return {
            name: self.flat_slice(parameter.grad, parameter)
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }

    def state(self) -> dict[str, StateTensor]:
        """See `Update.state`."""
        return {
            f"{name}.{key}": self.flat_slice(value, parameter)
            for name, parameter in self.parameters.items()
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if isinstance(value, Tensor)
        }

    def flat_slice(self, value: Tensor, parameter: nn.Parameter) -> StateTensor:
        """Return this rank's slice of a tensor like the parameter, or all of any other tensor."""
        if value.shape != parameter.shape or not value.dim():
            return StateTensor.of(value)
        extents = self.extents(parameter)
        length = sum(extent.size for extent in extents)
        size = tuple(whole_size(parameter))
        return StateTensor(value.dtype, size, extents, lambda: value.detach()[:length])

    def extents(self, parameter: Tensor) -> tuple[Extent, ...]:
        """Return the extents of a parameter's elements on this rank, without padding."""
        start = self._rank * parameter.numel()
        length = min(parameter.numel(), math.prod(whole_size(parameter)) - start)
        return (Extent(start, length),) if length > 0 else ()

    def load(self, target: Tensor, saved: SavedTensor, parameter: Tensor) -> Tensor:
        """Copy saved values into a flat slice, with zeros as padding; return the slice."""
        values = saved.read(self.extents(parameter))
        target[: len(values)].copy_(values)
        target[len(values) :].zero_()
        return target

    def load_state(self, name: str, key: str, saved: SavedTensor) -> None:
        """See `Update.load_state`."""
        parameter = self.parameters[name]
        if is_elementwise(key, saved, whole_size(parameter)):
            target = torch.empty(parameter.numel(), dtype=saved.dtype, device=parameter.device)
            self.optimizer.state[parameter][key] = self.load(target, saved, parameter)
            return
        device = parameter.device if steps_on_device(self.optimizer) else "cpu"
        self.optimizer.state[parameter][key] = read_whole(saved).to(device)


class FullyShardedRunner(ShardedGradients):
    """A `LoopRunner` that saves and loads this rank's flat slice of each parameter."""

    def state(self) -> dict[str, StateTensor]:
        """See `Runner.state`."""
        update = self._flat_update()
        tensors = {}
        for name, tensor in self._tensors().items():
            if isinstance(tensor, nn.Parameter):
                tensors[f"model.{name}"] = update.flat_slice(tensor.data, tensor)
            else:
                tensors[f"model.{name}"] = replace(StateTensor.of(tensor), replicas_differ=True)
        return tensors | {f"optimizer.{key}": tensor for key, tensor in update.state().items()}

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """See `Runner.load_state`."""
        update, tensors = self._flat_update(), self._tensors()
        check_shapes({n: whole_size(t) for n, t in tensors.items()}, set(tensors), saved)
        with torch.no_grad():
            for name, tensor in tensors.items():
                value = saved[f"model.{name}"]
                if isinstance(tensor, nn.Parameter):
                    update.load(tensor.data, value, tensor)
                else:
                    tensor.copy_(read_whole(value))
        load_optimizer(update, update.parameters, update.parameters, saved)

    def _flat_update(self) -> FlatShardUpdate:
        if not isinstance(self._update, FlatShardUpdate):
            raise TypeError("FullyShardedRunner needs a FlatShardUpdate")
        return self._update

    def _tensors(self) -> Mapping[str, Tensor]:
        """Return the parameters, under each of their names, and the persistent buffers."""
        tensors: dict[str, Tensor] = dict(plain_names(self.module, remove_duplicate=False))
        for path, module in self.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    tensors[plain_name(f"{path}.{name}".lstrip("."))] = buffer
        return tensors


def plain_names(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters under the names that they had before fairscale wrapped the blocks."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield plain_name(name), parameter


def _label_gathered(assembly: Assembly) -> Callable[..., None]:
    def label(module: nn.Module, _inputs: Any) -> None:
        assembly.meter.label(module.parameters(), "parameters")

    return label


def _refuse_whole_optimizers(assembly: Assembly) -> None:
    whole_optimizer = WholeOptimizer.of(assembly.make_optimizer, assembly.trained())
    if not whole_optimizer.kind.elementwise:
        raise ConfigError(
            f"fairscale's FullyShardedDataParallel gives the optimizer slices of parameters, "
            f"and {whole_optimizer.kind_name} needs whole ones. Use --strategy zero1_torch."
        )
