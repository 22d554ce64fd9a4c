"""Predict the seconds of a step on any number of ranks from the figures of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import get_args

from bigtrain.assembly.make_plan import make_plan
from bigtrain.core.strategy import Plan
from bigtrain.engine.setup import RunSetup, open_setup
from bigtrain.engine.time_blocks import SCRIPT
from bigtrain.errors import ConfigError
from bigtrain.job.load import override_job
from bigtrain.job.schema import Job
from bigtrain.machine.cluster import Cluster, CommOp, MeasuredOp
from bigtrain.machine.local_cluster import measure_local_cluster
from bigtrain.machine.rates import usable_cores
from bigtrain.machine.residuals import has_device
from bigtrain.speedup.inequality import SyncStep
from bigtrain.timing.run_seconds import RunClock
from bigtrain.timing.step_time import StepTimer

FORECAST_RANKS = (2, 4, 8, 16)
"""The numbers of ranks that are predicted for a cluster file."""
LARGEST_TRIED = 4096
"""The largest number of ranks that is tried in the search for the smallest number that pays."""


class StepForecaster:
    """Predicts the steps of one strategy on any number of ranks, with equal samples on each worker.

    Args:
        job: a job with the strategy, with a micro-batch size and accumulation, and without a global
            batch size.
        cluster: the cluster; None for this machine, whose rates are measured if none are cached.
        most: the largest number of ranks that runs on this machine.

    Raises:
        ConfigError: the seconds of the model's steps cannot be predicted, or the job cannot run.
    """

    def __init__(self, job: Job, cluster: Cluster | None, most: int) -> None:
        self._job, self._cluster, self._most = job, cluster, most
        self._here = cluster is None
        base = cluster or measure_local_cluster(most)
        self._base, self._cores = base, usable_cores()
        self._kind = base.device.kind
        plan = make_plan(job, most, self._kind)
        self.setup: RunSetup = open_setup(job, plan)
        self.is_local = self._here or has_device(base.device.kind, base.device.name)
        """Whether the figures of the cluster are for a device that this machine has."""
        at_once = min(most, self._cores if self._here else base.node.devices)
        self._clock = RunClock(
            job,
            self.setup.resolved,
            self.setup.workload,
            StepTimer(self.cluster_of(most)),
            at_once=at_once if self.is_local else 0,
            script=SCRIPT,
        )

    def cluster_of(self, ranks: int) -> Cluster:
        """Return the cluster with the figures for a number of ranks.

        A cluster file is not changed. On this machine, every rank has as many cores as it has when
        the largest number of ranks runs, even if fewer run. For more ranks than run on this
        machine, cores of the same speed are added.
        """
        if not self._here:
            return self._base
        node, device = self._base.node, self._base.device
        if not node.shared or ranks == self._most > self._cores:
            devices = max(ranks, node.devices)
            return self._base.model_copy(
                update={"node": node.model_copy(update={"devices": devices})}
            )
        share = ranks * max(1, self._cores // self._most) / self._cores
        flops = {name: rate and rate * share for name, rate in device.flops.model_dump().items()}
        rates = {
            "flops": device.flops.model_copy(update=flops),
            "memory_bandwidth": device.memory_bandwidth * share,
        }
        return self._base.model_copy(
            update={
                "device": device.model_copy(update=rates),
                "node": node.model_copy(update={"devices": ranks, "cores": ranks}),
            }
        )

    def step(self, ranks: int) -> SyncStep:
        """Predict a step on a number of ranks.

        Its `exposed` is the predicted `StepSeconds.exchange`, and its `compute` is the rest.

        Raises:
            ConfigError: a technique refuses this number of ranks, or the cluster has no links
                between nodes for them.
        """
        plan, cluster = self._plan(ranks), self.cluster_of(ranks)
        if cluster.between is None and ranks > cluster.node.devices:
            raise ConfigError(
                f"cluster {cluster.name} is one node of {cluster.node.devices} devices, and "
                f"{ranks} ranks need more. Add a link to its file: "
                "between: {latency: 1e-5, bandwidth: 50e9}."
            )
        timer, profile = StepTimer(cluster), self._clock.profile()
        seconds = self._clock.seconds_of(plan, timer)
        return SyncStep(
            ranks=ranks,
            workers=plan.batch.dp_size,
            batch=plan.batch.micro_size * plan.batch.accumulation_steps,
            alone=self.alone,
            compute=seconds.total - seconds.exchange,
            exposed=seconds.exchange,
            whole=timer.unhidden_seconds(plan, profile),
            latency=timer.unhidden_seconds(plan, profile, empty=True),
        )

    @cached_property
    def alone(self) -> float:
        """The predicted seconds of a step of one process with the samples of one worker."""
        single = override_job(self._job, ["strategy=single", "mesh.dp=-1"])
        plan = make_plan(single, 1, self._kind)
        return self._clock.seconds_of(plan, StepTimer(self.cluster_of(1))).total

    def messages(self, ranks: int) -> list[tuple[MeasuredOp, int, int]]:
        """Return the exchanges of one step among all ranks: the kind, all bytes, the number.

        The list is empty if any exchange is among fewer ranks or is of another kind, because it
        cannot be replayed.
        """
        plan = self._plan(ranks)
        messages: list[tuple[MeasuredOp, int, int]] = []
        for technique in plan.techniques.values():
            for traffic in technique.traffic(self._clock.profile(), plan):
                if traffic.ranks == 1 or not traffic.calls:
                    continue
                if traffic.ranks != ranks or traffic.kind not in get_args(CommOp):
                    return []
                times = plan.batch.accumulation_steps
                kind = self.cluster_of(ranks).op_of(
                    traffic.kind, shared_memory=traffic.shared_memory
                )
                messages.append((kind, traffic.step_bytes(times), traffic.step_calls(times)))
        return messages

    def bandwidth(self, ranks: int) -> float:
        """Return the bytes per second of the slowest link between a number of ranks."""
        cluster = self.cluster_of(ranks)
        link = cluster.inside
        if ranks > cluster.node.devices and cluster.between is not None:
            link = cluster.between
        return link.of("all_reduce").rate

    def _plan(self, ranks: int) -> Plan:
        return make_plan(self._job, ranks, self._kind)


def counts(most: int) -> list[int]:
    """Return the numbers of ranks to measure: the powers of two from 2, and the largest number.

    Args:
        most: the largest number of ranks.
    """
    powers = [2**n for n in range(1, most.bit_length())]
    return sorted({*powers, most})


def candidates() -> Sequence[int]:
    """Return the numbers of ranks to try: 2 to 64, then each an eighth more than the one before.

    The last number is `LARGEST_TRIED`.
    """
    numbers = [*range(2, 65)]
    while numbers[-1] < LARGEST_TRIED:
        numbers.append(min(LARGEST_TRIED, numbers[-1] * 9 // 8))
    return numbers
