"""What a rank sends, and what it moves out of its device's memory and back, over one step.

Each technique states its own (`Strategy.traffic`), as it does it: how often, in which precision, in
how many messages. How long that takes, `bigtrain.machine.collective_cost` says of a cluster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from bigtrain.activations.offload import MIN_OFFLOADED_BYTES
from bigtrain.costs.forecast import Profile
from bigtrain.memory.timeline import BlockTicks
from bigtrain.tensors.transfer import pinned_bytes

TrafficKind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "send",
    "receive",
    "copy",
    "to_host",
    "from_host",
    "to_disk",
    "from_disk",
]
EXCHANGES: tuple[TrafficKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "send",
    "receive",
)
"""Those that go between ranks."""
HOST_TRANSFERS: tuple[TrafficKind, ...] = ("to_host", "from_host", "to_disk", "from_disk")
"""Those that go between a device, its host and the host's disk."""
OverlapPhase = Literal["forward", "backward", "step", "nothing", "schedule", "passes"]


@dataclass(frozen=True)
class Traffic:
    """One kind of message, or of move, of one rank."""

    kind: TrafficKind
    nbytes: int
    """Of all calls together: of an exchange the whole tensors, as they are before a
    reduce-scatter and after an all-gather; of a move this rank's bytes; of copies in the device's
    own memory (into what is sent, out of what came) those that are copied."""
    calls: int
    """Messages; each has the latency of the link once more."""
    every: Literal["micro_batch", "step"]
    overlaps: OverlapPhase
    """The computation that it may hide behind: the forward or backward pass of one micro-batch (the
    last one of a step, where `every` is a step), the optimizer's step, or none. What a `schedule`
    of stages sends takes its time in that; so does what stands in the middle of `passes`, behind
    nothing."""
    ranks: int = 1
    """Of the group that exchanges."""
    stride: int = 1
    """From one rank of the group to the next; axes are (dp, pp, tp), the last the fastest."""
    in_process: bool = False
    """Whether it is between devices of one process: no process group sees it."""
    nothing_sent: bool = False
    """Of a receive: whether its rank sends nothing meanwhile, so that it takes time of its own."""
    in_hooks: bool = False
    """Whether hooks of `fully_shard` issue it, which on a CPU take time of their own."""

    def step_bytes(self, micro_batches: int) -> int:
        """Bytes over a step of so many micro-batches."""
        return self.nbytes * (micro_batches if self.every == "micro_batch" else 1)

    def step_calls(self, micro_batches: int) -> int:
        """Messages over a step of so many micro-batches."""
        return self.calls * (micro_batches if self.every == "micro_batch" else 1)


@dataclass(frozen=True)
class StepVolume:
    """What one rank sends and receives over a step, in bytes, by the kind of exchange.

    Of a collective that is the share of its textbook algorithm, whatever the backend does: of S
    bytes among n ranks (n-1)/n S for an all-gather, a reduce-scatter, an all-to-all (a ring), twice
    that for an all-reduce, all S for a broadcast and a reduce (a rank amid a chain).
    """

    sent: Mapping[str, int]
    received: Mapping[str, int]

    @property
    def sent_bytes(self) -> int:
        """Of all kinds together."""
        return sum(self.sent.values())

    @property
    def received_bytes(self) -> int:
        """Of all kinds together."""
        return sum(self.received.values())

    @property
    def kinds(self) -> list[str]:
        """The kinds of exchange there are, in order."""
        return sorted({*self.sent, *self.received})

    @classmethod
    def of(cls, whole: Mapping[tuple[str, int], int]) -> StepVolume:
        """From the bytes of whole tensors, by kind and ranks of the group."""
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()
        for (kind, ranks), nbytes in whole.items():
            share = _share(kind, nbytes, ranks)
            if share and kind != "receive":
                sent[kind] += share
            if share and kind != "send":
                received[kind] += share
        return cls(dict(sent), dict(received))

    @classmethod
    def stated(cls, traffic: Iterable[Traffic], micro_batches: int) -> StepVolume:
        """From what techniques say that they exchange, over a step of so many micro-batches."""
        whole: Counter[tuple[str, int]] = Counter()
        for one in traffic:
            if one.kind in EXCHANGES and not one.in_process:
                whole[one.kind, one.ranks] += one.step_bytes(micro_batches)
        return cls.of(whole)


def _share(kind: str, nbytes: int, ranks: int) -> int:
    if kind in ("send", "receive"):
        return nbytes
    if kind in ("broadcast", "reduce"):
        return nbytes if ranks > 1 else 0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) * nbytes // ranks


