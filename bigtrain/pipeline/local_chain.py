"""Run all stages of a cut model in one process, one after the other, each on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.cutting.stage import Stage
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.tensors.not_a_child import NotAChild
from bigtrain.tensors.tree import map_tensors, tree_tensors


class StageChain(nn.Module):
    """A module that calls the stages in order and copies boundary tensors from device to device.

    It has the parameters, buffers and modules of `model` under the same names.

    Args:
        stages: the stages of the whole model. Their parameters and buffers are moved to the
            devices.
        devices: the device of each stage.
        model: the whole model, with the parameters and buffers of the stages.

    Raises:
        ConfigError: a parameter is used on two devices.
    """

    def __init__(
        self, stages: Sequence[Stage], devices: Sequence[torch.device], model: nn.Module
    ) -> None:
        super().__init__()
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._modules = model._modules
        self._stages, self._devices = tuple(stages), tuple(devices)
        self._model = NotAChild(model)
        device_of: dict[int, tuple[str, torch.device]] = {}
        for stage, device in zip(stages, devices, strict=True):
            for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
                known_name, known_device = device_of.setdefault(id(tensor), (name, device))
                if known_device != device:
                    raise ConfigError(
                        f"strategy.cut: {known_name!r} is used on {known_device} and, as {name!r}, "
                        f"on {device}. Untie it in the model, or cut over ranks: leave "
                        "strategy.cut.devices out."
                    )
                tensor.data = tensor.data.to(device)
            stage.to_device(device)

    def train(self, mode: bool = True) -> StageChain:  # noqa: FBT001, FBT002 - as nn.Module has it
        """See `nn.Module.train`."""
        super().train(mode)
        for stage in self._stages:
            stage.train(mode)
        return self

    def follow_mode(self) -> None:
        """Set the stages to the mode (train or eval) that the user has set on `model`."""
        for stage in self._stages:
            if stage.training is not self._model.module.training:
                self.train(self._model.module.training)
                break

    def forward(self, inputs: Any) -> Any:
        """Return the model's output, on the device of the first input tensor."""
        self.follow_mode()
        input_tensors = tree_tensors(inputs)
        output_device = input_tensors[0].device if input_tensors else self._devices[0]
        boundary: Any = ()
        for stage, device in zip(self._stages, self._devices, strict=True):

            def move(tensor: Tensor, to: torch.device = device) -> Tensor:
                return tensor.to(to, non_blocking=True)

            batch = MicroBatch(
                map_tensors(inputs, move), None, 1, len(input_tensors[0]) if input_tensors else 0
            )
            boundary = stage(*map_tensors(boundary, move), micro_batch=batch)
        return map_tensors(boundary, lambda tensor: tensor.to(output_device))
