"""When R ranks are faster than one: the inequality of synchronous SGD, and its solutions.

R ranks process R B samples in a step of T_comp + T_sync seconds, one rank processes B in T_comp. An
epoch of N samples then takes N/(R B) (T_comp + T_sync) and N/B T_comp: more ranks pay if the first
is smaller. Ranks of one machine may compute more slowly together than one of them alone, so T_comp
has two values here, and the inequality is

    T_comp(R) + T_sync(R) < R T_comp(1).

This module measures nothing and does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeCost:
    """Seconds of a step's computation on one rank alone, as a linear function of its samples."""

    fixed: float
    """Seconds that do not depend on the batch: the optimizer, and issuing operations."""
    per_sample: float
    """Seconds of each sample."""

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
    """The ranks that compute: all except servers."""
    batch: int
    """Samples of each worker in a step (B)."""
    alone: float
    """T_comp(1): computation of one worker while no other rank computes."""
    compute: float
    """T_comp(R): computation of a worker while the others compute, too."""
    exposed: float
    """T_sync: the rest of the step. It includes waiting for slower ranks, but no exchange that
    overlaps with the backward pass. It is negative if sharing the update saves more time."""
    whole: float | None = None
    """The step's messages one after the other without computation; None if unknown."""
    latency: float = 0.0
    """The part of `whole` that messages without content would take."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.exposed

    @property
    def speedup(self) -> float:
        """Samples per second, divided by those of one rank."""
        return self.workers * self.alone / self.seconds

    @property
    def pays(self) -> bool:
        """Whether the inequality holds."""
        return self.speedup > 1

    @property
    def slowdown(self) -> float:
        """How many times as long a worker computes while others compute: 1 on separate cores."""
        return self.compute / self.alone

    @property
    def break_even(self) -> float:
        """The largest T_sync with which the ranks pay, in seconds; 0 or less if none does."""
        return self.workers * self.alone - self.compute

    def epoch_seconds(self, samples: int) -> float:
        """Return the seconds of an epoch, N/(R B) (T_comp + T_sync)."""
        return samples / (self.workers * self.batch) * self.seconds


@dataclass(frozen=True)
class Threshold:
    """The value of a quantity from which on more ranks pay."""

    value: float | None
    """The threshold; None if more ranks never pay."""
    reason: str
    """Why they never pay, or a remark on the value; may be empty."""


def _shared(step: SyncStep) -> str:
    if step.workers == 1:
        return "only one of the ranks computes, as in one process; start more ranks"
    return (
        f"{step.workers} ranks at once compute {step.slowdown:.2f} times as long as one alone: "
        "they share the same processor, so that nothing is gained"
    )


def batch_that_pays(step: SyncStep, cost: ComputeCost | None) -> Threshold:
    """Return the smallest samples of a worker, B, with which the inequality holds.

    T_sync does not depend on B, as gradients have the size of the parameters, and T_comp(R) grows
    in proportion to T_comp(1). So (R - slowdown) (fixed + per_sample B) > T_sync. A longer backward
    pass also overlaps more of the exchange, which this ignores: the true B may be smaller.
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

    The seconds of the exchange without its latency are proportional to 1/bandwidth. We assume that
    the overlap keeps its seconds, and that waiting beyond the exchange (slower ranks, shared cores)
    does not change.

    Args:
        step: a step that has `whole`.
        bandwidth: the present bandwidth.
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

    For a ring of replicas it has a closed form: T_sync is 2 (R-1) (a + S/(R b)), so more ranks pay
    if R > 2 S / (b (T_comp - 2 a)), and never if two latencies are longer than T_comp. This
    function tries the candidates in order, which works for the messages of any technique.

    Args:
        step_of: returns the predicted step of a number of ranks.
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
