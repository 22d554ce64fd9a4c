"""Average gradients over replicas: with DistributedDataParallel, or once after all passes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigtrain.core.participation import GradientUse
from bigtrain.core.strategy import Assembly
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.memory_format import flat_view
from bigtrain.units import MIB
from bigtrain.versions.torch_versions import FORWARD_SYNC_BUFFERS

BUCKET_SIZE = 25 * MIB
"""The default number of bytes of gradients that are averaged at once."""

AnyFuture = torch.futures.Future[Any]
Exchange = Callable[[Any], AnyFuture]
"""Starts to average a `torch.distributed.GradBucket`; the future returns its flat tensor."""


def average_gradients(
    assembly: Assembly,
    bucket_size: int | None = None,
    *,
    broadcast_buffers: bool = True,
    gradient_as_bucket_view: bool = True,
    exchange: Exchange | None = None,
    **options: Any,
) -> DistributedDataParallel | None:
    """Make an assembly average its gradients over the dp axis.

    The module is wrapped in DistributedDataParallel. In a pipeline, a `GradientAverager` runs after
    all passes of a step instead. The ranks of the dp axis need equal weights; none are broadcast.

    Args:
        assembly: the assembly that is changed.
        bucket_size: bytes of gradients that are averaged at once; None for 25 MiB.
        broadcast_buffers: whether buffers are copied from the first replica.
        gradient_as_bucket_view: whether gradients are views of the buckets.
        exchange: averages a bucket; None for an all-reduce in the dtype of the gradients. A
            pipeline does not call it.
        options: further arguments of DistributedDataParallel.

    Returns:
        The wrapper of the module; None in a pipeline, or with one replica.

    Raises:
        ConfigError: the model has no trained parameter.
    """
    plan, context, bucket_size = assembly.plan, assembly.context, bucket_size or BUCKET_SIZE
    if plan.dp == 1:
        return None
    if plan.pp > 1:
        follow = [b for root in assembly.roots for b in root.buffers()] if broadcast_buffers else ()
        assembly.average = GradientAverager(context, bucket_size, follow)
        return None
    options.setdefault("find_unused_parameters", assembly.routes.vary)
    if not any(p.requires_grad for p in assembly.module.parameters()):
        raise ConfigError(
            "the model has no parameter to train, so there is no gradient to average. Set "
            "requires_grad=True for at least one parameter."
        )
    settings: dict[str, Any] = {
        "device_ids": [context.device] if is_accelerator(context.device) else None,
        "process_group": context.dp_group,
        "bucket_cap_mb": bucket_size / MIB,
        "gradient_as_bucket_view": gradient_as_bucket_view,
        "init_sync": False,
        FORWARD_SYNC_BUFFERS: broadcast_buffers,
        **options,
    }
    wrapped = DistributedDataParallel(assembly.module, **settings)
    assembly.module = wrapped
    if settings.get("find_unused_parameters"):
        assembly.use = GradientUse()
        assembly.use.watch(assembly.trained().values())
    elif not settings.get("static_graph"):
        trained = assembly.trained()
        assembly.before_update.append(lambda: _check_complete(wrapped, trained))
    if plan.batch.accumulation_steps > 1:
        plain = partial(_average_bucket, context.dp_group)
        assembly.sync = LastMicroBatchSync(wrapped, exchange or plain)
        assembly.keep_gradients = gradient_as_bucket_view
        return wrapped
    # With one micro-batch, a new gradient is copied into its bucket, so none has to be zeroed.
    if exchange is not None:
        wrapped.register_comm_hook(exchange, _ask)
    return wrapped


_ask = lambda exchange, bucket: exchange(bucket)  # noqa: E731 - torch compares annotations


def _check_complete(wrapped: DistributedDataParallel, trained: Mapping[str, nn.Parameter]) -> None:
    """Check before the update that every gradient of the step was averaged.

    Raises:
        ConfigError: the loss of this rank does not depend on some parameters.
    """
    try:
        wrapped.reducer._check_reducer_finalized()
    except RuntimeError as error:
        match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        names = list(trained)
        missing = [names[int(number)] for number in match[1].split()] if match else []
        shown = ", ".join(missing[:3]) or "some parameters"
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(
            f"the loss of this rank does not depend on {shown}{more} in this step, and the other "
            "ranks wait for their gradients. Set strategy.replicate.find_unused_parameters=true "
            "(with --strategy ddp), or give prepare(..., example=(inputs, targets)), from which "
            "such parameters are found."
        ) from error


def _average_bucket(group: dist.ProcessGroup | None, bucket: Any) -> AnyFuture:
    """Average a bucket as DistributedDataParallel does: divide first, so that no sum overflows."""
    flat = bucket.buffer().div_(dist.get_world_size(group))
    work = dist.all_reduce(flat, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def with_averaged_gradients(forecast: Forecast, profile: Profile) -> Forecast:
    """Return a forecast whose gradients are views of DistributedDataParallel's buckets.

    DistributedDataParallel rebuilds its buckets when the second forward pass begins, in the order
    in which gradients were computed. If that pass is in the first step, the gradients are moved
    from the old buckets.

    Args:
        forecast: the forecast without averaging.
        profile: the profile of the model, or of one rank's stage.
    """
    states = replace(forecast.states, gradients=profile.gradient_bytes)
    passes = {way: forecast.passes[way.replace("first", "later")] for way in forecast.passes}
    if profile.copies_gradients():  # a gradient exists twice while it is copied into its bucket
        passes["first"] = profile.with_passing_gradients()
    return replace(forecast, states=states, passes=passes, moved_gradients=profile.gradient_bytes)


class LastMicroBatchSync:
    """Average gradients on the last micro-batch of a step only.

    In the first two steps all micro-batches fill the buckets, but only the buckets of the last
    micro-batch are exchanged. So gradients are views of the buckets from the first micro-batch on,
    also after the buckets are rebuilt at the second forward pass. With `no_sync` in these steps,
    gradients that were accumulated before the first average would exist twice. The sums are bitwise
    equal to the sums in later steps, and buffers are broadcast as often, so a resumed run continues
    as if it had not been stopped.

    Args:
        wrapped: the wrapper that fills the buckets.
        exchange: averages one bucket.
    """

    def __init__(self, wrapped: DistributedDataParallel, exchange: Exchange) -> None:
        self._wrapped, self._buckets = wrapped, _LastBuckets(exchange)
        self._steps = 0
        wrapped.register_comm_hook(self._buckets, _ask)

    def __call__(self, last: bool) -> AbstractContextManager[object]:
        """See `Assembly.sync`."""
        if not self._buckets.last:  # the first micro-batch of the step has broadcast the buffers
            self._wrapped.require_forward_param_sync = False
        self._buckets.last, warm = last, self._steps >= 2
        self._steps += last
        if last or not warm or not torch.is_grad_enabled():
            return nullcontext()
        return self._wrapped.no_sync()


class _LastBuckets:
    """Exchanges the buckets of the last micro-batch, and leaves the others unchanged.

    The C++ part of the wrapper references this object. A reference to the wrapper from here would
    make a cycle that Python's garbage collector does not see, and neither object would be freed.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.last = True

    def __call__(self, bucket: Any) -> AnyFuture:
        if self.last:
            return self._exchange(bucket)
        unchanged: AnyFuture = torch.futures.Future()
        unchanged.set_result(bucket.buffer())
        return unchanged


