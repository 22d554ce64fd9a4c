"""Evaluate one candidate: check it, cut the model, and predict its peaks and seconds."""

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
"""If the lowest peak of a rank is at least this many times the limit, no other cut is tried: moving
blocks to other ranks saves far less."""


@dataclass(frozen=True)
class EvaluatedPlan:
    """A candidate that fits, with its plan, peaks and seconds."""

    candidate: Candidate
    plan: Plan
    job: Job
    """The job that runs the plan."""
    peaks: Mapping[int, Peak]
    """The peaks of the ranks that were forecast, by pp rank."""
    seconds: StepSeconds
    recomputed: Mapping[str, BlockPolicy]
    """By name, the policies of the blocks that do not save all activations."""
    cuts: tuple[str, ...]
    """The name of the first block of each stage but the first stage."""
    stages: tuple[SectionRange, ...]
    """The sections of each stage, with the policies of its blocks."""

    @property
    def label(self) -> str:
        """The candidate's label, and the recompute policy if all blocks have the same one."""
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
    """A candidate that cannot run, or that does not fit the limit."""

    candidate: Candidate
    reason: str
    peak: Peak | None = None
    """The lowest peak of the rank that does not fit; None if memory is not the reason."""


class PlanEvaluator:
    """Evaluates the candidates of one job on one cluster.

    Args:
        job: the job, whose mesh, batch and strategy each candidate replaces.
        library: the sections of the job's model.
        timer: predicts seconds from the rates of the cluster.
        margins: by engine, the share by which forecasts are enlarged before they are compared with
            the limit.
        cut: whether some candidates are cut into stages.
        blocks: times the model's blocks on this machine; None to predict seconds from rates alone.
        checks: the checks of the model against plans; None to skip them.
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
        """Return an evaluator for a model with only the first blocks of this one.

        Args:
            blocks: the number of blocks.
        """
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
        """Find the largest number of the model's first blocks that fit, if not all of them do.

        Args:
            candidate: the candidate that trains them.
            limit: see `evaluate`.

        Returns:
            The number of blocks, and the number of parameters of the model with these blocks; None
            if not even one block fits.
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
        """Make the plan of a candidate, as a run of the candidate's job would.

        Raises:
            ConfigError: a technique refuses the candidate, or the model does not meet the plan.
        """
        plan = make_plan(
            candidate.job(self._job),
            candidate.devices,
            self.timer.cluster.device.kind,
            one_host=candidate.devices <= self.timer.cluster.node.devices,
        )
        return plan if self._checks is None else self._checks.meet(plan)[0]

    def whole_model(self, rows: int) -> ModelSections:
        """The model's sections in one process where all blocks save all activations.

        The part after the blocks is not exact: see `SectionLibrary.model_sections`.

        Args:
            rows: the rows of a micro-batch.

        Raises:
            ConfigError: the model does not run with micro-batches of this size.
        """
        if rows not in self._whole:
            plan = self.plan_of(Candidate(1, 1, None, rows, 1))
            self._whole[rows] = self._plan_timer.sections(
                plan, rows, "keep", cut=self._cut, exact=False
            )
        return self._whole[rows]

    def floor(self, candidate: Candidate, plan: Plan) -> MemoryFloor:
        """Return the lower bounds on a candidate's memory."""
        return MemoryFloor(plan, candidate, state_widths(self.whole_model(candidate.rows)))

    def seconds_with(self, candidate: Candidate, plan: Plan, choice: BlockPolicy) -> StepSeconds:
        """Predict a step whose stages are cut for speed and whose blocks have one policy.

        Memory is not considered.

        Args:
            candidate: a candidate.
            plan: the result of `plan_of`.
            choice: the policy of all blocks.

        Raises:
            ConfigError: the model does not run under this plan.
        """
        fit = self.fit(candidate, plan, exact=False)
        return self._seconds(plan, fit, fit.uniform_stages(fit.edges(None), choice))

    def evaluate(
        self, candidate: Candidate, plan: Plan, limit: int
    ) -> EvaluatedPlan | RejectedPlan:
        """Cut a candidate, give its blocks the fastest policies that fit, and predict its step.

        Args:
            candidate: a candidate.
            plan: the result of `plan_of`.
            limit: bytes that the tensors of a rank may take. The forecast peaks have to be lower by
                the engine's margin. With a limit of 0 every candidate is rejected, with the lowest
                possible peak of its fullest rank.

        Returns:
            The evaluated plan; a rejected plan, with the reason, if the candidate cannot run or
            does not fit.
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
        """Forecast the ranks in `evaluated.peaks` again; return the forecasts by pp rank."""
        fit = self.fit(evaluated.candidate, evaluated.plan)
        return {rank: fit.forecast(evaluated.stages, rank) for rank in evaluated.peaks}

    def host_state_bytes(self, candidate: Candidate, plan: Plan) -> int:
        """The most bytes of optimizer state that a rank offloads to the host; 0 without offload.

        Args:
            candidate: a candidate.
            plan: the result of `plan_of`.

        Raises:
            ConfigError: see `fit`.
        """
        if plan.offload_tiers.optimizer != "cpu":
            return 0
        numbers = self.fit(candidate, plan).levels["keep"].numbers
        shards = candidate.pp * plan.state_ranks
        # In addition, the host holds gradients and fp32 parameters, of four bytes an element.
        width = state_widths(self.whole_model(candidate.rows)).optimizer + 2 * 4
        return int(numbers * width) // shards

    def _over_host(self, candidate: Candidate, plan: Plan) -> str | None:
        """Return why offloaded optimizer state does not fit on the host; None if it does."""
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
        """Return the `StageFitter` of a candidate; repeated calls return the same object.

        Args:
            candidate: a candidate.
            plan: the result of `plan_of`.
            exact: whether the memory of the part after the blocks has to be exact, which may take
                one more run on fake tensors. Seconds and lower bounds do not need it.

        Raises:
            ConfigError: the model does not run under this plan, a technique refuses its stages, or
                other slices lead to the same exchanges.
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
        """The sections of a candidate where all blocks save all activations.

        `fit` has to have been called with this candidate and `exact=False`.
        """
        return self._fits[candidate, False].levels["keep"]

    def _check_new(self, candidate: Candidate, model: ModelSections) -> None:
        """Refuse slices whose exchanges equal those of earlier slices on the same number of ranks.

        Raises:
            ConfigError: the exchanges are equal; the message names the earlier slices.
        """
        key = (candidate.rows, candidate.tp, model.exchanges)
        known_slices = self._slices_by_exchanges.setdefault(key, candidate.slices)
        if candidate.tp > 1 and known_slices is not None and known_slices != candidate.slices:
            raise ConfigError(f"{candidate.label}: the same as with {known_slices.label}")

    def _split_passes(self, plan: Plan, candidate: Candidate) -> SplitPasses | None:
        """Return a function that makes the split passes; None if the schedule splits none."""
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
        # A split backward pass would recompute every block in both of its parts, and would hold
        # more memory in between than the recording of either part shows.
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
        """The slowdown of the optimizer's step and the shares of split backward passes."""
        return self._plan_timer.timed_parts(plan)


def _too_much(peak: Peak, limit: int) -> str:
    breakdown = vars(peak.breakdown)
    kind = max(breakdown, key=lambda part: breakdown[part])
    where = " in a save" if peak.phase == "save" else ""
    return (
        f"{format_bytes(peak.bytes - limit)} too much: {kind} {format_bytes(breakdown[kind])} of "
        f"{format_bytes(peak.bytes)}{where}"
    )
