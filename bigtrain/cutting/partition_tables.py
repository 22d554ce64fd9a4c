"""The cost of every run of consecutive pieces, and dynamic programming over them.

All tables are indexed [b, a] for the stage that holds the pieces a <= i < b.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
CostFn = Callable[[int, slice, slice], Floats]
"""The cost of a stage for rows (b) and columns (a) of the tables."""
CombineFn = Callable[..., Any]

TIE_WEIGHT = 1e-9
"""The weight of crossing bytes beside the evenness of the stages."""
TIE_TOLERANCE = 1e-13
"""What two sums of the same seconds may differ by, relatively, and still be a tie."""
ROWS_AT_ONCE = 96
"""Rows of a table worked on at once: what fits into a core's cache."""


@dataclass(frozen=True)
class AtomicUnits:
    """The n atomic pieces of a model in order of execution; before each but the first one may cut.

    Raises:
        ValueError: the lengths differ, or a tensor names a piece that is not there.
    """

    seconds: Sequence[float]
    """Forward and backward of one micro-batch, a number for each piece."""
    crossing: Sequence[int]
    """Bytes that cross a cut before piece i, in each direction; the first is not read."""
    params: Sequence[tuple[int, Sequence[int]]]
    """Bytes of each parameter, and the pieces that use it."""
    saved: Sequence[tuple[int, Sequence[int]]]
    """Bytes of each tensor that one micro-batch keeps for its backward pass, and the pieces that
    use it."""

    def __post_init__(self) -> None:
        n = len(self.seconds)
        if not n or len(self.crossing) != n:
            raise ValueError(f"{n} pieces with {len(self.crossing)} crossings")
        used = [piece for _, pieces in (*self.params, *self.saved) for piece in pieces]
        if used and not 0 <= min(used) <= max(used) < n:
            raise ValueError(f"a tensor names piece {min(used)} or {max(used)} of {n}")


@dataclass(frozen=True)
class Partition:
    """Stages of consecutive pieces."""

    cuts: tuple[int, ...]
    """The first piece of each stage but the first."""
    seconds: tuple[float, ...]
    """Of each stage, for one micro-batch, with what it sends."""
    bytes: tuple[int, ...]
    """Of each stage: parameters with all that belongs to them, and what is kept in flight."""
    crossing: int
    """Bytes over all cuts, in one direction."""
    proven: bool = True
    """Whether no other partition that fits has a faster slowest stage."""

    @property
    def slowest(self) -> float:
        """Seconds of the stage that the others wait for."""
        return max(self.seconds)


@dataclass(frozen=True)
class Tables:
    """What any stage would cost, (n + 1, n + 1)."""

    seconds: Floats
    """Infinite where b <= a: no stage is empty."""
    state: Integers
    saved: Integers
    crossing: Floats
    in_flight: Sequence[int]

    @property
    def n(self) -> int:
        """Number of pieces."""
        return len(self.crossing) - 1

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.in_flight)

    def bytes(self, stage: int, rows: Any, columns: Any) -> Integers:
        """Bytes of one of the stages if it were the pieces of [b, a]."""
        kept: Integers = (
            self.state[rows, columns] + self.in_flight[stage] * self.saved[rows, columns]
        )
        return kept


def make_tables(
    pieces: AtomicUnits, bandwidth: float, state_factor: float, in_flight: Sequence[int]
) -> Tables:
    """The tables of `partition`'s arguments; see there."""
    n = len(pieces.seconds)
    # More digits than needed: equal sums of seconds must come out as ties wherever they begin.
    ends = np.concatenate(([0.0], np.cumsum(np.asarray(pieces.seconds, dtype=np.longdouble))))
    crossing = np.zeros(n + 1)
    crossing[1:n] = pieces.crossing[1:]
    sent = crossing / bandwidth
    seconds = (ends[:, None] - ends[None, :]).astype(np.float64) + (sent[:, None] + sent[None, :])
    seconds[np.triu_indices(n + 1)] = math.inf
    state = np.ceil(state_factor * _union(pieces.params, n)).astype(np.int64)
    return Tables(seconds, state, _union(pieces.saved, n), crossing, in_flight)


