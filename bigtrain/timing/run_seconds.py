"""The seconds of a step of a run: what the planner would say of it, beside what is measured.

Nothing is timed or measured for it: it goes by what is kept of earlier questions to the machine.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
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
from bigtrain.prediction.record_sections import RecordedSections
from bigtrain.prediction.section_library import ModelSections, SectionLibrary
from bigtrain.prediction.sections import Section
from bigtrain.ranks.context import RunContext
from bigtrain.timing.block_seconds import BlockTimer, Slowdowns, slowdowns
from bigtrain.timing.step_time import MicroBatchSeconds, StepSeconds, StepTimer, TimedParts

MAX_STEPS = 1000
"""Steps whose seconds are kept: the newest."""
SECTION_POLICIES: dict[BlockPolicy, BlockPolicy] = {"offload": "keep", "full_offload": "full"}
"""As what blocks are computed whose tensors are moved away; the moves are the technique's."""


class StepWatch:
    """Notes the seconds of the steps in which memory is not tracked, and what all exchange.

    Args:
        context: whose exchanges are counted.
    """

    def __init__(self, context: RunContext) -> None:
        self._traffic = context.recorder.traffic
        self._volumes: deque[StepVolume] = deque(maxlen=MAX_STEPS)
        self._seconds: deque[float] = deque(maxlen=MAX_STEPS)
        self._count = 0
        self._tracked = False
        self._clock: CpuClock | None = None

    def begin(self, *, tracked: bool) -> None:
        """A step begins."""
        self._tracked = tracked
        self._traffic.begin()
        if self._clock is None and not tracked:
            self._clock = CpuClock()

    def end(self, seconds: float) -> StepVolume | None:
        """It is over, and has taken so long: what this rank has exchanged, where it is counted."""
        if not self._tracked:
            self._seconds.append(seconds)
            self._count += 1
        exchanged = self._traffic.end()
        if exchanged is None:
            return None
        self._volumes.append(StepVolume.of(exchanged))
        return self._volumes[-1]

    def volume(self) -> StepVolume | None:
        """What a step exchanges: that of the median step, by what it sends."""
        ordered = sorted(self._volumes, key=lambda volume: volume.sent_bytes)
        return ordered[len(ordered) // 2] if ordered else None

    def measured(self) -> StepMeasurement | None:
        """All of them; None where there was none."""
        if self._clock is None or not self._count:
            return None
        return StepMeasurement(self._count, statistics.median(self._seconds), self._clock.read())


def forecast_step_seconds(
    job: Job, resolved: ResolvedPlan, workload: Workload, context: RunContext
) -> StepForecast:
    """What a step of a run will take. No rank talks to another for it, and nothing is timed.

    Args:
        job: of the run.
        resolved: what will be run.
        workload: with an example; its model is not changed.
        context: of the rank that asks.
    """
    try:
        if context.local_world_size < context.world_size:
            return _none("the ranks are on several nodes, between which nothing was measured")
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
    """The same by any rates; see `forecast_step_seconds`.

    Raises:
        ConfigError: the model does not run without its numbers, or a step of it is not known.
    """
    return RunClock(job, resolved, workload, timer).forecast()


def _none(why: str) -> StepForecast:
    return StepForecast(None, source=why)


class RunClock:
    """One run's plan, evaluated as a candidate of the planner's is.

    Args:
        job: of the run.
        resolved: what will be run.
        workload: with an example; its model is not changed.
        timer: with the rates.
        at_once: ranks that share this machine; left out, all of the plan. 0: the rates are another
            machine's, and of its blocks nothing is known.
        script: `engine/time_blocks.py`, to time blocks where none are kept; left out, that is all.
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
        self._workload, self._rows = workload, workload.micro_batch.rows
        given = (lambda *_: workload.loss, workload.make_optimizer, torch.device("cpu"))
        example, slices = workload.micro_batch, resolved.slices
        self._library = SectionLibrary(workload.model, example, *given, slices)
        self._at_hand = at_once != 0
        ranks, rows = at_once or self._plan.world_size, [self._rows]
        given_blocks = (job, workload.model, workload.micro_batch, ranks, rows, script)
        self._blocks = BlockTimer(*given_blocks)

    def forecast(self) -> StepForecast:
        """Its seconds.

        Raises:
            ConfigError: the model does not run without its numbers, or this is not known of it.
        """
        seconds = self.seconds_of(self._plan, self._timer)
        if self._blocks.basis == "blocks":
            return _told(seconds, "blocks", self._blocks.source)
        rates = f"by the rates of this machine, measured {self._timer.cluster.caveat}"
        rates = rates if self._timer.cluster.caveat else "by the rates of this machine"
        return _told(seconds, "rates", f"{rates}; `bigtrain plan` times the model's blocks, too")

    def seconds_of(self, plan: Plan, timer: StepTimer) -> StepSeconds:
        """The same by part, also with more replicas than the run has, and of another link's rates.

        Raises:
            ConfigError: see `forecast`.
        """
        return timer.plan_seconds(plan, *self._pieces)

    def profile(self) -> Profile:
        """Of the first stage: the whole model where it is not cut.

        Raises:
            ConfigError: see `forecast`.
        """
        return self._pieces[1](0)

    @cached_property
    def _pieces(
        self,
    ) -> tuple[list[MicroBatchSeconds], Callable[[int], Profile], RecordedSections, TimedParts]:
        """Passes and profiles of stages, the run that says what an update takes, what is timed."""
        plan, cut = self._plan, self._plan.cut
        if cut is not None and (cut.recompute != "never" or not cut.is_distributed):
            raise ConfigError(f"what {plan.strategy.name} does in a step is not known in seconds")
        timed = self._slowdowns() if self._at_hand else None
        kept = self._sections("keep", timed)
        chosen, names = self._chosen(kept, timed)
        edges = self._edges()
        paces = [self._pace(chosen, *edge) for edge in pairwise(edges)]
        whole = _whole_edges(edges, len(chosen))

        def profile_of(stage: int) -> Profile:
            first, stop = whole[stage], max(whole[stage] + 1, whole[stage + 1])
            own = chosen[first:stop]
            layout, tp = self._resolved.layout, plan.tp
            into, out = (False, False) if layout is None else layout.between_ranks(stage)
            return compose_profile(
                kept.base,
                own,
                after=kept.sections[stop] if stop < len(chosen) else None,
                recomputed=[section.name for section in own if section.name in names],
                released=plan.release_gradients,
                dealt=(tp if into else 1, tp if out else 1),
            )

        parts = TimedParts() if timed is None else timed.parts(self._rows)
        return paces, profile_of, kept.base, parts

    def _slowdowns(self) -> Slowdowns | None:
        found = self._blocks.seconds(bf16_parameters=self._plan.bf16_parameters)
        if not found:
            return None

        whole = without_slices(self._plan)

        def sections_at(rows: int) -> ModelSections:
            return self._library.model_sections(whole, rows, "keep")

        given = (self._blocks.oversubscription, self._workload.model, sections_at, self._timer)
        return slowdowns(found, *given)

    def _sections(self, choice: BlockPolicy, timed: Slowdowns | None) -> ModelSections:
        cut = self._plan.pp > 1
        model = self._library.model_sections(self._plan, self._rows, choice, cut=cut)
        if timed is None:
            return model
        kept = self._library.model_sections(self._plan, self._rows, "keep", cut=cut)
        return timed.applied(model, kept, choice, self._rows, self._timer)

    def _chosen(
        self, kept: ModelSections, timed: Slowdowns | None
    ) -> tuple[list[Section], frozenset[str]]:
        """Every section as its block is told to compute, and the names of those computed again."""
        policies = {
            name: SECTION_POLICIES.get(policy, policy)
            for name, policy in self._resolved.policies.items()
        }
        names = [section.name for section in kept.sections]
        others = [name for name, policy in policies.items() if policy != "keep"]
        unknown = [name for name in others if name not in names]
        if unknown:
            raise ConfigError(f"{unknown[0]} is computed again, and is no block of the model")
        bodies = {policy: self._sections(policy, timed) for policy in {*policies.values()}}
        if any(len(body.sections) != len(names) for body in bodies.values()):
            raise ConfigError("the model's blocks do not follow one another")
        chosen = [
            bodies[policies[name]].sections[place] if name in policies else kept.sections[place]
            for place, name in enumerate(names)
        ]
        return chosen, recomputed_names(policies)

    def _edges(self) -> list[float]:
        """Where each stage begins, in sections, and the end: a cut may go through a block.

        Then the block's seconds are dealt out as its arithmetic is. Layers are whole here.
        """
        whole, is_cut = without_slices(self._plan), self._plan.pp > 1
        sections = self._library.model_sections(whole, self._rows, "keep", cut=is_cut).sections
        layout, count = self._resolved.layout, len(sections)
        if layout is None or self._plan.pp == 1:
            return [0, count]
        works = (section.forward for section in sections)
        flops = [float(((w.flops + w.low_flops) * w.times).sum()) for w in works]
        ends = list(accumulate(flops))
        if len(layout.ranks) > 1 and count < 3:
            raise ConfigError("the model's blocks do not follow one another, and it is cut")
        edges = [0.0]
        for before in accumulate(layout.chosen.flops[:-1]):
            place = min(bisect_right(ends, before), count - 2)
            into = before - (ends[place] - flops[place])
            edges.append(place + min(1.0, max(0.0, into / flops[place] if flops[place] else 0.0)))
        return [*edges, count]

    def _pace(self, sections: Sequence[Section], start: float, stop: float) -> MicroBatchSeconds:
        """A micro-batch through some sections and back, of the first and the last a part."""
        paces = [MicroBatchSeconds(0.0, 0.0)]
        for place, section in enumerate(sections):
            share = min(stop, place + 1.0) - max(start, float(place))
            if share > 0:
                paces.append(self._timer.pass_seconds([section], self._plan.tp).scaled(share))
        return MicroBatchSeconds.sum(paces)


def _whole_edges(edges: Sequence[float], count: int) -> list[int]:
    """Where stages begin and end in whole sections: each has one at least.

    Where there are more stages than sections, the first ones share theirs.
    """
    rising = accumulate(map(round, edges), lambda before, edge: max(before + 1, edge))
    left = len(edges) - 1
    return [max(0, min(edge, count - left + place)) for place, edge in enumerate(rising)]


def _told(seconds: StepSeconds, basis: StepBasis, source: str) -> StepForecast:
    parts = {name: part for name, part in vars(seconds).items() if part}
    return StepForecast(seconds.total, parts, basis, source)
