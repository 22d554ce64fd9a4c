"""The small numbers of a step that all ranks tell each other when they have read its batch.

One gather between the hosts has all of them. It begins when the batch is read. A rank waits for it
when it needs the numbers. Numbers that are known only after the passes, such as the loss, need a
gather of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bigtrain.ranks.context import RunContext


@dataclass(frozen=True, slots=True)
class OwnNumbers:
    """The numbers of one rank in a step. Each is exact as a float64."""

    targets: float
    """The valid targets of its micro-batches."""
    rows: float
    """The rows of its micro-batches."""
    micro_batches: float
    """The number of its micro-batches."""
    shapes: float
    """The number of different shapes that its micro-batches have."""
    signal: float = 0.0
    """The number of the signal to stop that it has received; 0 for none."""
    peak: float = -1.0
    """The peak of its memory so far in bytes; below 0 if it is not measured."""
    divisors: tuple[float, ...] = ()
    """The sum of each further divisor of the loss over its micro-batches."""

    def as_row(self) -> list[float]:
        """Return all numbers in one list."""
        fixed = self.targets, self.rows, self.micro_batches, self.shapes, self.signal, self.peak
        return [*fixed, *self.divisors]

    @classmethod
    def of_row(cls, row: Sequence[float]) -> OwnNumbers:
        """Return the numbers of a list from `as_row`."""
        targets, rows, micro_batches, shapes, signal, peak, *divisors = row
        return cls(targets, rows, micro_batches, shapes, signal, peak, tuple(divisors))


class StepNumbers:
    """The numbers of all ranks in one step, in one gather.

    Args:
        context: the ranks.
        replicas: the ranks of the dp axis that compute a loss. They are its last ones; the ranks
            before them are parameter servers.
    """

    def __init__(self, context: RunContext, replicas: int) -> None:
        self._context, self._replicas = context, replicas
        self._wait: Callable[[], list[list[float]]] | None = None
        self._everyone: list[OwnNumbers] = []
        self._micro_batches: Sequence[Any] | None = None
        self.is_even = False
        """Whether, in the step of the last `targets_of`, the micro-batches of each replica are
        known to have one shape."""

    def begin(self, own: OwnNumbers) -> None:
        """Begin the gather, and do not wait for it. Collective over all ranks.

        This forgets the numbers of an earlier step that were not used.

        Args:
            own: the numbers of this rank, with equally many divisors on every rank.
        """
        self._micro_batches = None
        self._wait = self._context.begin_rows(own.as_row())

    def everyone(self) -> list[OwnNumbers]:
        """Return the numbers of all ranks, in the order of ranks. The first call waits for them."""
        if self._wait is not None:
            self._everyone, self._wait = [OwnNumbers.of_row(row) for row in self._wait()], None
        return self._everyone

    def replicas(self) -> list[OwnNumbers]:
        """Return the numbers of the ranks that share the global batch on this rank's dp axis."""
        everyone = self.everyone()
        return [everyone[rank] for rank in self._context.ranks_of("dp")[-self._replicas :]]

    def divisors(self) -> list[float]:
        """Return the rows that count in the loss, then its further divisors, of all replicas."""
        replicas = self.replicas()
        columns = zip(*(numbers.divisors for numbers in replicas), strict=True)
        return [math.fsum(numbers.targets for numbers in replicas), *map(math.fsum, columns)]

    def belong_to(self, micro_batches: Sequence[Any]) -> None:
        """Tell to which micro-batches the numbers belong; see `targets_of`."""
        self._micro_batches = micro_batches

    def targets_of(self, micro_batches: Sequence[Any]) -> float | None:
        """Return the valid targets of the global batch; None if they have to be gathered.

        A runner may change the micro-batches that it got, or run others, whose numbers are not
        known here. So the numbers are used only once, and only for the list that `belong_to` got.

        Args:
            micro_batches: the micro-batches of this rank.
        """
        known = self._micro_batches is micro_batches
        self.is_even, self._micro_batches = False, None
        if not known:
            return None
        replicas = self.replicas()
        self.is_even = all(numbers.shapes <= 1 for numbers in replicas)
        return math.fsum(numbers.targets for numbers in replicas)