def comm_units(profile: Profile) -> list[BlockTicks]:
    """What is gathered or reduced as one: the blocks, then what is in none; with parameters."""
    units = [first for first, _ in profile.blocks]
    if profile.outside_blocks is not None:
        units.append(profile.outside_blocks)
    return [unit for unit in units if unit.shapes]


def parameter_shapes(profile: Profile, *, trained: bool = True) -> list[tuple[int, ...]]:
    """The shapes of the parameters, tied ones once; one long tensor where nobody knows them."""
    units = comm_units(profile)
    if not units:
        return [(profile.trained_elements,)]
    return [
        shape
        for unit in units
        for shape, wanted in zip(unit.shapes, unit.trained, strict=True)
        if wanted or not trained
    ]


def message_count(sizes: Iterable[int], capacity: int, *, may_exceed: bool = False) -> int:
    """In how many messages tensors go, neighbours together.

    Args:
        sizes: of the tensors, in the order in which they come.
        capacity: what goes together; a larger one goes by itself.
        may_exceed: whether the tensor that reaches `capacity` goes with those before it, as in
            torch's buckets.
    """
    messages, filled = 0, 0
    for size in sizes:
        is_full = filled >= capacity if may_exceed else filled + size > capacity
        if is_full or messages == 0:
            messages, filled = messages + 1, 0
        filled += size
    return messages


def gradient_average_traffic(
    profile: Profile,
    ranks: int,
    stride: int,
    *,
    bucket: int,
    overlaps: bool,
    buffers: bool = True,
) -> tuple[Traffic, ...]:
    """Gradients averaged once a step, in buckets, in their own precision.

    By torch's DistributedDataParallel in the backward pass of the last micro-batch, or by
    `replicas.GradientAverager` when all of them are through. Buffers follow the first replica's
    once a step either way.

    Args:
        profile: of what is on the rank.
        ranks: replicas.
        stride: from one replica to the next.
        bucket: bytes that are averaged together.
        overlaps: whether it is done in the backward pass.
        buffers: whether buffers follow.
    """
    total = max(1, sum(math.prod(shape) for shape in parameter_shapes(profile)))
    size = profile.gradient_bytes / total
    sizes = [round(math.prod(shape) * size) for shape in reversed(parameter_shapes(profile))]
    calls = max(1, message_count(sizes, bucket, may_exceed=overlaps))
    behind: OverlapPhase = "backward" if overlaps else "nothing"
    traffic = [Traffic("all_reduce", profile.gradient_bytes, calls, "step", behind, ranks, stride)]
    if buffers and profile.buffer_bytes:
        traffic.append(buffer_broadcast_traffic(profile, ranks, stride, "step"))
    return tuple(traffic)


def buffer_broadcast_traffic(
    profile: Profile, ranks: int, stride: int, every: Literal["micro_batch", "step"]
) -> Traffic:
    """Buffers that follow the first replica's, in one message: a profile does not count them."""
    return Traffic("broadcast", profile.buffer_bytes, 1, every, "nothing", ranks, stride)


def offloaded_activations(profile: Profile) -> tuple[int, int]:
    """What the blocks of one micro-batch save and have moved away: (bytes, tensors)."""
    moved_sizes = _moved_sizes(profile)
    return sum(moved_sizes), len(moved_sizes)


def pinned_activations(profile: Profile) -> int:
    """Bytes that what `offloaded_activations` counts takes in pinned memory of the host."""
    return sum(map(pinned_bytes, _moved_sizes(profile)))


def _moved_sizes(profile: Profile) -> list[int]:
    """Bytes of each tensor that the blocks of one micro-batch save and have moved away.

    Read off a profile whose run on fake tensors has moved them: what was there when a block began
    and is gone before the backward pass has left the device, as what a block saves is let go of
    while the next one runs. What the last block saves stays. A tensor that lives across the
    beginning of a block and that nobody saves is counted, too: blocks save what they are given.
    """
    # Of a profile that was put together of sections the windows are of what is computed again.
    windows, named = [w[1] for w in profile.windows], [first for first, _ in profile.blocks]
    blocks = named if len(named) > len(windows) else windows
    begins = sorted(block.forward[0] for block in blocks)[1:]
    return [
        span.nbytes
        for span in profile.passes["first"].spans
        if span.kind == "temporary"
        and span.nbytes >= MIN_OFFLOADED_BYTES
        and any(span.birth < begin < span.death for begin in begins)
    ]
