"""The best disjoint sets, compared with trying all sets."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest

from bigtrain.slice_planning import set_packing
from bigtrain.slice_planning.set_packing import Option, frontier


def random_options(seed: int, count: int, claims: int) -> list[Option]:
    """Random options over `claims` claims."""
    rng = random.Random(seed)
    return [
        Option(
            n,
            frozenset(map(str, rng.sample(range(claims), rng.randint(1, 3)))),
            float(rng.randint(-4, 9)),
            float(-rng.randint(0, 9)),
        )
        for n in range(count)
    ]


def all_sets(options):
    """Yield the sums of cost and bytes of all disjoint sets."""
    numbers = range(len(options))
    for chosen in chain.from_iterable(combinations(numbers, k) for k in range(len(options) + 1)):
        chosen_options = [options[n] for n in chosen]
        if sum(len(o.claims) for o in chosen_options) == len(
            frozenset().union(*(o.claims for o in chosen_options))
        ):
            yield sum(o.cost for o in chosen_options), sum(o.nbytes for o in chosen_options)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("claims", [4, 9, 20])
def test_the_frontier_is_that_of_all_sets(seed, claims):
    options = random_options(seed, 9, claims)
    points = frontier(options)
    every = list(all_sets(options))
    best = {
        point
        for point in every
        if not any(o != point and o[0] <= point[0] and o[1] <= point[1] for o in every)
    }
    assert {(p.cost, p.nbytes) for p in points} == best
    for point in points:
        taken = [options[n] for n in point.taken]
        assert sum(o.cost for o in taken) == point.cost
        assert len(frozenset().union(*(o.claims for o in taken))) == sum(
            len(o.claims) for o in taken
        )


@pytest.mark.parametrize("seed", range(6))
def test_one_set_is_the_best_of_the_frontier(seed):
    options = random_options(seed, 14, 12)
    points = frontier(options)
    cheapest = frontier(options, best_key=lambda p: (p.cost, p.nbytes))
    smallest = frontier(options, best_key=lambda p: (p.nbytes, p.cost))
    assert [(p.cost, p.nbytes) for p in cheapest] == [(points[0].cost, points[0].nbytes)]
    assert [(p.cost, p.nbytes) for p in smallest] == [(points[-1].cost, points[-1].nbytes)]


def blocks_along_a_skip(count: int) -> list[Option]:
    """A skip connection excludes the inside of every block, as in a ResNet."""
    skip = Option("skip", frozenset(f"{n}.last" for n in range(count)), 1.0, -8.0 * count)
    inside = [
        Option(f"{n}.{part}", frozenset(claims), 2.0, nbytes)
        for n in range(count)
        for part, claims, nbytes in (
            ("first", (f"{n}.first", f"{n}.middle"), -13.0),
            ("second", (f"{n}.middle", f"{n}.last"), -13.5),
        )
    ]
    return [skip, *inside]


def test_blocks_that_are_alike_are_solved_once(monkeypatch):
    branched = []
    branch = set_packing._Search._branch
    monkeypatch.setattr(
        set_packing._Search,
        "_branch",
        lambda self, part: branched.append(part) or branch(self, part),
    )
    points = frontier(blocks_along_a_skip(200), best_key=lambda p: (p.nbytes, p.cost))
    assert len(points[0].taken) == 201
    assert len(branched) < 20


def test_a_long_chain_is_solved():
    chained = [Option(n, frozenset((f"w{n}", f"w{n + 1}")), 1.0, -float(n % 7)) for n in range(150)]
    best = frontier(chained, best_key=lambda p: (p.nbytes, p.cost))[0]
    # The classic recurrence over a path, by hand.
    before, now = 0.0, 0.0
    for option in chained:
        before, now = now, max(now, before - option.nbytes)
    assert -best.nbytes == now


def test_too_many_points_are_thinned_and_stay_sets_that_can_be(monkeypatch):
    monkeypatch.setattr(set_packing, "MOST_POINTS", 8)
    options = [Option(n, frozenset({str(n)}), float(2**n), -float(3**n)) for n in range(6)]
    points = frontier(options)
    assert len(points) == 8
    assert points[0].taken == ()
    assert points[-1].taken == (0, 1, 2, 3, 4, 5)
