"""Parameters and buffers of a model by name, and which of them may be bf16."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


def first_named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, then buffers; a tied tensor once, under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, then buffers; a tied tensor under each of its names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def names_of(model: nn.Module) -> list[str]:
    """Return the first name of every parameter and buffer."""
    return [*(n for n, _ in model.named_parameters()), *(n for n, _ in model.named_buffers())]


def bf16_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of fp32 parameters that layers can use in bf16, frozen ones included.

    Parameters of BatchNorm and similar norms are not among them: their running statistics stay in
    fp32, and the kernels take no mixture of dtypes.
    """
    in_norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _NormBase)
        for parameter in module.parameters(recurse=False)
    }
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.float32 and id(parameter) not in in_norms
    ]
