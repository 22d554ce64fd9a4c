"""Replicas that average gradients by a ring of sends and receives during the backward pass.

The gradients of each dtype are in one flat tensor, the last layer's first. This tensor is cut into
buckets. A bucket is sent as soon as all its gradients are made, in n chunks whose sizes differ by
one element at most. In each of 2 (n-1) steps a rank sends a chunk to the next rank and receives one
from the previous rank: first partial sums, to which every rank adds its gradient (reduce-scatter),
then finished chunks (all-gather). One rank computes the final value of a chunk and the others copy
it, so replicas stay equal bit for bit.

Memory: that of one process, and one chunk. Gradients are never freed: they are views of buckets.
Communication: each rank sends and receives 2 (n-1)/n of the gradients' bytes in a step. With bf16
gradients the sums are computed and sent in fp32: 3 (n-1)/n of the gradients' bytes.
Constraints: 2 replicas or more; no pipeline; on a GPU no slices and no synchronized BatchNorm,
because NCCL would have to run their exchanges beside those of the ring. Buffers (BatchNorm
statistics) are those of rank 0.
Example: torchrun --nproc-per-node 3 bigtrain/train.py --strategy ring

Source: Patarasu and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of
workstations, section 4; Sergeev and Del Balso 2018, Horovod (arXiv 1802.05799), section 3.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn

from bigtrain.core.replicas import BUCKET_SIZE, broadcast_buffers
from bigtrain.core.strategy import Assembly, Plan, Strategy
from bigtrain.core.traits import SPARSE, Need, Traits
from bigtrain.core.variants import Shape, Variant
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import Traffic, buffer_broadcast_traffic
from bigtrain.devices import current_stream, is_accelerator, on_stream, set_current, side_stream
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Bytes, Role
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.memory_format import is_dense


class Ring(Strategy):
    """Ring all-reduce by point-to-point messages."""

    name: ClassVar[str] = "ring"
    role: ClassVar[Role] = "replicate"
    summary: ClassVar[str] = "replicas; gradients averaged around a ring during the backward pass"

    bucket_size: Bytes = Field(BUCKET_SIZE, gt=0)
    """Bytes of gradients that are averaged at once."""

    @property
    def need(self) -> Need:
        """See `Strategy.need`: `ddp` does the same in less time."""
        return "learning"

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(cannot_hold=SPARSE, sends_messages=True)

    def variants(self, shape: Shape) -> Iterable[Variant]:  # noqa: ARG002
        """Return no variant: `ddp` sends as many bytes by the backend's own all-reduce."""
        return ()

    def check(self, plan: Plan) -> None:
        """Refuse a single replica, pipelines, and other exchanges in the backward pass on a GPU."""
        if plan.dp == 1:
            raise ConfigError(
                "strategy ring sends gradients around 2 replicas or more, and mesh.dp=1. "
                "Use --strategy single, or start more ranks."
            )
        if plan.pp > 1:
            raise ConfigError(
                "strategy ring sends during the backward pass of a step's last micro-batch, and a "
                f"pipeline (mesh.pp={plan.pp}) interleaves several. "
                "Use strategy.replicate=ddp."
            )
        if plan.sync_batchnorm:
            raise ConfigError(
                "train.sync_batchnorm=true exchanges statistics while the thread of strategy ring "
                "sends gradients, and NCCL may wait for ever if ranks begin the two in different "
                "orders. Use strategy.replicate=ddp, or train.sync_batchnorm=false."
            )
        if plan.tp > 1 and is_accelerator(plan.device_type):
            raise ConfigError(
                f"slices (mesh.tp={plan.tp}) exchange tensors while the thread of strategy ring "
                "sends gradients, and NCCL may wait for ever if ranks begin the two in different "
                "orders. Use strategy.replicate=ddp, or device=cpu."
            )

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Add gradients that are never freed, and the buffer that receives a chunk."""
        states = replace(
            forecast.states,
            gradients=profile.gradient_bytes,
            buffers=forecast.states.buffers + self._staging_bytes(profile, plan),
        )
        passes = {name: forecast.passes[name.replace("first", "later")] for name in forecast.passes}
        return replace(forecast, states=states, passes=passes)

    def _staging_bytes(self, profile: Profile, plan: Plan) -> int:
        """Return the bytes of the receive buffer and, if sums are in fp32, of the send buffer."""
        size = _number_bytes(profile)
        largest = max(_bucket_lengths(profile.trained_elements, self.bucket_size // size))
        chunk = max(chunk_lengths(largest, plan.dp))
        return chunk * (size if size >= 4 else 2 * 4)

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """Return a rank's messages: in each of two rounds it sends and receives all chunks but one.

        The rounds are the reduce-scatter and the all-gather. The rank's position in the ring
        decides which chunk of a bucket is left out. The bytes are exact if all gradients have one
        dtype: a profile does not have the sizes by dtype.
        """
        here, size = plan.dp_rank or 0, _number_bytes(profile)
        lengths = _bucket_lengths(profile.trained_elements, self.bucket_size // size)
        sent = received = 0
        for length in lengths:
            chunks = chunk_lengths(length, plan.dp)
            # Sums are at least fp32, and finished chunks have the gradients' precision.
            summed, finished = max(size, 4), size
            omitted = [chunks[(here + step) % plan.dp] for step in range(3)]
            sent += summed * (length - omitted[1]) + finished * (length - omitted[2])
            received += summed * (length - omitted[0]) + finished * (length - omitted[1])
        stride, calls = plan.pp * plan.tp, 2 * (plan.dp - 1) * len(lengths)
        messages = [
            Traffic("send", sent, calls, "step", "backward", plan.dp, stride),
            Traffic("receive", received, 0, "step", "backward", plan.dp, stride),
        ]
        if profile.buffer_bytes:
            messages.append(buffer_broadcast_traffic(profile, plan.dp, stride, "step"))
        return tuple(messages)

    def apply(self, assembly: Assembly) -> None:
        """Make the gradients views of buckets, which are averaged when they are full."""
        flow = GradientRing(assembly, self.bucket_size)
        assembly.sync, assembly.average = flow.micro_batch, flow.finish
        assembly.keep_gradients = True


def chunk_lengths(length: int, ranks: int) -> list[int]:
    """Return the lengths of a bucket's chunks, one for each rank, which differ by one at most."""
    return [length // ranks + (number < length % ranks) for number in range(ranks)]


def _bucket_lengths(elements: int, most: int) -> list[int]:
    """Return the number of elements of each bucket, which is at most `most`."""
    most = max(1, most)
    return [min(most, elements - begin) for begin in range(0, max(1, elements), most)]


def _number_bytes(profile: Profile) -> int:
    return max(1, round(profile.gradient_bytes / max(1, profile.trained_elements)))


class RingReduce:
    """Averages tensors over a ring of ranks, in place.

    Args:
        context: the rank.
        group: a group of the ranks on the rank's dp axis.
        length: the number of elements of the longest tensor.
        dtype: the dtype of the tensors. If it is narrower than fp32, sums are in fp32.
    """

    def __init__(
        self,
        context: RunContext,
        group: dist.ProcessGroup | None,
        length: int,
        dtype: torch.dtype,
    ) -> None:
        self._group, self._size = group, context.dp_size
        self._rank, members = context.dp_rank, context.ranks_of("dp")
        self._next = members[(self._rank + 1) % self._size]
        self._before = members[(self._rank - 1) % self._size]
        sums = torch.float32 if dtype.itemsize < 4 else dtype
        chunk = max(chunk_lengths(length, self._size))
        self.arriving = torch.empty(chunk, dtype=sums, device=context.device)
        self.leaving = torch.empty_like(self.arriving) if sums != dtype else None
        """The fp32 partial sum that is sent, if the dtype is narrower than fp32; None otherwise."""

    def __call__(self, flat: Tensor) -> None:
        """Average a 1-dim tensor in place; it has the same length on every rank. Collective."""
        chunks = torch.split(flat, chunk_lengths(len(flat), self._size))
        chunk = chunks[self._rank]
        for step in range(self._size - 1):  # reduce-scatter
            sent = chunk
            if self.leaving is not None and step == 0:
                sent = self.leaving[: len(chunk)].copy_(chunk)
            chunk = chunks[(self._rank - step - 1) % self._size]
            arrived = self.arriving[: len(chunk)]
            self._exchange(sent, arrived)
            if self.leaving is None:
                chunk += arrived
            else:  # the gradient itself stays bf16; the fp32 sum is sent from this buffer
                chunk = torch.add(arrived, chunk, out=self.leaving[: len(chunk)])
        finished = chunks[(self._rank + 1) % self._size]
        torch.div(chunk, self._size, out=chunk)
        if self.leaving is not None:
            finished.copy_(chunk)
        for step in range(self._size - 1):  # all-gather
            sent = chunks[(self._rank + 1 - step) % self._size]
            self._exchange(sent, chunks[(self._rank - step) % self._size])

    def _exchange(self, sent: Tensor, arriving: Tensor) -> None:
        """Start both messages before waiting for either, so that no two ranks wait for each other.

        The receive is started first. gloo announces a receive to the sender in the stream that also
        carries the data sent by this rank. Behind a chunk of data the announcement would be late,
        and chunks would not overlap.
        """
        operations = []
        if len(arriving):  # a bucket with fewer elements than ranks has empty chunks
            operations.append(dist.P2POp(dist.irecv, arriving, self._before, self._group))
        if len(sent):
            operations.append(dist.P2POp(dist.isend, sent, self._next, self._group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


@dataclass(eq=False)
class _Bucket:
    """A flat slice of the gradients of one dtype."""

    flat: Tensor
    reduce: RingReduce
    waits: int = 0
    """The number of parameters whose gradients are in the bucket, whole or in part."""
    missing: int = 0
    """The number of these parameters without a gradient in the step's last micro-batch so far."""
    event: Any = None
    """The event that an accelerator records when the bucket's gradients are made; else None."""


class GradientRing:
    """Makes the gradients of a rank views of buckets, and averages the buckets over the ring.

    All ranks send their buckets in the same order, from a thread. On a CPU the thread waits for
    sends and receives; with an accelerator it uses a side stream.

    Args:
        assembly: an assembly whose model has the trained parameters.
        bucket_size: bytes of gradients that are averaged at once.

    Raises:
        ConfigError: the model has no parameter to train.
    """

    def __init__(self, assembly: Assembly, bucket_size: int) -> None:
        self._context = assembly.context
        self._group = self._context.new_group("dp")  # only the sending thread uses it
        self._buffers = list(assembly.model.buffers())
        parameters = [p for p in assembly.model.parameters() if p.requires_grad]
        if not parameters:
            raise ConfigError(
                "the model has no parameter to train, so there is no gradient to average. Set "
                "requires_grad=True for at least one parameter."
            )
        self._views: dict[nn.Parameter, Tensor] = {}
        self._buckets: list[_Bucket] = []
        self._buckets_of: dict[nn.Parameter, list[_Bucket]] = {p: [] for p in parameters}
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            self._make_buckets([p for p in reversed(parameters) if p.dtype == dtype], bucket_size)
        staging = {id(b.reduce): b.reduce for b in self._buckets}.values()
        assembly.meter.label(
            [t for r in staging for t in (r.arriving, r.leaving) if t is not None], "buffers"
        )
        assembly.meter.label(self._views.values(), "gradients")
        device = self._context.device
        self._stream = side_stream(device) if is_accelerator(device) else None
        self._reached: set[nn.Parameter] = set()
        self._begun = self._last = False
        self._sent = 0
        self._waiting: queue.SimpleQueue[_Bucket | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None
        self._error: BaseException | None = None
        for parameter in parameters:
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(self._arrived)

    def _make_buckets(self, parameters: Sequence[nn.Parameter], bucket_size: int) -> None:
        """Make one flat tensor for the gradients of one dtype, and cut it into buckets."""
        first = parameters[0]
        total = sum(p.numel() for p in parameters)
        lengths = _bucket_lengths(total, bucket_size // first.dtype.itemsize)
        flat = torch.zeros(total, dtype=first.dtype, device=first.device)
        reduce = RingReduce(self._context, self._group, max(lengths), first.dtype)
        buckets = [_Bucket(part, reduce) for part in torch.split(flat, lengths)]
        begin = 0
        for parameter in parameters:
            end = begin + parameter.numel()
            flat_slice = flat[begin:end]
            self._views[parameter] = (
                flat_slice.as_strided(parameter.shape, parameter.stride())
                if is_dense(parameter)
                else flat_slice.view(parameter.shape)
            )
            for bucket in buckets[begin // lengths[0] : -(-end // lengths[0])]:
                self._buckets_of[parameter].append(bucket)
                bucket.waits += 1
            begin = end
        self._buckets += buckets

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """See `Assembly.sync`."""
        return self._passing(last=last) if torch.is_grad_enabled() else nullcontext()

    @contextmanager
    def _passing(self, *, last: bool) -> Iterator[None]:
        if not self._begun:
            self._begin_step()
        self._last = last
        yield
        if last:
            self._last = self._begun = False
            self._join()
            for parameter in self._views:  # the optimizer skips parameters without a gradient
                if parameter not in self._reached:
                    parameter.grad = None

    def _begin_step(self) -> None:
        self._begun, self._sent = True, 0
        self._reached.clear()
        for bucket in self._buckets:
            bucket.missing = bucket.waits
        for parameter, view in self._views.items():
            if parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr():
                parameter.grad = view.zero_()

    def _arrived(self, parameter: nn.Parameter) -> None:
        """Note that a gradient is made; in the last micro-batch, send buckets that are complete."""
        self._reached.add(parameter)
        if not self._last:
            return
        for bucket in self._buckets_of[parameter]:
            bucket.missing -= 1
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._sent]
        self._sent += 1
        if self._stream is not None:
            bucket.event = current_stream(self._context.device).record_event()
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_all, name="ring", daemon=True)
            self._sender.start()
        self._waiting.put(bucket)

    def _send_all(self) -> None:
        """Average the buckets in the queue until None comes; the thread runs this."""
        try:
            # A new thread's current device is the first GPU, which another rank may use.
            set_current(self._context.device)
            with on_stream(self._stream) if self._stream is not None else nullcontext():
                while (bucket := self._waiting.get()) is not None:
                    if self._stream is not None:
                        self._stream.wait_event(bucket.event)
                    bucket.reduce(bucket.flat)
        except BaseException as error:  # noqa: BLE001 - raised where the step waits for it
            self._error = error

    def _join(self) -> None:
        """Wait until all buckets in the queue are averaged.

        Raises:
            BaseException: the error that ended the thread.
        """
        if self._sender is not None:
            self._waiting.put(None)
            self._sender.join()
            self._sender = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._stream is not None:
            current_stream(self._context.device).wait_stream(self._stream)

    def finish(self, gradients: Sequence[Tensor]) -> None:  # noqa: ARG002 - they are views
        """See `Assembly.average`: send the buckets that still lack a gradient of this rank."""
        for parameter, view in self._views.items():
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                parameter.grad = view  # only other ranks have this gradient
        while self._sent < len(self._buckets):
            self._send_next()
        self._join()
        broadcast_buffers(self._context, self._buffers)
