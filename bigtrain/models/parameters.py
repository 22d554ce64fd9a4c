"""The parameters and buffers of a model by name, and the names of bf16 parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


def first_named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, then the buffers, by name; a tied tensor has only its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, then the buffers, by name; a tied tensor has each of its names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def names_of(model: nn.Module) -> list[str]:
    """Return the first name of every parameter, then of every buffer."""
    return [*(n for n, _ in model.named_parameters()), *(n for n, _ in model.named_buffers())]


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of the whole parameter; DeepSpeed's stage 3 empties it between its uses."""
    return getattr(parameter, "ds_shape", parameter.shape)


def bf16_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of fp32 parameters that layers can use in bf16, including frozen parameters.

    The parameters of BatchNorm and InstanceNorm stay in fp32: their running statistics are fp32,
    and the kernels take no mixture of dtypes.
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
"""The attribute of a module with the names of its own left-out parameters. As an attribute, it is
copied with the module."""


def leave_out(model: nn.Module, name: str) -> None:
    """Freeze a parameter on which the loss does not depend, and record its name in the module."""
    model.get_parameter(name).requires_grad_(False)
    owner, _, own_name = name.rpartition(".")
    module = model.get_submodule(owner)
    setattr(module, _LEFT_OUT, getattr(module, _LEFT_OUT, frozenset()) | {own_name})


def forget_left_out(model: nn.Module) -> None:
    """Remove the names that `leave_out` recorded; `requires_grad` is not changed."""
    for module in model.modules():
        vars(module).pop(_LEFT_OUT, None)


def left_out_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that `leave_out` froze.

    These parameters have fp32 values if trained parameters have fp32 values: a run may train them
    after all, and a checkpoint has their values unrounded.
    """
    return {
        f"{name}.{own_name}" if name else own_name
        for name, module in model.named_modules()
        for own_name in getattr(module, _LEFT_OUT, ())
    }


def low_names(model: nn.Module, *, bf16_parameters: bool, frozen_in_bf16: bool) -> list[str]:
    """Return the names of the parameters that layers have in bf16.

    With `bf16_parameters`, these are all parameters of `bf16_parameter_names`. Otherwise, with
    `frozen_in_bf16`, they are the frozen weights that autocast would convert at each use (linear
    and convolution layers): nothing updates a frozen parameter, so it needs no fp32 value, and the
    results are the same. Frozen parameters of other layers, such as norms and embeddings, are used
    in fp32 and stay in fp32, and so do the parameters of `left_out_names`.

    Args:
        model: the model; its parameters have the `requires_grad` of the run.
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
        model: the model; its parameters have the `requires_grad` of the run.
        bf16_parameters: see `Plan.bf16_parameters`.
        cast_when_gathered: see `Plan.casts_when_gathered`. If it is true, the parameters of
            `left_out_names` have fp32 values.
    """
    names = low_names(model, bf16_parameters=bf16_parameters, frozen_in_bf16=True)
    wide = left_out_names(model) if cast_when_gathered else set[str]()
    return [n for n in names if n not in wide and not model.get_parameter(n).requires_grad]


def _converted(model: nn.Module) -> set[str]:
    """Return the names of frozen parameters of layers whose weights autocast converts.

    Parameters that other modules use too are not among them.
    """
    elsewhere = {
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if not _is_autocast(module)
    }
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):  # reads the weights without calling the layer
            elsewhere.update(map(id, module.parameters()))
    return {
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and id(parameter) not in elsewhere
    }


def _is_autocast(module: nn.Module) -> bool:
    is_conv1d = type(module).__module__ == "transformers.pytorch_utils"
    return isinstance(module, _AUTOCAST_LAYERS) or is_conv1d
