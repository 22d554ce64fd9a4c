"""How an optimizer is put to the parameters, and how its whole state is read and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from bigtrain.optim.whole import MakeOptimizer as MakeOptimizer
from bigtrain.optim.whole import WholeOptimizer
from bigtrain.tensors.shards import (
    SavedTensor,
    StateTensor,
    as_dtensor_like,
    local_tensor,
    read_like,
    read_whole,
)


class Update(Protocol):
    """The optimizer of one rank, and the way from and to its whole state."""

    optimizer: torch.optim.Optimizer
    """Whose learning rates are set."""

    def step(self) -> None:
        """Update the parameters by their gradients."""

    def resident_tensors(self) -> Iterable[Tensor]:
        """The tensors of the state that this rank holds in memory, fp32 copies included."""

    def state(self) -> dict[str, StateTensor]:
        """What this rank holds of the state, as `NAME.KEY`."""

    def masters(self) -> dict[str, StateTensor]:
        """The fp32 values of the parameters that are computed with in less, or in shards."""

    def load_state(self, name: str, key: str, saved: SavedTensor) -> None:
        """Take over what this rank holds of one tensor of the state."""

    def load_master(self, name: str, saved: SavedTensor) -> None:
        """Take over what this rank holds of a parameter's fp32 values, where a copy is kept."""

    def close(self) -> None:
        """Let go of files and threads."""


class WholeUpdate:
    """The optimizer on the parameters themselves, sharded (as DTensors) or not."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], make_optimizer: MakeOptimizer
    ) -> None:
        whole = WholeOptimizer.of(make_optimizer, parameters)
        self._stand_ins = _stand_ins(parameters)
        self._parameters = {**parameters, **self._stand_ins}
        self._beside = {name: parameters[name] for name in self._stand_ins}
        self.optimizer = whole.put_on({name: [p] for name, p in self._parameters.items()})

    def step(self) -> None:
        """See `Update.step`."""
        for name, parameter in self._beside.items():
            gradient, own = parameter.grad, self._stand_ins[name]
            own.grad = None if gradient is None else as_dtensor_like(gradient, own)
        self.optimizer.step()
        for own in self._stand_ins.values():
            own.grad = None

    def resident_tensors(self) -> Iterable[Tensor]:
        """See `Update.resident_tensors`."""
        return optimizer_tensors(self.optimizer)

    def state(self) -> dict[str, StateTensor]:
        """See `Update.state`."""
        tensors = {}
        for name, parameter in self._parameters.items():
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    tensors[f"{name}.{key}"] = StateTensor.of(value)
        return tensors

    def masters(self) -> dict[str, StateTensor]:
        """See `Update.masters`."""
        return {}

    def load_state(self, name: str, key: str, saved: SavedTensor) -> None:
        """See `Update.load_state`."""
        parameter = self._parameters[name]
        if is_elementwise(key, saved, parameter.shape):
            # In the parameter's own order in memory, which kernels go through side by side, and in
            # its type, but for optimizers that bring their state to the type they want.
            own_values = local_tensor(parameter).detach()
            keeps_dtype = hasattr(self.optimizer, "state_keys") or not saved.dtype.is_floating_point
            loaded = torch.empty_like(
                own_values, dtype=saved.dtype if keeps_dtype else own_values.dtype
            )
            loaded.copy_(read_like(saved, parameter))
            self.optimizer.state[parameter][key] = as_dtensor_like(loaded, parameter)
            return
        # A step count is on the host, but for the kernels that read it on the device.
        device = local_tensor(parameter).device if steps_on_device(self.optimizer) else "cpu"
        self.optimizer.state[parameter][key] = read_whole(saved).to(device)

    def load_master(self, name: str, saved: SavedTensor) -> None:
        """See `Update.load_master`."""

    def close(self) -> None:
        """See `Update.close`."""


def _stand_ins(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """What is whole beside shards, as DTensors on the same memory.

    torch's kernels for many tensors take no DTensors and plain tensors in one call.
    """
    shard = next((p for p in parameters.values() if isinstance(p, DTensor)), None)
    if shard is None:
        return {}
    mesh = shard.device_mesh
    whole = [Replicate()] * mesh.ndim
    return {
        name: nn.Parameter(DTensor.from_local(p.detach(), mesh, whole, run_check=False))
        for name, p in parameters.items()
        if not isinstance(p, DTensor)
    }


_ONCE = ("step", "mu_product", "eta", "mu")
"""What torch's optimizers keep once for a parameter, as a number."""


def is_elementwise(key: str, value: Tensor | SavedTensor, shape: tuple[int, ...]) -> bool:
    """Whether a slot of the state has a number for each element of a parameter of this shape.

    The shapes alone do not tell for a parameter that is one number without dimensions.
    """
    return tuple(value.shape) == tuple(shape) and (len(shape) > 0 or key not in _ONCE)


def bytes_per_parameter_byte(make_optimizer: MakeOptimizer) -> float:
    """Bytes held for each byte of a parameter: itself, its gradient, the optimizer's state."""
    return 2.0 + sum(state_bytes_by_slot(make_optimizer, side=64).values()) / 4


def state_bytes_per_parameter_byte(make_optimizer: MakeOptimizer) -> float:
    """Bytes of state for each byte of an fp32 parameter, found out by one step on a few numbers."""
    return sum(state_bytes_by_slot(make_optimizer).values()) / 4


def state_bytes_by_slot(make_optimizer: MakeOptimizer, side: int = 32) -> dict[str, float]:
    """Bytes of each slot of the state for each number of an fp32 matrix; step counts left out."""
    parameter = nn.Parameter(torch.zeros(side, side))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer([parameter])
    optimizer.step()
    slots = optimizer.state.get(parameter, {}).items()
    return {
        key: value.numel() * value.element_size() / parameter.numel()
        for key, value in slots
        if isinstance(value, Tensor) and value.numel() > 1
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """The tensors of an optimizer's state."""
    for slots in optimizer.state.values():
        yield from (value for value in slots.values() if isinstance(value, Tensor))


def steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step counts live on the device: the kernels that read them there."""
    return bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))
