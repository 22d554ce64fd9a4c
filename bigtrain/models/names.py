"""Giving a described model its values on this rank: all of them, or a piece at a time."""

from __future__ import annotations

from torch import Tensor, nn


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tied tensor under each of its names."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def names_of(model: nn.Module) -> list[str]:
    """The first name of every parameter and buffer."""
    return [*(n for n, _ in model.named_parameters()), *(n for n, _ in model.named_buffers())]
