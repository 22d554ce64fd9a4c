"""When R ranks are faster than one: the inequality of synchronous SGD, and its solutions.

R ranks process R B samples in a step of T_comp + T_sync seconds, and one rank processes B samples
in T_comp seconds. So an epoch of N samples takes N/(R B) (T_comp + T_sync) seconds on R ranks and
N/B T_comp on one. More ranks pay if the first time is shorter. Ranks of one machine may compute
more slowly together than one rank alone, so T_comp has two values here, and the inequality is

    T_comp(R) + T_sync(R) < R T_comp(1).

This module measures nothing and does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeCost:
    """The seconds of computing a step on one rank alone, as a linear function of its samples."""

    fixed: float
    """The seconds that do not depend on the batch: the optimizer, and issuing operations."""
    per_sample: float
    """The seconds of each sample."""

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> ComputeCost | None:
        """Return the line through two measurements (samples, seconds).

        The result is None if more samples did not take longer. If the fixed part would be
        negative, it is 0.
        """
        (low, low_seconds), (high, high_seconds) = sorted((first, second))
        if high == low or high_seconds <= low_seconds:
            return None
        slope = (high_seconds - low_seconds) / (high - low)
        if low_seconds < slope * low:
            return cls(0.0, high_seconds / high)
        return cls(low_seconds - slope * low, slope)


@dataclass(frozen=True)
class SyncStep:
    """One step of several ranks, in seconds."""

    ranks: int
    workers: int
    """The number of ranks that compute: all except servers. It is R in the inequality."""
    batch: int
    """The samples of each worker in a step (B)."""
    alone: float
    """T_comp(1): the computation of one worker while no other rank computes."""
    compute: float
    """T_comp(R): the computation of a worker while the other workers compute, too."""
    exposed: float
    """T_sync: the rest of the step. It includes waiting for slower ranks, but no exchange that
    overlaps with the backward pass. It is negative if dividing the optimizer's step among the ranks
    saves more time than the exchanges take."""
    whole: float | None = None
    """All messages of the step, one after the other, without computation; None if unknown."""
    latency: float = 0.0
    """The part of `whole` that messages without content would take."""

    @property
    def seconds(self) -> float:
        """The seconds of the whole step."""
        return self.compute + self.exposed

    @property
    def speedup(self) -> float:
        """The samples per second of all ranks, divided by those of one rank."""
        return self.workers * self.alone / self.seconds

    @property
    def pays(self) -> bool:
        """Whether the inequality holds, so that more ranks are faster than one."""
        return self.speedup > 1

    @property
    def slowdown(self) -> float:
        """T_comp(R) / T_comp(1): 1 if ranks do not share cores."""
        return self.compute / self.alone

    @property
    def break_even(self) -> float:
        """The T_sync, in seconds, below which more ranks pay; 0 or less if none is short enough."""
        return self.workers * self.alone - self.compute

    def epoch_seconds(self, samples: int) -> float:
        """Return the seconds of an epoch, N/(R B) (T_comp + T_sync).

        Args:
            samples: the samples of an epoch (N).
        """
        return samples / (self.workers * self.batch) * self.seconds


@dataclass(frozen=True)
class Threshold:
    """The smallest value of a quantity with which more ranks pay."""

    value: float | None
    """The smallest value; None if no value makes more ranks pay, or if it is not known."""
    reason: str
    """Why there is no value, or a remark on the value; may be empty."""


def _shared(step: SyncStep) -> str:
    if step.workers == 1:
        return "only one of the ranks computes, as in one process; start more ranks"
    return (
        f"{step.workers} ranks at once compute {step.slowdown:.2f} times as long as one alone: "
        "they share the same processor, so that nothing is gained"
    )


def batch_that_pays(step: SyncStep, cost: ComputeCost | None) -> Threshold:
    """Return the smallest number of samples of a worker, B, with which the inequality holds.

    T_sync does not depend on B, as gradients have the size of the parameters, and T_comp(R) grows
    in proportion to T_comp(1). So (R - slowdown) (fixed + per_sample B) > T_sync. A longer backward
    pass also overlaps with more of the exchange. This is ignored, so the true B may be smaller.

    Args:
        step: the step of several ranks.
        cost: the computation of one rank; None if it is not known.
    """
    gain = step.workers - step.slowdown
    if step.workers == 1 or gain <= 0:
        return Threshold(None, _shared(step))
    if step.exposed <= 0:
        return Threshold(1, "the ranks wait for no exchange")
    if cost is None:
        return Threshold(None, "twice the samples took no longer, so computation has no cost here")
    needed = (step.exposed / gain - cost.fixed) / cost.per_sample
    return Threshold(max(1, math.floor(needed) + 1), "")


def bandwidth_that_pays(step: SyncStep, bandwidth: float) -> Threshold:
    """Return the smallest bandwidth with which the inequality holds, in the unit of `bandwidth`.

    The seconds of the exchange without its latency are proportional to 1/bandwidth. The seconds of
    the exchange that overlap with computation are assumed not to change, nor the seconds of waiting
    for other causes (slower ranks, shared cores).

    Args:
        step: the step of several ranks. If its `whole` is None, there is no solution.
        bandwidth: the present bandwidth, in any unit.
    """
    if step.workers == 1 or step.break_even <= 0:
        return Threshold(None, _shared(step))
    if step.exposed <= 0:
        return Threshold(0.0, "the ranks wait for no exchange")
    if step.whole is None:
        return Threshold(None, "the seconds of the exchange alone are not known")
    hidden, beyond = max(0.0, step.whole - step.exposed), max(0.0, step.exposed - step.whole)
    for seconds, cause in (
        (step.latency - hidden, "the latency of the messages alone"),
        (beyond, "waiting for slower ranks, and for cores that exchanges share with computation"),
        (step.latency - hidden + beyond, "latency and waiting for slower ranks together"),
    ):
        if seconds >= step.break_even:
            return Threshold(
                None,
                f"{cause} takes {seconds:.2g} s, and only {step.break_even:.2g} s can be saved",
            )
    transfer = max(0.0, step.whole - step.latency)
    return Threshold(bandwidth * transfer / (step.break_even + hidden - beyond - step.latency), "")


def ranks_that_pay(step_of: Callable[[int], SyncStep], candidates: Iterable[int]) -> Threshold:
    """Return the smallest number of ranks with which the inequality holds.

    For the all-reduce of S bytes in a ring with latency a and bandwidth b there is a closed form:
    T_sync is 2 (R-1) (a + S/(R b)), so more ranks pay if R > 2 S / (b (T_comp - 2 a)), and never if
    two latencies are longer than T_comp. This function tries the candidates in order instead, which
    works for the messages of any technique.

    Args:
        step_of: returns the predicted step on a number of ranks.
        candidates: numbers of ranks, ascending; at least one.

    Raises:
        ValueError: there are no candidates.
    """
    best: SyncStep | None = None
    last = None
    for ranks in candidates:
        last = step_of(ranks)
        if last.pays:
            return Threshold(ranks, "")
        best = last if best is None or last.speedup > best.speedup else best
    if best is None or last is None:
        raise ValueError("there are no candidates")
    if best.break_even <= 0:
        return Threshold(None, _shared(best))
    return Threshold(
        None,
        f"up to {last.ranks} ranks the exchange takes more than they save: the best number, "
        f"{best.ranks}, is {best.speedup:.2f} times as fast as one",
    )
