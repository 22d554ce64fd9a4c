"""The messages that a rank sends in one step, and its transfers between device and host.

Each technique returns its traffic from `Strategy.traffic`: the bytes, the number of messages, and
how often they are sent. `bigtrain.machine.collective_cost` predicts the seconds on a cluster.
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
"""The kinds of traffic between ranks."""
HOST_TRANSFERS: tuple[TrafficKind, ...] = ("to_host", "from_host", "to_disk", "from_disk")
"""The kinds of traffic between a device, its host and the host's disk."""
OverlapPhase = Literal["forward", "backward", "step", "nothing", "schedule", "passes"]


@dataclass(frozen=True)
class Traffic:
    """The messages or transfers of one kind that one rank makes in a micro-batch or a step."""

    kind: TrafficKind
    nbytes: int
    """Bytes of all calls together. For an exchange they are those of the whole tensors: before a
    reduce-scatter, after an all-gather. For a transfer they are this rank's bytes. For copies
    within the device (into messages and out of them) they are the copied bytes."""
    calls: int
    """The number of messages; each adds the latency of the link."""
    every: Literal["micro_batch", "step"]
    """Whether `nbytes` and `calls` are those of each micro-batch or of each step."""
    overlaps: OverlapPhase
    """The computation that the traffic may overlap with: the forward or the backward pass of one
    micro-batch (of the last micro-batch if `every` is "step"), the optimizer's step, or nothing.
    Messages of a pipeline "schedule" and exchanges in the middle of "passes" overlap with nothing.
    Their seconds are counted as part of the schedule and of the passes."""
    ranks: int = 1
    """The number of ranks in the group that exchanges."""
    stride: int = 1
    """The difference between the ranks of two neighbours in the group. The axes of the mesh are
    (dp, pp, tp), of which tp varies fastest."""
    in_process: bool = False
    """Whether the traffic is between devices of one process, and so uses no process group."""
    nothing_sent: bool = False
    """Whether this is a receive during which the rank sends nothing, so that its seconds count."""
    in_hooks: bool = False
    """Whether hooks of `fully_shard` start the exchange. On a CPU the hooks' seconds count."""
    shared_memory: bool = False
    """Whether the ranks exchange in shared memory."""

    def step_bytes(self, micro_batches: int) -> int:
        """Return the bytes of a step of `micro_batches` micro-batches."""
        return self.nbytes * (micro_batches if self.every == "micro_batch" else 1)

    def step_calls(self, micro_batches: int) -> int:
        """Return the number of messages of a step of `micro_batches` micro-batches."""
        return self.calls * (micro_batches if self.every == "micro_batch" else 1)


@dataclass(frozen=True)
class StepVolume:
    """The bytes that one rank sends and receives in a step, by the kind of exchange.

    The bytes of a collective are those of the textbook algorithm, whatever the backend does. For a
    tensor of S bytes and n ranks a rank sends (n-1)/n S in an all-gather, a reduce-scatter or an
    all-to-all (a ring), twice as much in an all-reduce, and S in a broadcast or a reduce (a rank
    inside a chain).
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
        """Return the volume of exchanges.

        Args:
            volumes: the bytes of whole tensors, by (kind of exchange, number of ranks).
        """
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
        """Return the volume of the techniques' traffic in a step of `micro_batches` micro-batches.

        Traffic within a process and transfers to and from the host are left out.
        """
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
    """Return the units that are gathered or reduced as a whole: each block, and all the rest.

    Units without parameters are left out.
    """
    units = [first for first, _ in profile.blocks]
    if profile.outside_blocks is not None:
        units.append(profile.outside_blocks)
    return [unit for unit in units if unit.shapes]


def parameter_shapes(profile: Profile, *, trained: bool = True) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters; a tied parameter counts once.

    If the shapes are not known, one shape with all trained elements is returned.

    Args:
        profile: the profile of the model, or of a rank's part of it.
        trained: whether to return the shapes of trained parameters only.
    """
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
    """Return the number of messages in which tensors are sent, several to a message.

    Args:
        sizes: the bytes of the tensors, in the order of sending.
        capacity: the most bytes of one message. A larger tensor has its own message, unless
            messages may exceed the capacity.
        may_exceed: whether the tensor with which a message exceeds `capacity` still belongs to
            that message, as in the buckets of DistributedDataParallel.
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
    """Return the traffic of averaging gradients once a step, in the gradients' precision.

    torch's DistributedDataParallel averages during the backward pass of the last micro-batch,
    `replicas.GradientAverager` after all backward passes. Both also copy the first replica's
    buffers to the other replicas once a step.

    Args:
        profile: the profile of the rank's part of the model.
        ranks: the number of replicas.
        stride: the difference in rank from one replica to the next.
        bucket: bytes of the gradients that are averaged in one message.
        overlaps: whether gradients are averaged during the backward pass.
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
    """Return the traffic of copying the first replica's buffers to the others.

    It is one message, because a profile does not contain the number of buffers.
    """
    return Traffic("broadcast", profile.buffer_bytes, 1, every, "nothing", ranks, stride)


def offloaded_activations(profile: Profile) -> tuple[int, int]:
    """Return the bytes and the number of one micro-batch's saved tensors that are offloaded."""
    moved_sizes = _moved_sizes(profile)
    return sum(moved_sizes), len(moved_sizes)


def pinned_activations(profile: Profile) -> int:
    """Return the bytes of pinned host memory for the offloaded tensors of one micro-batch."""
    return sum(map(pinned_bytes, _moved_sizes(profile)))


def _moved_sizes(profile: Profile) -> list[int]:
    """Return the bytes of each saved tensor of one micro-batch that is offloaded.

    The run on fake tensors that recorded the profile offloaded these tensors, so that a block's
    saved tensors are freed while the next block runs. Therefore a temporary storage counts if it is
    large enough to be offloaded, and is alive when any block except the first begins. The inputs of
    blocks count, too, because blocks save them. The saved tensors of the last block stay on the
    device.
    """
    # In a composed profile `windows` has only the recomputed blocks.
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
