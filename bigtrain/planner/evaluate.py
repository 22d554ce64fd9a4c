"""One candidate: whether it can be run and fits, where it is cut, and how long a step takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from bigtrain.activations.policy import BlockPolicy
from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.model_checks import ModelChecks
from bigtrain.core.strategy import ModelFacts, Plan
from bigtrain.core.variants import Variant
from bigtrain.costs.forecast import Profile
from bigtrain.costs.state_bytes import StateWidths, min_state_bytes
from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job
from bigtrain.memory.timeline import Peak
from bigtrain.planner.fit import StageFitter
from bigtrain.planner.held_micro_batches import several_wait
from bigtrain.planner.recompute_levels import RECOMPUTE_LEVELS, RecomputeLevels, SectionRange
from bigtrain.planner.space import Candidate, written_options
from bigtrain.prediction.compose import count_parameters
from bigtrain.prediction.fake_runs.slices import without_slices
from bigtrain.prediction.section_library import ModelSections, SectionLibrary
from bigtrain.prediction.sections import PassPair
from bigtrain.timing.block_seconds import BlockTimer, Slowdowns, slowdowns
from bigtrain.timing.step_time import (
    StepSeconds,
    StepTimer,
    TimedParts,
)
from bigtrain.units import format_bytes

HOPELESS_FACTOR = 2
"""Times the limit, from which on cutting a model elsewhere is not tried: a rank's lowest peak is
far more than moving blocks to others takes off."""


@dataclass(frozen=True)
class EvaluatedPlan:
    """A candidate with its plan and what is expected of it."""

    candidate: Candidate
    plan: Plan
    job: Job
    """The job that runs it."""
    peaks: Mapping[int, Peak]
    """By pp rank, of those that were looked at."""
    seconds: StepSeconds
    recomputed: Mapping[str, BlockPolicy]
    """The blocks that keep less than everything."""
    cuts: tuple[str, ...]
    """The blocks that stages begin with."""

    @property
    def label(self) -> str:
        """The candidate's words, and what blocks keep where that is the same for all."""
        recompute = self.job.strategy.roles().get("recompute")
        mode = None if recompute is None else recompute.options.get("mode")
        return self.candidate.label if mode is None else f"{self.candidate.label}+{mode}"

    @property
    def fullest_rank(self) -> int:
        """The pp rank with the highest peak."""
        return max(self.peaks, key=lambda rank: self.peaks[rank].bytes)

    @property
    def peak(self) -> Peak:
        """The highest of all ranks."""
        return self.peaks[self.fullest_rank]


@dataclass(frozen=True)
class RejectedPlan:
    """A candidate that cannot be run, or does not fit."""

    candidate: Candidate
    reason: str
    peak: Peak | None = None
    """The lowest that was found, where it is memory."""


