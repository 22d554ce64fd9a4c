"""Exact weighted set packing: the best sets of options in which no two options share a claim.

The options form a graph with an edge between two options that share a claim (rivals). Its connected
components are solved independently; equal components (a model's blocks) are solved once. Within a
component the search branches on the option with the most rivals: it takes or leaves the option, and
solves the rest. In networks for images a few options connect all others: those along the residual
connections.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

MOST_POINTS = 1024
"""The most points of a frontier; a longer one is thinned evenly."""
MOST_BRANCHES = 200_000
"""The number of branches that are searched exactly. After that, the search takes an option with
rivals, or leaves its whole component; it does not try sets with the rivals instead."""


@dataclass(frozen=True)
class Option:
    """A choice that can be taken together with others if their claims do not overlap."""

    key: Any
    claims: frozenset[str]
    """Two options with a common claim exclude each other."""
    cost: float
    """The cost of taking the option; negative for a gain."""
    nbytes: float
    """The memory that the option adds; negative for a saving."""


class Point(NamedTuple):
    """A set of options with its total cost and bytes."""

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
    """The union of two sets, flattened only at the end: copying tuples would be quadratic."""

    __slots__ = ()


_NOTHING = Point(0.0, 0.0, ())


def frontier(
    options: Sequence[Option], *, best_key: Callable[[Point], Any] | None = None
) -> list[Point]:
    """Return the Pareto-optimal sets in cost and bytes, the cheapest first.

    Args:
        options: in an order such that equal parts of a model have their options in the same order.
        best_key: returns the key of a set; only the set with the smallest key is then returned.
            Adding an option to two sets must not change which of them has the smaller key. None
            to return all Pareto-optimal sets.
    """
    points = _Search(options, best_key).solve(tuple(range(len(options))))
    return [
        point._replace(taken=tuple(options[n].key for n in sorted(_flat(point.taken))))
        for point in points
    ]


class _Search:
    def __init__(self, options: Sequence[Option], best_key: Callable[[Point], Any] | None) -> None:
        self._options = options
        self._best_key = best_key
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
        """Return the frontier of some of the options."""
        points = [_NOTHING]
        for part in self._parts(numbers):
            part_points = self._part(part)
            points = self._best(
                [
                    Point(a.cost + b.cost, a.nbytes + b.nbytes, _Pair((a.taken, b.taken)))
                    for a in points
                    for b in part_points
                ]
            )
        return points

    def _parts(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        remaining, parts = set(numbers), []
        for first in numbers:
            if first not in remaining:
                continue
            remaining.discard(first)
            part, pending = [first], [first]
            while pending:
                near = self._rivals[pending.pop()] & remaining
                remaining -= near
                part += near
                pending += near
            parts.append(tuple(sorted(part)))
        return parts

    def _part(self, numbers: tuple[int, ...]) -> list[Point]:
        """Return the frontier of a connected component; equal components are solved once."""
        signature = self._signature(numbers)
        if signature not in self._solved:
            position = {number: n for n, number in enumerate(numbers)}
            points = self._branch(numbers)
            self._solved[signature] = [
                Point(p.cost, p.nbytes, tuple(position[number] for number in _flat(p.taken)))
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
        option_alone = Point(option.cost, option.nbytes, (number,))
        self._branches += 1
        with_it = [
            Point(
                option_alone.cost + p.cost,
                option_alone.nbytes + p.nbytes,
                _Pair((option_alone.taken, p.taken)),
            )
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
        if self._best_key is not None:
            return [min(points, key=self._best_key)]
        points.sort(key=lambda point: (point.cost, point.nbytes))
        best_points: list[Point] = []
        for point in points:
            if not best_points or point.nbytes < best_points[-1].nbytes:
                best_points.append(point)
        if len(best_points) > MOST_POINTS:
            step = (len(best_points) - 1) / (MOST_POINTS - 1)
            best_points = [best_points[round(n * step)] for n in range(MOST_POINTS)]
        return best_points
