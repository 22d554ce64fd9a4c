"""Replicas that average gradients: torch's DistributedDataParallel, or once after all is done."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigtrain.errors import ConfigError
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.dtensors import flat_view
from bigtrain.units import MIB

# torch 2.15 gave the option a new name, and warns of the old one.
_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def wrap_ddp(
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


class LastMicroBatchSync:
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


class GradientAverager:
    """Average gradients over the dp axis in place, when all micro-batches are through.

    Where a pipeline owns the step: torch's DistributedDataParallel counts on one backward pass
    after each forward pass. Small gradients travel together, large ones as they are.

    Args:
        context: the dp group.
        bucket_size: bytes that are copied together, at most.
        buffers: what follows the first replica's after each step (BatchNorm statistics), as under
            DistributedDataParallel before each forward pass.
    """

    def __init__(
        self, context: RunContext, bucket_size: int = 25 * MIB, buffers: Iterable[Tensor] = ()
    ) -> None:
        self._size, self._group = context.dp_size, context.dp_group
        self._source = context.ranks_of("dp")[0]
        self._bucket_size = bucket_size
        self._buffers = list(buffers)

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Average these; every replica gives as many, of the same shapes."""
        if self._size == 1:
            return
        for bucket in self._buckets(gradients):
            if len(bucket) == 1 and _lies_flat(bucket[0]):
                self._average(flat_view(bucket[0]))
                continue
            together = torch.cat([gradient.reshape(-1) for gradient in bucket])
            self._average(together)
            begin = 0
            for gradient in bucket:
                part = together[begin : begin + gradient.numel()]
                gradient.copy_(part.view(gradient.shape))
                begin += gradient.numel()
        for buffer in self._buffers:
            dist.broadcast(buffer, src=self._source, group=self._group)

    def _average(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)  # gloo cannot average by itself
        tensor /= self._size

    def _buckets(self, gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Neighbours of one type, as many as fit."""
        bucket: list[Tensor] = []
        filled = 0
        for gradient in gradients:
            fits = bucket and bucket[0].dtype == gradient.dtype
            if bucket and not (fits and filled + gradient.nbytes <= self._bucket_size):
                yield bucket
                bucket, filled = [], 0
            bucket.append(gradient)
            filled += gradient.nbytes
        if bucket:
            yield bucket


def _lies_flat(tensor: Tensor) -> bool:
    return flat_view(tensor).data_ptr() == tensor.data_ptr()