def broadcast_buffers(context: RunContext, buffers: Sequence[Tensor]) -> None:
    """Copy buffers from the first replica. Collective over the dp axis.

    On an accelerator, several buffers are sent in one message. On a CPU each buffer is sent in a
    message of its own, without a copy.

    Args:
        context: the ranks.
        buffers: the buffers of this rank, which are overwritten.
    """
    group = context.dp_group
    if group is None or context.dp_size == 1 or not buffers:
        return
    if is_accelerator(context.device):  # as DistributedDataParallel does
        together: Any = dist._broadcast_coalesced  # type: ignore[attr-defined]
        together(group, list(buffers), BUCKET_SIZE, 0)
        return
    for buffer in buffers:
        dist.broadcast(buffer, group=group, group_src=0)


class GradientAverager:
    """Average gradients over the dp axis in place, after all micro-batches of a step.

    Pipelines need it, because DistributedDataParallel expects one backward pass after each forward
    pass. Small gradients are copied into one message; a large gradient is sent alone.

    Args:
        context: a context with the dp group.
        bucket_size: the most bytes that are copied into one message.
        buffers: buffers (such as BatchNorm statistics) that are copied from the first replica in
            each step, after the gradients are averaged. DistributedDataParallel copies them before
            each forward pass.
    """

    def __init__(
        self, context: RunContext, bucket_size: int = BUCKET_SIZE, buffers: Iterable[Tensor] = ()
    ) -> None:
        self._context = context
        self._size, self._group = context.dp_size, context.dp_group
        self._bucket_size = bucket_size
        self._buffers = list(buffers)

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients in place. Every replica passes as many, of the same shapes."""
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
        broadcast_buffers(self._context, self._buffers)

    def _average(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)  # gloo has no averaging reduction
        tensor /= self._size

    def _buckets(self, gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield groups of consecutive tensors of one dtype, as large as a bucket allows."""
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
