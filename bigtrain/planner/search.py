"""The search: candidates by the least time that they can take, until none can be faster."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from bigtrain.core.strategy import Plan
from bigtrain.errors import ConfigError
from bigtrain.planner.evaluate import EvaluatedPlan, PlanEvaluator, RejectedPlan
from bigtrain.planner.space import Candidate, SearchSpace

MAX_PLANS = 10
"""Plans that are told of."""
NUM_BOUNDS = 2
"""At a candidate, before its memory is forecast; see `_OpenCandidate.num_bounds`."""
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
        judge: of the candidates.
        space: where they come from.
    """

    def __init__(self, judge: PlanEvaluator, space: SearchSpace) -> None:
        self.evaluator, self.space = judge, space
        self._known: dict[tuple[Candidate, int], EvaluatedPlan | RejectedPlan] = {}
        self._refused: list[RejectedPlan] = []
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
        found = list(answer.best)
        for level in FRONT_LIMITS if found else ():
            found += self._fastest(int(limit * level), 1)
        answer.front = _front(found)
        answer.rejected += self._refused
        answer.evaluated = len({candidate for candidate, _ in self._known})
        answer.seconds = time.perf_counter() - began
        return answer

    def _opened(self, *, fallback_tier: bool = False) -> Iterator[_OpenCandidate]:
        unfit: dict[int, str] = {}
        for one in self.space.candidates(fallback_tier=fallback_tier):
            found = _OpenCandidate(one, 0.0)
            if one.rows not in unfit:
                try:
                    found.seconds = self.evaluator.least_seconds(one)
                except ConfigError as error:  # layers may want more than one row to train on
                    unfit[one.rows] = str(error)
            if one.rows in unfit:
                self._refuse(found, unfit[one.rows])
            yield found

    def _refuse(self, one: _OpenCandidate, reason: str) -> None:
        one.refused = True
        self._refused.append(RejectedPlan(one.candidate, reason))

    def _fastest(
        self, limit: int, count: int, answer: SearchResult | None = None
    ) -> list[EvaluatedPlan]:
        best: list[EvaluatedPlan] = []
        refusals = 0
        queue = [(one.seconds, number) for number, one in enumerate(self._open)]
        heapq.heapify(queue)
        while queue:
            seconds, number = heapq.heappop(queue)
            one = self._open[number]
            if len(best) >= count and seconds >= best[count - 1].seconds.total:
                break
            if one.plan is None and not one.refused:
                self._look(one)
            if one.refused or limit <= one.failed_limit:
                continue
            if one.least_bytes > limit:
                if answer is not None:
                    answer.below_bound += 1
                continue
            if one.num_bounds < NUM_BOUNDS:
                self._look(one)
                heapq.heappush(queue, (one.seconds, number))
                continue
            found = self._judged(one, limit)
            if isinstance(found, RejectedPlan):
                refusals += 1
                if found.peak is not None:
                    one.failed_limit = max(one.failed_limit, limit)
                if answer is not None:
                    answer.rejected.append(found)
                elif refusals >= MAX_REJECTIONS:
                    break
                continue
            best.append(found)
            best.sort(key=_rank)
            del best[count:]
        return best

    def _look(self, one: _OpenCandidate) -> None:
        """Look at a candidate more closely."""
        try:
            if one.plan is None:
                one.plan = self.evaluator.plan_of(one.candidate)
                one.least_bytes = self.evaluator.least_bytes(one.candidate, one.plan)
                return
            if not one.is_tight:
                self._bound(one, one.plan)
                return
            look = (self.evaluator.even_seconds, self.evaluator.kept_seconds)[one.num_bounds]
            one.seconds = max(one.seconds, look(one.candidate, one.plan))
            one.num_bounds += 1
        except ConfigError as error:
            self._refuse(one, str(error))

    def _bound(self, one: _OpenCandidate, plan: Plan) -> None:
        one.least_bytes = max(one.least_bytes, self.evaluator.floor_bytes(one.candidate, plan))
        one.is_tight = True

    def _judged(self, one: _OpenCandidate, limit: int) -> EvaluatedPlan | RejectedPlan:
        key = (one.candidate, limit)
        if key not in self._known:
            plan = one.plan or self.evaluator.plan_of(one.candidate)
            self._known[key] = self.evaluator.evaluate(one.candidate, plan, limit)
        return self._known[key]

    def smallest(self) -> EvaluatedPlan | RejectedPlan | None:
        """The candidate that holds least, whatever it takes; for where nothing fits."""
        for one in self._open:
            if one.plan is None and not one.refused:
                self._look(one)
        best: EvaluatedPlan | RejectedPlan | None = None
        queue = [(one.least_bytes, n) for n, one in enumerate(self._open) if not one.refused]
        heapq.heapify(queue)
        while queue:
            least, number = heapq.heappop(queue)
            one = self._open[number]
            if best is not None and least >= _bytes(best):
                break
            if not one.is_tight:
                self._look(one)
                if not one.refused:
                    heapq.heappush(queue, (one.least_bytes, number))
                continue
            found = self._judged(one, 0)
            if best is None or _bytes(found) < _bytes(best):
                best = found
        return best


def _rank(judged: EvaluatedPlan) -> tuple[float, int]:
    return judged.seconds.total, judged.peak.bytes


def _bytes(found: EvaluatedPlan | RejectedPlan) -> int:
    if isinstance(found, EvaluatedPlan):
        return found.peak.bytes
    return found.peak.bytes if found.peak is not None else 2**62


def _front(found: list[EvaluatedPlan]) -> list[EvaluatedPlan]:
    kept: list[EvaluatedPlan] = []
    for one in sorted(found, key=_rank):
        if not kept or one.peak.bytes < kept[-1].peak.bytes:
            kept.append(one)
    return kept
