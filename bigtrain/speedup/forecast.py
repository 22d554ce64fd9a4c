"""The predicted seconds of a step on any number of ranks, by a cluster's figures."""

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
from bigtrain.machine.cluster import Cluster, CommOp
from bigtrain.machine.local_cluster import measure_local_cluster
from bigtrain.machine.rates import usable_cores
from bigtrain.machine.residuals import has_device
from bigtrain.speedup.inequality import SyncStep
from bigtrain.timing.run_seconds import RunClock
from bigtrain.timing.step_time import StepTimer

FORECAST_RANKS = (2, 4, 8, 16)
"""The numbers of ranks that are predicted for a cluster file."""
LARGEST_TRIED = 4096
"""The search for the smallest number of ranks that pays ends here."""


class StepForecaster:
    """Predicts steps of one strategy; the samples of a worker do not depend on their number.

    Args:
        job: a job with the strategy, with a micro-batch size and accumulation, and no global batch
            size.
        cluster: the figures; None for this machine's, which are measured if none are cached.
        most: the largest number of ranks that runs on this machine.

    Raises:
        ConfigError: the model's seconds cannot be predicted, or the job cannot run.
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
        """Whether the figures describe this machine's device."""
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
        """Return the figures for a number of ranks.

        On this machine every rank is given as many cores as it has when the most ranks run, also
        if fewer run. More ranks than the machine has room for are given cores of the same speed.
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
        """Predict a step; `exposed` is the planner's exchange, `compute` is the rest.

        Raises:
            ConfigError: the technique refuses so many ranks, or the cluster has no link for them.
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
        """Seconds of a step of one process with a worker's samples."""
        single = override_job(self._job, ["strategy=single", "mesh.dp=-1"])
        plan = make_plan(single, 1, self._kind)
        return self._clock.seconds_of(plan, StepTimer(self.cluster_of(1))).total

    def messages(self, ranks: int) -> list[tuple[CommOp, int, int]]:
        """Return the exchanges of one step among all ranks: kind, bytes of all, number of them.

        The list is empty if an exchange is among fewer ranks: it cannot be replayed.
        """
        plan = self._plan(ranks)
        messages: list[tuple[CommOp, int, int]] = []
        for technique in plan.techniques.values():
            for traffic in technique.traffic(self._clock.profile(), plan):
                if traffic.ranks == 1 or not traffic.calls:
                    continue
                if traffic.ranks != ranks or traffic.kind not in get_args(CommOp):
                    return []
                times = plan.batch.accumulation_steps
                kind: CommOp = traffic.kind  # type: ignore[assignment]
                messages.append((kind, traffic.step_bytes(times), traffic.step_calls(times)))
        return messages

    def bandwidth(self, ranks: int) -> float:
        """Return the bytes per second of the slowest link between so many ranks."""
        cluster = self.cluster_of(ranks)
        link = cluster.inside
        if ranks > cluster.node.devices and cluster.between is not None:
            link = cluster.between
        return link.of("all_reduce").rate

    def _plan(self, ranks: int) -> Plan:
        return make_plan(self._job, ranks, self._kind)


def counts(most: int) -> list[int]:
    """Return the powers of two from 2 on, and the largest number of ranks."""
    powers = [2**n for n in range(1, most.bit_length())]
    return sorted({*powers, most})


def candidates() -> Sequence[int]:
    """Return the numbers of ranks to try: all up to 64, then each an eighth more than the last."""
    numbers = [*range(2, 65)]
    while numbers[-1] < LARGEST_TRIED:
        numbers.append(min(LARGEST_TRIED, numbers[-1] * 9 // 8))
    return numbers
