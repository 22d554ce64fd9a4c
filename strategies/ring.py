"""Replicas whose gradients go around a ring of sends and receives, beside the backward pass.

The gradients lie end to end, the last layer's first, and are cut into buckets. A bucket goes as
soon as its gradients are there, in n chunks whose sizes differ by one at most. Twice n-1 times
each rank sends a chunk to the next one while it receives one from the one before: first sums that
grow by its own gradient on each rank (scatter-reduce), then finished chunks (all-gather). What a
chunk comes to is computed by one rank and copied by all others: replicas stay equal bit for bit.

Memory: as one process, the gradients never go away (they are views of the buckets), and a chunk.
Communication: 2 (n-1)/n of the gradients' bytes sent and received per rank in a step; gradients in
bf16 are summed in fp32, and their sums travel as such: 3 (n-1)/n of their bytes.
Constraints: 2 replicas or more; no pipeline. Buffers (BatchNorm statistics) follow rank 0's.
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
from bigtrain.costs.traffic import Traffic, TrafficKind, buffer_broadcast_traffic
from bigtrain.devices import current_stream, is_accelerator, on_stream, set_current, side_stream
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Bytes, Role
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.memory_format import is_dense


class Ring(Strategy):
    """Ring all-reduce from point-to-point sends."""

    name: ClassVar[str] = "ring"
    role: ClassVar[Role] = "replicate"
    summary: ClassVar[str] = "replicas; gradients go around a ring during the backward pass"

    bucket_size: Bytes = Field(BUCKET_SIZE, gt=0)
    """Bytes of gradients that go around at once."""

    @property
    def need(self) -> Need:
        """See `Strategy.need`: `ddp` does the same in less time."""
        return "learning"

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(cannot_hold=SPARSE, sends_messages=True)

    def variants(self, shape: Shape) -> Iterable[Variant]:  # noqa: ARG002
        """None: `ddp` sends as much by the backend's own all-reduce."""
        return ()

    def check(self, plan: Plan) -> None:
        """Refuse a ring of one, and several backward passes at work in turn."""
        if plan.dp == 1:
            raise ConfigError(
                "strategy ring hands gradients around 2 replicas or more, and mesh.dp=1. "
                "Use --strategy single, or start more ranks."
            )
        if plan.pp > 1:
            raise ConfigError(
                "strategy ring sends while the one backward pass of a step's last micro-batch "
                f"runs, and a pipeline (mesh.pp={plan.pp}) runs several in turn. "
                "Use strategy.replicate=ddp."
            )

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Gradients are there all the time, and added to; beside them a chunk that comes in."""
        states = replace(
            forecast.states,
            gradients=profile.gradient_bytes,
            buffers=forecast.states.buffers + self._staging_bytes(profile, plan),
        )
        passes = {way: forecast.passes[way.replace("first", "later")] for way in forecast.passes}
        return replace(forecast, states=states, passes=passes)

    def _staging_bytes(self, profile: Profile, plan: Plan) -> int:
        """The largest chunk of a bucket: what comes in; where sums are wider, what goes, too."""
        size = _number_bytes(profile)
        largest = max(_bucket_lengths(profile.trained_elements, self.bucket_size // size))
        chunk = max(chunk_lengths(largest, plan.dp))
        return chunk * (size if size >= 4 else 2 * 4)

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """Each chunk of each bucket but one, twice; which one, the place in the ring says.

        To the byte where all gradients are of one type: those of another are in buckets of their
        own, and a profile does not say how many they are.
        """
        here, size = plan.dp_rank or 0, _number_bytes(profile)
        lengths = _bucket_lengths(profile.trained_elements, self.bucket_size // size)
        sent = received = 0
        for length in lengths:
            chunks = chunk_lengths(length, plan.dp)
            # The sums are in fp32 at least, the finished chunks as the gradients are.
            summed, finished = max(size, 4), size
            kept = [chunks[(here + step) % plan.dp] for step in range(3)]
            sent += summed * (length - kept[1]) + finished * (length - kept[2])
            received += summed * (length - kept[0]) + finished * (length - kept[1])
        group, calls = (plan.dp, plan.pp * plan.tp), 2 * (plan.dp - 1) * len(lengths)
        ways: tuple[tuple[TrafficKind, int, int], ...] = (
            ("send", sent, calls),
            ("receive", received, 0),
        )
        messages = [Traffic(k, nbytes, c, "step", "backward", *group) for k, nbytes, c in ways]
        if profile.buffer_bytes:
            messages.append(buffer_broadcast_traffic(profile, *group, "step"))
        return tuple(messages)

    def apply(self, assembly: Assembly) -> None:
        """Let the gradients be views of buckets that go around when they are full."""
        flow = GradientRing(assembly, self.bucket_size)
        assembly.sync, assembly.average = flow.micro_batch, flow.finish
        assembly.keep_gradients = True


def chunk_lengths(length: int, ranks: int) -> list[int]:
    """A bucket of so many numbers in as many chunks as ranks, whose sizes differ by one at most."""
    return [length // ranks + (number < length % ranks) for number in range(ranks)]


def _bucket_lengths(elements: int, most: int) -> list[int]:
    """Numbers of each bucket."""
    most = max(1, most)
    return [min(most, elements - begin) for begin in range(0, max(1, elements), most)]


def _number_bytes(profile: Profile) -> int:
    return max(1, round(profile.gradient_bytes / max(1, profile.trained_elements)))


class RingReduce:
    """Averages tensors over a ring of ranks, in place.

    Args:
        context: the dp group.
        length: numbers of the longest tensor.
        dtype: of the tensors; sums are in fp32 where it is narrower.
    """

    def __init__(self, context: RunContext, length: int, dtype: torch.dtype) -> None:
        self._group, self._size = context.dp_group, context.dp_size
        self._rank, members = context.dp_rank, context.ranks_of("dp")
        self._next = members[(self._rank + 1) % self._size]
        self._before = members[(self._rank - 1) % self._size]
        sums = torch.float32 if dtype.itemsize < 4 else dtype
        chunk = max(chunk_lengths(length, self._size))
        self.arriving = torch.empty(chunk, dtype=sums, device=context.device)
        self.leaving = torch.empty_like(self.arriving) if sums != dtype else None
        """A sum on its way: of gradients in bf16, which hold none in fp32."""

    def __call__(self, flat: Tensor) -> None:
        """Average a tensor of one dim; every rank gives one as long, in the same order."""
        chunks = torch.split(flat, chunk_lengths(len(flat), self._size))
        chunk = chunks[self._rank]
        for step in range(self._size - 1):  # scatter-reduce
            sent = chunk
            if self.leaving is not None and step == 0:
                sent = self.leaving[: len(chunk)].copy_(chunk)
            chunk = chunks[(self._rank - step - 1) % self._size]
            arrived = self.arriving[: len(chunk)]
            self._exchange(sent, arrived)
            if self.leaving is None:
                chunk += arrived
            else:  # the gradient itself stays narrow; its sum goes on from here
                chunk = torch.add(arrived, chunk, out=self.leaving[: len(chunk)])
        mine = chunks[(self._rank + 1) % self._size]
        torch.div(chunk, self._size, out=chunk)
        if self.leaving is not None:
            mine.copy_(chunk)
        for step in range(self._size - 1):  # all-gather
            sent = chunks[(self._rank + 1 - step) % self._size]
            self._exchange(sent, chunks[(self._rank - step) % self._size])

    def _exchange(self, sent: Tensor, arriving: Tensor) -> None:
        """Begin both before waiting for either: all ranks do, so that none waits for the other.

        The receive first: by gloo it is announced to the sender in the stream of what is sent,
        and behind a chunk the announcement would come late: one chunk would go after the other.
        """
        operations = []
        if len(arriving):  # of a bucket with fewer numbers than ranks some chunks are empty
            operations.append(dist.P2POp(dist.irecv, arriving, self._before, self._group))
        if len(sent):
            operations.append(dist.P2POp(dist.isend, sent, self._next, self._group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


@dataclass(eq=False)
class _Bucket:
    """A stretch of the gradients of one type."""

    flat: Tensor
    reduce: RingReduce
    waits: int = 0
    """Parameters whose gradients, or parts of them, are in it."""
    missing: int = 0
    """Those of them that have none yet in this step's last micro-batch."""
    event: Any = None
    """On an accelerator: when its gradients are there."""


