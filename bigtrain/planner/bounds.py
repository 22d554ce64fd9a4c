"""What no plan of a candidate is faster than, and none holds less than. And what outdoes what.

Nothing here forecasts a step. A candidate whose bound is above what is known already need not be;
the forecast of `prediction.predict`, which has run the step on fake tensors, is what is believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from bigtrain.core.strategy import Plan
from bigtrain.errors import ConfigError
from bigtrain.planner.evaluate import PlanEvaluator
from bigtrain.planner.fit import StageFitter
from bigtrain.planner.recompute_levels import RecomputeLevels
from bigtrain.planner.space import Candidate
from bigtrain.prediction.compose import wire_bytes
from bigtrain.prediction.fake_runs.conversions import with_conversions
from bigtrain.prediction.section_library import ModelSections
from bigtrain.prediction.sections import Section, concatenate_sections
from bigtrain.timing.step_time import MicroBatchSeconds, closed_form_bubble

WORK_SLACK = 0.06
"""The share of a step that may be saved by what the bound on its work does not see; at most 4.7 %
of a step was, in 980 plans of eight models that were drawn."""
EVEN_SLACK = 0.03
"""The same of what is exchanged and updated, too, in stages that are alike; there 1.9 %."""
END_SLACK = 0.01
"""The same where all is seen, but for what is after the blocks, which was read off other sizes."""


class PlanBounds:
    """The bounds of one job's candidates on one cluster.

    Args:
        evaluator: what they are bounds of.
    """

    def __init__(self, evaluator: PlanEvaluator) -> None:
        self.evaluator, self._clock = evaluator, evaluator.clock
        self._paces: dict[object, MicroBatchSeconds] = {}
        self._whole: dict[object, MicroBatchSeconds] = {}
        self._smaller: dict[object, bool] = {}
        self._converted: dict[int, tuple[ModelSections, ModelSections]] = {}

    def least_seconds(self, candidate: Candidate) -> float:
        """No plan of this candidate is faster: its work, evenly dealt, and the bubble, less a bit.

        The bit is for stages that are not alike, which wait less than equal ones, and for engines
        that convert fewer parameters than the one process that the work is counted in.
        """
        whole_model = self._least_pace(candidate)
        seconds = candidate.micro_batches * whole_model.total / candidate.pp
        crowded = self._clock.oversubscription * seconds
        cut = candidate.cut_traits
        if cut is not None:
            arguments = (cut.schedule, candidate.pp, candidate.micro_batches)
            # Replicas that want whole backward passes wait no less.
            splits = cut.splits_backward
            bubble_fraction = closed_form_bubble(
                *arguments, candidate.stages_per_rank, splits=splits
            )
            # To the inputs: all stages in a row.
            one_pass = whole_model.forward + whole_model.backward / 2
            seconds = (
                max(seconds, one_pass)
                if bubble_fraction is None
                else seconds / (1.0 - bubble_fraction)
            )
        return max(seconds, crowded) * (1 - WORK_SLACK)

    def _least_pace(self, candidate: Candidate) -> MicroBatchSeconds:
        """A micro-batch through the whole model, everything kept, on one of its tp ranks."""
        rows, tp = candidate.rows, candidate.tp
        if (rows, tp) not in self._paces:
            sections = self.evaluator.whole_model(rows).sections
            self._paces[rows, tp] = self._clock.least_seconds(sections, tp)
        return self._paces[rows, tp]

    def even_seconds(self, candidate: Candidate, plan: Plan) -> float:
        """The same with what is exchanged and updated: all stages have as many blocks.

        Raises:
            ConfigError: the model cannot be run so.
        """
        fit = self.evaluator.fit(candidate, plan, exact=False)
        return self._even_seconds(candidate, plan, fit) * (1 - EVEN_SLACK)

    def _even_seconds(self, candidate: Candidate, plan: Plan, fit: StageFitter) -> float:
        kept = fit.levels["keep"]
        key = (id(kept), plan.tp)  # sections are kept with their fits
        if key not in self._whole:
            self._whole[key] = self._clock.pass_seconds(kept.sections, plan.tp)
        whole_model = self._whole[key]
        paces = [whole_model.scaled(1 / candidate.stages)] * candidate.stages
        update = self._clock.update_seconds(plan, kept.base, kept.trained // fit.ranks)
        timed = self.evaluator.timed_parts(plan)
        profiles = [[fit.even_stage()] * (candidate.stages // fit.ranks)]
        given = (plan, paces, profiles, update * timed.update)
        return self._clock.step(*given, split=timed.split, played=False).total

    def kept_seconds(self, candidate: Candidate, plan: Plan) -> float:
        """No plan of this candidate is faster: it is cut for speed, and blocks keep everything.

        Raises:
            ConfigError: it cannot be cut so.
        """
        return self.evaluator.seconds_with(candidate, plan, "keep").total * (1 - END_SLACK)

    def least_bytes(self, candidate: Candidate, plan: Plan) -> int:
        """No plan of this candidate holds less on its fullest rank: its share of the states."""
        numbers = self.evaluator.whole_model(candidate.rows).numbers
        given = (numbers // (candidate.pp * candidate.tp), candidate.rows, plan)
        moments = (False, True)
        return max(self.evaluator.least_states(*given, gradients=there) for there in moments)

    def floor_bytes(self, candidate: Candidate, plan: Plan) -> int:
        """No plan of this candidate holds less: its states and what micro-batches keep.

        Raises:
            ConfigError: the model cannot be run so.
        """
        return self.evaluator.fit(candidate, plan, exact=False).floor()

    def holds_no_more(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether it holds no more than with other slices, all else alike, whatever blocks keep.

        Args:
            candidate: one that has been bounded by `even_seconds`.
            other: another.
        """
        pair = [self.evaluator.kept(one) for one in (candidate, other)]
        key = (id(pair[0]), id(pair[1]))  # both are kept with their fits
        if key not in self._smaller:
            mine, theirs = (one.sections for one in pair)
            self._smaller[key] = smaller_in_slices(mine, theirs, candidate.tp)
        return self._smaller[key]

    def converts(self, plan: Plan) -> bool:
        """Whether it converts its parameters, and rates say how long a step takes."""
        return plan.autocast_weights and self.evaluator.blocks is None

    def outdone_by(
        self, candidate: Candidate, plan: Plan, others: Iterable[Candidate], slack: float
    ) -> Candidate | None:
        """Another one whose parameters are not converted: smaller, and slower by the slack at most.

        Nothing is run for the candidate: what it takes is at least what the other does, and its
        conversions, and gradients of four bytes a number where those are exchanged.

        Args:
            candidate: one that `converts`.
            plan: its own.
            others: all that are alike but for how replicas share state; those of one engine count.
            slack: a share of a step.
        """
        for other in others:
            if other.engine != candidate.engine:  # each has buffers of its own beside the states
                continue
            with suppress(ConfigError):  # it cannot be run so
                if self._outdoes(other, candidate, plan, slack):
                    return other
        return None

    def _outdoes(self, other: Candidate, candidate: Candidate, plan: Plan, slack: float) -> bool:
        theirs = self.evaluator.plan_of(other)
        smaller = self.least_bytes(other, theirs) < self.least_bytes(candidate, plan)
        if not smaller or not theirs.bf16_parameters:
            return False
        fit = self.evaluator.fit(other, theirs, exact=False)
        own_fit = self.evaluator.fit_of(candidate, plan, self._converting(fit))
        least = self._even_seconds(candidate, plan, own_fit)
        return least >= (1 - slack) * self._even_seconds(other, theirs, fit)

    def _converting(self, fit: StageFitter) -> RecomputeLevels:
        """The sections of a model of bf16 parameters as those of one that converts them."""
        kept = fit.levels["keep"]
        if id(kept) not in self._converted:  # the key is kept, so that its id stays its own
            self._converted[id(kept)] = kept, with_conversions(kept)
        _, converting = self._converted[id(kept)]
        return RecomputeLevels(["keep"], lambda _: converting)


def smaller_in_slices(sections: Sequence[Section], others: Sequence[Section], tp: int) -> bool:
    """Whether no part of a model in some slices saves more or is sent more than in others.

    And none of all has a higher moment than the highest of those: every stage has a block.

    Args:
        sections: of the whole model.
        others: of the same model in other slices.
        tp: ranks that slice it.
    """
    pairs = {(id(a.passes), id(b.passes)): (a, b) for a, b in zip(sections, others, strict=True)}
    figures = [[_figures(one, tp) for one in pair] for pair in pairs.values()]
    kept = (zip(mine[1:], theirs[1:], strict=True) for mine, theirs in figures)
    highest, theirs = (max(pair[side][0] for pair in figures) for side in (0, 1))
    return highest <= theirs and all(a <= b for pair in kept for a, b in pair)


def _figures(section: Section, tp: int) -> tuple[int, ...]:
    """Bytes at the highest moment; that are saved, and sent to it, forward and back."""
    alone = (concatenate_sections([one], begins=False, is_sent=False)[0] for one in section.passes)
    highest = max(max(timeline.steps()[1], default=0) for timeline in alone)
    return (highest, *(one.saved for one in section.passes), *wire_bytes(section, tp))