def _union(tensors: Sequence[tuple[int, Sequence[int]]], n: int) -> Integers:
    """Bytes of the distinct tensors that the pieces a <= i < b use, exactly.

    A tensor is counted at the first piece of the stage that uses it: for its piece p, with q the
    one before, where q < a <= p < b. That is a rectangle, and its corners are enough.
    """
    rows, left, right, sizes = [], [], [], []
    for nbytes, users in tensors:
        previous_user = -1
        for piece in sorted(set(users)):
            rows.append(piece + 1)
            left.append(previous_user + 1)
            right.append(piece + 1)
            sizes.append(nbytes)
            previous_user = piece
    table = np.zeros((n + 1, n + 1), dtype=np.int64)
    np.add.at(table, (rows, left), np.asarray(sizes, dtype=np.int64))
    np.add.at(table, (rows, right), -np.asarray(sizes, dtype=np.int64))
    np.cumsum(table, axis=0, out=table)
    np.cumsum(table, axis=1, out=table)
    return table


def exact_partition(tables: Tables, limits: Sequence[int | None]) -> Partition | None:
    """The best partition where each stage has its own limit in bytes."""
    lows = lowest_starts(tables, limits)

    def seconds(_stage: int, rows: slice, columns: slice) -> Floats:
        return tables.seconds[rows, columns]

    slowest = float(sweep_stages(tables, lows, seconds, np.maximum)[-1][tables.n])
    if slowest == math.inf:
        return None
    bound = slowest + abs(slowest) * TIE_TOLERANCE

    most = float(tables.crossing[np.isfinite(tables.crossing)].max(initial=0.0)) + 1.0

    def uneven(_stage: int, rows: slice, columns: slice) -> Floats:
        """A stage that waits for the slowest holds as much of the rest as it may."""
        times = tables.seconds[rows, columns]
        square = (times / bound) ** 2 if bound else times
        return np.where(
            times <= bound, square + TIE_WEIGHT * tables.crossing[columns] / most, math.inf
        )

    values = sweep_stages(tables, lows, uneven, np.add)
    return partition_at(tables, backtrack_cuts(tables, lows, uneven, np.add, values))


def lowest_starts(tables: Tables, limits: Sequence[int | None]) -> list[Integers]:
    """For each stage and end b the smallest a with which it fits: a longer stage holds more."""
    ends = np.arange(tables.n + 1)
    lows = []
    for stage, limit in enumerate(limits):
        low, high = np.zeros_like(ends), ends.copy()
        while limit is not None and bool((low < high).any()):
            middle = (low + high) // 2
            fits = tables.bytes(stage, ends, middle) <= limit
            high = np.where(fits, middle, high)
            low = np.where(fits, low, np.minimum(middle + 1, high))
        lows.append(low)
    return lows


def sweep_stages(
    tables: Tables, lows: Sequence[Integers], cost: CostFn, combine: CombineFn
) -> list[Floats]:
    """The least combined cost of the first stages, for each number of them and each end b."""
    n, stages = tables.n, tables.stages
    starts = np.arange(n + 1)
    values = [np.full(n + 1, math.inf)]
    values[0][0] = 0.0
    for stage in range(stages):
        before, after = values[-1], np.full(n + 1, math.inf)
        # As many pieces are left over as there are stages to come.
        for begin in range(stage + 1, n - stages + stage + 2, ROWS_AT_ONCE):
            rows = slice(begin, min(begin + ROWS_AT_ONCE, n - stages + stage + 2))
            low = lows[stage][rows]
            columns = slice(max(stage, int(low.min())), rows.stop - 1)
            if columns.start >= columns.stop:
                continue
            total = combine(before[columns], cost(stage, rows, columns))
            total[starts[columns] < low[:, None]] = math.inf
            after[rows] = total.min(axis=1)
        values.append(after)
    return values


def backtrack_cuts(
    tables: Tables, lows: Sequence[Integers], cost: CostFn, combine: CombineFn, values: list[Floats]
) -> tuple[int, ...]:
    """The cuts behind the last value: from the end, each the earliest that gives it."""
    cuts: list[int] = []
    end = tables.n
    for stage in range(tables.stages - 1, 0, -1):
        columns = slice(int(lows[stage][end]), end)
        total = combine(values[stage][columns], cost(stage, slice(end, end + 1), columns)[0])
        end = columns.start + int(np.argmin(total))
        cuts.append(end)
    return tuple(reversed(cuts))


def partition_at(tables: Tables, cuts: tuple[int, ...]) -> Partition:
    """The partition with these cuts."""
    ends, starts = (*cuts, tables.n), (0, *cuts)
    return Partition(
        cuts=cuts,
        seconds=tuple(float(tables.seconds[b, a]) for b, a in zip(ends, starts, strict=True)),
        bytes=tuple(
            int(tables.bytes(s, b, a)) for s, (b, a) in enumerate(zip(ends, starts, strict=True))
        ),
        crossing=int(sum(tables.crossing[cut] for cut in cuts)),
    )
