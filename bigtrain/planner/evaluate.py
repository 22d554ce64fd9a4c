"""Evaluate one candidate: whether it runs and fits, where it is cut, and the seconds of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bigtrain.activations.policy import BlockPolicy
from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.model_checks import ModelChecks
from bigtrain.core.strategy import ModelFacts, Plan
from bigtrain.core.variants import Variant
from bigtrain.costs.forecast import Forecast
from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job
from bigtrain.memory.timeline import Peak
from bigtrain.planner.fit import StageFitter
from bigtrain.planner.held_micro_batches import several_wait
from bigtrain.planner.memory_floor import MemoryFloor, state_widths
from bigtrain.planner.space import Candidate, written_options
from bigtrain.planner.stages import (
    RECOMPUTE_LEVELS,
    RecomputeLevels,
    SectionRange,
    SplitPasses,
    StageCache,
)
from bigtrain.prediction.compose import count_parameters
from bigtrain.prediction.section_library import ModelSections, SectionLibrary
from bigtrain.timing.block_seconds import BlockTimer
from bigtrain.timing.plan_timer import PlanTimer
from bigtrain.timing.step_time import PlanStages, StepSeconds, StepTimer, TimedParts
from bigtrain.units import format_bytes

HOPELESS_FACTOR = 2
"""If the lowest peak of a rank is this many times the limit, no other cut is tried: moving blocks
to other ranks saves far less."""


@dataclass(frozen=True)
class EvaluatedPlan:
    """A candidate that fits, with its plan, peaks and seconds."""

    candidate: Candidate
    plan: Plan
    job: Job
    """The job that runs it."""
    peaks: Mapping[int, Peak]
    """The peaks of the ranks that were forecast, by pp rank."""
    seconds: StepSeconds
    recomputed: Mapping[str, BlockPolicy]
    """The blocks that save less than everything, by name."""
    cuts: tuple[str, ...]
    """The block that each stage but the first begins with."""
    stages: tuple[SectionRange, ...]
    """The sections of each stage, with the policies of its blocks."""

    @property
    def label(self) -> str:
        """The candidate's words, and the recomputation if it is the same for all blocks."""
        recompute = self.job.strategy.roles().get("recompute")
        mode = None if recompute is None else recompute.options.get("mode")
        return self.candidate.label if mode is None else f"{self.candidate.label}+{mode}"

    @property
    def fullest_rank(self) -> int:
        """The pp rank with the highest peak."""
        return max(self.peaks, key=lambda rank: self.peaks[rank].bytes)

    @property
    def peak(self) -> Peak:
        """The highest peak of all ranks."""
        return self.peaks[self.fullest_rank]


@dataclass(frozen=True)
class RejectedPlan:
    """A candidate that cannot be run, or does not fit."""

    candidate: Candidate
    reason: str
    peak: Peak | None = None
    """The lowest peak of the rank that does not fit; None if memory is not the reason."""


