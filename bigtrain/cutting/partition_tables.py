"""Tables of the costs of every run of consecutive layers, and dynamic programming over them.

An entry [b, a] of a table is for the stage that has the layers a <= i < b.
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
"""Returns the costs of a stage, given its index, for rows (b) and columns (a) of the tables."""
CombineFn = Callable[..., Any]
"""Combines the costs of the earlier stages with the cost of one more stage, elementwise."""

TIE_WEIGHT = 1e-9
"""The weight of crossing bytes compared with the evenness of the stages."""
TIE_TOLERANCE = 1e-13
"""The relative difference up to which two sums of seconds are a tie."""
ROWS_AT_ONCE = 96
"""Rows of a table that are computed at once, so that they fit into the cache of a core."""


@dataclass(frozen=True)
class LayerCosts:
    """The costs of the n layers of a model, in the order of execution.

    A layer is the work between two neighbouring cut points. It may be a part of a module.

    Raises:
        ValueError: the lengths differ, or a tensor has the index of a layer that does not exist.
    """

    seconds: Sequence[float]
    """Seconds of each layer's forward and backward pass of one micro-batch."""
    crossing: Sequence[int]
    """Bytes that cross a cut before layer i, in each direction; the first entry is not used."""
    params: Sequence[tuple[int, Sequence[int]]]
    """The bytes of each parameter, and the indices of the layers that use it."""
    saved: Sequence[tuple[int, Sequence[int]]]
    """The bytes of each tensor that one micro-batch saves for its backward pass, and the indices of
    the layers that use it."""

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
    """The index of the first layer of the second and of each later stage."""
    seconds: tuple[float, ...]
    """Seconds of each stage for one micro-batch, including its messages."""
    bytes: tuple[int, ...]
    """Bytes of each stage: parameters, gradients, optimizer state, and the saved tensors of the
    micro-batches in flight."""
    crossing: int
    """Bytes of one micro-batch over all cuts, in one direction."""
    proven: bool = True
    """Whether it is known that no partition that fits has a faster slowest stage."""

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage for one micro-batch."""
        return max(self.seconds)


@dataclass(frozen=True)
class Tables:
    """The costs of all possible stages; tables of shape (n + 1, n + 1), apart from `crossing`."""

    seconds: Floats
    """Seconds of a stage for one micro-batch; infinite for b <= a, because no stage is empty."""
    state: Integers
    """Bytes of a stage's parameters, gradients and optimizer state."""
    saved: Integers
    """Bytes that a stage saves for the backward pass of one micro-batch."""
    crossing: Floats
    """Bytes over a cut before each layer, in one direction; n + 1 entries."""
    in_flight: Sequence[int]
    """The most micro-batches in flight on each stage."""

    @property
    def n(self) -> int:
        """The number of layers."""
        return len(self.crossing) - 1

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.in_flight)

    def bytes(self, stage: int, rows: Any, columns: Any) -> Integers:
        """Return the bytes of a stage in these rows (b) and columns (a) of the tables."""
        nbytes: Integers = (
            self.state[rows, columns] + self.in_flight[stage] * self.saved[rows, columns]
        )
        return nbytes


def make_tables(
    layers: LayerCosts, bandwidth: float, state_factor: float, in_flight: Sequence[int]
) -> Tables:
    """Return the tables of a model; for the arguments see `partition`."""
    n = len(layers.seconds)
    # With extra digits, equal sums of seconds are ties, whichever layer a stage begins with.
    ends = np.concatenate(([0.0], np.cumsum(np.asarray(layers.seconds, dtype=np.longdouble))))
    crossing = np.zeros(n + 1)
    crossing[1:n] = layers.crossing[1:]
    sent = crossing / bandwidth
    seconds = (ends[:, None] - ends[None, :]).astype(np.float64) + (sent[:, None] + sent[None, :])
    seconds[np.triu_indices(n + 1)] = math.inf
    state = np.ceil(state_factor * _union(layers.params, n)).astype(np.int64)
    return Tables(seconds, state, _union(layers.saved, n), crossing, in_flight)


def _union(tensors: Sequence[tuple[int, Sequence[int]]], n: int) -> Integers:
    """Return the table of the bytes of the distinct tensors that the layers a <= i < b use.

    A tensor is counted at the first layer of a stage that uses it. If layer p uses the tensor, and
    q is the previous layer that uses it, the tensor is counted at p in the stages with
    q < a <= p < b. These are a rectangle of the table. The bytes are added at its corners, and two
    cumulative sums spread them over the rectangle.
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
    """Return the best partition in which each stage fits its own limit; None if none fits.

    Args:
        tables: the costs of all possible stages.
        limits: the most bytes of each stage; None for no limit.
    """
    lows = lowest_starts(tables, limits)

    def seconds(_stage: int, rows: slice, columns: slice) -> Floats:
        return tables.seconds[rows, columns]

    slowest = float(sweep_stages(tables, lows, seconds, np.maximum)[-1][tables.n])
    if slowest == math.inf:
        return None
    bound = slowest + abs(slowest) * TIE_TOLERANCE

    most = float(tables.crossing[np.isfinite(tables.crossing)].max(initial=0.0)) + 1.0

    def uneven(_stage: int, rows: slice, columns: slice) -> Floats:
        """The squared share of the slowest stage's seconds, plus a small weight of crossing bytes.

        The sum over the stages is least for even stages.
        """
        times = tables.seconds[rows, columns]
        square = (times / bound) ** 2 if bound else times
        return np.where(
            times <= bound, square + TIE_WEIGHT * tables.crossing[columns] / most, math.inf
        )

    values = sweep_stages(tables, lows, uneven, np.add)
    return partition_at(tables, backtrack_cuts(tables, lows, uneven, np.add, values))


def lowest_starts(tables: Tables, limits: Sequence[int | None]) -> list[Integers]:
    """Return the smallest a with which each stage fits its limit, for each end b.

    Args:
        tables: the costs of all possible stages.
        limits: the most bytes of each stage; None for no limit.
    """
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
    """Return the least combined cost of the first k stages, for each k and each end b.

    Args:
        tables: the costs of all possible stages.
        lows: the result of `lowest_starts`.
        cost: returns the costs of a stage.
        combine: combines costs, such as `np.add` or `np.maximum`.
    """
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
    """Return the cuts with the least combined cost, in order; of equal cuts the earliest.

    Args:
        tables: the costs of all possible stages.
        lows: see `sweep_stages`.
        cost: see `sweep_stages`.
        combine: see `sweep_stages`.
        values: the result of `sweep_stages`.
    """
    cuts: list[int] = []
    end = tables.n
    for stage in range(tables.stages - 1, 0, -1):
        columns = slice(int(lows[stage][end]), end)
        total = combine(values[stage][columns], cost(stage, slice(end, end + 1), columns)[0])
        end = columns.start + int(np.argmin(total))
        cuts.append(end)
    return tuple(reversed(cuts))


def partition_at(tables: Tables, cuts: tuple[int, ...]) -> Partition:
    """Return the partition with these cuts; `proven` is true."""
    ends, starts = (*cuts, tables.n), (0, *cuts)
    return Partition(
        cuts=cuts,
        seconds=tuple(float(tables.seconds[b, a]) for b, a in zip(ends, starts, strict=True)),
        bytes=tuple(
            int(tables.bytes(s, b, a)) for s, (b, a) in enumerate(zip(ends, starts, strict=True))
        ),
        crossing=int(sum(tables.crossing[cut] for cut in cuts)),
    )
