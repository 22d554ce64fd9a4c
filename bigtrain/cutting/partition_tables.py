"""The cost of every run of consecutive layers, and dynamic programming over them.

All tables are indexed [b, a] for the stage with the layers a <= i < b.
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
"""The weight of crossing bytes compared with the evenness of the stages."""
TIE_TOLERANCE = 1e-13
"""The relative difference up to which two sums of seconds are a tie."""
ROWS_AT_ONCE = 96
"""Rows of a table that are computed at once, so that they fit into the cache of a core."""


@dataclass(frozen=True)
class LayerCosts:
    """The costs of the n layers of a model, in order of execution.

    A layer is the work between two neighbouring cut points, and may be less than a module.

    Raises:
        ValueError: the lengths differ, or a tensor names a layer that does not exist.
    """

    seconds: Sequence[float]
    """Seconds of each layer, forward and backward, for one micro-batch."""
    crossing: Sequence[int]
    """Bytes that cross a cut before layer i, in each direction; the first is not used."""
    params: Sequence[tuple[int, Sequence[int]]]
    """The bytes of each parameter, and the layers that use it."""
    saved: Sequence[tuple[int, Sequence[int]]]
    """The bytes of each tensor that one micro-batch saves for its backward pass, and the layers
    that use it."""

    def __post_init__(self) -> None:
        n = len(self.seconds)
        if not n or len(self.crossing) != n:
            raise ValueError(f"{n} layers with {len(self.crossing)} crossings")
        used = [layer for _, layers in (*self.params, *self.saved) for layer in layers]
        if used and not 0 <= min(used) <= max(used) < n:
            raise ValueError(f"a tensor names layer {min(used)} or {max(used)} of {n}")


@dataclass(frozen=True)
class Partition:
    """Stages of consecutive layers."""

    cuts: tuple[int, ...]
    """The first layer of the second and each later stage."""
    seconds: tuple[float, ...]
    """Seconds of each stage for one micro-batch, sending included."""
    bytes: tuple[int, ...]
    """Bytes of each stage: parameters, gradients, optimizer state and what is in flight."""
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
    """The costs of all possible stages; tables of (n + 1, n + 1)."""

    seconds: Floats
    """Infinite for b <= a: no stage is empty."""
    state: Integers
    saved: Integers
    crossing: Floats
    in_flight: Sequence[int]

    @property
    def n(self) -> int:
        """Number of layers."""
        return len(self.crossing) - 1

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.in_flight)

    def bytes(self, stage: int, rows: Any, columns: Any) -> Integers:
        """Bytes of a stage if it has the layers of [b, a]."""
        nbytes: Integers = (
            self.state[rows, columns] + self.in_flight[stage] * self.saved[rows, columns]
        )
        return nbytes


def make_tables(
    layers: LayerCosts, bandwidth: float, state_factor: float, in_flight: Sequence[int]
) -> Tables:
    """Make the tables; for the arguments see `partition`."""
    n = len(layers.seconds)
    # With extra digits, so that equal sums of seconds are ties wherever they begin.
    ends = np.concatenate(([0.0], np.cumsum(np.asarray(layers.seconds, dtype=np.longdouble))))
    crossing = np.zeros(n + 1)
    crossing[1:n] = layers.crossing[1:]
    sent = crossing / bandwidth
    seconds = (ends[:, None] - ends[None, :]).astype(np.float64) + (sent[:, None] + sent[None, :])
    seconds[np.triu_indices(n + 1)] = math.inf
    state = np.ceil(state_factor * _union(layers.params, n)).astype(np.int64)
    return Tables(seconds, state, _union(layers.saved, n), crossing, in_flight)


def _union(tensors: Sequence[tuple[int, Sequence[int]]], n: int) -> Integers:
    """Bytes of the distinct tensors that the layers a <= i < b use, exactly.

    A tensor is counted at the first layer of the stage that uses it: for its layer p, with q the
    one before, where q < a <= p < b. That is a rectangle, and its corners are enough.
    """
    rows, left, right, sizes = [], [], [], []
    for nbytes, users in tensors:
        previous_user = -1
        for layer in sorted(set(users)):
            rows.append(layer + 1)
            left.append(previous_user + 1)
            right.append(layer + 1)
            sizes.append(nbytes)
            previous_user = layer
    table = np.zeros((n + 1, n + 1), dtype=np.int64)
    np.add.at(table, (rows, left), np.asarray(sizes, dtype=np.int64))
    np.add.at(table, (rows, right), -np.asarray(sizes, dtype=np.int64))
    np.cumsum(table, axis=0, out=table)
    np.cumsum(table, axis=1, out=table)
    return table


def exact_partition(tables: Tables, limits: Sequence[int | None]) -> Partition | None:
    """The best partition in which each stage fits its limit in bytes; None if none fits."""
    lows = lowest_starts(tables, limits)

    def seconds(_stage: int, rows: slice, columns: slice) -> Floats:
        return tables.seconds[rows, columns]

    slowest = float(sweep_stages(tables, lows, seconds, np.maximum)[-1][tables.n])
    if slowest == math.inf:
        return None
    bound = slowest + abs(slowest) * TIE_TOLERANCE

    most = float(tables.crossing[np.isfinite(tables.crossing)].max(initial=0.0)) + 1.0

    def uneven(_stage: int, rows: slice, columns: slice) -> Floats:
        """The square of a stage's share of the slowest: its sum is least for even stages."""
        times = tables.seconds[rows, columns]
        square = (times / bound) ** 2 if bound else times
        return np.where(
            times <= bound, square + TIE_WEIGHT * tables.crossing[columns] / most, math.inf
        )

    values = sweep_stages(tables, lows, uneven, np.add)
    return partition_at(tables, backtrack_cuts(tables, lows, uneven, np.add, values))


def lowest_starts(tables: Tables, limits: Sequence[int | None]) -> list[Integers]:
    """For each stage and end b the smallest a with which it fits: more layers need more bytes."""
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
    """The least combined cost of the first k stages, for each k and each end b."""
    n, stages = tables.n, tables.stages
    starts = np.arange(n + 1)
    values = [np.full(n + 1, math.inf)]
    values[0][0] = 0.0
    for stage in range(stages):
        before, after = values[-1], np.full(n + 1, math.inf)
        # Each of the remaining stages needs at least one layer.
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
    """The cuts of the least cost, from the last to the first; of equal ones the earliest."""
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
