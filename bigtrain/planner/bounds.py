"""Lower bounds on the seconds and bytes of candidates, and dominance between candidates.

No step is forecast here. A candidate whose bound is worse than a plan that is already known needs
no forecast; all that is reported comes from forecasts, whose steps were run on fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigtrain.core.strategy import Plan
from bigtrain.planner.evaluate import PlanEvaluator
from bigtrain.planner.space import Candidate
from bigtrain.prediction.compose import boundary_bytes
from bigtrain.prediction.section_library import ModelSections
from bigtrain.prediction.sections import Section, concatenate_sections
from bigtrain.timing.step_time import MicroBatchSeconds, closed_form_bubble

WORK_SLACK = 0.06
"""The share of a step by which the bound on a candidate's work may be too high. Over 980 plans of
eight models, drawn at random, it was too high by 4.7 % at most."""
EVEN_SLACK = 0.03
"""The share for the bound that adds exchanges and the update, with equal stages; the largest error
was 1.9 %."""
END_SLACK = 0.01
"""The share for the bound that cuts the model: only the part after the blocks is estimated from
runs of other sizes."""


class PlanBounds:
    """The bounds of one job's candidates on one cluster.

    Args:
        evaluator: the evaluator of the candidates.
    """

    def __init__(self, evaluator: PlanEvaluator) -> None:
        self.evaluator, self._timer = evaluator, evaluator.timer
        self._least_passes: dict[tuple[int, int], MicroBatchSeconds] = {}
        self._passes: dict[tuple[ModelSections, int], MicroBatchSeconds] = {}
        self._no_larger: dict[tuple[ModelSections, ModelSections], bool] = {}

    def least_seconds(self, candidate: Candidate) -> float:
        """A lower bound on the candidate's step: its work on equal stages, and the bubble.

        `WORK_SLACK` is taken off, because unequal stages may wait less than equal ones, and some
        engines convert fewer parameters than the one process in which the work is counted.
        """
        whole_model = self._least_pass_seconds(candidate)
        seconds = candidate.micro_batches * whole_model.total / candidate.pp
        oversubscribed = self._timer.oversubscription * seconds
        cut = candidate.cut_traits
        if cut is not None:
            # Replicas that need whole backward passes wait no less than this.
            bubble_fraction = closed_form_bubble(
                cut.schedule,
                candidate.pp,
                candidate.micro_batches,
                candidate.stages_per_rank,
                splits=cut.splits_backward,
            )
            # One micro-batch through all stages, and its gradients back to the inputs.
            one_pass = whole_model.forward + whole_model.backward / 2
            seconds = (
                max(seconds, one_pass)
                if bubble_fraction is None
                else seconds / (1.0 - bubble_fraction)
            )
        return max(seconds, oversubscribed) * (1 - WORK_SLACK)

    def _least_pass_seconds(self, candidate: Candidate) -> MicroBatchSeconds:
        """One micro-batch through the whole model on one of the tp ranks, nothing recomputed."""
        key = (candidate.rows, candidate.tp)
        if key not in self._least_passes:
            sections = self.evaluator.whole_model(candidate.rows).sections
            self._least_passes[key] = self._timer.least_seconds(sections, candidate.tp)
        return self._least_passes[key]

    def even_seconds(self, candidate: Candidate, plan: Plan) -> float:
        """A closer lower bound: with exchanges and the update, where all stages are equal.

        Raises:
            ConfigError: the model does not run under this plan.
        """
        fit = self.evaluator.fit(candidate, plan, exact=False)
        keep_all = fit.levels["keep"]
        key = (keep_all, plan.tp)
        if key not in self._passes:
            self._passes[key] = self._timer.pass_seconds(keep_all.sections, plan.tp)
        update = self._timer.update_seconds(plan, keep_all.base, keep_all.trained // fit.ranks)
        timed = self.evaluator.timed_parts(plan)
        seconds = self._timer.step(
            plan,
            [self._passes[key].scaled(1 / candidate.stages)] * candidate.stages,
            [[fit.even_stage()] * (candidate.stages // fit.ranks)],
            update * timed.update,
            split=timed.split,
            simulated=False,
        ).total
        return seconds * (1 - EVEN_SLACK)

    def kept_seconds(self, candidate: Candidate, plan: Plan) -> float:
        """The highest lower bound: the model cut for speed, and all blocks save all activations.

        Raises:
            ConfigError: it cannot be cut so.
        """
        return self.evaluator.seconds_with(candidate, plan, "keep").total * (1 - END_SLACK)

    def least_bytes(self, candidate: Candidate, plan: Plan) -> int:
        """A lower bound on the bytes of the fullest rank: its share of the states."""
        numbers = self.evaluator.whole_model(candidate.rows).numbers
        return self.evaluator.floor(candidate, plan).states_of_model(numbers)

    def floor_bytes(self, candidate: Candidate, plan: Plan, *, all_kept: bool = False) -> int:
        """A closer lower bound: with the tensors that micro-batches in flight have saved.

        Args:
            candidate: the candidate.
            plan: its plan.
            all_kept: whether all blocks save all activations; by default none saves more than it
                must.

        Raises:
            ConfigError: the model does not run under this plan.
        """
        fit = self.evaluator.fit(candidate, plan, exact=False)
        return fit.floor_bytes(all_kept=all_kept)

    def is_no_larger(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether a candidate's slices take no more memory than another's, whatever blocks keep.

        Args:
            candidate: one that `even_seconds` was called with.
            other: the same candidate with other slices, likewise.
        """
        sections, others = (
            self.evaluator.bounded_sections(compared) for compared in (candidate, other)
        )
        key = (sections, others)
        if key not in self._no_larger:
            self._no_larger[key] = are_no_larger(sections.sections, others.sections, candidate.tp)
        return self._no_larger[key]


def are_no_larger(sections: Sequence[Section], others: Sequence[Section], tp: int) -> bool:
    """Whether a model in some slices holds no more on any stage than in other slices.

    That is if no section saves or receives more, and the highest peak of all sections is no
    higher: every stage has a block.

    Args:
        sections: the sections of the whole model.
        others: the sections of the same model with other slices.
        tp: ranks that slice it.
    """
    # A run can show that a model does not run in blocks. Later slices then have other sections than
    # earlier ones, and the two are not compared.
    if [section.name for section in sections] != [section.name for section in others]:
        return False
    # Equal blocks share their passes: each kind is compared once.
    pairs = {(id(a.passes), id(b.passes)): (a, b) for a, b in zip(sections, others, strict=True)}
    figures = [(_section_bytes(a, tp), _section_bytes(b, tp)) for a, b in pairs.values()]
    highest, others_highest = (max(pair[side][0] for pair in figures) for side in (0, 1))
    return highest <= others_highest and all(
        mine <= theirs
        for pair in figures
        for mine, theirs in zip(pair[0][1:], pair[1][1:], strict=True)
    )


def _section_bytes(section: Section, tp: int) -> tuple[int, ...]:
    """Bytes at the section's peak; saved, by pass; received, forward and backward."""
    alone = (
        concatenate_sections([section_pass], begins=False, is_sent=False)[0]
        for section_pass in section.passes
    )
    highest = max(max(timeline.steps()[1], default=0) for timeline in alone)
    return (
        highest,
        *(section_pass.saved for section_pass in section.passes),
        *boundary_bytes(section, tp),
    )