class PlanEvaluator:
    """Evaluates the candidates of one job on one cluster.

    Args:
        job: its model, data and precision are used.
        library: the sections of its model.
        timer: rates of the cluster.
        margins: by engine, the share by which forecasts are enlarged before they are compared with
            the limit.
        cut: whether some candidates are cut into stages.
        blocks: times the model's blocks on this machine; None to go by the rates alone.
        checks: the checks of the model against plans; None refuses no plan.
    """

    def __init__(
        self,
        job: Job,
        library: SectionLibrary,
        timer: StepTimer,
        margins: Mapping[str, float],
        *,
        cut: bool = False,
        blocks: BlockTimer | None = None,
        checks: ModelChecks | None = None,
    ) -> None:
        self.timer, self.blocks = timer, blocks
        self._job, self._margins, self._cut, self._checks = job, margins, cut, checks
        self._plan_timer = PlanTimer(library, timer, blocks)
        self._stage_cache = StageCache()
        self._whole: dict[int, ModelSections] = {}
        self._fits: dict[tuple[Candidate, bool], StageFitter] = {}
        self._slices_by_exchanges: dict[object, Variant | None] = {}

    def first_blocks(self, blocks: int) -> PlanEvaluator:
        """An evaluator for the model's first blocks alone."""
        plan_timer = self._plan_timer.first_blocks(blocks)
        evaluator = PlanEvaluator(
            self._job,
            plan_timer.section_library,
            self.timer,
            self._margins,
            cut=self._cut,
            blocks=self.blocks,
            checks=self._checks,
        )
        evaluator._plan_timer = plan_timer
        return evaluator

    def most_blocks(self, candidate: Candidate, limit: int) -> tuple[int, int] | None:
        """Return how many of the model's blocks fit, and their parameters; None if none does.

        Args:
            candidate: how they are trained.
            limit: see `evaluate`.
        """
        low, high, plan = 0, self._plan_timer.section_library.num_blocks, self.plan_of(candidate)
        while high - low > 1:
            middle = (low + high) // 2
            outcome = self.first_blocks(middle).evaluate(candidate, plan, limit)
            low, high = (middle, high) if isinstance(outcome, EvaluatedPlan) else (low, middle)
        if low == 0:
            return None
        return low, count_parameters(self.first_blocks(low).whole_model(candidate.rows).sections)

    def plan_of(self, candidate: Candidate) -> Plan:
        """The plan of a candidate, as a run of it would make it.

        Raises:
            ConfigError: a technique, or the model, refuses it.
        """
        plan = make_plan(
            candidate.job(self._job), candidate.devices, self.timer.cluster.device.kind
        )
        return plan if self._checks is None else self._checks.meet(plan)[0]

    def whole_model(self, rows: int) -> ModelSections:
        """The model's sections in one process where all blocks keep everything.

        They are not exact: see `SectionLibrary.model_sections`.
        """
        if rows not in self._whole:
            plan = self.plan_of(Candidate(1, 1, None, rows, 1))
            self._whole[rows] = self._plan_timer.sections(
                plan, rows, "keep", cut=self._cut, exact=False
            )
        return self._whole[rows]

    def floor(self, candidate: Candidate, plan: Plan) -> MemoryFloor:
        """Lower bounds on a candidate's memory."""
        return MemoryFloor(plan, candidate, state_widths(self.whole_model(candidate.rows)))

    def seconds_with(self, candidate: Candidate, plan: Plan, choice: BlockPolicy) -> StepSeconds:
        """The seconds of a step where the model is cut for speed and all blocks have one policy.

        Memory is not considered.

        Raises:
            ConfigError: the model does not run under this plan.
        """
        fit = self.fit(candidate, plan, exact=False)
        return self._seconds(plan, fit, fit.uniform_stages(fit.edges(None), choice))

    def evaluate(
        self, candidate: Candidate, plan: Plan, limit: int
    ) -> EvaluatedPlan | RejectedPlan:
        """Cut a candidate, let its blocks keep as much as fits, and predict its peaks and seconds.

        Args:
            candidate: one of the space.
            plan: the result of `plan_of`.
            limit: bytes that a rank may hold, including the margin for the forecast's error.
        """
        limit = int(limit / (1 + self._margins.get(candidate.engine, 0.0)))
        try:
            host_problem = self._over_host(candidate, plan)
            if host_problem is not None:
                return RejectedPlan(candidate, host_problem)
            fit = self.fit(candidate, plan)
            fitted = fit.fitted(fit.edges(None), limit)
        except ConfigError as error:
            return RejectedPlan(candidate, str(error))
        is_near = isinstance(fitted, Peak) and fitted.bytes < HOPELESS_FACTOR * limit
        if is_near and candidate.stages > 1:
            with suppress(ConfigError):  # no cut fits
                fitted = fit.fitted(fit.edges(limit), limit)
        if isinstance(fitted, Peak):
            return RejectedPlan(candidate, _too_much(fitted, limit), fitted)
        stages, peaks = fitted
        return self._evaluated(candidate, plan, fit, stages, peaks)

    def forecasts(self, evaluated: EvaluatedPlan) -> dict[int, Forecast]:
        """The forecasts of the ranks whose peaks a plan has, by pp rank."""
        fit = self.fit(evaluated.candidate, evaluated.plan)
        return {rank: fit.forecast(evaluated.stages, rank) for rank in evaluated.peaks}

    def host_state_bytes(self, candidate: Candidate, plan: Plan) -> int:
        """Bytes of optimizer state that each rank offloads to the host, at most; 0 if none is."""
        if plan.offload_tiers.optimizer != "cpu":
            return 0
        numbers = self.fit(candidate, plan).levels["keep"].numbers
        shards = candidate.pp * plan.state_ranks
        # The host holds gradients and fp32 values in addition, four bytes each.
        width = state_widths(self.whole_model(candidate.rows)).optimizer + 2 * 4
        return int(numbers * width) // shards

    def _over_host(self, candidate: Candidate, plan: Plan) -> str | None:
        """Why optimizer state that is offloaded to the host does not fit there; None if it does."""
        node = self.timer.cluster.node
        rank_bytes = self.host_state_bytes(candidate, plan)
        node_bytes = rank_bytes * min(node.devices, candidate.devices)
        if node_bytes <= node.host_memory:
            return None
        return (
            f"{format_bytes(node_bytes)} of optimizer state on the host of a node, which has "
            f"{format_bytes(node.host_memory)}"
        )

    def fit(self, candidate: Candidate, plan: Plan, *, exact: bool = True) -> StageFitter:
        """The candidate's stages.

        Args:
            candidate: one of the space.
            plan: the result of `plan_of`.
            exact: whether the memory outside the blocks matters, for which more may have to be run
                on fake tensors; seconds and bounds go by the blocks alone.

        Raises:
            ConfigError: the model does not run under this plan, or a technique refuses its stages.
        """
        if (candidate, exact) not in self._fits:
            levels = self._levels(plan, candidate, exact=exact)
            self._check_new(candidate, levels["keep"])
            fit = self._fitter(candidate, plan, levels)
            plan.check_model(ModelFacts(shared=fit.shared))
            self._fits[candidate, exact] = fit
        return self._fits[candidate, exact]

    def _fitter(self, candidate: Candidate, plan: Plan, levels: RecomputeLevels) -> StageFitter:
        checkpoint = self._job.checkpoint
        saves = checkpoint.saves and not is_accelerator(plan.device_type)
        return StageFitter(
            plan,
            candidate,
            levels,
            self.timer,
            self._stage_cache,
            self.floor(candidate, plan),
            split_passes=self._split_passes(plan, candidate),
            checkpoint=checkpoint if saves else None,
        )

    def bounded_sections(self, candidate: Candidate) -> ModelSections:
        """The sections, all blocks keeping everything, of a candidate that `fit` has seen.

        The call of `fit` was one that is not exact.
        """
        return self._fits[candidate, False].levels["keep"]

    def _check_new(self, candidate: Candidate, model: ModelSections) -> None:
        """Refuse slices whose exchanges equal those of other slices on as many ranks.

        Raises:
            ConfigError: with the name of those.
        """
        key = (candidate.rows, candidate.tp, model.exchanges)
        known_slices = self._slices_by_exchanges.setdefault(key, candidate.slices)
        if candidate.tp > 1 and known_slices is not None and known_slices != candidate.slices:
            raise ConfigError(f"{candidate.label}: the same as with {known_slices.label}")

    def _split_passes(self, plan: Plan, candidate: Candidate) -> SplitPasses | None:
        """Gives the sections' split backward passes; None where the schedule splits none."""
        if not plan.splits_backward:
            return None
        return lambda: self._plan_timer.section_library.split_passes(
            plan, candidate.rows, waiting=several_wait(plan), cut=plan.pp > 1
        )

    def _levels(self, plan: Plan, candidate: Candidate, *, exact: bool) -> RecomputeLevels:
        """The model's sections at each policy that the plan allows; see `fit`."""

        def sections_for(choice: BlockPolicy) -> ModelSections:
            return self._plan_timer.sections(
                plan,
                candidate.rows,
                choice,
                waiting=several_wait(plan),
                cut=plan.pp > 1,
                exact=exact,
            )

        allowed = [c for c in RECOMPUTE_LEVELS if c != "selective" or plan.keeps_products]
        # A split backward pass would recompute every block in both of its parts, and hold more
        # meanwhile than was recorded of either part.
        return RecomputeLevels(["keep"] if plan.splits_backward else allowed, sections_for)

    def _evaluated(
        self,
        candidate: Candidate,
        plan: Plan,
        fit: StageFitter,
        stages: tuple[SectionRange, ...],
        peaks: Mapping[int, Peak],
    ) -> EvaluatedPlan:
        chosen = [fit.sections(stage) for stage in stages]
        recomputed = {
            section.name: choice
            for stage, sections in zip(stages, chosen, strict=True)
            for section, choice in zip(sections, stage.choices, strict=True)
            if choice != "keep"
        }
        cuts = tuple(sections[0].name for sections in chosen[1:])
        blocks = sum(bool(section.name) for section in fit.levels["keep"].sections)
        job = candidate.job(self._job, **written_options(cuts, recomputed, blocks))
        seconds = self._seconds(plan, fit, stages)
        return EvaluatedPlan(candidate, plan, job, peaks, seconds, recomputed, cuts, stages)

    def _seconds(self, plan: Plan, fit: StageFitter, stages: Sequence[SectionRange]) -> StepSeconds:
        return self.timer.plan_seconds(
            plan,
            PlanStages(
                seconds=[self.timer.pass_seconds(fit.sections(s), plan.tp) for s in stages],
                profile_of=lambda stage: fit.profile(stages[stage]),
                base=fit.levels["keep"].base,
                timed=self.timed_parts(plan),
            ),
        )

    def timed_parts(self, plan: Plan) -> TimedParts:
        """How much longer the optimizer's step and split backward passes take than rates say."""
        return self._plan_timer.timed_parts(plan)


def _too_much(peak: Peak, limit: int) -> str:
    breakdown = vars(peak.breakdown)
    kind = max(breakdown, key=lambda part: breakdown[part])
    where = " in a save" if peak.phase == "save" else ""
    return (
        f"{format_bytes(peak.bytes - limit)} too much: {kind} {format_bytes(breakdown[kind])} of "
        f"{format_bytes(peak.bytes)}{where}"
    )
