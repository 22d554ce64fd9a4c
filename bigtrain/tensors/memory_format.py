"""The order of a tensor's elements in memory: channels last, gaps, and flat views."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_BY_DIMENSIONS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(tensor: Tensor) -> Tensor:
    """Return a batch of images or videos with channels last in memory; any other tensor itself."""
    memory_format = _BY_DIMENSIONS.get(tensor.dim())
    return tensor if memory_format is None else tensor.contiguous(memory_format=memory_format)


def set_channels_last(model: nn.Module) -> None:
    """Convert weights of convolutions (4 or 5 dims) to channels last, in place, one at a time."""
    for parameter in model.parameters():
        if parameter.dim() in _BY_DIMENSIONS:
            parameter.data = channels_last(parameter.data)


def flat_view(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor as a 1-dim tensor.

    Without gaps in memory, the result is a view in memory order. With gaps, it is in row-major
    order: a view if the elements have equal distances, as a column of a matrix, and otherwise a
    copy.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements have no gaps in memory, in any order of dims (such as channels_last)."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
