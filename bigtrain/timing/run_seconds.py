"""The predicted and the measured seconds of a run's steps.

The prediction for a run is that of the planner for the same plan. Nothing is timed for it: it uses
rates and block times that were measured on this machine before.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

import torch

from bigtrain.activations.policy import BlockPolicy, recomputed_names
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import Plan
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Profile
from bigtrain.costs.traffic import StepVolume
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job
from bigtrain.machine.busy import CpuClock
from bigtrain.machine.local_cluster import cached_local_cluster
from bigtrain.machine.residuals import StepBasis
from bigtrain.prediction.compose import compose_profile
from bigtrain.prediction.fake_runs.slices import without_slices
from bigtrain.prediction.memory_report import StepForecast, StepMeasurement
from bigtrain.prediction.section_library import ModelSections, SectionLibrary
from bigtrain.prediction.sections import Section
from bigtrain.ranks.context import RunContext
from bigtrain.timing.block_seconds import BlockTimer
from bigtrain.timing.plan_timer import PlanTimer
from bigtrain.timing.step_time import MicroBatchSeconds, PlanStages, StepSeconds, StepTimer

MAX_STEPS = 1000
"""The seconds and volumes of this many of the newest steps are stored."""
SECTION_POLICIES: dict[BlockPolicy, BlockPolicy] = {"offload": "keep", "full_offload": "full"}
"""For a policy with offload, the policy that computes the same. The seconds of the transfers come
from the traffic that the technique reports."""


class StepWatch:
    """Records the seconds of steps without memory tracking, and the bytes that all steps exchange.

    Args:
        context: the context of the rank whose exchanges are counted.
    """

    def __init__(self, context: RunContext) -> None:
        self._traffic = context.recorder.traffic
        self._volumes: deque[StepVolume] = deque(maxlen=MAX_STEPS)
        self._seconds: deque[float] = deque(maxlen=MAX_STEPS)
        self._count = 0
        self._tracked = False
        self._clock: CpuClock | None = None

    def begin(self, *, tracked: bool) -> None:
        """Begin a step.

        Args:
            tracked: whether memory is tracked, which makes the step slower.
        """
        self._tracked = tracked
        self._traffic.begin()
        if self._clock is None and not tracked:
            self._clock = CpuClock()

    def end(self, seconds: float) -> StepVolume | None:
        """End a step.

        Args:
            seconds: the seconds of the step.

        Returns:
            The bytes that this rank has exchanged in the step; None if they were not counted.
        """
        if not self._tracked:
            self._seconds.append(seconds)
            self._count += 1
        exchanged = self._traffic.end()
        if exchanged is None:
            return None
        self._volumes.append(StepVolume.of(exchanged))
        return self._volumes[-1]

    def volume(self) -> StepVolume | None:
        """The volume of the step whose sent bytes are the median; None if none was counted."""
        ordered = sorted(self._volumes, key=lambda volume: volume.sent_bytes)
        return ordered[len(ordered) // 2] if ordered else None

    def measured(self) -> StepMeasurement | None:
        """The median seconds of the recorded steps; None if no step was recorded."""
        if self._clock is None or not self._count:
            return None
        return StepMeasurement(self._count, statistics.median(self._seconds), self._clock.read())


def forecast_step_seconds(
    job: Job, resolved: ResolvedPlan, workload: Workload, context: RunContext
) -> StepForecast:
    """Predict the seconds of a run's step. The prediction times nothing and asks no other rank.

    Args:
        job: the job of the run.
        resolved: the plan of the run.
        workload: a workload with an example micro-batch; its model is not changed.
        context: the context of the calling rank.

    Returns:
        The seconds and their source. If they cannot be predicted, the seconds are None, and the
        source is the reason.
    """
    try:
        if context.local_world_size < context.world_size:
            return _none(
                "the ranks are on several nodes, and the links between them were not measured"
            )
        cluster = cached_local_cluster(context.world_size, context.device.type)
        if cluster is None:
            return _none("the rates of this machine are not known: bigtrain doctor measures them")
        return forecast_on(StepTimer(cluster), job, resolved, workload)
    except Exception as error:  # noqa: BLE001 - user code of any kind runs here; the run goes on
        lines = str(error).strip().splitlines() or [""]
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        return _none(f"{kind}{lines[0]}")


def forecast_on(
    timer: StepTimer, job: Job, resolved: ResolvedPlan, workload: Workload
) -> StepForecast:
    """Predict the seconds of a run's step from given rates.

    Args:
        timer: predicts seconds from the rates of a cluster.
        job: see `forecast_step_seconds`.
        resolved: see `forecast_step_seconds`.
        workload: see `forecast_step_seconds`.

    Raises:
        ConfigError: the model does not run on fake tensors, or its steps cannot be predicted.
    """
    return RunClock(job, resolved, workload, timer).forecast()


def _none(why: str) -> StepForecast:
    return StepForecast(None, source=why)


class RunClock:
    """Predicts the seconds of one run's step as the planner predicts those of a plan.

    Args:
        job: the job of the run.
        resolved: the plan of the run.
        workload: a workload with an example micro-batch; its model is not changed.
        timer: predicts seconds from the rates of the cluster.
        at_once: the number of ranks that share this machine; by default all ranks of the plan. With
            0, block times are not used, because the rates are those of another machine.
        script: the path of `engine/time_blocks.py`, which times blocks that are not cached; None to
            use cached times only.
    """

    def __init__(
        self,
        job: Job,
        resolved: ResolvedPlan,
        workload: Workload,
        timer: StepTimer,
        *,
        at_once: int | None = None,
        script: Path | None = None,
    ) -> None:
        self._plan, self._resolved, self._timer = resolved.plan, resolved, timer
        self._rows = workload.micro_batch.rows
        library = SectionLibrary(
            workload.model,
            workload.micro_batch,
            lambda *_: workload.loss,
            workload.make_optimizer,
            torch.device("cpu"),
            resolved.slices,
        )
        self._blocks = BlockTimer(
            job,
            workload.model,
            workload.micro_batch,
            ranks=at_once or self._plan.world_size,
            rows=[self._rows],
            script=script,
        )
        self._plan_timer = PlanTimer(library, timer, None if at_once == 0 else self._blocks)

    def forecast(self) -> StepForecast:
        """Predict the seconds of a step; the result includes their parts and their source.

        Raises:
            ConfigError: the model does not run on fake tensors, or its steps cannot be predicted.
        """
        seconds = self.seconds_of(self._plan, self._timer)
        if self._blocks.basis == "blocks":
            return _forecast(seconds, "blocks", self._blocks.source)
        rates = f"by the rates of this machine, measured {self._timer.cluster.caveat}"
        rates = rates if self._timer.cluster.caveat else "by the rates of this machine"
        return _forecast(
            seconds, "rates", f"{rates}; `bigtrain plan` times the model's blocks, too"
        )

    def seconds_of(self, plan: Plan, timer: StepTimer) -> StepSeconds:
        """Predict the seconds of a step, by part.

        Args:
            plan: the plan of the run, or one that differs only in the number of replicas.
            timer: predicts seconds from the rates of a cluster; its links may differ from those of
                the run.

        Raises:
            ConfigError: see `forecast`.
        """
        return timer.plan_seconds(plan, self._stages)

    def profile(self) -> Profile:
        """The memory profile of the first stage, or of the whole model if it is not cut.

        Raises:
            ConfigError: see `forecast`.
        """
        return self._stages.profile_of(0)

    @cached_property
    def _stages(self) -> PlanStages:
        plan, cut = self._plan, self._plan.cut
        if cut is not None and (cut.recompute != "never" or not cut.is_distributed):
            raise ConfigError(
                f"the seconds of a step with {plan.strategy.name} cannot be predicted"
            )
        keep_all = self._sections("keep")
        chosen, names = self._chosen(keep_all)
        edges = self._edges()
        stage_edges = _whole_edges(edges, len(chosen))

        def profile_of(stage: int) -> Profile:
            first, stop = stage_edges[stage], max(stage_edges[stage] + 1, stage_edges[stage + 1])
            sections = chosen[first:stop]
            layout, tp = self._resolved.layout, plan.tp
            into, out = (False, False) if layout is None else layout.between_ranks(stage)
            return compose_profile(
                keep_all.base,
                sections,
                after=keep_all.sections[stop] if stop < len(chosen) else None,
                recomputed=[section.name for section in sections if section.name in names],
                released=plan.release_gradients,
                scatter_ranks=(tp if into else 1, tp if out else 1),
            )

        return PlanStages(
            seconds=[self._stage_seconds(chosen, start, stop) for start, stop in pairwise(edges)],
            profile_of=profile_of,
            base=keep_all.base,
            timed=self._plan_timer.timed_parts(plan),
        )

    def _sections(self, choice: BlockPolicy) -> ModelSections:
        return self._plan_timer.sections(self._plan, self._rows, choice, cut=self._plan.pp > 1)

    def _chosen(self, keep_all: ModelSections) -> tuple[list[Section], frozenset[str]]:
        """Return the sections, each at its block's policy, and the names of recomputed blocks."""
        policies = {
            name: SECTION_POLICIES.get(policy, policy)
            for name, policy in self._resolved.policies.items()
        }
        names = [section.name for section in keep_all.sections]
        others = [name for name, policy in policies.items() if policy != "keep"]
        unknown = [name for name in others if name not in names]
        if unknown:
            raise ConfigError(f"{unknown[0]} is recomputed, and is no block of the model")
        by_policy = {policy: self._sections(policy) for policy in {*policies.values()}}
        if any(len(model.sections) != len(names) for model in by_policy.values()):
            raise ConfigError("the model's blocks do not follow one another")
        chosen = [
            by_policy[policies[name]].sections[index]
            if name in policies
            else keep_all.sections[index]
            for index, name in enumerate(names)
        ]
        return chosen, recomputed_names(policies)

    def _edges(self) -> list[float]:
        """Return the start of each stage, as an index of a section, and the number of sections.

        A cut may be inside a block. The index is then fractional, and divides the seconds of the
        block as the cut divides its FLOPs. These are the FLOPs of unsliced layers.
        """
        unsliced, is_cut = without_slices(self._plan), self._plan.pp > 1
        library = self._plan_timer.section_library
        sections = library.model_sections(unsliced, self._rows, "keep", cut=is_cut).sections
        layout, count = self._resolved.layout, len(sections)
        if layout is None or self._plan.pp == 1:
            return [0, count]
        works = (section.forward for section in sections)
        flops = [float(((w.flops + w.low_flops) * w.times).sum()) for w in works]
        ends = list(accumulate(flops))
        if len(layout.ranks) > 1 and count < 3:
            raise ConfigError("the model is cut, and its blocks do not follow one another")
        edges = [0.0]
        for before in accumulate(layout.chosen.flops[:-1]):
            index = min(bisect_right(ends, before), count - 2)
            into = before - (ends[index] - flops[index])
            edges.append(index + min(1.0, max(0.0, into / flops[index] if flops[index] else 0.0)))
        return [*edges, count]

    def _stage_seconds(
        self, sections: Sequence[Section], start: float, stop: float
    ) -> MicroBatchSeconds:
        """Predict a micro-batch on a stage that may begin and end inside a section."""
        parts = [MicroBatchSeconds(0.0, 0.0)]
        for index, section in enumerate(sections):
            share = min(stop, index + 1.0) - max(start, float(index))
            if share > 0:
                parts.append(self._timer.pass_seconds([section], self._plan.tp).scaled(share))
        return MicroBatchSeconds.sum(parts)


def _whole_edges(edges: Sequence[float], count: int) -> list[int]:
    """Round the edges so that each stage has at least one section.

    If there are more stages than sections, the first stages begin at the same section.
    """
    rising = accumulate(map(round, edges), lambda before, edge: max(before + 1, edge))
    stages = len(edges) - 1
    return [max(0, min(edge, count - stages + stage)) for stage, edge in enumerate(rising)]


def _forecast(seconds: StepSeconds, basis: StepBasis, source: str) -> StepForecast:
    parts = {name: part for name, part in vars(seconds).items() if part}
    return StepForecast(seconds.total, parts, basis, source)
