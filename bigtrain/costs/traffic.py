"""The messages that a rank sends in one step, and its transfers between device and host.

Each technique states its traffic (`Strategy.traffic`): how often, in which precision, in how many
messages. `bigtrain.machine.collective_cost` predicts the seconds on a cluster.
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
"""The kinds that are between ranks."""
HOST_TRANSFERS: tuple[TrafficKind, ...] = ("to_host", "from_host", "to_disk", "from_disk")
"""The kinds between a device, its host and the host's disk."""
OverlapPhase = Literal["forward", "backward", "step", "nothing", "schedule", "passes"]


@dataclass(frozen=True)
class Traffic:
    """Messages or transfers of one kind, of one rank."""

    kind: TrafficKind
    nbytes: int
    """All calls together. Of an exchange, the whole tensors: those before a reduce-scatter, those
    after an all-gather. Of a transfer, this rank's bytes. Of copies within the device (into
    messages and out of them), the copied bytes."""
    calls: int
    """The number of messages; each adds the latency of the link."""
    every: Literal["micro_batch", "step"]
    overlaps: OverlapPhase
    """The computation that it may overlap with: the forward or the backward pass of one micro-batch
    (of the last one, if `every` is a step), the optimizer's step, or nothing. Messages of a
    pipeline `schedule` and exchanges in the middle of `passes` overlap with nothing, and are
    counted in the seconds of the schedule and of the passes."""
    ranks: int = 1
    """The size of the group that exchanges."""
    stride: int = 1
    """The distance between neighbours of the group; axes are (dp, pp, tp), the last the fastest."""
    in_process: bool = False
    """Whether it is between devices of one process, and so in no process group."""
    nothing_sent: bool = False
    """Whether this is a receive during which its rank sends nothing, so that its seconds count."""
    in_hooks: bool = False
    """Whether hooks of `fully_shard` issue it, whose seconds count on a CPU."""

    def step_bytes(self, micro_batches: int) -> int:
        """Bytes over a step of so many micro-batches."""
        return self.nbytes * (micro_batches if self.every == "micro_batch" else 1)

    def step_calls(self, micro_batches: int) -> int:
        """Messages over a step of so many micro-batches."""
        return self.calls * (micro_batches if self.every == "micro_batch" else 1)


@dataclass(frozen=True)
class StepVolume:
    """The bytes that one rank sends and receives in a step, by the kind of exchange.

    Of a collective it counts the share of the textbook algorithm, whatever the backend does: of S
    bytes among n ranks (n-1)/n S for an all-gather, a reduce-scatter, an all-to-all (a ring), twice
    that for an all-reduce, all S for a broadcast and a reduce (a rank inside a chain).
    """

    sent: Mapping[str, int]
    received: Mapping[str, int]

    @property
    def sent_bytes(self) -> int:
        """The sent bytes of all kinds."""
        return sum(self.sent.values())

    @property
    def received_bytes(self) -> int:
        """The received bytes of all kinds."""
        return sum(self.received.values())

    @property
    def kinds(self) -> list[str]:
        """The kinds of exchange, sorted."""
        return sorted({*self.sent, *self.received})

    @classmethod
    def of(cls, volumes: Mapping[tuple[str, int], int]) -> StepVolume:
        """Make it from the bytes of whole tensors, by kind and size of the group."""
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()
        for (kind, ranks), nbytes in volumes.items():
            share = _share(kind, nbytes, ranks)
            if share and kind != "receive":
                sent[kind] += share
            if share and kind != "send":
                received[kind] += share
        return cls(dict(sent), dict(received))

    @classmethod
    def stated(cls, traffic: Iterable[Traffic], micro_batches: int) -> StepVolume:
        """Make it from the techniques' traffic, for a step of so many micro-batches."""
        volumes: Counter[tuple[str, int]] = Counter()
        for exchange in traffic:
            if exchange.kind in EXCHANGES and not exchange.in_process:
                volumes[exchange.kind, exchange.ranks] += exchange.step_bytes(micro_batches)
        return cls.of(volumes)


def _share(kind: str, nbytes: int, ranks: int) -> int:
    if kind in ("send", "receive"):
        return nbytes
    if kind in ("broadcast", "reduce"):
        return nbytes if ranks > 1 else 0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) * nbytes // ranks


def comm_units(profile: Profile) -> list[BlockTicks]:
    """The units that are gathered or reduced as one: blocks, then the rest; with parameters."""
    units = [first for first, _ in profile.blocks]
    if profile.outside_blocks is not None:
        units.append(profile.outside_blocks)
    return [unit for unit in units if unit.shapes]


def parameter_shapes(profile: Profile, *, trained: bool = True) -> list[tuple[int, ...]]:
    """The shapes of the parameters, tied ones once; one long shape if they are not known."""
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
    """The number of messages for tensors of which neighbours are sent together.

    Args:
        sizes: the bytes of the tensors, in order.
        capacity: bytes of one message; a larger tensor has its own message.
        may_exceed: whether the tensor that reaches `capacity` still joins the message, as in
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
    """The traffic of averaging gradients once a step, in buckets, in the gradients' precision.

    torch's DistributedDataParallel does it in the backward pass of the last micro-batch,
    `replicas.GradientAverager` after all backward passes. Both also copy the first replica's
    buffers to the others once a step.

    Args:
        profile: the profile of the rank's part of the model.
        ranks: replicas.
        stride: the distance in ranks from one replica to the next.
        bucket: bytes that are averaged together.
        overlaps: whether it is done in the backward pass.
        buffers: whether buffers are copied.
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
    """Copying the first replica's buffers: one message, as their number is not known."""
    return Traffic("broadcast", profile.buffer_bytes, 1, every, "nothing", ranks, stride)


def offloaded_activations(profile: Profile) -> tuple[int, int]:
    """The saved activations of one micro-batch that are offloaded: (bytes, tensors)."""
    moved_sizes = _moved_sizes(profile)
    return sum(moved_sizes), len(moved_sizes)


def pinned_activations(profile: Profile) -> int:
    """The bytes of pinned host memory that `offloaded_activations` take."""
    return sum(map(pinned_bytes, _moved_sizes(profile)))


def _moved_sizes(profile: Profile) -> list[int]:
    """The bytes of each saved tensor of one micro-batch that is offloaded.

    They are read off a profile whose run on fake tensors has offloaded them: a tensor that was
    alive when a block began and is freed before the backward pass has left the device, because a
    block's saved tensors are freed while the next block runs. Those of the last block stay. A
    tensor that is alive when a block begins and that no block saves is counted as well: blocks save
    their inputs.
    """
    # In a composed profile the windows are those of recomputed blocks.
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
