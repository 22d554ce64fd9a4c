"""torch's DistributedDataParallel around a model, for every technique whose replicas average."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigtrain.distributed import RunContext
from bigtrain.errors import ConfigError
from bigtrain.units import MIB

# torch 2.15 gave the option a new name, and warns of the old one.
_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def wrap(
    module: nn.Module,
    context: RunContext,
    *,
    bucket_size: int = 25 * MIB,
    broadcast_buffers: bool = True,
    **options: Any,
) -> DistributedDataParallel:
    """Wrap a module whose weights are the same on all ranks of the dp axis already.

    Args:
        module: with at least one trained parameter.
        context: the device and the dp group.
        bucket_size: bytes of gradient that are averaged at once.
        broadcast_buffers: whether buffers follow rank 0's at each forward pass.
        options: further arguments of DistributedDataParallel.

    Raises:
        ConfigError: nothing is to be trained.
    """
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigError("the model has no parameter to train: there is nothing to average.")
    settings: dict[str, Any] = {
        "device_ids": [context.device] if context.device.type == "cuda" else None,
        "process_group": context.dp_group,
        "bucket_cap_mb": bucket_size / MIB,
        "gradient_as_bucket_view": True,
        "init_sync": False,
        _BUFFERS: broadcast_buffers,
    }
    return DistributedDataParallel(module, **{**settings, **options})


class Sync:
    """Average gradients on the last micro-batch of a step only.

    The first two steps average on every micro-batch: the average of an average is the same
    number, and the gradients become views of the buckets at once, which are built anew at the
    start of the second step. Without that, accumulating before the first average would hold
    every gradient twice.
    """

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self._wrapped = wrapped
        self._steps = 0

    def __call__(self, last: bool) -> AbstractContextManager[object]:
        """See `Assembly.sync`."""
        warm = self._steps >= 2
        self._steps += last
        if last or not warm or not torch.is_grad_enabled():
            return nullcontext()
        return self._wrapped.no_sync()
