"""Parameters and buffers of a model by name, and which of them are bf16."""

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


_AUTOCAST_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


_LEFT_OUT = "_bigtrain_left_out"
"""The attribute of a module that names its own left-out parameters; copies of a model have it."""


def leave_out(model: nn.Module, name: str) -> None:
    """Freeze a parameter because the loss does not reach it, and remember that."""
    model.get_parameter(name).requires_grad_(False)
    owner, _, own_name = name.rpartition(".")
    module = model.get_submodule(owner)
    setattr(module, _LEFT_OUT, getattr(module, _LEFT_OUT, frozenset()) | {own_name})


def forget_left_out(model: nn.Module) -> None:
    """Remove what `leave_out` has noted; `requires_grad` stays."""
    for module in model.modules():
        vars(module).pop(_LEFT_OUT, None)


def left_out_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that are frozen only because the loss does not reach them.

    They keep fp32 values where trained parameters do: a run may train them after all, and a
    checkpoint has their values unrounded.
    """
    return {
        f"{name}.{own_name}" if name else own_name
        for name, module in model.named_modules()
        for own_name in getattr(module, _LEFT_OUT, ())
    }


def low_names(model: nn.Module, *, bf16_parameters: bool, frozen_in_bf16: bool) -> list[str]:
    """Return the names of parameters that layers have in bf16.

    Nothing updates a frozen parameter, so it needs no fp32 value. Where autocast converts weights
    at each use, frozen ones of the layers that it does this for are bf16 all the time: the numbers
    are the same. Others, such as those of norms and embeddings, are used in fp32 there, and so are
    those of `left_out_names`.

    Args:
        model: with `requires_grad` of its parameters as in the run.
        bf16_parameters: see `Plan.bf16_parameters`.
        frozen_in_bf16: see `Plan.frozen_in_bf16`.
    """
    if bf16_parameters:
        return bf16_parameter_names(model)
    if not frozen_in_bf16:
        return []
    converted = _converted(model) - left_out_names(model)
    return [name for name in bf16_parameter_names(model) if name in converted]


def frozen_low_names(
    model: nn.Module, *, bf16_parameters: bool, cast_when_gathered: bool
) -> list[str]:
    """Return the names of frozen parameters that have no fp32 value; see `low_names`.

    Args:
        model: with `requires_grad` of its parameters as in the run.
        bf16_parameters: see `Plan.bf16_parameters`.
        cast_when_gathered: see `Plan.casts_when_gathered`; those of `left_out_names` are fp32 then.
    """
    names = low_names(model, bf16_parameters=bf16_parameters, frozen_in_bf16=True)
    wide = left_out_names(model) if cast_when_gathered else set[str]()
    return [n for n in names if n not in wide and not model.get_parameter(n).requires_grad]


def _converted(model: nn.Module) -> set[str]:
    """The names of frozen parameters that only layers use whose weights autocast converts."""
    elsewhere = {
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if not _is_autocast(module)
    }
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):  # it reads its layers' weights itself
            elsewhere.update(map(id, module.parameters()))
    return {
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and id(parameter) not in elsewhere
    }


def _is_autocast(module: nn.Module) -> bool:
    is_conv1d = type(module).__module__ == "transformers.pytorch_utils"
    return isinstance(module, _AUTOCAST_LAYERS) or is_conv1d
