"""The search: candidates by the least time that they can take, until none can be faster."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bigtrain.core.strategy import Plan
from bigtrain.core.variants import Variant
from bigtrain.errors import ConfigError
from bigtrain.planner.bounds import PlanBounds
from bigtrain.planner.evaluate import EvaluatedPlan, PlanEvaluator, RejectedPlan
from bigtrain.planner.space import Candidate, SearchSpace

MAX_PLANS = 10
"""Plans that are told of."""
NUM_BOUNDS = 2
"""At a candidate, before its memory is forecast; see `_OpenCandidate.num_bounds`."""
OUTDONE_SLACK = 0.03
"""The share of a step that may be lost where what holds less is not compared with what is alike but
for its slices, or for how it shares state, to the end: what blocks need not compute again is more
than that."""
FRONT_LIMITS = (0.6, 0.35, 0.2)
"""Shares of the limit at which the fastest plan is looked for, too, for the front."""
MAX_REJECTIONS = 16
"""Plans that do not fit such a share, after which it is given up: the front may end early."""


@dataclass
class SearchResult:
    """What a search has found."""

    best: list[EvaluatedPlan] = field(default_factory=list)
    """The fastest that fit, the fastest first."""
    rejected: list[RejectedPlan] = field(default_factory=list)
    front: list[EvaluatedPlan] = field(default_factory=list)
    """Plans than which no other is both smaller and faster, the fastest first."""
    candidates: int = 0
    """In the space."""
    evaluated: int = 0
    """Of which the memory was forecast; others are slower than the best, or hold too much."""
    below_bound: int = 0
    """Whose states, and what micro-batches keep at least, are above the limit."""
    seconds: float = 0.0


@dataclass
class _OpenCandidate:
    """A candidate, and how fast it can be at best: looked at the closer the longer it leads."""

    candidate: Candidate
    seconds: float
    num_bounds: int = 0
    """0: its work. 1: and what it exchanges, evenly cut. 2: cut as it would be."""
    plan: Plan | None = None
    least_bytes: int = 0
    """No plan of it holds less; closer from the first look on."""
    is_tight: bool = False
    """Whether that is as close as it gets."""
    failed_limit: int = 0
    """The largest limit that it was found not to fit."""
    refused: bool = False


class PlanSearch:
    """A search of one space.

    Args:
        evaluator: of the candidates.
        space: where they come from.
    """

    def __init__(self, evaluator: PlanEvaluator, space: SearchSpace) -> None:
        self.evaluator, self.space, self.bounds = evaluator, space, PlanBounds(evaluator)
        self._known: dict[tuple[Candidate, int], EvaluatedPlan | RejectedPlan] = {}
        self._refused: list[RejectedPlan] = []
        self._bounded: dict[Candidate, list[_OpenCandidate]] = {}
        self._outdone: dict[tuple[int, int, Variant | None], Variant | None] = {}
        self._others: dict[Candidate, list[Candidate]] = {}
        self._open = [*self._opened()]

    def run(self, limit: int) -> SearchResult:
        """Find the fastest plans that fit.

        Args:
            limit: bytes that a rank may hold.

        Raises:
            ConfigError: techniques refuse all that there is.
        """
        began = time.perf_counter()
        answer = SearchResult(candidates=len(self._open))
        answer.best = self._fastest(limit, MAX_PLANS, answer)
        if not answer.best:
            # Moving state in each step is taken to cost more than all else that makes room.
            self._open += self._opened(fallback_tier=True)
            answer.candidates, answer.below_bound = len(self._open), 0
            answer.best = self._fastest(limit, MAX_PLANS, answer)
        if all(one.refused for one in self._open) and self._refused:
            raise ConfigError(self._refused[0].reason)
        fitting = list(answer.best)
        for level in FRONT_LIMITS if fitting else ():
            fitting += self._fastest(int(limit * level), 1)
        answer.front = _front(fitting)
        answer.rejected += self._refused
        answer.evaluated = len({candidate for candidate, _ in self._known})
        answer.seconds = time.perf_counter() - began
        return answer

    def _opened(self, *, fallback_tier: bool = False) -> Iterator[_OpenCandidate]:
        unfit_rows: dict[int, str] = {}
        for candidate in self.space.candidates(fallback_tier=fallback_tier):
            opened = _OpenCandidate(candidate, 0.0)
            if candidate.rows not in unfit_rows:
                try:
                    opened.seconds = self.bounds.least_seconds(candidate)
                except ConfigError as error:  # layers may want more than one row to train on
                    unfit_rows[candidate.rows] = str(error)
            if candidate.rows in unfit_rows:
                self._refuse(opened, unfit_rows[candidate.rows])
            self._others.setdefault(_whatever_shared(candidate), []).append(candidate)
            yield opened

    def _refuse(self, opened: _OpenCandidate, reason: str) -> None:
        opened.refused = True
        self._refused.append(RejectedPlan(opened.candidate, reason))

    def _fastest(
        self, limit: int, count: int, answer: SearchResult | None = None
    ) -> list[EvaluatedPlan]:
        best: list[EvaluatedPlan] = []
        refusals = 0
        queue = [(opened.seconds, number) for number, opened in enumerate(self._open)]
        heapq.heapify(queue)
        while queue:
            seconds, number = heapq.heappop(queue)
            opened = self._open[number]
            if len(best) >= count and seconds >= best[count - 1].seconds.total:
                break
            if opened.plan is None and not opened.refused:
                self._look(opened)
            if opened.refused or limit <= opened.failed_limit:
                continue
            if opened.least_bytes > limit:
                if answer is not None:
                    answer.below_bound += 1
                continue
            if opened.num_bounds < NUM_BOUNDS:
                self._look(opened)
                heapq.heappush(queue, (opened.seconds, number))
                continue
            outcome = self._judged(opened, limit)
            if isinstance(outcome, RejectedPlan):
                refusals += 1
                if outcome.peak is not None:
                    opened.failed_limit = max(opened.failed_limit, limit)
                if answer is not None:
                    answer.rejected.append(outcome)
                elif refusals >= MAX_REJECTIONS:
                    break
                continue
            best.append(outcome)
            best.sort(key=_rank)
            del best[count:]
        return best

    def _look(self, opened: _OpenCandidate) -> None:
        """Look at a candidate more closely."""
        try:
            if opened.plan is None:
                opened.plan = self.evaluator.plan_of(opened.candidate)
                opened.least_bytes = self.bounds.least_bytes(opened.candidate, opened.plan)
                return
            if opened.num_bounds and not opened.is_tight:
                self._bound(opened, opened.plan)
                return
            self._refuse_outdone(opened)
            if not opened.num_bounds:
                self._refuse_converting(opened, opened.plan)
            if opened.refused:
                return
            bound = (self.bounds.even_seconds, self.bounds.kept_seconds)[opened.num_bounds]
            opened.seconds = max(opened.seconds, bound(opened.candidate, opened.plan))
            opened.num_bounds += 1
            if opened.num_bounds == 1 and opened.candidate.slices is not None:
                self._compare_slices(opened)
        except ConfigError as error:
            self._refuse(opened, str(error))

    def _compare_slices(self, opened: _OpenCandidate) -> None:
        """Find out which slices hold no less than others and are not much faster, evenly cut.

        What is so of two plans that are alike but for them is taken to be so on other meshes, with
        micro-batches of as many rows.
        """
        alike = self._bounded.setdefault(replace(opened.candidate, slices=None), [])
        for other in alike:
            pair = sorted((opened, other), key=lambda one: one.seconds)
            for better, worse in (pair, reversed(pair)):
                is_near = better.seconds <= (1 + OUTDONE_SLACK) * worse.seconds
                given = (better.candidate, worse.candidate)
                is_open = not better.refused and _sliced(better) not in self._outdone
                if is_near and is_open and self.bounds.holds_no_more(*given):
                    self._outdone[_sliced(worse)] = better.candidate.slices
                    self._refuse_outdone(worse)
                    break
        alike.append(opened)

    def _refuse_outdone(self, opened: _OpenCandidate) -> None:
        better = self._outdone.get(_sliced(opened))
        if better is not None and not opened.refused:
            words = f"no smaller, and no faster but for {OUTDONE_SLACK:.0%}, than {better.label}"
            self._refuse(opened, f"{opened.candidate.label}: {words}")

    def _refuse_converting(self, opened: _OpenCandidate, plan: Plan) -> None:
        """Leave out what converts its parameters, and is outdone: runs of it are another kind."""
        candidate = opened.candidate
        if opened.refused or not self.bounds.converts(plan):
            return
        others = self._others[_whatever_shared(candidate)]
        better = self.bounds.outdone_by(candidate, plan, others, OUTDONE_SLACK)
        if better is not None:
            words = f"larger than {better.label}, and no faster but for {OUTDONE_SLACK:.0%}"
            self._refuse(opened, f"{candidate.label}: {words}")

    def _bound(self, opened: _OpenCandidate, plan: Plan) -> None:
        opened.least_bytes = max(
            opened.least_bytes, self.bounds.floor_bytes(opened.candidate, plan)
        )
        opened.is_tight = True

    def _judged(self, opened: _OpenCandidate, limit: int) -> EvaluatedPlan | RejectedPlan:
        key = (opened.candidate, limit)
        if key not in self._known:
            plan = opened.plan or self.evaluator.plan_of(opened.candidate)
            self._known[key] = self.evaluator.evaluate(opened.candidate, plan, limit)
        return self._known[key]

    def smallest(self) -> EvaluatedPlan | RejectedPlan | None:
        """The candidate that holds least, whatever it takes; for where nothing fits."""
        for opened in self._open:
            if opened.plan is None and not opened.refused:
                self._look(opened)
        best: EvaluatedPlan | RejectedPlan | None = None
        queue = [
            (opened.least_bytes, n) for n, opened in enumerate(self._open) if not opened.refused
        ]
        heapq.heapify(queue)
        while queue:
            least, number = heapq.heappop(queue)
            opened = self._open[number]
            if best is not None and least >= _bytes(best):
                break
            if not opened.is_tight:
                self._look(opened)
                if not opened.refused:
                    heapq.heappush(queue, (opened.least_bytes, number))
                continue
            outcome = self._judged(opened, 0)
            if best is None or _bytes(outcome) < _bytes(best):
                best = outcome
        return best


def _sliced(opened: _OpenCandidate) -> tuple[int, int, Variant | None]:
    """What is compared of slices: on any mesh, with micro-batches of as many rows."""
    one = opened.candidate
    return one.rows, one.tp, one.slices


def _whatever_shared(candidate: Candidate) -> Candidate:
    """What candidates have in common that differ in how replicas share state alone."""
    return replace(candidate, replicate=None)


def _rank(judged: EvaluatedPlan) -> tuple[float, int]:
    return judged.seconds.total, judged.peak.bytes


def _bytes(outcome: EvaluatedPlan | RejectedPlan) -> int:
    if isinstance(outcome, EvaluatedPlan):
        return outcome.peak.bytes
    return outcome.peak.bytes if outcome.peak is not None else 2**62


def _front(fitting: list[EvaluatedPlan]) -> list[EvaluatedPlan]:
    front: list[EvaluatedPlan] = []
    for evaluated in sorted(fitting, key=_rank):
        if not front or evaluated.peak.bytes < front[-1].peak.bytes:
            front.append(evaluated)
    return front
