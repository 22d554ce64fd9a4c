"""Lower bounds on the seconds and bytes of candidates, and dominance between candidates.

No step is forecast here. A candidate whose bound is worse than a plan that is already known needs
no forecast. The figures of reported plans come from forecasts, not from these bounds.
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
"""The share of a step that is subtracted from `PlanBounds.least_seconds`, as its estimate may be
too high. Over 980 plans of eight models, drawn at random, it was too high by 4.7 % at most."""
EVEN_SLACK = 0.03
"""The share of a step that is subtracted from `PlanBounds.even_seconds`; over the same plans, its
estimate was too high by 1.9 % at most."""
END_SLACK = 0.01
"""The share of a step that is subtracted from `PlanBounds.kept_seconds`, in which only the part
after the blocks is estimated from runs of other sizes."""


class PlanBounds:
    """Lower bounds on the seconds and bytes of one job's candidates on one cluster.

    Args:
        evaluator: the evaluator of the candidates.
    """

    def __init__(self, evaluator: PlanEvaluator) -> None:
        self.evaluator, self._timer = evaluator, evaluator.timer
        self._least_passes: dict[tuple[int, int], MicroBatchSeconds] = {}
        self._passes: dict[tuple[ModelSections, int], MicroBatchSeconds] = {}
        self._no_larger: dict[tuple[ModelSections, ModelSections], bool] = {}

    def least_seconds(self, candidate: Candidate) -> float:
        """A lower bound on the seconds of a step: computing on equal stages, and the bubble.

        `WORK_SLACK` is subtracted, because unequal stages may wait less than equal ones, and some
        engines convert fewer parameters than the one process in which the operations are counted.

        Raises:
            ConfigError: the model does not run with micro-batches of this size.
        """
        whole_model = self._least_pass_seconds(candidate)
        seconds = candidate.micro_batches * whole_model.total / candidate.pp
        oversubscribed = self._timer.oversubscription * seconds
        cut = candidate.cut_traits
        if cut is not None:
            # A plan may not split the backward passes although its schedule does. The bubble of
            # such a plan is no smaller than this one.
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
        """The least seconds of a micro-batch in the whole model on a tp rank, without recompute."""
        key = (candidate.rows, candidate.tp)
        if key not in self._least_passes:
            sections = self.evaluator.whole_model(candidate.rows).sections
            self._least_passes[key] = self._timer.least_seconds(sections, candidate.tp)
        return self._least_passes[key]

    def even_seconds(self, candidate: Candidate, plan: Plan) -> float:
        """A closer bound on the seconds: equal stages, with exchanges and the optimizer's step.

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
        """The closest bound on the seconds: cut for speed, and all blocks save all activations.

        Raises:
            ConfigError: the model does not run under this plan, or cannot be cut into its stages.
        """
        return self.evaluator.seconds_with(candidate, plan, "keep").total * (1 - END_SLACK)

    def least_bytes(self, candidate: Candidate, plan: Plan) -> int:
        """A lower bound on the bytes of the fullest rank: its share of the model's states."""
        numbers = self.evaluator.whole_model(candidate.rows).numbers
        return self.evaluator.floor(candidate, plan).states_of_model(numbers)

    def floor_bytes(self, candidate: Candidate, plan: Plan, *, all_kept: bool = False) -> int:
        """A closer bound on the bytes: states, and the saved tensors of micro-batches in flight.

        Args:
            candidate: the candidate.
            plan: its plan.
            all_kept: whether all blocks save all activations; by default all have the policy with
                the least memory.

        Raises:
            ConfigError: the model does not run under this plan.
        """
        fit = self.evaluator.fit(candidate, plan, exact=False)
        return fit.floor_bytes(all_kept=all_kept)

    def is_no_larger(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether a candidate's slices take no more memory than another's, with every policy.

        Args:
            candidate: a candidate that `even_seconds` was called with.
            other: the same candidate with other slices. `even_seconds` was called with it, too.
        """
        sections, others = (
            self.evaluator.bounded_sections(compared) for compared in (candidate, other)
        )
        key = (sections, others)
        if key not in self._no_larger:
            self._no_larger[key] = are_no_larger(sections.sections, others.sections, candidate.tp)
        return self._no_larger[key]


def are_no_larger(sections: Sequence[Section], others: Sequence[Section], tp: int) -> bool:
    """Whether no stage of a model holds more bytes in some slices than in other slices.

    It is true if no section saves or receives more bytes, and the highest peak of all sections is
    no higher. The peaks are not compared one by one, because every stage has a block.

    Args:
        sections: the sections of the whole model.
        others: the sections of the same model with other slices.
        tp: the number of ranks that slice the model.
    """
    # A run can show that a model does not run in blocks. Slices recorded after it then have
    # different sections from those recorded before, and the two are not compared.
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
    """Return a section's bytes: at its peak, saved by each pass, received forward and backward."""
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
