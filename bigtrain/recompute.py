"""Activation checkpointing: computing a forward pass again instead of keeping what it made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint


def recomputed(module: nn.Module, compute: Callable[[], Any]) -> Any:
    """Compute now, keep what goes in, and compute again when the backward pass wants the rest.

    Random numbers are the same the second time, and running statistics do not move again.

    Args:
        module: whose statistics must not follow the second pass.
        compute: the forward pass; what it closes over is kept.

    Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
    """

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), statistics_kept(module)

    return checkpoint(compute, use_reentrant=False, context_fn=contexts)


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """BatchNorm and its like normalise as before, and their running statistics stay."""
    norms = [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    before = [(norm.momentum, norm._buffers.get("num_batches_tracked")) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm._buffers["num_batches_tracked"] = None
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm._buffers["num_batches_tracked"] = tracked
