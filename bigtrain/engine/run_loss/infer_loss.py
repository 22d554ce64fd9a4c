"""Infer the loss of a run whose job and data name neither a loss nor a task.

If the model's output contains a loss, this loss is used. Otherwise integer targets are taken for
classes (cross entropy), and floating-point targets of the output's shape for values (mean squared
error).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.losses.loss import CrossEntropy, Loss, as_loss, main_logits
from bigtrain.tensors.fake import fake_model, run_without_numbers


def infer_loss(name: str, model: nn.Module, example: MicroBatch) -> tuple[Loss, str]:
    """Infer a loss from the shapes and dtypes of targets and outputs.

    Args:
        name: the key `data.name`, for the messages.
        model: a model on any device, including the meta device. A copy runs once on fake tensors.
        example: one micro-batch; only its shapes and dtypes matter.

    Returns:
        The loss, and a line on the choice.

    Raises:
        ConfigError: no loss follows from targets and outputs, or the model does not run on fake
            tensors.
    """
    way_out = (
        "Give Data(..., loss=...), a mean loss of (output, targets), or set "
        "model.loss=package.module:function."
    )
    begin = f"data.name={name} names no task and no loss"
    try:
        output = run_without_numbers(lambda device: _output(model, example, device))
    except Exception as error:  # noqa: BLE001 - user code of any kind runs here
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{begin}, and the model does not run on fake tensors, so its output is not known "
            f"({type(error).__name__}: {first}). {way_out}"
        ) from None
    if own_loss(output) is not None:
        return as_loss(own_loss), f"loss: the model's own (output.loss), as {begin}"
    targets = example.targets
    try:
        logits = main_logits(output)
    except ConfigError:
        logits = None
    if not isinstance(targets, Tensor) or logits is None:
        kinds = f"targets are a {type(targets).__name__}, the output a {type(output).__name__}"
        raise ConfigError(f"{begin}; {kinds}, which do not determine a loss. {way_out}")
    shapes = (
        f"targets {tuple(targets.shape)} of {_short(targets.dtype)}, outputs {tuple(logits.shape)}"
    )
    dim = _class_dim(logits, targets)
    if dim is not None:
        return CrossEntropy(class_dim=dim), f"loss: cross entropy, as {begin}: {shapes}"
    if targets.is_floating_point() and targets.shape == logits.shape:
        return as_loss(F.mse_loss), f"loss: mean squared error, as {begin}: {shapes}"
    raise ConfigError(f"{begin}; {shapes} do not determine a loss. {way_out}")


def own_loss(output: Any, _targets: Any = None) -> Any:
    """Return the loss in a model's output, a tensor without dims; None if there is none."""
    loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


def _output(model: nn.Module, example: MicroBatch, device: torch.device) -> Any:
    with torch.no_grad():
        return fake_model(model, device, double=False).train()(example.fake(device).inputs)


def _class_dim(logits: Tensor, targets: Tensor) -> Any:
    """Return the class dim of the logits for integer targets; None if there is none."""
    if targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool:
        return None
    shape = tuple(logits.shape)
    if logits.dim() == targets.dim() + 1:
        if shape[:-1] == tuple(targets.shape):
            return -1
        if (shape[0], *shape[2:]) == tuple(targets.shape):
            return 1
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
