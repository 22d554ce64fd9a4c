"""Predict the seconds of a step: computing, pipeline bubble, exchanges, transfers, update.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer (Williams et
al. 2009, Roofline), plus the time to launch it. The rates are those of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Profile
from bigtrain.costs.traffic import EXCHANGES, HOST_TRANSFERS, Traffic
from bigtrain.devices import is_accelerator
from bigtrain.machine.cluster import Cluster, MeasuredOp
from bigtrain.machine.collective_cost import collective_seconds, spread_over_nodes
from bigtrain.prediction.record_sections import RecordedSections
from bigtrain.prediction.sections import OpLog, Section
from bigtrain.schedules.bubble import StageSeconds, bubble_share, simulate_step
from bigtrain.schedules.orders import schedule_orders, stage_ranks
from bigtrain.slicing.exchange import TensorExchange

MAX_SIMULATED_ACTIONS = 4096
"""The schedule of a step with up to this many actions (passes of a micro-batch on a stage) is
simulated. For a longer step, the bubble is that of the closed form for equal stages, and all ranks
are taken to be as slow as the slowest. If there is no closed form, a longer step is simulated, too.
"""

EXCHANGE_OPERATIONS = 8
"""An exchange is assumed to take as long to launch as this many operations: copies in and out,
streams that wait for one another, and the call itself."""

TILE = 128
"""Rows and columns of a tile of a matrix product; see `product_efficiency`."""


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of one step by part."""

    compute: float
    """Forward and backward passes of the busiest rank, recomputation included."""
    bubble: float = 0.0
    """Idle time of the busiest rank, which waits for other stages and their boundary tensors."""
    exchange: float = 0.0
    """Communication with replicas, and with the tp ranks that have other slices of the same layers.
    The part that overlaps with computing is left out."""
    moving: float = 0.0
    """Transfers to and from the host or the disk that do not overlap with computing."""
    update: float = 0.0
    """Clipping and the optimizer's step."""

    @property
    def total(self) -> float:
        """The seconds of the whole step."""
        return sum(float(getattr(self, f.name)) for f in fields(self))


@dataclass(frozen=True)
class MicroBatchSeconds:
    """The seconds of one micro-batch on one stage."""

    forward: float
    """Computing of the forward pass, without exchanges."""
    backward: float
    """Computing of the backward pass, without exchanges."""
    exchange: tuple[float, float] = (0.0, 0.0)
    """Exchanges over the tp axis in the forward and in the backward pass. They overlap with
    nothing."""

    @property
    def computing(self) -> float:
        """Computing, forward and backward."""
        return self.forward + self.backward

    @property
    def exchanging(self) -> float:
        """Exchanges over the tp axis, forward and backward."""
        return sum(self.exchange)

    @property
    def total(self) -> float:
        """Computing and exchanges, forward and backward."""
        return self.computing + self.exchanging

    @classmethod
    def sum(cls, parts: Iterable[MicroBatchSeconds]) -> MicroBatchSeconds:
        """Add up the seconds of several parts that run one after the other."""
        rows = [(part.forward, part.backward, *part.exchange) for part in parts]
        forward, backward, exchange_forward, exchange_backward = map(sum, zip(*rows, strict=True))
        return cls(forward, backward, (exchange_forward, exchange_backward))

    def scaled(self, share: float) -> MicroBatchSeconds:
        """Return all seconds multiplied by a factor, as for a share of the stage."""
        forward, backward = self.exchange
        return MicroBatchSeconds(
            share * self.forward, share * self.backward, (share * forward, share * backward)
        )


@dataclass(frozen=True)
class TimedParts:
    """Ratios for parts of a step that were timed; the defaults are for a prediction from rates."""

    update: float = 1.0
    """The timed seconds of clipping and the optimizer's step over those predicted from rates."""
    split: tuple[float, float] = (0.5, 0.5)
    """The seconds of the backward passes for the inputs and for the weights, each divided by those
    of a whole backward pass. The sum of timed shares is above 1, as both parts do some of the same
    work."""


@dataclass(frozen=True)
class PlanStages:
    """The figures of a plan's stages on which the seconds of a step depend.

    A model that is not cut is one stage.
    """

    seconds: Sequence[MicroBatchSeconds]
    """The seconds of a micro-batch, by stage."""
    profile_of: Callable[[int], Profile]
    """Returns the memory profile of a stage, given its number."""
    base: RecordedSections
    """The run on fake tensors whose optimizer step is scaled to each rank's share."""
    timed: TimedParts
    """The ratios that were timed for this model on this device."""