class PlanEvaluator:
    """Judges the candidates for one job on one cluster.

    Args:
        job: model, data and precision are taken from it.
        library: of its model.
        clock: of the cluster.
        margins: by engine, the share by which forecasts are enlarged before they are compared.
        cut: whether some candidates are cut into stages.
        blocks: what the model's blocks take on the machine at hand; None to go by rates.
        checks: of the model against plans; None refuses none.
    """

    def __init__(
        self,
        job: Job,
        library: SectionLibrary,
        clock: StepTimer,
        margins: Mapping[str, float],
        *,
        cut: bool = False,
        blocks: BlockTimer | None = None,
        checks: ModelChecks | None = None,
    ) -> None:
        self._checks = checks
        self._job, self._library, self.clock, self.blocks = job, library, clock, blocks
        self._device_type, self._margins = clock.cluster.device.kind, margins
        self._cut = cut
        self._composed: dict[object, Profile] = {}
        self._cuts: dict[object, list[int]] = {}
        self._alike: dict[object, Variant | None] = {}
        self._whole: dict[int, ModelSections] = {}
        self._fits: dict[tuple[Candidate, bool], StageFitter] = {}
        self._slowdowns: dict[bool, Slowdowns | None] = {}
        self._timed: dict[int, tuple[ModelSections, ModelSections]] = {}

    def first_blocks(self, blocks: int) -> PlanEvaluator:
        """For the same model with its first blocks alone."""
        library = self._library.first_blocks(blocks)
        given = (self._job, library, self.clock, self._margins)
        evaluator = PlanEvaluator(*given, cut=self._cut, blocks=self.blocks, checks=self._checks)
        evaluator._slowdowns = self._slowdowns
        return evaluator

    def most_blocks(self, candidate: Candidate, limit: int) -> tuple[int, int] | None:
        """How many of the model's blocks fit, and the parameters with them; None: not one does.

        Args:
            candidate: how they are trained.
            limit: see `judge`.
        """
        low, high, plan = 0, self._library.num_blocks, self.plan_of(candidate)
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
        plan = make_plan(candidate.job(self._job), candidate.devices, self._device_type)
        return plan if self._checks is None else self._checks.meet(plan)[0]

    def whole_model(self, rows: int) -> ModelSections:
        """The model's sections in one process, everything kept; see `model_sections` on `exact`."""
        if rows not in self._whole:
            plan = self.plan_of(Candidate(1, 1, None, rows, 1))
            self._whole[rows] = self._sections(plan, rows, "keep", cut=self._cut, exact=False)
        return self._whole[rows]

    def _sections(self, plan: Plan, rows: int, choice: BlockPolicy, **kind: bool) -> ModelSections:
        """See `SectionLibrary.model_sections`; they take as long as they were seen to."""
        model = self._library.model_sections(plan, rows, choice, **kind)
        slowdowns = self._slowdown(plan)
        if slowdowns is None:
            return model
        if id(model) not in self._timed:  # the key is kept, so that its id stays its own
            kept = self._library.model_sections(plan, rows, "keep", **{**kind, "exact": False})
            applied = slowdowns.applied(model, kept, choice, rows, self.clock)
            self._timed[id(model)] = model, applied
        return self._timed[id(model)][1]

    def _slowdown(self, plan: Plan) -> Slowdowns | None:
        """What was timed of the blocks as this plan has their parameters."""
        low = plan.bf16_parameters
        if self.blocks is None:
            return None
        if low not in self._slowdowns:
            whole = without_slices(plan)

            def sections_at(rows: int) -> ModelSections:
                return self._library.model_sections(whole, rows, "keep")

            timed = self.blocks.seconds(bf16_parameters=low)
            arguments = (self.blocks.oversubscription, self.blocks.model, sections_at, self.clock)
            self._slowdowns[low] = slowdowns(timed, *arguments) if timed else None
        return self._slowdowns[low]

    def seconds_with(self, candidate: Candidate, plan: Plan, choice: BlockPolicy) -> StepSeconds:
        """Of a step, cut for speed, where all blocks choose this, whatever is held."""
        fit = self.fit(candidate, plan, exact=False)
        return self._seconds(plan, fit, fit.alike(fit.edges(None), choice))

    def least_states(self, numbers: int, rows: int, plan: Plan, *, gradients: bool = True) -> int:
        """The states of so many trained numbers on the ranks that share them, on the fullest.

        Args:
            numbers: trained, on all ranks together.
            rows: of a micro-batch.
            plan: how they are shared.
            gradients: when there are those; otherwise when all forward passes have ended.
        """
        low = plan.bf16_parameters and plan.master_weights
        # Shards are the fp32 values themselves, gathered in bf16.
        keeps_fp32 = plan.replicate.optimizer_gets == "shards"
        plain = self._state_widths(rows)
        state = plain.optimizer + (4.0 if low and not keeps_fp32 else 0.0)
        widths = StateWidths(
            (4.0 if keeps_fp32 else 2.0) if low else plain.parameters,
            0.0 if plan.release_gradients or not gradients else 2.0 if low else plain.gradients,
            0.0 if plan.offload_tiers.optimizer != "device" else state,
        )
        stage = plan.replicate.sharded_states
        gathered = plan.replicate.gathers_whole and not gradients
        used = 2.0 if plan.bf16_parameters else plain.parameters
        return min_state_bytes(numbers, widths, stage, plan.state_ranks) + (
            int(numbers * used) if gathered else 0
        )

    def _state_widths(self, rows: int) -> StateWidths:
        """In one process, where nothing is sharded."""
        model = self.whole_model(rows)
        states, numbers = model.states, max(1, model.numbers)
        return StateWidths(
            *(n / numbers for n in (states.parameters, states.gradients, states.optimizer))
        )

    def evaluate(
        self, candidate: Candidate, plan: Plan, limit: int
    ) -> EvaluatedPlan | RejectedPlan:
        """Cut it, let its blocks keep as much as fits, and say what comes of it.

        Args:
            candidate: one of the space.
            plan: of `plan_of`.
            limit: bytes that a rank may hold, what a forecast may be wrong by included.
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
        return self._judged(candidate, plan, fit, *fitted)

    def _over_host(self, candidate: Candidate, plan: Plan) -> str | None:
        """What is too much for the host's memory, where the optimizer's state is to be there."""
        if plan.offload_tiers.optimizer != "cpu":
            return None
        node = self.clock.cluster.node
        numbers = self.fit(candidate, plan).levels["keep"].numbers
        shards = candidate.pp * plan.state_ranks
        # Gradients come to the host beside its fp32 values.
        width = self._state_widths(candidate.rows).optimizer + 2 * 4
        rank_bytes = int(numbers * width) // shards
        node_bytes = rank_bytes * min(node.devices, candidate.devices)
        if node_bytes <= node.host_memory:
            return None
        return (
            f"{format_bytes(node_bytes)} of optimizer state on the host of a node, which has "
            f"{format_bytes(node.host_memory)}"
        )

    def fit(self, candidate: Candidate, plan: Plan, *, exact: bool = True) -> StageFitter:
        """Its stages; not exact is what follows from blocks alone, or is of seconds.

        Raises:
            ConfigError: the model cannot be run so, or a technique refuses its stages.
        """
        if (candidate, exact) not in self._fits:
            levels = self._levels(plan, candidate, exact=exact)
            self._check_new(candidate, levels["keep"])
            fit = self.fit_of(candidate, plan, levels)
            plan.check_model(ModelFacts(shared=fit.shared))
            self._fits[candidate, exact] = fit
        return self._fits[candidate, exact]

    def fit_of(self, candidate: Candidate, plan: Plan, levels: RecomputeLevels) -> StageFitter:
        """Its stages of these sections."""
        kept = levels["keep"]
        given = (kept.numbers // candidate.pp, candidate.rows, plan)
        share = candidate.pp / max(1, kept.states.parameters)
        with_gradients = self.least_states(*given) * share
        factors = self.least_states(*given, gradients=False) * share, with_gradients
        arguments = (plan, candidate, levels, self.clock, self._composed, self._cuts, factors)
        split_passes, config = self._split_passes(plan, candidate), self._job.checkpoint
        saves = config.saves and not is_accelerator(plan.device_type)
        return StageFitter(*arguments, split_passes, config if saves else None)

    def kept(self, candidate: Candidate) -> ModelSections:
        """The sections of one that was fit, not exactly, all of whose blocks keep everything."""
        return self._fits[candidate, False].levels["keep"]

    def _check_new(self, candidate: Candidate, model: ModelSections) -> None:
        """Refuse what exchanges the same between the same ranks as another way to slice layers."""
        key = (candidate.rows, candidate.tp, model.exchanges)
        other = self._alike.setdefault(key, candidate.slices)
        if candidate.tp > 1 and other is not None and other != candidate.slices:
            raise ConfigError(f"{candidate.label}: the same as with {other.label}")

    def _split_passes(
        self, plan: Plan, candidate: Candidate
    ) -> Callable[[], Mapping[str, PassPair] | None] | None:
        """What is asked for sections that go back in two parts; None where none does."""
        if not plan.splits_backward:
            return None
        kind = {"waiting": several_wait(plan), "cut": plan.pp > 1}
        return lambda: self._library.split_passes(plan, candidate.rows, **kind)

    def _levels(self, plan: Plan, candidate: Candidate, *, exact: bool) -> RecomputeLevels:
        """The model's sections for each choice that this plan can run; see `fit`."""
        kind = {"waiting": several_wait(plan), "cut": plan.pp > 1, "exact": exact}

        def body(choice: BlockPolicy) -> ModelSections:
            return self._sections(plan, candidate.rows, choice, **kind)

        usual = [c for c in RECOMPUTE_LEVELS if c != "selective" or plan.keeps_products]
        # A backward pass in two parts would compute every block again in both of them, and what
        # it holds then is more than any of its parts has.
        return RecomputeLevels(["keep"] if plan.splits_backward else usual, body)

    def _judged(
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
        return EvaluatedPlan(candidate, plan, job, peaks, seconds, recomputed, cuts)

    def _seconds(self, plan: Plan, fit: StageFitter, stages: Sequence[SectionRange]) -> StepSeconds:
        paces = [self.clock.pass_seconds(fit.sections(stage), plan.tp) for stage in stages]
        base, timed = fit.levels["keep"].base, self.timed_parts(plan)
        return self.clock.plan_seconds(
            plan, paces, lambda stage: fit.profile(stages[stage]), base, timed
        )

    def timed_parts(self, plan: Plan) -> TimedParts:
        """What was timed of a step beside its passes, on the machine at hand."""
        slowdowns = self._slowdown(plan)
        if slowdowns is None:
            return TimedParts()
        on_host = plan.offload_tiers.optimizer == "cpu" and is_accelerator(plan.device_type)
        parts = slowdowns.parts(plan.batch.micro_size)
        return replace(parts, update=1.0) if on_host else parts


def _too_much(peak: Peak, limit: int) -> str:
    breakdown = vars(peak.breakdown)
    kind = max(breakdown, key=lambda part: breakdown[part])
    where = " in a save" if peak.phase == "save" else ""
    return (
        f"{format_bytes(peak.bytes - limit)} too much: {kind} {format_bytes(breakdown[kind])} of "
        f"{format_bytes(peak.bytes)}{where}"
    )
