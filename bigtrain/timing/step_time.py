"""How long a step takes: computing, waiting for other stages, talking, moving, updating.

An operation takes as long as its arithmetic or its reading and writing, whichever is longer, and at
least what it costs to issue it (Williams et al. 2009, Roofline); rates are those of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise

import numpy as np

from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Profile
from bigtrain.costs.traffic import HOST_TRANSFERS, Traffic
from bigtrain.devices import is_accelerator
from bigtrain.machine.cluster import Cluster, CommOp
from bigtrain.machine.collective_cost import collective_seconds as exchange_seconds
from bigtrain.prediction.record_sections import RecordedSections
from bigtrain.prediction.sections import OpLog, Section
from bigtrain.schedules.bubble import StageSeconds, bubble_share, simulate_step
from bigtrain.schedules.orders import schedule_orders, stage_ranks
from bigtrain.slicing.exchange import TensorExchange
from bigtrain.timing.products import product_efficiency

MAX_SIMULATED_ACTIONS = 4096
"""Actions of a step up to which its schedule is played through; above, a step is as long as the
closed form of equal stages says of the slowest."""

EXCHANGE_OPERATIONS = 8
"""An exchange is issued like so many operations: copies in and out, streams that wait for one
another, the call itself. An assumption."""


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of one step, by what is waited for."""

    compute: float
    """Of the busiest rank: forward and backward, what is computed again included."""
    bubble: float = 0.0
    """Of the same rank, idle: waiting for the stages before and behind, and for what they send."""
    exchange: float = 0.0
    """Talking to replicas, as far as it does not hide behind computing, and to ranks that have
    other slices of the same layers."""
    moving: float = 0.0
    """To and from the host or the disk, as far as it does not hide."""
    update: float = 0.0
    """Clipping and the optimizer."""

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(float(getattr(self, f.name)) for f in fields(self))


@dataclass(frozen=True)
class MicroBatchSeconds:
    """One micro-batch on one stage, in seconds."""

    forward: float
    backward: float
    """Of computing, as `forward`."""
    exchange: tuple[float, float] = (0.0, 0.0)
    """Of what the ranks of the tp axis exchange meanwhile, forward and backward, behind nothing."""

    @property
    def computing(self) -> float:
        """There and back."""
        return self.forward + self.backward

    @property
    def exchanging(self) -> float:
        """There and back."""
        return sum(self.exchange)

    @property
    def total(self) -> float:
        """There and back, with what is exchanged."""
        return self.computing + self.exchanging

    @classmethod
    def sum(cls, paces: Iterable[MicroBatchSeconds]) -> MicroBatchSeconds:
        """One after the other."""
        found = [(pace.forward, pace.backward, *pace.exchange) for pace in paces]
        forward, backward, there, back = map(sum, zip(*found, strict=True))
        return cls(forward, backward, (there, back))

    def scaled(self, share: float) -> MicroBatchSeconds:
        """Of a part."""
        there, back = self.exchange
        parts = (share * self.forward, share * self.backward, (share * there, share * back))
        return MicroBatchSeconds(*parts)


@dataclass(frozen=True)
class TimedParts:
    """What was timed of a step beside its sections' passes; else as rates say, and in halves."""

    update: float = 1.0
    """Times that clipping and the optimizer take longer than rates say."""
    split: tuple[float, float] = (0.5, 0.5)
    """Of a backward pass in two parts, for the inputs and for the weights, each part's seconds over
    those of a whole pass: together more than 1, as some of it is done in both."""


