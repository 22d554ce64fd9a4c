"""Batch normalisation over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from bigtrain.errors import ConfigError
from bigtrain.hvd.gathers import allgather_async
from bigtrain.hvd.process_sets import global_process_set
from bigtrain.hvd.reductions import Sum, grouped_allreduce_async
from bigtrain.hvd.session import size


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose mean and variance in training are over all ranks' samples.

    An input is (samples, channels, ...) with any number of further dims. Ranks may have different
    numbers of samples. In evaluation the running statistics are used, if the module has them. CPU
    tensors are supported, too. The arguments are those of `torch.nn.BatchNorm2d`.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's
        if input.dim() < 2:
            raise ConfigError(
                f"hvd.SyncBatchNorm: an input of shape {list(input.shape)} has no channels. Give "
                "[samples, channels, ...]."
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's
        """Normalize by the statistics of all ranks' samples, or by the running statistics.

        Collective in training mode. Also collective in evaluation if the module has no running
        statistics, because the statistics of the batch are then used.

        Args:
            input: (samples, channels, ...); the number of samples may differ between the ranks.

        Raises:
            ConfigError: the input has no channels; or the statistics of the batch are used, and all
                ranks together have at most one value for each channel.
            ValueError: torch's error for the latter, if there is only one rank.
            LaunchError: `init` was not called, and the statistics of the batch are used.
        """
        self._check_input_dim(input)
        of_batch = self.training or self.running_mean is None
        if not of_batch or size() == 1:
            return super().forward(input)
        share = 0.0 if self.momentum is None else self.momentum
        running: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.training and self.track_running_stats:
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if self.momentum is None:
                    share = 1.0 / float(self.num_batches_tracked)
            running = (self.running_mean, self.running_var)
        out: Tensor = _OverRanks.apply(input, self.weight, self.bias, *running, self.eps, share)
        return out


def _in_shape(vector: Tensor, like: Tensor) -> Tensor:
    return vector.reshape(1, -1, *[1] * (like.dim() - 2))


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        samples: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        share: float,
    ) -> Tensor:
        precise = samples.float() if samples.dtype in (torch.half, torch.bfloat16) else samples
        dims = [0, *range(2, samples.dim())]
        count = samples.numel() // max(samples.shape[1], 1)
        if count:
            spread, mean = torch.var_mean(precise, dims, correction=0)
        else:
            spread = mean = precise.new_zeros(samples.shape[1])
        mine = torch.cat([mean.new_tensor([count]), mean, spread])
        everyone = allgather_async(mine[None], "sync_batch_norm").result()
        counts, means, spreads = everyone.split([1, len(mean), len(mean)], dim=1)
        total = counts.sum()
        if total <= 1:
            raise ConfigError(
                f"hvd.SyncBatchNorm: {int(total)} value for each channel on all ranks has no "
                "variance. Give more samples."
            )
        mean = (counts * means).sum(0) / total
        spread = (counts * (spreads + (means - mean) ** 2)).sum(0) / total
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), share)
            unbiased = spread * (total / (total - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), share)
        scale = torch.rsqrt(spread + eps)
        ctx.save_for_backward(samples, weight, mean, scale, total)
        ctx.has_bias = bias is not None
        # The kernel for evaluation normalizes with given statistics: here those of all ranks.
        out = batch_norm(
            precise,
            *(mean, spread),
            None if weight is None else weight.to(precise.dtype),
            None if bias is None else bias.to(precise.dtype),
            training=False,
            eps=eps,
        )
        return out.to(samples.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        samples, weight, mean, scale, total = ctx.saved_tensors
        dims = [0, *range(2, samples.dim())]
        gradient = gradient.to(mean.dtype)
        normal = (samples.to(mean.dtype) - _in_shape(mean, samples)) * _in_shape(scale, samples)
        sums = gradient.sum(dims)
        moments = (gradient * normal).sum(dims)
        d_weight = moments if weight is not None else None
        d_bias = sums if ctx.has_bias else None
        d_samples = None
        if ctx.needs_input_grad[0]:
            handle = grouped_allreduce_async(
                [sums, moments], name="sync_batch_norm", op=Sum, process_set=global_process_set
            )
            all_sums, all_moments = handle.result()
            d_samples = gradient - _in_shape(all_sums / total, samples)
            d_samples -= normal * _in_shape(all_moments / total, samples)
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            d_samples = (d_samples * _in_shape(factor, samples)).to(samples.dtype)
        if d_weight is not None and weight is not None:
            d_weight = d_weight.to(weight.dtype)
            d_bias = None if d_bias is None else d_bias.to(weight.dtype)
        return d_samples, d_weight, d_bias, None, None, None, None
