"""Images with their channels last in memory, which convolutions on GPUs work on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_BY_DIMENSIONS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(tensor: Tensor) -> Tensor:
    """The same numbers, of a batch of images or videos laid so; any other tensor as it is."""
    order = _BY_DIMENSIONS.get(tensor.dim())
    return tensor if order is None else tensor.contiguous(memory_format=order)


def set_channels_last(model: nn.Module) -> None:
    """Lay the weights of convolutions so, in place and one at a time."""
    for parameter in model.parameters():
        if parameter.dim() in _BY_DIMENSIONS:
            parameter.data = channels_last(parameter.data)
