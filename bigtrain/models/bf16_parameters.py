"""Which parameters may be computed with in bf16, where the fp32 values are kept elsewhere."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def bf16_parameter_names(model: nn.Module) -> list[str]:
    """The trained and frozen fp32 parameters that layers can use in bf16, by their plain names.

    Not among them are those of BatchNorm and its like: their running statistics stay in fp32,
    and the kernels take no mixture.
    """
    kept = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _NormBase)
        for parameter in module.parameters(recurse=False)
    }
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.float32 and id(parameter) not in kept
    ]