class StepTimer:
    """Times on one cluster.

    Args:
        cluster: rates of devices and links.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        device, node = cluster.device, cluster.node
        at_once = min(node.devices, node.cores or node.devices) if node.shared else 1
        self.oversubscription = node.devices / at_once if node.shared else 1.0
        """Ranks of a node for each that computes at full speed, at which the times below are."""
        share = 1.0 / at_once
        self._flops = device.flops.fp32 * device.efficiency * share
        self._low_flops = device.flops.bf16 * device.efficiency * share
        self._nbytes = device.memory_bandwidth * share
        self._launch = device.launch
        self._processors = device.processors if device.kind == "cuda" else None
        # On a CPU what was measured of exchanges has it.
        self._issue = 0.0 if node.shared else EXCHANGE_OPERATIONS * device.launch
        self._known: dict[tuple[int, bool], tuple[Section, float]] = {}
        self._exchanged: dict[tuple[int, int], tuple[tuple[TensorExchange, ...], float]] = {}

    def op_seconds(self, work: OpLog) -> float:
        """Seconds of the operations of a pass, one after the other."""
        return self._work_seconds(work)

    def _work_seconds(self, work: OpLog, parts: int = 1) -> float:
        """The same, of one of so many parts: then products reach the full rate, however small."""
        arithmetic = work.flops / self._flops + work.low_flops / self._low_flops
        if self._processors and parts == 1:
            fp32_depth, low_depth = 2 * self._flops / self._nbytes, self._low_flops / self._nbytes
            overhead = np.where(work.low_flops > 0, low_depth, fp32_depth)
            arithmetic /= product_efficiency(work.products, self._processors, overhead)
        longer = np.maximum(arithmetic, work.nbytes / self._nbytes) / parts
        return float(((longer + self._launch) * work.times).sum())

    def host_op_seconds(self, work: OpLog) -> float:
        """Seconds of the same on the host of a GPU, whose memory its ranks share."""
        node = self.cluster.node
        return float((work.nbytes * work.times).sum()) * node.devices / node.host_bandwidth

    def pass_seconds(self, sections: Sequence[Section], tp: int = 1) -> MicroBatchSeconds:
        """One micro-batch through some sections and back, on one of the ranks that slice them."""
        return MicroBatchSeconds(
            sum(self._pass(s, back=False) for s in sections),
            sum(self._pass(s, back=True) for s in sections),
            (
                sum(self._exchanges(s, tp, back=False) for s in sections),
                sum(self._exchanges(s, tp, back=True) for s in sections),
            ),
        )

    def least_seconds(self, sections: Sequence[Section], tp: int) -> MicroBatchSeconds:
        """No rank of so many that slice these is faster: each has its part, at the full rate."""
        if tp == 1:
            return self.pass_seconds(sections)
        both = [
            sum(
                self._work_seconds(s.backward if back else s.forward, parts=tp) * s.slowdown[back]
                for s in sections
            )
            for back in (False, True)
        ]
        return MicroBatchSeconds(both[0], both[1])

    def _exchanges(self, section: Section, tp: int, *, back: bool) -> float:
        """Seconds of what the tp axis exchanges in a pass: each stands between two operations."""
        exchanges = section.exchanges[back]
        if tp == 1 or not exchanges:
            return 0.0
        key = (id(exchanges), tp)
        if key not in self._exchanged:  # they are kept, so that their id stays their own
            seconds = 0.0
            for one in exchanges:
                given = (one.kind, one.nbytes, tp, 1, self.cluster)
                alone = exchange_seconds(*given, after_work=True)
                seconds += max(self._issue, alone + self._beside(one.kind))
            self._exchanged[key] = exchanges, seconds
        return self._exchanged[key][1]

    def _pass(self, section: Section, *, back: bool) -> float:
        work = section.backward if back else section.forward
        key = (id(work), back)
        if key not in self._known:  # the section is kept, so that its work's id stays its own
            self._known[key] = (section, self.op_seconds(work))
        return self._known[key][1] * section.slowdown[back]

    def plan_seconds(
        self,
        plan: Plan,
        paces: Sequence[MicroBatchSeconds],
        profile_of: Callable[[int], Profile],
        base: RecordedSections,
        timed: TimedParts,
    ) -> StepSeconds:
        """One step of a plan, from its stages.

        Args:
            plan: mesh, schedule, batch, techniques.
            paces: of every stage; of the whole model where it is not cut.
            profile_of: a stage's profile, by its number; the whole model's is that of 0.
            base: the run that says what the optimizer's step takes.
            timed: on the device, of this model.
        """
        ranks: tuple[int, ...] = (0,)
        if plan.cut is not None and plan.pp > 1:
            ranks = stage_ranks(plan.cut.schedule, plan.pp, len(paces) // plan.pp)
        count = max(ranks) + 1
        sampled = sorted({0, count // 2, count - 1})
        own_stages = ([n for n, whose in enumerate(ranks) if whose == rank] for rank in sampled)
        rank_profiles = [[profile_of(stage) for stage in stages] for stages in own_stages]
        most_trained = max(sum(p.trained_elements for p in own) for own in rank_profiles)
        update = self.update_seconds(plan, base, most_trained) * timed.update
        return self.step(plan, paces, rank_profiles, update, split=timed.split)

    def update_seconds(self, plan: Plan, base: RecordedSections, trained: int) -> float:
        """Seconds of clipping and the optimizer on so many numbers, by rates; see `step`.

        Args:
            plan: says where it is done.
            base: the run that says what it takes.
            trained: numbers, of all shards; of which a rank has one. It has less to read and to
                write than all, in as many operations. On a CPU they count as part of what is timed.
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
        paces: Sequence[MicroBatchSeconds],
        rank_profiles: Sequence[Sequence[Profile]],
        update: float,
        *,
        split: tuple[float, float] = (0.5, 0.5),
        played: bool = True,
    ) -> StepSeconds:
        """One step.

        Args:
            plan: mesh, schedule, batch, techniques.
            paces: of every stage; of the whole model where it is not cut.
            rank_profiles: the stages of the ranks that tell what is sent, of all ranks or fewer.
            update: seconds of the optimizer's step on a rank, alone on its cores.
            split: see `TimedParts`.
            played: whether a short schedule is played through; otherwise, where it has no closed
                form, ranks wait no less than this says.
        """
        micro_batches = plan.batch.accumulation_steps
        profiles = [profile for own in rank_profiles for profile in own]
        if plan.pp > 1 and plan.splits_backward:
            paces = [replace(pace, backward=sum(split) * pace.backward) for pace in paces]
        compute, idle, within = self._computing(plan, paces, profiles, split, played=played)
        slowest = max(paces, key=lambda pace: pace.total)
        exchange = moving = 0.0
        for own in rank_profiles:
            parts = [self._traffic(plan, profile, slowest, micro_batches) for profile in own]
            comm_seconds, transfer_seconds = (sum(each) for each in zip(*parts, strict=True))
            exchange, moving = max(exchange, comm_seconds), max(moving, transfer_seconds)
        update *= self.oversubscription
        return StepSeconds(compute, idle, within + exchange, moving, update)

    def unhidden_seconds(self, plan: Plan, profile: Profile, *, empty: bool = False) -> float:
        """Seconds of all that goes between ranks in a step, one after the other, nothing hidden.

        Args:
            plan: not cut into stages.
            profile: of the whole model.
            empty: count the messages without what is in them: their latency.
        """
        return sum(
            traffic.step_calls(plan.batch.accumulation_steps)
            / traffic.calls
            * self._one(replace(traffic, nbytes=0) if empty else traffic)
            for technique in plan.techniques.values()
            for traffic in technique.traffic(profile, plan)
            if traffic.ranks > 1 and traffic.calls
        )

    def _computing(
        self,
        plan: Plan,
        paces: Sequence[MicroBatchSeconds],
        profiles: Sequence[Profile],
        split: tuple[float, float],
        *,
        played: bool,
    ) -> tuple[float, float, float]:
        """Seconds of the busiest rank: computing, waiting, talking to those with its slices."""
        micro_batches = plan.batch.accumulation_steps
        cut = plan.cut
        if plan.pp == 1 or cut is None:
            computing = sum(pace.computing for pace in paces)
            exchanging = micro_batches * sum(pace.exchanging for pace in paces)
            return self.oversubscription * micro_batches * computing, 0.0, exchanging
        schedule = cut.schedule
        sending = self._sending(plan, profiles)
        splits = plan.splits_backward
        weights = split[1] / sum(split) if splits else 0.0
        ranks = stage_ranks(schedule, plan.pp, len(paces) // plan.pp)
        gathered = max((p.boundary.gathered for p in profiles), default=0)
        paces = self._with_gathers(plan.tp, paces, ranks, gathered)
        stages = [_seconds(pace, sending, weights) for pace in paces]
        busy_seconds, rank_seconds = [(0.0, 0.0)] * plan.pp, [0.0] * plan.pp
        for rank, pace, with_sending in zip(ranks, paces, stages, strict=True):
            computing, exchanging = busy_seconds[rank]
            computing += micro_batches * pace.computing
            busy_seconds[rank] = computing, exchanging + micro_batches * pace.exchanging
            rank_seconds[rank] += micro_batches * sum(with_sending)
        per_rank = len(paces) // plan.pp
        is_short = 2 * len(paces) * micro_batches <= MAX_SIMULATED_ACTIONS
        bubble_fraction = None
        if not (played and is_short):
            bubble_fraction = closed_form_bubble(
                schedule, plan.pp, micro_batches, per_rank, splits=splits
            )
        if bubble_fraction is not None:
            total = max(rank_seconds) / (1.0 - bubble_fraction)
        elif played:
            total = simulate_step(
                schedule_orders(schedule, plan.pp, per_rank, micro_batches), stages
            ).seconds
        else:  # one micro-batch goes there and back through all stages
            total = sum(
                stage_seconds.forward + stage_seconds.input_backward for stage_seconds in stages
            )
        # Where ranks take turns on the cores, those that wait leave them to the others.
        total = max(total, self.oversubscription * sum(rank_seconds) / len(rank_seconds))
        computing, exchanging = max(busy_seconds, key=sum)
        return computing, max(0.0, total - computing - exchanging), exchanging

    def _sending(self, plan: Plan, profiles: Sequence[Profile]) -> float:
        """Seconds for what crosses a cut; on a GPU it hides but for where a rank waits for it."""
        nbytes = max((p.boundary.incoming for p in profiles), default=0)
        one = exchange_seconds("send", nbytes, 2, plan.tp, self.cluster, after_work=True)
        return max(self._issue, one + self._beside("send"))

    def _with_gathers(
        self, tp: int, paces: Sequence[MicroBatchSeconds], ranks: Sequence[int], nbytes: int
    ) -> Sequence[MicroBatchSeconds]:
        """With what ranks of the tp axis gather of what others have sent each a part of."""
        if tp == 1 or not nbytes:
            return paces
        one = exchange_seconds("all_gather", nbytes, tp, 1, self.cluster, after_work=True)
        seconds = max(self._issue, one + self._beside("all_gather"))
        crosses = [False, *(a != b for a, b in pairwise(ranks)), False]
        return [
            replace(p, exchange=(p.exchange[0] + seconds * into, p.exchange[1] + seconds * out))
            for p, (into, out) in zip(paces, pairwise(crosses), strict=True)
        ]

    def _traffic(
        self, plan: Plan, profile: Profile, pace: MicroBatchSeconds, micro_batches: int
    ) -> tuple[float, float]:
        """Seconds that are not hidden: of exchanges between replicas, and of moves."""
        by_overlap: dict[str, list[tuple[Traffic, float]]] = {}
        for technique in plan.techniques.values():
            for traffic in technique.traffic(profile, plan):
                if traffic.overlaps in ("schedule", "passes"):  # see `_sending`, `_exchanges`
                    continue
                by_overlap.setdefault(f"{traffic.every} {traffic.overlaps}", []).append(
                    (traffic, self._one(traffic))
                )
        comm_seconds = transfer_seconds = 0.0
        for key, messages in by_overlap.items():
            times = micro_batches if key.startswith("micro_batch") else 1
            total_seconds = sum(seconds for _, seconds in messages)
            # What goes on meanwhile does not hide that each message has to be issued.
            issued = sum(traffic.calls for traffic, _ in messages if traffic.ranks > 1)
            # Nor has the first to be gathered or the last to be reduced anything to hide behind.
            alone = max((s / t.calls for t, s in messages if t.ranks > 1 and t.calls), default=0.0)
            exposed = max(issued * self._issue, alone, total_seconds - self._hides(key, pace))
            transfers = sum(
                seconds for traffic, seconds in messages if traffic.kind in HOST_TRANSFERS
            )
            share = transfers / total_seconds if total_seconds else 0.0
            comm_seconds += times * exposed * (1 - share)
            transfer_seconds += times * exposed * share
        return comm_seconds, transfer_seconds

    def _hides(self, key: str, pace: MicroBatchSeconds) -> float:
        """Seconds of computing behind which something may hide; on a CPU both want the cores."""
        if self.cluster.node.shared:
            return 0.0
        return {"forward": pace.forward, "backward": pace.backward}.get(key.split()[1], 0.0)

    def _one(self, traffic: Traffic) -> float:
        node = self.cluster.node
        if traffic.kind == "receive" and not traffic.nothing_sent:  # what is sent counts
            return 0.0
        if traffic.kind == "to_host" or traffic.kind == "from_host":
            return traffic.nbytes / node.host_link if node.host_link else 0.0
        if traffic.kind == "to_disk" or traffic.kind == "from_disk":
            rate = node.disk_write if traffic.kind == "to_disk" else node.disk_read
            return traffic.nbytes * node.devices / rate if rate else 0.0
        if traffic.kind == "copy":  # read and written
            return self.oversubscription * 2 * traffic.nbytes / self._nbytes
        arguments = (traffic.nbytes, traffic.ranks, traffic.stride, self.cluster, traffic.calls)
        between = traffic.overlaps in ("forward", "backward")
        kind: CommOp = "send" if traffic.kind == "receive" else traffic.kind
        seconds = exchange_seconds(kind, *arguments, after_work=between)
        return seconds + (traffic.calls * self._beside(kind) if traffic.in_hooks else 0.0)

    def _beside(self, kind: CommOp) -> float:
        """Seconds to issue it; see `LinkSpec.issue`."""
        measured = self.cluster.inside.kinds.get(kind)
        return measured.issue if measured else 0.0


@cache
def closed_form_bubble(
    schedule: str, pp: int, micro_batches: int, stages_per_rank: int, *, splits: bool
) -> float | None:
    """The share of a step in which ranks with equal stages wait; None without a closed form.

    Args:
        schedule: one of `orders.SCHEDULES`.
        pp: number of ranks.
        micro_batches: of one step.
        stages_per_rank: as in `orders.schedule_orders`.
        splits: whether backward passes go in two parts, see `Plan.splits_backward`.
    """
    shares = (1.0, 1.0, 1.0) if splits else (1.0, 2.0, 0.0)
    try:
        return bubble_share(schedule, pp, micro_batches, stages_per_rank, *shares)
    except ValueError:  # too few micro-batches
        return None


def _seconds(pace: MicroBatchSeconds, sending: float, weights_share: float) -> StageSeconds:
    """With sending, and the share of the backward pass that is done later, for the weights."""
    weights = pace.backward * weights_share
    there, back = (sending + exchange for exchange in pace.exchange)
    return StageSeconds(pace.forward + there, pace.backward - weights + back, weights)
