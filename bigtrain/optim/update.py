"""The optimizer of one rank: its step, and how its state is saved and loaded."""

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
    """The optimizer of one rank, and access to its part of the whole state."""

    optimizer: torch.optim.Optimizer
    """The torch optimizer; learning rates are set in its groups."""

    def step(self) -> None:
        """Update the parameters from their gradients."""

    def resident_tensors(self) -> Iterable[Tensor]:
        """Return the tensors of the state in this rank's memory, including fp32 copies."""

    def state(self) -> dict[str, StateTensor]:
        """Return this rank's elements of the state, under names `NAME.KEY`."""

    def masters(self) -> dict[str, StateTensor]:
        """Return this rank's elements of the fp32 copies of parameters, by parameter name.

        Parameters without a separate fp32 copy are not in the result.
        """

    def load_state(self, name: str, key: str, saved: SavedTensor) -> None:
        """Load this rank's elements of one tensor of the state.

        Args:
            name: the name of the parameter.
            key: the key of the tensor in the parameter's state, such as 'exp_avg'.
            saved: the whole tensor in a checkpoint.
        """

    def load_master(self, name: str, saved: SavedTensor) -> None:
        """Load this rank's elements of a parameter's fp32 copy; do nothing without such a copy.

        Args:
            name: the name of the parameter.
            saved: the whole parameter in a checkpoint.
        """

    def close(self) -> None:
        """Close files, and remove hooks."""


class WholeUpdate:
    """The optimizer on the parameters themselves, which are plain tensors or DTensors.

    Args:
        parameters: the trained parameters of this rank, by name.
        make_optimizer: makes the optimizer.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], make_optimizer: MakeOptimizer
    ) -> None:
        whole_optimizer = WholeOptimizer.of(make_optimizer, parameters)
        self._stand_ins = _stand_ins(parameters)
        self._parameters = {**parameters, **self._stand_ins}
        self._replaced = {name: parameters[name] for name in self._stand_ins}
        self.optimizer = whole_optimizer.put_on({name: [p] for name, p in self._parameters.items()})

    def step(self) -> None:
        """See `Update.step`."""
        for name, parameter in self._replaced.items():
            gradient, stand_in = parameter.grad, self._stand_ins[name]
            stand_in.grad = None if gradient is None else as_dtensor_like(gradient, stand_in)
        self.optimizer.step()
        for stand_in in self._stand_ins.values():
            stand_in.grad = None

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
            # Kernels require the memory order and the dtype of the parameter. Optimizers with
            # `state_keys` convert their state themselves.
            own_values = local_tensor(parameter).detach()
            keeps_dtype = hasattr(self.optimizer, "state_keys") or not saved.dtype.is_floating_point
            loaded = torch.empty_like(
                own_values, dtype=saved.dtype if keeps_dtype else own_values.dtype
            )
            loaded.copy_(read_like(saved, parameter))
            self.optimizer.state[parameter][key] = as_dtensor_like(loaded, parameter)
            return
        # Other tensors are step counts and the like; they are on the host unless kernels read them.
        device = local_tensor(parameter).device if steps_on_device(self.optimizer) else "cpu"
        self.optimizer.state[parameter][key] = read_whole(saved).to(device)

    def load_master(self, name: str, saved: SavedTensor) -> None:
        """See `Update.load_master`."""

    def close(self) -> None:
        """See `Update.close`."""


def _stand_ins(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return DTensors on the memory of the plain parameters, if other parameters are DTensors.

    torch's foreach and fused kernels do not take DTensors and plain tensors in one call.
    """
    shard = next((p for p in parameters.values() if isinstance(p, DTensor)), None)
    if shard is None:
        return {}
    mesh = shard.device_mesh
    placements = [Replicate()] * mesh.ndim
    return {
        name: nn.Parameter(DTensor.from_local(p.detach(), mesh, placements, run_check=False))
        for name, p in parameters.items()
        if not isinstance(p, DTensor)
    }


_ONCE = ("step", "mu_product", "eta", "mu")
"""Keys of the state of torch's optimizers that have one number for each parameter."""


def is_elementwise(key: str, value: Tensor | SavedTensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of the state has an element for each element of a parameter.

    For a 0-dim parameter the shapes cannot decide, so the key decides.

    Args:
        key: the key of the tensor in the parameter's state.
        value: the tensor.
        shape: the shape of the parameter.
    """
    return tuple(value.shape) == tuple(shape) and (len(shape) > 0 or key not in _ONCE)


def bytes_per_parameter_byte(make_optimizer: MakeOptimizer) -> float:
    """Return the bytes of parameter, gradient and state for each byte of an fp32 parameter.

    They are measured by a trial step on a small matrix.
    """
    return 2.0 + sum(state_bytes_by_slot(make_optimizer, side=64).values()) / 4


def state_bytes_per_parameter_byte(make_optimizer: MakeOptimizer) -> float:
    """Return the bytes of state for each byte of an fp32 parameter, measured by a trial step."""
    return sum(state_bytes_by_slot(make_optimizer).values()) / 4


def state_bytes_by_slot(make_optimizer: MakeOptimizer, side: int = 32) -> dict[str, float]:
    """Return the bytes of each tensor of the state for each element of an fp32 parameter, by key.

    They are measured by a trial step. Step counts are left out.

    Args:
        make_optimizer: makes the optimizer.
        side: rows and columns of the matrix for the trial step.
    """
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
    """Yield the tensors of an optimizer's state."""
    for slots in optimizer.state.values():
        yield from (value for value in slots.values() if isinstance(value, Tensor))


def steps_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether step counts are on the device, where fused and capturable kernels read them."""
    return bool(optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))