class GradientRing:
    """The gradients of a rank as views of buckets, and what sends these.

    All ranks send their buckets in one order. A thread does it on a CPU, where sends and receives
    are waited for, and with an accelerator on a stream of its own.

    Args:
        assembly: with the parameters that will be trained.
        bucket_size: bytes of gradients that go around at once.
    """

    def __init__(self, assembly: Assembly, bucket_size: int) -> None:
        self._context = assembly.context
        self._buffers = list(assembly.model.buffers())
        parameters = [p for p in assembly.model.parameters() if p.requires_grad]
        if not parameters:
            raise ConfigError("the model has no parameter to train: there is nothing to average.")
        self._views: dict[nn.Parameter, Tensor] = {}
        self._buckets: list[_Bucket] = []
        self._buckets_of: dict[nn.Parameter, list[_Bucket]] = {p: [] for p in parameters}
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            self._lay([p for p in reversed(parameters) if p.dtype == dtype], bucket_size)
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

    def _lay(self, parameters: Sequence[nn.Parameter], bucket_size: int) -> None:
        """Lay the gradients of one type end to end, and cut them into buckets."""
        first = parameters[0]
        total = sum(p.numel() for p in parameters)
        lengths = _bucket_lengths(total, bucket_size // first.dtype.itemsize)
        flat = torch.zeros(total, dtype=first.dtype, device=first.device)
        reduce = RingReduce(self._context, max(lengths), first.dtype)
        buckets = [_Bucket(part, reduce) for part in torch.split(flat, lengths)]
        begin = 0
        for parameter in parameters:
            end = begin + parameter.numel()
            stretch = flat[begin:end]
            self._views[parameter] = (
                stretch.as_strided(parameter.shape, parameter.stride())
                if is_dense(parameter)
                else stretch.view(parameter.shape)
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
            for parameter in self._views:  # a step that does not use it leaves it alone
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
        """The gradient of a parameter is there; those of the micro-batches before are in it."""
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
        """What the thread does: bucket by bucket, until there is none."""
        try:
            # A new thread's device is the first, where it would take memory of another rank's.
            set_current(self._context.device)
            with on_stream(self._stream) if self._stream is not None else nullcontext():
                while (bucket := self._waiting.get()) is not None:
                    if self._stream is not None:
                        self._stream.wait_event(bucket.event)
                    bucket.reduce(bucket.flat)
        except BaseException as error:  # noqa: BLE001 - raised where the step waits for it
            self._error = error

    def _join(self) -> None:
        """Wait for what was sent.

        Raises:
            BaseException: what the thread was ended by.
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
        """See `Assembly.average`: send what is left, as some gradient of it was never made."""
        for parameter, view in self._views.items():
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                parameter.grad = view  # of another rank's: nothing of this one's is in it
        while self._sent < len(self._buckets):
            self._send_next()
        self._join()
        broadcast_buffers(self._context, self._buffers)
