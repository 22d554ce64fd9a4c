"""The search: candidates by the least time that they can take, until none can be faster."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from bigtrain.errors import ConfigError
from bigtrain.planner.judge import Judge, Judged, Refused
from bigtrain.planner.space import Candidate, Space
from bigtrain.strategy import Plan

BEST = 10
"""Plans that are told of."""
LEVELS = (0.6, 0.35, 0.2)
"""Shares of the limit at which the fastest plan is looked for, too, for the front."""


@dataclass
class Answer:
    """What a search has found."""

    best: list[Judged] = field(default_factory=list)
    """The fastest that fit, the fastest first."""
    refused: list[Refused] = field(default_factory=list)
    front: list[Judged] = field(default_factory=list)
    """Plans than which no other is both smaller and faster, the fastest first."""
    candidates: int = 0
    """In the space, those that a technique refuses left out."""
    judged: int = 0
    """Of which the memory was forecast; others are slower than the best, or hold too much."""
    floored: int = 0
    """Whose states alone are above the limit."""
    seconds: float = 0.0


@dataclass(frozen=True)
class _Open:
    candidate: Candidate
    plan: Plan
    least_seconds: float
    least_bytes: int


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

    def run(self, limit: int) -> Answer:
        """Find the fastest plans that fit.

        Args:
            limit: bytes that a rank may hold.
        """
        began = time.perf_counter()
        open_ = self._open()
        answer = Answer(candidates=len(open_), refused=list(self._refused))
        answer.best = self._fastest(open_, limit, BEST, answer)
        found = list(answer.best)
        for level in LEVELS if found else ():
            found += self._fastest(open_, int(limit * level), 1, answer, quiet=True)
        answer.front = _front(found)
        answer.judged = len({candidate for candidate, _ in self._known})
        answer.seconds = time.perf_counter() - began
        return answer

    def _open(self) -> list[_Open]:
        found = []
        self._refused = []
        for candidate in self.space.candidates():
            try:
                plan = self.judge.plan_of(candidate)
                least = self.judge.least_seconds(candidate)
                held = self.judge.least_bytes(candidate, plan)
            except ConfigError as error:
                self._refused.append(Refused(candidate, str(error)))
                continue
            found.append(_Open(candidate, plan, least, held))
        if not found and self._refused:
            raise ConfigError(self._refused[0].reason)
        return sorted(found, key=lambda one: one.least_seconds)

    def _fastest(
        self, open_: list[_Open], limit: int, count: int, answer: Answer, *, quiet: bool = False
    ) -> list[Judged]:
        best: list[Judged] = []
        for one in open_:
            if len(best) >= count and one.least_seconds >= best[count - 1].seconds.total:
                break
            if one.least_bytes > limit:
                answer.floored += not quiet
                continue
            found = self._judged(one, limit)
            if isinstance(found, Refused):
                if not quiet:
                    answer.refused.append(found)
                continue
            best.append(found)
            best.sort(key=_rank)
            del best[count:]
        return best

    def _judged(self, one: _Open, limit: int) -> Judged | Refused:
        key = (one.candidate, limit)
        if key not in self._known:
            self._known[key] = self.judge.judge(one.candidate, one.plan, limit)
        return self._known[key]

    def smallest(self) -> Judged | Refused | None:
        """The candidate that holds least, whatever it takes; for where nothing fits."""
        open_ = sorted(self._open(), key=lambda one: one.least_bytes)
        best: Judged | Refused | None = None
        for one in open_:
            if best is not None and one.least_bytes >= _bytes(best):
                break
            found = self._judged(one, 0)
            if _bytes(found) < (_bytes(best) if best is not None else 2**63):
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