class StepTimer:
    """Predicts seconds on one cluster from its rates.

    Args:
        cluster: the cluster, with the rates of its devices and links.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        device, node = cluster.device, cluster.node
        at_once = min(node.devices, node.cores or node.devices) if node.shared else 1
        self.oversubscription = node.devices / at_once if node.shared else 1.0
        """The number of ranks of a node for each rank that computes at full speed; 1 unless ranks
        share cores. The rates below are those of a rank at full speed."""
        share = 1.0 / at_once
        self._flops = device.flops.fp32 * device.efficiency * share
        self._low_flops = device.flops.bf16 * device.efficiency * share
        self._nbytes = device.memory_bandwidth * share
        self._launch = device.launch
        self._processors = device.processors if device.kind == "cuda" else None
        # On a CPU the measured seconds of an exchange include its launch.
        self._issue = 0.0 if node.shared else EXCHANGE_OPERATIONS * device.launch
        self._op_seconds: dict[OpLog, float] = {}
        self._exchange_seconds: dict[tuple[tuple[TensorExchange, ...], int, float], float] = {}

    def op_seconds(self, work: OpLog) -> float:
        """Predict the seconds of operations that run one after the other on the device."""
        return self._work_seconds(work)

    def _work_seconds(self, work: OpLog, parts: int = 1) -> float:
        """Predict the seconds of one of `parts` equal parts of each operation.

        With more than one part, products of every size are assumed to reach the full rate.
        """
        arithmetic = work.flops / self._flops + work.low_flops / self._low_flops
        if self._processors and parts == 1:
            fp32_depth, low_depth = 2 * self._flops / self._nbytes, self._low_flops / self._nbytes
            overhead = np.where(work.low_flops > 0, low_depth, fp32_depth)
            arithmetic /= product_efficiency(work.products, self._processors, overhead)
        longer = np.maximum(arithmetic, work.nbytes / self._nbytes) / parts
        return float(((longer + self._launch) * work.times).sum())

    def host_op_seconds(self, work: OpLog) -> float:
        """Predict the seconds of operations on the host, whose bandwidth a node's ranks share."""
        node = self.cluster.node
        return float((work.nbytes * work.times).sum()) * node.devices / node.host_bandwidth

    def pass_seconds(self, sections: Sequence[Section], tp: int = 1) -> MicroBatchSeconds:
        """Predict one micro-batch in some sections, forward and backward.

        Args:
            sections: the sections of one tp rank.
            tp: the number of ranks over which the layers are sliced.
        """
        return MicroBatchSeconds(
            sum(self._pass(s, backward=False) for s in sections),
            sum(self._pass(s, backward=True) for s in sections),
            (
                sum(self._exchanges(s, tp, backward=False) for s in sections),
                sum(self._exchanges(s, tp, backward=True) for s in sections),
            ),
        )

    def least_seconds(self, sections: Sequence[Section], tp: int) -> MicroBatchSeconds:
        """A lower bound on the seconds of one micro-batch on a tp rank, from unsliced sections.

        Each tp rank is assumed to have an equal part of every operation, at the full rate, and to
        exchange nothing.

        Args:
            sections: sections of the unsliced model.
            tp: the number of ranks over which the layers are sliced.
        """
        if tp == 1:
            return self.pass_seconds(sections)
        return MicroBatchSeconds(
            sum(self._work_seconds(s.forward, parts=tp) * s.slowdown[0] for s in sections),
            sum(self._work_seconds(s.backward, parts=tp) * s.slowdown[1] for s in sections),
        )

    def _exchanges(self, section: Section, tp: int, *, backward: bool) -> float:
        """Return the seconds of a section's exchanges over tp, which do not overlap operations."""
        exchanges = section.exchanges[backward]
        if tp == 1 or not exchanges:
            return 0.0
        work = self._pass(section, backward=backward) / len(exchanges)
        key = (exchanges, tp, work)
        if key not in self._exchange_seconds:
            seconds = 0.0
            for exchange in exchanges:
                # Python issues these exchanges, too. Without this cost two measured plans of
                # tensor_sequence were forecast 18 and 37 % too low; with it 2 %.
                kind, nbytes = exchange.kind, exchange.nbytes
                in_transit = collective_seconds(
                    kind, nbytes, tp, 1, self.cluster, after_work=True, work=work
                )
                seconds += max(self._issue, in_transit + self._measured_issue(kind))
            self._exchange_seconds[key] = seconds
        return self._exchange_seconds[key]

    def _pass(self, section: Section, *, backward: bool) -> float:
        work = section.backward if backward else section.forward
        if work not in self._op_seconds:
            self._op_seconds[work] = self.op_seconds(work)
        return self._op_seconds[work] * section.slowdown[backward]

    def plan_seconds(self, plan: Plan, stages: PlanStages) -> StepSeconds:
        """Predict one step of a plan.

        Args:
            plan: the plan, of which mesh, schedule, batch and techniques are used.
            stages: the stages of this plan, or of a plan that differs from it only in the number of
                replicas.
        """
        count = len(stages.seconds)
        ranks: tuple[int, ...] = (0,)
        if plan.cut is not None and plan.pp > 1:
            ranks = stage_ranks(plan.cut.schedule, plan.pp, count // plan.pp)
        num_ranks = max(ranks) + 1
        # The first and the last rank hold the model's ends. All other ranks are taken to be like
        # the one in the middle.
        sampled = sorted({0, num_ranks // 2, num_ranks - 1})
        own_stages = ([n for n, owner in enumerate(ranks) if owner == rank] for rank in sampled)
        rank_profiles = [
            [stages.profile_of(stage) for stage in stages_of_rank] for stages_of_rank in own_stages
        ]
        most_trained = max(
            sum(p.trained_elements for p in stages_of_rank) for stages_of_rank in rank_profiles
        )
        update = self.update_seconds(plan, stages.base, most_trained) * stages.timed.update
        return self.step(plan, stages.seconds, rank_profiles, update, split=stages.timed.split)

    def update_seconds(self, plan: Plan, base: RecordedSections, trained: int) -> float:
        """Predict the seconds of clipping and the optimizer's step on one rank from rates.

        Each rank updates only its shard, in as many operations as for the whole. On a CPU the
        launches of the operations are divided by the number of shards, too, as ranks share the
        cores.

        Args:
            plan: the plan, of which the number of shards and the offload are used.
            base: the run on fake tensors whose optimizer step is scaled.
            trained: the trained elements of all shards together.
        """
        run_on = sum(t.numbers for s in base.sections for t in s.tensors if t.trained)
        work = base.step_work.scaled(trained / max(1, run_on))
        if not self.cluster.node.shared:
            work = work.scaled(1 / plan.state_ranks)
        if plan.offload_tiers.optimizer == "cpu" and is_accelerator(plan.device_type):
            return self.host_op_seconds(work)
        return self.op_seconds(work) / (plan.state_ranks if self.cluster.node.shared else 1)

    def step(
        self,
        plan: Plan,
        stage_seconds: Sequence[MicroBatchSeconds],
        rank_profiles: Sequence[Sequence[Profile]],
        update: float,
        *,
        split: tuple[float, float] = (0.5, 0.5),
        simulated: bool = True,
    ) -> StepSeconds:
        """Predict one step of a plan from the seconds of its stages.

        Args:
            plan: the plan, of which mesh, schedule, batch and techniques are used.
            stage_seconds: the seconds of a micro-batch on each stage, or on the whole model if it
                is not cut.
            rank_profiles: by rank, the profiles of the rank's stages. Ranks that do not send the
                most may be left out.
            update: the seconds of the optimizer's step on a rank that is alone on its cores.
            split: see `TimedParts`.
            simulated: whether to simulate a short schedule. If not, the bubble is that of the
                closed form, or a lower bound for a schedule without one.
        """
        micro_batches = plan.batch.accumulation_steps
        profiles = [profile for rank_profile in rank_profiles for profile in rank_profile]
        if plan.pp > 1 and plan.splits_backward:
            stage_seconds = [
                replace(stage, backward=sum(split) * stage.backward) for stage in stage_seconds
            ]
        compute, idle, within = self._computing(
            plan, stage_seconds, profiles, split, simulated=simulated
        )
        slowest = max(stage_seconds, key=lambda stage: stage.total)
        exchange = moving = 0.0
        for rank_profile in rank_profiles:
            parts = [
                self._traffic(plan, profile, slowest, micro_batches) for profile in rank_profile
            ]
            comm_seconds, transfer_seconds = (sum(each) for each in zip(*parts, strict=True))
            exchange, moving = max(exchange, comm_seconds), max(moving, transfer_seconds)
        update *= self.oversubscription
        return StepSeconds(compute, idle, within + exchange, moving, update)

    def unhidden_seconds(self, plan: Plan, profile: Profile, *, empty: bool = False) -> float:
        """Predict the seconds of all messages of a step if they overlap with nothing.

        Args:
            plan: a plan that is not cut into stages.
            profile: the profile of the whole model.
            empty: whether to count every message as 0 bytes, so that only its latency remains.
        """
        return sum(
            traffic.step_calls(plan.batch.accumulation_steps)
            / traffic.calls
            * self._traffic_seconds(replace(traffic, nbytes=0) if empty else traffic)
            for technique in plan.techniques.values()
            for traffic in technique.traffic(profile, plan)
            if traffic.ranks > 1 and traffic.calls
        )

    def _computing(
        self,
        plan: Plan,
        stage_seconds: Sequence[MicroBatchSeconds],
        profiles: Sequence[Profile],
        split: tuple[float, float],
        *,
        simulated: bool,
    ) -> tuple[float, float, float]:
        """Predict the seconds of the busiest rank: computing, idle, exchanging over the tp axis."""
        micro_batches = plan.batch.accumulation_steps
        cut = plan.cut
        if plan.pp == 1 or cut is None:
            computing = sum(stage_time.computing for stage_time in stage_seconds)
            exchanging = micro_batches * sum(stage_time.exchanging for stage_time in stage_seconds)
            return self.oversubscription * micro_batches * computing, 0.0, exchanging
        schedule, per_rank = cut.schedule, len(stage_seconds) // plan.pp
        pass_seconds = sum(stage.computing for stage in stage_seconds) / (2 * len(stage_seconds))
        sending = self._sending(plan, profiles, pass_seconds)
        splits = plan.splits_backward
        weights_share = split[1] / sum(split) if splits else 0.0
        ranks = stage_ranks(schedule, plan.pp, per_rank)
        gathered = max((p.boundary.gathered for p in profiles), default=0)
        stage_seconds = self._with_gathers(plan.tp, stage_seconds, ranks, gathered)
        stages = [_with_sending(stage_time, sending, weights_share) for stage_time in stage_seconds]
        busy_seconds, rank_seconds = [(0.0, 0.0)] * plan.pp, [0.0] * plan.pp
        for rank, stage_time, with_sending in zip(ranks, stage_seconds, stages, strict=True):
            computing, exchanging = busy_seconds[rank]
            computing += micro_batches * stage_time.computing
            busy_seconds[rank] = computing, exchanging + micro_batches * stage_time.exchanging
            rank_seconds[rank] += micro_batches * sum(with_sending)
        is_short = 2 * len(stages) * micro_batches <= MAX_SIMULATED_ACTIONS
        bubble_fraction = None
        if not (simulated and is_short):
            bubble_fraction = closed_form_bubble(
                schedule, plan.pp, micro_batches, per_rank, splits=splits
            )
        if bubble_fraction is not None:
            total = max(rank_seconds) / (1.0 - bubble_fraction)
        elif simulated:
            orders = schedule_orders(schedule, plan.pp, per_rank, micro_batches)
            total = simulate_step(orders, stages).seconds
        else:  # at least one micro-batch passes all stages, forward and backward
            total = sum(stage.forward + stage.input_backward for stage in stages)
        # Ranks that share the cores also use the cores of idle ranks.
        total = max(total, self.oversubscription * sum(rank_seconds) / len(rank_seconds))
        computing, exchanging = max(busy_seconds, key=sum)
        return computing, max(0.0, total - computing - exchanging), exchanging

    def _sending(self, plan: Plan, profiles: Sequence[Profile], work: float) -> float:
        """Predict the seconds of sending the largest boundary tensor to the next stage.

        Args:
            plan: the plan.
            profiles: the profiles of the stages.
            work: the seconds of a forward or a backward pass of a stage.
        """
        nbytes, tp = max((p.boundary.incoming for p in profiles), default=0), plan.tp
        seconds = collective_seconds(
            "send", nbytes, 2, tp, self.cluster, after_work=True, work=work
        )
        return max(self._issue, seconds + self._measured_issue("send"))

    def _with_gathers(
        self,
        tp: int,
        stage_seconds: Sequence[MicroBatchSeconds],
        ranks: Sequence[int],
        nbytes: int,
    ) -> Sequence[MicroBatchSeconds]:
        """Add the all-gathers over tp: each tp rank is sent only a part of a boundary tensor.

        Args:
            tp: the number of ranks that gather.
            stage_seconds: the seconds of each stage.
            ranks: the pp rank of each stage.
            nbytes: the bytes that are gathered at each boundary between ranks.
        """
        if tp == 1 or not nbytes:
            return stage_seconds
        alone = collective_seconds("all_gather", nbytes, tp, 1, self.cluster, after_work=True)
        seconds = max(self._issue, alone + self._measured_issue("all_gather"))
        crosses = [False, *(a != b for a, b in pairwise(ranks)), False]
        return [
            replace(
                stage,
                exchange=(stage.exchange[0] + seconds * into, stage.exchange[1] + seconds * out),
            )
            for stage, (into, out) in zip(stage_seconds, pairwise(crosses), strict=True)
        ]

    def _traffic(
        self, plan: Plan, profile: Profile, slowest: MicroBatchSeconds, micro_batches: int
    ) -> tuple[float, float]:
        """Predict the seconds by which exchanges of replicas, and transfers, make a step longer."""
        by_overlap: dict[tuple[str, str], list[tuple[Traffic, float]]] = {}
        for technique in plan.techniques.values():
            for traffic in technique.traffic(profile, plan):
                if traffic.overlaps in ("schedule", "passes"):  # see `_sending`, `_exchanges`
                    continue
                by_overlap.setdefault((traffic.every, traffic.overlaps), []).append(
                    (traffic, self._traffic_seconds(traffic, slowest))
                )
        comm_seconds = transfer_seconds = 0.0
        for (every, overlaps), messages in by_overlap.items():
            times = micro_batches if every == "micro_batch" else 1
            total_seconds = sum(seconds for _, seconds in messages)
            # The launches of messages do not overlap with computing.
            issued = sum(traffic.calls for traffic, _ in messages if traffic.ranks > 1)
            # The first gather or the last reduction does not overlap with anything.
            alone = max((s / t.calls for t, s in messages if t.ranks > 1 and t.calls), default=0.0)
            hidden = self._hidden_seconds(overlaps, slowest)
            exposed = max(issued * self._issue, alone, total_seconds - hidden)
            overlapping = max(0.0, 1.0 - exposed / total_seconds) if total_seconds else 0.0
            # Computation that overlaps with exchanges has fewer processors.
            busy = sum(seconds * self._busy_share(traffic) for traffic, seconds in messages)
            exposed += overlapping * busy
            transfers = sum(
                seconds for traffic, seconds in messages if traffic.kind in HOST_TRANSFERS
            )
            share = transfers / total_seconds if total_seconds else 0.0
            comm_seconds += times * exposed * (1 - share)
            transfer_seconds += times * exposed * share
        return comm_seconds, transfer_seconds

    def _hidden_seconds(self, overlaps: str, slowest: MicroBatchSeconds) -> float:
        """The seconds of computing with which messages may overlap.

        They are 0 on a CPU, where messages need the cores, too.
        """
        if self.cluster.node.shared:
            return 0.0
        return {"forward": slowest.forward, "backward": slowest.backward}.get(overlaps, 0.0)

    def _busy_share(self, traffic: Traffic) -> float:
        """The share of a GPU's processors that an exchange keeps busy; see `Link.channels`."""
        if traffic.ranks == 1 or traffic.kind not in EXCHANGES or not self._processors:
            return 0.0
        cluster = self.cluster
        spread = spread_over_nodes(traffic.ranks, traffic.stride, cluster.node.devices)
        link = cluster.inside if spread.nodes == 1 or not cluster.between else cluster.between
        return min(1.0, (link.channels or 0) / self._processors)

    def _traffic_seconds(self, traffic: Traffic, slowest: MicroBatchSeconds | None = None) -> float:
        node = self.cluster.node
        if traffic.kind == "receive" and not traffic.nothing_sent:  # overlaps with a counted send
            return 0.0
        if traffic.kind == "to_host" or traffic.kind == "from_host":
            return traffic.nbytes / node.host_link if node.host_link else 0.0
        if traffic.kind == "to_disk" or traffic.kind == "from_disk":
            rate = node.disk_write if traffic.kind == "to_disk" else node.disk_read
            return traffic.nbytes * node.devices / rate if rate else 0.0
        if traffic.kind == "copy":  # each byte is read and written
            return self.oversubscription * 2 * traffic.nbytes / self._nbytes
        kind = self.cluster.op_of(traffic.kind, shared_memory=traffic.shared_memory)
        work = None
        if slowest is not None and traffic.calls:
            passes = {"forward": slowest.forward, "backward": slowest.backward}
            work = passes.get(traffic.overlaps, 0.0) / traffic.calls
        seconds = collective_seconds(
            kind,
            traffic.nbytes,
            traffic.ranks,
            traffic.stride,
            self.cluster,
            traffic.calls,
            after_work=traffic.overlaps in ("forward", "backward"),
            work=work,
        )
        issued = traffic.calls * self._measured_issue(kind) if traffic.in_hooks else 0.0
        return seconds + issued

    def _measured_issue(self, kind: MeasuredOp) -> float:
        """The measured seconds to issue a collective; 0 if not measured; see `LinkSpec.issue`."""
        measured = self.cluster.inside.kinds.get(kind)
        return measured.issue if measured else 0.0


@cache
def closed_form_bubble(
    schedule: str, pp: int, micro_batches: int, stages_per_rank: int, *, splits: bool
) -> float | None:
    """The idle share of a step if all stages are equal; None if there is no closed form.

    Args:
        schedule: one of `orders.SCHEDULES`.
        pp: the number of pp ranks.
        micro_batches: the number of micro-batches of one step.
        stages_per_rank: see `orders.schedule_orders`.
        splits: whether backward passes are split in two; see `Plan.splits_backward`.
    """
    shares = (1.0, 1.0, 1.0) if splits else (1.0, 2.0, 0.0)
    try:
        return bubble_share(schedule, pp, micro_batches, stages_per_rank, *shares)
    except ValueError:  # too few micro-batches
        return None


def product_efficiency(
    products: NDArray[np.float64], processors: int, overhead: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The share of a GPU's rate for large matrix products that products of given sizes reach.

    The model is that of NVIDIA's Matrix Multiplication Background User's Guide. The output is cut
    into tiles, and a tile at the edge costs as much as a whole one (tile quantization). The
    processors compute one tile each at a time (wave quantization). A tile also takes time apart
    from its arithmetic, which matters less the longer k is. Of this time only that of writing the
    result is counted, because it follows from the data sheet. If there are fewer tiles than
    processors, k is cut as well if that is faster (split-k), and each part writes its result. Tiles
    are 128 x 128; along a side of the output of at most 64 they are 64 wide.

    Args:
        products: (operations, 4), the m, n, k and batch of each operation; see `OpLog.products`.
            Where they are 0, the share is 1.
        processors: see `DeviceSpec.processors`.
        overhead: (operations,), the k whose arithmetic takes as long as writing the result.

    Returns:
        (operations,), each between 0 and 1.
    """
    m, n, k, batch = np.maximum(products, 1.0).T
    # Interpolated sizes may differ a little from whole numbers.
    edges = [np.where(size > TILE / 2, TILE, TILE / 2) for size in (m, n)]
    rows, columns = (np.ceil(s / e - 1e-6) for s, e in zip((m, n), edges, strict=True))
    tiles = rows * columns * np.ceil(batch - 1e-6)
    best = np.zeros_like(m)
    for parts in (np.ones_like(m), np.maximum(1.0, processors // tiles)):
        waves = np.ceil(tiles * parts / processors)
        busy = tiles * parts / (waves * processors)
        best = np.maximum(best, busy * k / (k + parts * overhead))
    share = best * (m / (rows * edges[0])) * (n / (columns * edges[1]))
    return np.where(products[:, 0] > 0, np.minimum(share, 1.0), 1.0)


def _with_sending(stage: MicroBatchSeconds, sending: float, weights_share: float) -> StageSeconds:
    """Return the seconds of a stage's passes, with sending and with the exchanges over tp.

    The part of the backward pass for the weights sends and exchanges nothing.

    Args:
        stage: the seconds of computing, and those of exchanges over tp, without sending.
        sending: the seconds of sending a boundary tensor.
        weights_share: the share of the backward pass that computes the gradients of the weights.
    """
    weights = stage.backward * weights_share
    forward_extra, backward_extra = (sending + exchange for exchange in stage.exchange)
    return StageSeconds(
        stage.forward + forward_extra, stage.backward - weights + backward_extra, weights
    )
