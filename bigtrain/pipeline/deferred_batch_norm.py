"""BatchNorm over micro-batches: running statistics of the whole batch, updated once a step.

Each micro-batch is normalised by its own statistics, because the other micro-batches are not
computed yet. The running statistics, which evaluation uses, are updated with the mean and variance
over all micro-batches of a step.

Source: torchgpipe (Kim et al. 2020, arXiv 2004.09910), section 2.2.3, deferred batch norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class DeferredBatchNorm:
    """Delays the update of the running statistics of BatchNorm modules until `commit`.

    Args:
        modules: the stages of a rank, whose BatchNorm modules get hooks.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules_by_id = {id(m): m for module in modules for m in module.modules()}
        self._seen = [
            _BatchNormSums(m)
            for m in modules_by_id.values()
            if isinstance(m, _NormBase) and _tracks(m)
        ]

    def commit(self) -> None:
        """Update the running statistics with all inputs since the last call."""
        for seen in self._seen:
            seen.commit()


class _BatchNormSums:
    """Sums over the inputs of one BatchNorm module, in float64 on the device of the inputs."""

    def __init__(self, norm: _NormBase) -> None:
        self._norm = norm
        self._momentum = norm.momentum
        self._tracked: Tensor | None = None
        self._sums: tuple[int, Tensor, Tensor] | None = None
        norm.register_forward_pre_hook(self._before)
        norm.register_forward_hook(self._after, always_call=True)

    def _before(self, norm: Any, inputs: tuple[Any, ...]) -> None:
        # A pass without a counter is a recomputation; the first pass has counted the same inputs.
        if not norm.training or norm.num_batches_tracked is None:
            return
        with torch.no_grad():
            values = inputs[0].detach().double()
            dims = [dim for dim in range(values.dim()) if dim != 1]
            sums, squares = values.sum(dims), values.square().sum(dims)
            count = values.numel() // values.shape[1]
        if self._sums is not None:
            before = self._sums
            count, sums, squares = before[0] + count, before[1] + sums, before[2] + squares
        self._sums = (count, sums, squares)
        self._momentum, norm.momentum = norm.momentum, 0.0
        self._tracked = norm._buffers["num_batches_tracked"]
        norm._buffers["num_batches_tracked"] = None

    def _after(self, norm: Any, _inputs: Any, _output: Any) -> None:
        if self._tracked is not None:
            norm.momentum = self._momentum
            norm._buffers["num_batches_tracked"] = self._tracked
            self._tracked = None

    @torch.no_grad()
    def commit(self) -> None:
        if self._sums is None:
            return
        norm: Any = self._norm
        count, sums, squares = self._sums
        self._sums = None
        mean = sums / count
        variance = (squares - count * mean.square()) / max(1, count - 1)  # unbiased, as torch's
        norm.num_batches_tracked.add_(1)
        factor = norm.momentum
        if factor is None:
            factor = 1.0 / float(norm.num_batches_tracked)
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), factor)
        norm.running_var.lerp_(variance.to(norm.running_var.dtype), factor)


def has_running_statistics(model: nn.Module) -> bool:
    """Whether a model has a BatchNorm or an InstanceNorm with running statistics."""
    return any(_tracks(module) for module in model.modules())


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.num_batches_tracked is not None
