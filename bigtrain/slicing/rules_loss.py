"""Cross entropy of logits whose classes are dealt out to the ranks: no rank has them all.

Of each target three numbers are exchanged: the largest logit, the sum of exponentials, and what
belongs to the target. With label smoothing a fourth, the sum of all log-probabilities: a rank's own
mean would be another number. Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bigtrain.slicing.exchange import SliceGroup, all_reduce
from bigtrain.slicing.sliced_tensor import held, is_sliced, rule
from bigtrain.slicing.slices import Slices


@rule(F.cross_entropy)
def _cross_entropy(
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    old = size_average is not None or reduce is not None
    if not is_sliced(logits) or is_sliced(target) or weight is not None or old:
        return NotImplemented
    if target.dtype.is_floating_point or len(logits.slices.sections) > 1 or logits.dim() < 2:
        return NotImplemented
    if logits.slices.dim != 1:
        return NotImplemented
    local, group = held(logits), logits.group
    if local.dim() > 2:  # (batch, classes, ...) to (targets, classes)
        local = local.movedim(1, -1).reshape(-1, local.shape[1])
    losses = _Losses.apply(
        local, target.reshape(-1), logits.slices, group, ignore_index, label_smoothing
    )
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


class _Losses(torch.autograd.Function):
    """(targets, own classes) to the loss of each target, equal on all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        slices: Slices,
        group: SliceGroup,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        ((begin, length),) = slices.parts(group.rank, group.size)
        highest = all_reduce(logits.amax(1), group, dist.ReduceOp.MAX)
        shifted = logits - highest.unsqueeze(1)
        place = target - begin
        elsewhere = (place < 0) | (place >= length)
        place = place.masked_fill(elsewhere, 0)
        own = shifted.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0.0)
        rows = [own, shifted.sum(1)] if smoothing else [own]
        probabilities = shifted.exp_()
        sums = all_reduce(torch.stack([probabilities.sum(1), *rows]), group)
        log_total = sums[0].log()
        losses = log_total - sums[1]
        if smoothing:
            even = log_total - sums[2] / slices.total
            losses = (1 - smoothing) * losses + smoothing * even
        ignored = target == ignore_index
        probabilities.div_(sums[0].unsqueeze(1))
        ctx.save_for_backward(probabilities, place, elsewhere | ignored, ignored)
        ctx.smoothing, ctx.classes = smoothing, slices.total
        return losses.masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, place, elsewhere, ignored = ctx.saved_tensors
        rows = gradient.masked_fill(ignored, 0.0).unsqueeze(1)
        smoothing = ctx.smoothing
        result = probabilities - smoothing / ctx.classes if smoothing else probabilities.clone()
        hit = (~elsewhere).to(result.dtype) * (smoothing - 1.0)
        result.scatter_add_(1, place.unsqueeze(1), hit.unsqueeze(1))
        return result.mul_(rows), None, None, None, None, None
