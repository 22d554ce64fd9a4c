"""The search: evaluate candidates by rising lower bounds, until no other can be faster."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bigtrain.core.strategy import Plan
from bigtrain.core.variants import Variant
from bigtrain.errors import ConfigError
from bigtrain.planner.bounds import PlanBounds
from bigtrain.planner.evaluate import EvaluatedPlan, PlanEvaluator, RejectedPlan
from bigtrain.planner.space import Candidate, SearchSpace
from bigtrain.units import KIB

MAX_PLANS = 10
"""The most plans that are reported."""
DOMINANCE_SLACK = 0.03
"""A choice of slices is dropped if another choice uses no more memory and is at most this share of
a step slower. The memory that the other choice saves lets fewer blocks recompute, which gains more
than this share."""
FRONT_LIMITS = (0.6, 0.35, 0.2)
"""Shares of the limit for which the fastest plan is searched in addition, for the Pareto front."""
FRONTIER_QUERIES = 24
"""The most memory limits for which `PlanSearch.frontier` searches the fastest plan."""
FRONTIER_RATIO = 1.04
"""`PlanSearch.frontier` searches no plan between two peaks that differ by less than this factor."""
MAX_REJECTIONS = 16
"""The search for a share of `FRONT_LIMITS` ends after this many rejected plans, even without a plan
that fits. The front may then have fewer plans."""


@dataclass
class SearchResult:
    """The plans that a search has found."""

    best: list[EvaluatedPlan] = field(default_factory=list)
    """The fastest plans that fit, the fastest first."""
    rejected: list[RejectedPlan] = field(default_factory=list)
    front: list[EvaluatedPlan] = field(default_factory=list)
    """The Pareto front, the fastest plan first: no other plan is both smaller and faster."""
    front_limits: list[int] = field(default_factory=list)
    """For each plan of a whole front the limit at which the search finds it; otherwise empty."""
    candidates: int = 0
    """The number of candidates of the space."""
    evaluated: int = 0
    """The number of candidates whose memory was forecast. The others were refused or excluded by
    their lower bounds."""
    below_bound: int = 0
    """The number of candidates whose lower bound on memory is above the limit."""
    seconds: float = 0.0
    """The seconds that the search took."""


@dataclass
class _OpenCandidate:
    """A candidate and its lower bounds.

    A closer bound is computed when the candidate is first in the queue.
    """

    candidate: Candidate
    seconds: float
    """The lower bound on the seconds of a step."""
    num_bounds: int = 0
    """How many of the bounds of `PlanSearch._bounds` are in `seconds` and `least_bytes`."""
    plan: Plan | None = None
    least_bytes: int = 0
    """The lower bound on the bytes of the fullest rank; at first, on those of its states alone."""
    kept_bytes: int = 0
    """`PlanBounds.floor_bytes` if all blocks save all activations; 0 if that is above the limit.
    Within the limit the candidate may fit, and `least_bytes` does not contain the bound for other
    policies."""
    failed_limit: int = 0
    """The largest limit, in bytes, that the candidate was found not to fit."""
    refused: bool = False
    """Whether the candidate cannot run, or other slices dominate its slices."""


class PlanSearch:
    """A best-first search of one space: the candidate with the lowest bound on seconds comes first.

    Args:
        evaluator: the evaluator of the candidates.
        space: the search space.
    """

    def __init__(self, evaluator: PlanEvaluator, space: SearchSpace) -> None:
        self.evaluator, self.space, self.bounds = evaluator, space, PlanBounds(evaluator)
        self._outcomes: dict[tuple[Candidate, int], EvaluatedPlan | RejectedPlan] = {}
        self._refused: list[RejectedPlan] = []
        self._with_slices: dict[Candidate, list[_OpenCandidate]] = {}
        self._dominating_slices: dict[tuple[int, int, Variant | None], Variant | None] = {}
        self._bounds = (self._bound_even_seconds, self._bound_bytes, self._bound_cut_seconds)
        self._open = [*self._opened()]
        self._has_offload = False
        """Whether `_open` has the candidates with offload."""

    def run(
        self,
        limit: int,
        *,
        only_best: bool = False,
        frontier: bool = False,
        with_offload: bool = False,
    ) -> SearchResult:
        """Find the fastest plans that fit.

        Args:
            limit: bytes that a rank may hold.
            only_best: whether to search the fastest plan only. The front is then that plan alone.
            frontier: whether the front is the whole of `frontier`, and not a few plans.
            with_offload: whether plans with offload are searched although other plans fit.

        Raises:
            ConfigError: every candidate is refused.
        """
        began = time.perf_counter()
        if frontier or with_offload:
            self._open_offload()
        answer = SearchResult(candidates=len(self._open))
        count = 1 if only_best else MAX_PLANS
        answer.best = self._fastest(limit, count, answer)
        if not answer.best:
            # Offload is searched last: moving state in every step costs more than any other
            # technique that saves memory.
            self._open_offload()
            answer.candidates, answer.below_bound = len(self._open), 0
            answer.best = self._fastest(limit, count, answer)
        if all(opened.refused for opened in self._open) and self._refused:
            raise ConfigError(self._refused[0].reason)
        fitting = list(answer.best)
        if frontier and fitting:
            points = self.frontier(limit)
            answer.front_limits = [at for at, _ in points]
            answer.front = [plan for _, plan in points]
        else:
            for share in FRONT_LIMITS if fitting and not only_best else ():
                fitting += self._fastest(int(limit * share), 1)
            answer.front = _front(fitting)
        answer.rejected += self._refused
        answer.evaluated = len({candidate for candidate, _ in self._outcomes})
        answer.seconds = time.perf_counter() - began
        return answer

    def frontier(self, limit: int) -> list[tuple[int, EvaluatedPlan]]:
        """Find plans from the least seconds to the least memory, none beaten in both by another.

        Between two plans the fastest plan is searched whose peak is at most the geometric mean of
        their peaks. The widest gap comes first. The engines' margins have to be zero, so that a
        limit is one on predicted peaks.

        Args:
            limit: bytes that a rank may hold.

        Returns:
            For each plan the limit at which the search finds it, and the plan; the fastest first.
            The limits below the first are whole KiB. The list is empty if no plan fits.

        Raises:
            ConfigError: every candidate is refused.
        """
        self._open_offload()
        fastest = self._fastest(limit, 1, exhaustive=True)
        if all(opened.refused for opened in self._open) and self._refused:
            raise ConfigError(self._refused[0].reason)
        smallest = self.smallest()
        if not fastest or smallest is None or smallest.peak is None:
            return [(limit, plan) for plan in fastest]
        least = -(-smallest.peak.bytes // KIB) * KIB
        points = [(limit, fastest[0])]
        points += [(least, plan) for plan in self._fastest(least, 1, exhaustive=True)]
        if len(points) == 1:
            return points
        searched = [least]  # between two neighbours, the highest limit that was searched
        for _ in range(FRONTIER_QUERIES):
            peaks = [plan.peak.bytes for _, plan in points]
            gaps = [above / low for above, low in zip(peaks, searched, strict=False)]
            widest = max(range(len(gaps)), key=gaps.__getitem__)
            if gaps[widest] < FRONTIER_RATIO:
                break
            middle = math.isqrt(peaks[widest] * searched[widest]) // KIB * KIB
            found = self._fastest(middle, 1, exhaustive=True)
            if found and found[0].peak.bytes > peaks[widest + 1]:
                points.insert(widest + 1, (middle, found[0]))
                searched[widest : widest + 1] = [middle, searched[widest]]
            else:
                searched[widest] = middle
        undominated = _front([plan for _, plan in points])
        return [point for point in points if point[1] in undominated]

    def _open_offload(self) -> None:
        """Add the candidates with offload to the search, if it does not have them yet."""
        if not self._has_offload:
            self._open += self._opened(fallback_tier=True)
            self._has_offload = True

    def _opened(self, *, fallback_tier: bool = False) -> Iterator[_OpenCandidate]:
        unfit_rows: dict[int, str] = {}
        for candidate in self.space.candidates(fallback_tier=fallback_tier):
            opened = _OpenCandidate(candidate, 0.0)
            if candidate.rows not in unfit_rows:
                try:
                    opened.seconds = self.bounds.least_seconds(candidate)
                except ConfigError as error:  # such as BatchNorm, which needs more than one row
                    unfit_rows[candidate.rows] = str(error)
            if candidate.rows in unfit_rows:
                self._refuse(opened, unfit_rows[candidate.rows])
            yield opened

    def _refuse(self, opened: _OpenCandidate, reason: str) -> None:
        opened.refused = True
        self._refused.append(RejectedPlan(opened.candidate, reason))

    def _fastest(
        self,
        limit: int,
        count: int,
        answer: SearchResult | None = None,
        *,
        exhaustive: bool = False,
    ) -> list[EvaluatedPlan]:
        """Find the fastest plans that fit a limit.

        Args:
            limit: bytes that a rank may hold.
            count: how many plans to find.
            answer: the result to which rejected plans are added. If it is None, the search ends
                after `MAX_REJECTIONS` of them.
            exhaustive: whether the search never ends before no other plan can be faster.
        """
        best: list[EvaluatedPlan] = []
        num_rejected = 0
        queue = [(opened.seconds, number) for number, opened in enumerate(self._open)]
        heapq.heapify(queue)
        while queue:
            seconds, number = heapq.heappop(queue)
            opened = self._open[number]
            if len(best) >= count and seconds >= best[count - 1].seconds.total:
                break
            if opened.plan is None and not opened.refused:
                self._make_plan(opened)
            if opened.refused or limit <= opened.failed_limit:
                continue
            if opened.least_bytes > limit:
                if answer is not None:
                    answer.below_bound += 1
                continue
            if self._tighten(opened, limit, len(self._bounds)):
                heapq.heappush(queue, (opened.seconds, number))
                continue
            outcome = self._evaluated(opened, limit)
            if isinstance(outcome, RejectedPlan):
                num_rejected += 1
                if outcome.peak is not None:
                    opened.failed_limit = max(opened.failed_limit, limit)
                if answer is not None:
                    answer.rejected.append(outcome)
                elif num_rejected >= MAX_REJECTIONS and not exhaustive:
                    break
                continue
            best.append(outcome)
            best.sort(key=_by_seconds)
            del best[count:]
        return [self._with_finest_form(plan, limit) for plan in best[:1]] + best[1:]

    def _with_finest_form(self, found: EvaluatedPlan, limit: int) -> EvaluatedPlan:
        """Return a plan with the finest form of its data parallelism that fits and is no slower.

        The search has evaluated only a few of these forms.
        """
        forms = self.space.finer_forms(found.candidate)
        current = found.candidate.replicate
        low = next((n for n, form in enumerate(forms) if form.replicate == current), -1)
        high = len(forms) - 1
        while low < high:
            middle = (low + high + 1) // 2
            outcome = self._evaluated(_OpenCandidate(forms[middle], 0.0), limit)
            if isinstance(outcome, EvaluatedPlan) and _by_seconds(outcome) <= _by_seconds(found):
                low, found = middle, outcome
            else:
                high = middle - 1
        return found

    def _make_plan(self, opened: _OpenCandidate) -> None:
        """Make the candidate's plan and its lower bound on memory, or refuse the candidate.

        The bound counts only parameters, gradients and optimizer state.
        """
        try:
            opened.plan = self.evaluator.plan_of(opened.candidate)
            opened.least_bytes = self.bounds.least_bytes(opened.candidate, opened.plan)
        except ConfigError as error:
            self._refuse(opened, str(error))

    def _tighten(self, opened: _OpenCandidate, limit: int, number: int) -> bool:
        """Apply the next closer bound to a candidate, or refuse the candidate.

        Args:
            opened: the candidate.
            limit: bytes that a rank may hold. The bound on bytes is computed again for a lower
                limit than before.
            number: how many of the bounds to apply.

        Returns:
            Whether a bound was left to apply.
        """
        is_new = opened.num_bounds < number
        if not is_new and opened.kept_bytes <= limit:
            return False
        bound = self._bounds[opened.num_bounds] if is_new else self._bound_bytes
        try:
            bound(opened, self._plan_of(opened), limit)
            opened.num_bounds += is_new
        except ConfigError as error:
            self._refuse(opened, str(error))
        return True

    def _plan_of(self, opened: _OpenCandidate) -> Plan:
        return opened.plan or self.evaluator.plan_of(opened.candidate)

    def _bound_even_seconds(self, opened: _OpenCandidate, plan: Plan, _limit: int) -> None:
        self._refuse_dominated_slices(opened)
        if opened.refused:
            return
        bound = self.bounds.even_seconds(opened.candidate, plan)
        opened.seconds = max(opened.seconds, bound)
        if opened.candidate.slices is not None:
            self._compare_slices(opened)

    def _bound_bytes(self, opened: _OpenCandidate, plan: Plan, limit: int) -> None:
        """Bound the bytes, but only if a model that saves all activations exceeds the limit.

        The bound for other policies takes one more run of the model on fake tensors.
        """
        kept = self.bounds.floor_bytes(opened.candidate, plan, all_kept=True)
        if kept <= limit:
            opened.kept_bytes = kept
            return
        opened.kept_bytes = 0
        bound = self.bounds.floor_bytes(opened.candidate, plan)
        opened.least_bytes = max(opened.least_bytes, bound)

    def _bound_cut_seconds(self, opened: _OpenCandidate, plan: Plan, _limit: int) -> None:
        self._refuse_dominated_slices(opened)
        if not opened.refused:
            bound = self.bounds.kept_seconds(opened.candidate, plan)
            opened.seconds = max(opened.seconds, bound)

    def _compare_slices(self, opened: _OpenCandidate) -> None:
        """Find out which slices dominate others; see `DOMINANCE_SLACK`.

        Slices are compared on one mesh. The result is used on all meshes with the same number of
        tp ranks and the same rows of a micro-batch.
        """
        others = self._with_slices.setdefault(replace(opened.candidate, slices=None), [])
        for known in others:
            faster, slower = sorted((opened, known), key=lambda variant: variant.seconds)
            for better, worse in ((faster, slower), (slower, faster)):
                is_near = better.seconds <= (1 + DOMINANCE_SLACK) * worse.seconds
                is_open = not better.refused and _slicing(better) not in self._dominating_slices
                if (
                    is_near
                    and is_open
                    and self.bounds.is_no_larger(better.candidate, worse.candidate)
                ):
                    self._dominating_slices[_slicing(worse)] = better.candidate.slices
                    self._refuse_dominated_slices(worse)
                    break
        others.append(opened)

    def _refuse_dominated_slices(self, opened: _OpenCandidate) -> None:
        better = self._dominating_slices.get(_slicing(opened))
        if better is not None and not opened.refused:
            self._refuse(
                opened,
                f"{opened.candidate.label}: {better.label} uses no more memory and is at most "
                f"{DOMINANCE_SLACK:.0%} slower",
            )

    def _evaluated(self, opened: _OpenCandidate, limit: int) -> EvaluatedPlan | RejectedPlan:
        key = (opened.candidate, limit)
        if key not in self._outcomes:
            plan = self._plan_of(opened)
            self._outcomes[key] = self.evaluator.evaluate(opened.candidate, plan, limit)
        return self._outcomes[key]

    def smallest(self) -> EvaluatedPlan | RejectedPlan | None:
        """Find the candidate with the lowest peak, however slow it is, for when no plan fits.

        Returns:
            The outcome of the candidate with a limit of 0; None if every candidate is refused.
        """
        for opened in self._open:
            if opened.plan is None and not opened.refused:
                self._make_plan(opened)
        best: EvaluatedPlan | RejectedPlan | None = None
        queue = [
            (opened.least_bytes, n) for n, opened in enumerate(self._open) if not opened.refused
        ]
        heapq.heapify(queue)
        needed = self._bounds.index(self._bound_bytes) + 1
        while queue:
            least, number = heapq.heappop(queue)
            opened = self._open[number]
            if best is not None and least >= _peak_bytes(best):
                break
            if self._tighten(opened, 0, needed):
                if not opened.refused:
                    heapq.heappush(queue, (opened.least_bytes, number))
                continue
            outcome = self._evaluated(opened, 0)
            if best is None or _peak_bytes(outcome) < _peak_bytes(best):
                best = outcome
        return best


def _slicing(opened: _OpenCandidate) -> tuple[int, int, Variant | None]:
    """The key under which slices are compared: the rows, the tp ranks and the slices."""
    candidate = opened.candidate
    return candidate.rows, candidate.tp, candidate.slices


def _by_seconds(evaluated: EvaluatedPlan) -> tuple[float, int]:
    return evaluated.seconds.total, evaluated.peak.bytes


def _peak_bytes(outcome: EvaluatedPlan | RejectedPlan) -> int:
    return outcome.peak.bytes if outcome.peak is not None else 2**62


def _front(fitting: list[EvaluatedPlan]) -> list[EvaluatedPlan]:
    front: list[EvaluatedPlan] = []
    for evaluated in sorted(fitting, key=_by_seconds):
        if not front or evaluated.peak.bytes < front[-1].peak.bytes:
            front.append(evaluated)
    return front
