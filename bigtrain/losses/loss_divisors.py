"""The divisors of torch's own losses, from the arguments of their calls."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from bigtrain.losses.loss_trace import Call, Node

BY_TARGET = tuple(
    getattr(F, name)
    for name in ("cross_entropy", "nll_loss", "linear_cross_entropy")
    if hasattr(F, name)  # torch has the last one since 2.14
)
"""Losses that divide by the number of targets that are not ignored."""


class ValidTargets:
    """Counts targets that are not ignored, each with the weight of its class."""

    def __init__(self, ignored: int) -> None:
        self._ignored = ignored

    def __call__(self, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the count as a 0-dim fp64 tensor.

        Args:
            target: labels of any shape.
            weights: the weights of the classes; None for equal weights.
        """
        valid = target != self._ignored
        if weights is None:
            return valid.sum(dtype=torch.float64)
        each = weights[target.where(valid, torch.zeros_like(target))]
        return (each * valid).sum(dtype=torch.float64)


def is_labels(target: Node) -> bool:
    """Whether targets are class indices, not probabilities."""
    return not (target.dtype.is_floating_point or target.dtype.is_complex)


def bound_arguments(call: Call) -> dict[str, Any]:
    """Return the arguments of a call by name, with nodes in place of tensors.

    Args:
        call: a call of a Python function, which has a signature.
    """
    args, kwargs = tree_unflatten(call.leaves, call.spec)
    bound = inspect.signature(call.func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def reduction_of(call: Call) -> str | None:
    """Return the reduction of a call of a loss in `torch.nn.functional`; None for other calls."""
    func = call.func
    if getattr(func, "__module__", None) != F.__name__ or not inspect.isfunction(func):
        return None
    if "reduction" not in inspect.signature(func).parameters:
        return None
    arguments = bound_arguments(call)
    average, reduce = arguments.get("size_average"), arguments.get("reduce")
    if average is not None or reduce is not None:  # deprecated in favour of `reduction`
        if reduce is False:
            return "none"
        return "sum" if average is False else "mean"
    return str(arguments["reduction"])


def number_of_values(call: Call, arguments: Mapping[str, Any], reduction: str) -> float:
    """Return the divisor of a mean loss of torch, as far as it depends only on shapes.

    Targets of the value `ignore_index` and weights are not taken into account.

    Args:
        call: a call of a loss of torch.
        arguments: the result of `bound_arguments`.
        reduction: the result of `reduction_of`.
    """
    first = call.nodes[0]
    if call.func is F.ctc_loss:
        return float(first.shape[1]) if len(first.shape) == 3 else 1.0
    if reduction == "batchmean":
        return float(first.shape[0])
    if call.func in BY_TARGET:
        target = arguments["target"]
        if not is_labels(target):  # probabilities: one for each class
            return float(target.size / target.shape[1 if len(target.shape) > 1 else 0])
        return float(target.size)
    if call.func in (F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss):
        return float(first.shape[0]) if len(first.shape) > 1 else 1.0
    if call.func in (F.triplet_margin_loss, F.triplet_margin_with_distance_loss):
        return first.size / first.shape[-1]
    if call.func is F.cosine_embedding_loss:
        return float(first.shape[0]) if len(first.shape) > 1 else 1.0
    shapes = [node.shape for node in call.nodes]
    broadcast: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return float(broadcast.numel())
