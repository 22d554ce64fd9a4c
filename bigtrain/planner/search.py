"""The search: candidates by the least time that they can take, until none can be faster."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from bigtrain.core.strategy import Plan
from bigtrain.errors import ConfigError
from bigtrain.planner.evaluate import Judge, Judged, Refused
from bigtrain.planner.space import Candidate, Space

BEST = 10
"""Plans that are told of."""
LOOKS = 2
"""At a candidate, before its memory is forecast; see `_Open.looks`."""
LEVELS = (0.6, 0.35, 0.2)
"""Shares of the limit at which the fastest plan is looked for, too, for the front."""
PATIENCE = 16
"""Plans that do not fit such a share, after which it is given up: the front may end early."""


@dataclass
class Answer:
    """What a search has found."""

    best: list[Judged] = field(default_factory=list)
    """The fastest that fit, the fastest first."""
    refused: list[Refused] = field(default_factory=list)
    front: list[Judged] = field(default_factory=list)
    """Plans than which no other is both smaller and faster, the fastest first."""
    candidates: int = 0
    """In the space."""
    judged: int = 0
    """Of which the memory was forecast; others are slower than the best, or hold too much."""
    floored: int = 0
    """Whose states, and what micro-batches keep at least, are above the limit."""
    seconds: float = 0.0


@dataclass
class _Open:
    """A candidate, and how fast it can be at best: looked at the closer the longer it leads."""

    candidate: Candidate
    seconds: float
    looks: int = 0
    """0: its work. 1: and what it exchanges, evenly cut. 2: cut as it would be."""
    plan: Plan | None = None
    least_bytes: int = 0
    """No plan of it holds less; closer from the first look on."""
    bounded: bool = False
    """Whether that is as close as it gets."""
    too_small: int = 0
    """The largest limit that it was found not to fit."""
    refused: bool = False


class Search:
    """A search of one space.

    Args:
        judge: of the candidates.
        space: where they come from.
    """

    def __init__(self, judge: Judge, space: Space) -> None:
        self.judge, self.space = judge, space
        self._known: dict[tuple[Candidate, int], Judged | Refused] = {}
        self._refused: list[Refused] = []
        self._open = [*self._opened("device")]

    def run(self, limit: int) -> Answer:
        """Find the fastest plans that fit.

        Args:
            limit: bytes that a rank may hold.

        Raises:
            ConfigError: techniques refuse all that there is.
        """
        began = time.perf_counter()
        answer = Answer(candidates=len(self._open))
        answer.best = self._fastest(limit, BEST, answer)
        if not answer.best and self.space.elsewhere is not None:
            # Moving state in each step is taken to cost more than all else that makes room.
            self._open += self._opened(self.space.elsewhere)
            answer.candidates, answer.floored = len(self._open), 0
            answer.best = self._fastest(limit, BEST, answer)
        if all(one.refused for one in self._open) and self._refused:
            raise ConfigError(self._refused[0].reason)
        found = list(answer.best)
        for level in LEVELS if found else ():
            found += self._fastest(int(limit * level), 1)
        answer.front = _front(found)
        answer.refused += self._refused
        answer.judged = len({candidate for candidate, _ in self._known})
        answer.seconds = time.perf_counter() - began
        return answer

    def _opened(self, place: str) -> Iterator[_Open]:
        unfit: dict[int, str] = {}
        for one in self.space.candidates(place):
            found = _Open(one, 0.0)
            if one.rows not in unfit:
                try:
                    found.seconds = self.judge.least_seconds(one)
                except ConfigError as error:  # layers may want more than one row to train on
                    unfit[one.rows] = str(error)
            if one.rows in unfit:
                self._refuse(found, unfit[one.rows])
            yield found

    def _refuse(self, one: _Open, reason: str) -> None:
        one.refused = True
        self._refused.append(Refused(one.candidate, reason))

    def _fastest(self, limit: int, count: int, answer: Answer | None = None) -> list[Judged]:
        best: list[Judged] = []
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
            if one.refused or limit <= one.too_small:
                continue
            if one.least_bytes > limit:
                if answer is not None:
                    answer.floored += 1
                continue
            if one.looks < LOOKS:
                self._look(one)
                heapq.heappush(queue, (one.seconds, number))
                continue
            found = self._judged(one, limit)
            if isinstance(found, Refused):
                refusals += 1
                if found.peak is not None:
                    one.too_small = max(one.too_small, limit)
                if answer is not None:
                    answer.refused.append(found)
                elif refusals >= PATIENCE:
                    break
                continue
            best.append(found)
            best.sort(key=_rank)
            del best[count:]
        return best

    def _look(self, one: _Open) -> None:
        """Look at a candidate more closely."""
        try:
            if one.plan is None:
                one.plan = self.judge.plan_of(one.candidate)
                one.least_bytes = self.judge.least_bytes(one.candidate, one.plan)
                return
            if not one.bounded:
                self._bound(one, one.plan)
                return
            look = (self.judge.even_seconds, self.judge.kept_seconds)[one.looks]
            one.seconds = max(one.seconds, look(one.candidate, one.plan))
            one.looks += 1
        except ConfigError as error:
            self._refuse(one, str(error))

    def _bound(self, one: _Open, plan: Plan) -> None:
        one.least_bytes = max(one.least_bytes, self.judge.floor_bytes(one.candidate, plan))
        one.bounded = True

    def _judged(self, one: _Open, limit: int) -> Judged | Refused:
        key = (one.candidate, limit)
        if key not in self._known:
            plan = one.plan or self.judge.plan_of(one.candidate)
            self._known[key] = self.judge.judge(one.candidate, plan, limit)
        return self._known[key]

    def smallest(self) -> Judged | Refused | None:
        """The candidate that holds least, whatever it takes; for where nothing fits."""
        for one in self._open:
            if one.plan is None and not one.refused:
                self._look(one)
        best: Judged | Refused | None = None
        queue = [(one.least_bytes, n) for n, one in enumerate(self._open) if not one.refused]
        heapq.heapify(queue)
        while queue:
            least, number = heapq.heappop(queue)
            one = self._open[number]
            if best is not None and least >= _bytes(best):
                break
            if not one.bounded:
                self._look(one)
                if not one.refused:
                    heapq.heappush(queue, (one.least_bytes, number))
                continue
            found = self._judged(one, 0)
            if best is None or _bytes(found) < _bytes(best):
                best = found
        return best


def _rank(judged: Judged) -> tuple[float, int]:
    return judged.seconds.total, judged.peak.bytes


def _bytes(found: Judged | Refused) -> int:
    if isinstance(found, Judged):
        return found.peak.bytes
    return found.peak.bytes if found.peak is not None else 2**62


def _front(found: list[Judged]) -> list[Judged]:
    kept: list[Judged] = []
    for one in sorted(found, key=_rank):
        if not kept or one.peak.bytes < kept[-1].peak.bytes:
            kept.append(one)
    return kept
