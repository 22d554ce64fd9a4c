"""The best sets of options of which no two claim the same thing, exactly.

Options that share no claim, not even by way of others, are independent: their sets are found by
themselves and put together. Parts of a model that are alike (blocks) are solved once. Within a part
the option with most rivals is taken, or left, and what is left is solved again: in networks for
images few options, those along the skips, hold all others together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

MOST_POINTS = 1024
"""Points of a frontier that are kept; of more, those that are spread evenly over the bytes."""
MOST_BRANCHES = 200_000
"""Options that are tried both ways; after so many the one that is best by itself is taken."""


@dataclass(frozen=True)
class Option:
    """Something that can be done or left, on its own terms."""

    key: Any
    claims: frozenset[str]
    """What no other option may claim beside it."""
    cost: float
    """Added where it is taken; below 0 it is a gain."""
    nbytes: float
    """Held in addition; below 0 it is less."""


class Point(NamedTuple):
    """A set of options."""

    cost: float
    nbytes: float
    taken: tuple[Any, ...]
    """Keys of the options."""


def _flat(nested: tuple[Any, ...]) -> Iterator[Any]:
    pending = [nested]
    while pending:
        item = pending.pop()
        if isinstance(item, _Pair):
            pending += [item[1], item[0]]
        else:
            yield from item


class _Pair(tuple[Any, ...]):
    """Two sets as one."""

    __slots__ = ()


_NOTHING = Point(0.0, 0.0, ())


def frontier(
    options: Sequence[Option], *, first_of: Callable[[Point], Any] | None = None
) -> list[Point]:
    """All sets than which no other costs less and holds less, from the cheapest on.

    Args:
        options: in an order in which parts that are alike have their options alike.
        first_of: where one set is wanted: it is the one of which this is least. What is added up
            must not change which of two sets is better.
    """
    found = _Search(options, first_of).solve(tuple(range(len(options))))
    return [
        point._replace(taken=tuple(options[n].key for n in sorted(_flat(point.taken))))
        for point in found
    ]


class _Search:
    def __init__(self, options: Sequence[Option], first_of: Callable[[Point], Any] | None) -> None:
        self._options = options
        self._first_of = first_of
        self._branches = 0
        self._solved: dict[object, list[Point]] = {}
        by_claim = defaultdict(set)
        for n, option in enumerate(options):
            for claim in option.claims:
                by_claim[claim].add(n)
        self._rivals = [
            set(chain.from_iterable(by_claim[claim] for claim in option.claims)) - {n}
            for n, option in enumerate(options)
        ]

    def solve(self, numbers: tuple[int, ...]) -> list[Point]:
        """The frontier of some of the options."""
        found = [_NOTHING]
        for part in self._parts(numbers):
            points = self._part(part)
            found = self._best(
                [
                    Point(a.cost + b.cost, a.nbytes + b.nbytes, _Pair((a.taken, b.taken)))
                    for a in found
                    for b in points
                ]
            )
        return found

    def _parts(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        left, found = set(numbers), []
        for first in numbers:
            if first not in left:
                continue
            left.discard(first)
            part, pending = [first], [first]
            while pending:
                near = self._rivals[pending.pop()] & left
                left -= near
                part += near
                pending += near
            found.append(tuple(sorted(part)))
        return found

    def _part(self, numbers: tuple[int, ...]) -> list[Point]:
        """Of options that hang together; by places in the part, so that it serves for others."""
        signature = self._signature(numbers)
        if signature not in self._solved:
            place = {number: n for n, number in enumerate(numbers)}
            points = self._branch(numbers)
            self._solved[signature] = [
                Point(p.cost, p.nbytes, tuple(place[number] for number in _flat(p.taken)))
                for p in points
            ]
        return [
            Point(p.cost, p.nbytes, tuple(numbers[n] for n in p.taken))
            for p in self._solved[signature]
        ]

    def _branch(self, numbers: tuple[int, ...]) -> list[Point]:
        inside = set(numbers)
        number = max(numbers, key=lambda n: (len(self._rivals[n] & inside), -n))
        option = self._options[number]
        own = Point(option.cost, option.nbytes, (number,))
        self._branches += 1
        with_it = [
            Point(own.cost + p.cost, own.nbytes + p.nbytes, _Pair((own.taken, p.taken)))
            for p in self.solve(
                tuple(n for n in numbers if n not in self._rivals[number] | {number})
            )
        ]
        alone = not self._rivals[number] & inside
        if self._branches > MOST_BRANCHES and not alone:
            return self._best([*with_it, _NOTHING])
        return self._best([*with_it, *self.solve(tuple(n for n in numbers if n != number))])

    def _signature(self, numbers: tuple[int, ...]) -> object:
        names: dict[str, int] = {}
        entries = []
        for number in numbers:
            option = self._options[number]
            claims = frozenset(
                names.setdefault(claim, len(names)) for claim in sorted(option.claims)
            )
            entries.append((option.cost, option.nbytes, claims))
        return tuple(entries)

    def _best(self, points: list[Point]) -> list[Point]:
        if self._first_of is not None:
            return [min(points, key=self._first_of)]
        points.sort(key=lambda point: (point.cost, point.nbytes))
        found: list[Point] = []
        for point in points:
            if not found or point.nbytes < found[-1].nbytes:
                found.append(point)
        if len(found) > MOST_POINTS:
            step = (len(found) - 1) / (MOST_POINTS - 1)
            found = [found[round(n * step)] for n in range(MOST_POINTS)]
        return found
