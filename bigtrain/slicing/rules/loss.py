"""Cross entropy of logits that are sliced along the classes: no rank has all classes.

For each target the ranks exchange three numbers: the largest logit, the sum of exponentials and the
target's logit. Label smoothing needs a fourth, the sum of all logits. If the logits are sliced
along the targets instead, each rank computes the losses of its targets.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bigtrain.slicing.exchange import SliceGroup, all_reduce
from bigtrain.slicing.sliced_tensor import SlicedTensor, is_sliced, local_of, rule, whole_of
from bigtrain.slicing.slices import Slices


@rule(F.cross_entropy)
def _cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    old = size_average is not None or reduce is not None
    if not is_sliced(logits) or is_sliced(target) or old or logits.dim() < 2:
        return NotImplemented
    by_classes = logits.slices.dim == 1
    if target.dtype.is_floating_point or (by_classes and len(logits.slices.sections) > 1):
        return NotImplemented
    weight = whole_of(weight)
    if by_classes:
        losses: Any = _by_classes(logits, target, weight, ignore_index, label_smoothing)
    else:
        losses = _by_targets(logits, target, weight, ignore_index, label_smoothing)
    if reduction == "none":
        return losses
    total = losses.sum()  # sliced losses become a whole sum here
    return total / _count(target, weight, ignore_index) if reduction == "mean" else total


def _count(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the divisor of the mean: the number of valid targets, or the sum of their weights."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum()
    return weight[target.masked_fill(~valid, 0)].masked_fill(~valid, 0.0).sum()


def _by_targets(
    logits: SlicedTensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float
) -> SlicedTensor:
    """Return the losses of this rank's targets; the rank has the logits of all their classes."""
    group, dim = logits.group, logits.slices.dim
    target_dim = dim - 1 if dim else 0
    local_targets = logits.slices.at(target_dim).local(target, group.rank, group.size)
    losses = F.cross_entropy(
        local_of(logits),
        local_targets,
        weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=smoothing,
    )
    return logits.like(losses, target_dim)


def _by_classes(
    logits: SlicedTensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float
) -> Tensor:
    """Return the losses of all targets; the classes are sliced."""
    local, group = local_of(logits), logits.group
    if local.dim() > 2:  # (batch, classes, ...) to (targets, classes)
        local = local.movedim(1, -1).reshape(-1, local.shape[1])
    if torch.is_autocast_enabled(local.device.type) and local.dtype != torch.float64:
        local = local.float()
    of = _Targets(logits.slices, group, ignore_index, smoothing, weight)
    losses: Tensor = _Losses.apply(local, target.reshape(-1), of)
    return losses.view(target.shape)


@dataclass(frozen=True)
class _Targets:
    """The arguments of a cross entropy except logits and targets."""

    slices: Slices
    """How the classes are sliced."""
    group: SliceGroup
    ignore_index: int
    smoothing: float
    weight: Tensor | None
    """The weights of all classes, not only of this rank's."""

    @property
    def begin(self) -> int:
        return self.slices.parts(self.group.rank, self.group.size)[0][0]

    @property
    def length(self) -> int:
        return self.slices.length(self.group.rank, self.group.size)

    def own_weights(self) -> Tensor | None:
        return None if self.weight is None else self.weight.narrow(0, self.begin, self.length)

    @property
    def all_weights(self) -> Any:
        """The sum of the weights of all classes; without weights, the number of classes."""
        return self.slices.total if self.weight is None else self.weight.sum()


class _Losses(torch.autograd.Function):
    """Compute each target's loss, equal on all ranks, from logits (targets, local classes).

    For C classes with weights w, logits z, target t, smoothing e and Z = sum_c exp(z_c), the loss
    is (1 - e) w_t (log Z - z_t) + e / C sum_c w_c (log Z - z_c), as in torch.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, of: _Targets) -> Tensor:
        full = torch.promote_types(logits.dtype, torch.float32)
        highest = all_reduce(logits.amax(1).to(full), of.group, dist.ReduceOp.MAX)
        shifted = logits.to(full) - highest.unsqueeze(1)
        ignored = target == of.ignore_index
        local_target = target - of.begin
        elsewhere = (local_target < 0) | (local_target >= of.length) | ignored
        local_target = local_target.masked_fill(elsewhere, 0)
        rows = [shifted.gather(1, local_target.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0.0)]
        if of.smoothing:
            local_weights = of.own_weights()
            rows.append(
                shifted.sum(1) if local_weights is None else shifted @ local_weights.to(full)
            )
        probabilities = shifted.exp_()
        sums = all_reduce(torch.stack([probabilities.sum(1), *rows]), of.group)
        log_total = sums[0].log()
        losses = log_total - sums[1]
        weights = None
        if of.weight is not None:
            weights = of.weight.to(full)[target.masked_fill(ignored, 0)]
            losses = losses * weights
        if of.smoothing:
            even = (log_total * of.all_weights - sums[2]) / of.slices.total
            losses = (1 - of.smoothing) * losses + of.smoothing * even
        probabilities.div_(sums[0].unsqueeze(1))
        ctx.save_for_backward(probabilities, local_target, elsewhere, ignored, weights)
        ctx.of, ctx.dtype = of, logits.dtype
        return losses.masked_fill(ignored, 0.0).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local_target, elsewhere, ignored, weights = ctx.saved_tensors
        of: _Targets = ctx.of
        rows = gradient.to(probabilities.dtype).masked_fill(ignored, 0.0).unsqueeze(1)
        share = of.smoothing / of.slices.total
        local_weights = of.own_weights()
        hit = (~elsewhere).to(probabilities.dtype).mul_(of.smoothing - 1.0)
        if local_weights is None:
            result = probabilities.clone()  # the factors of the target and of all classes sum to 1
        else:
            hit.mul_(weights)
            of_all = (1.0 - of.smoothing) * weights + share * of.all_weights
            result = probabilities * of_all.unsqueeze(1)
        if of.smoothing:
            result.sub_(share if local_weights is None else share * local_weights.to(result.dtype))
        result.scatter_add_(1, local_target.unsqueeze(1), hit.unsqueeze(1))
        return result.mul_(rows).to(ctx.dtype), None, None
