"""Modules with few values, and all values of a module by name, for tests of initial weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a model by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def have_equal_values(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors have the same names and the same bits."""
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


class One(nn.Module):
    """A module with the parameters or buffers that a function adds to it."""

    def __init__(self, make: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        make(self)


def module_with_buffer(tensor: Callable[[], torch.Tensor]) -> Callable[[], nn.Module]:
    """A constructor of a module with one buffer, `x`."""
    return lambda: One(lambda module: module.register_buffer("x", tensor()))
