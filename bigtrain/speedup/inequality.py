"""When R ranks are faster than one: the inequality of synchronous SGD, and its solutions.

R ranks that compute go through R B samples in a step of T_comp + T_sync, one of them through B in
T_comp. An epoch of N samples then takes N/(R B) (T_comp + T_sync) and N/B T_comp: the ranks pay
where the first is less. Ranks of one machine may compute more slowly together than one of them
alone, so T_comp has two values here, and the inequality is

    T_comp(R) + T_sync(R) < R T_comp(1).

Nothing here measures, and nothing imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeCost:
    """Seconds of computing a step on one rank alone, by the samples of it: a line."""

    fixed: float
    """Of the step, whatever its batch: the optimizer, what it takes to issue operations."""
    per_sample: float

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> ComputeCost | None:
        """The line through two measurements, (samples, seconds); None where more took no longer.

        Where it would cost less than nothing to begin, all of it is per sample.
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
    """Those of them that compute: all, but for servers."""
    batch: int
    """Samples of each worker in a step (B)."""
    alone: float
    """T_comp(1): of one worker with nobody else on the machine."""
    compute: float
    """T_comp(R): of a worker while the others compute, too."""
    exposed: float
    """T_sync: what a step takes beyond that. Waiting for slower ranks is in it, what hides behind
    the backward pass is not; it is negative where the update is shared and that saves more."""
    whole: float | None = None
    """The same messages one after the other, while nothing computes; None: nobody knows."""
    latency: float = 0.0
    """Of `whole`, what the messages would take with no bytes in them."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.exposed

    @property
    def speedup(self) -> float:
        """Samples a second over those of one rank."""
        return self.workers * self.alone / self.seconds

    @property
    def pays(self) -> bool:
        """Whether the inequality holds."""
        return self.speedup > 1

    @property
    def crowding(self) -> float:
        """By how much a worker computes longer beside the others: 1 where nothing is shared."""
        return self.compute / self.alone

    @property
    def room(self) -> float:
        """T_sync below which it pays, in seconds; none at all where it is not above 0."""
        return self.workers * self.alone - self.compute

    def epoch_seconds(self, samples: int) -> float:
        """N/(R B) (T_comp + T_sync)."""
        return samples / (self.workers * self.batch) * self.seconds


@dataclass(frozen=True)
class Threshold:
    """From where on more ranks pay; or that they never do."""

    value: float | None
    """None for never."""
    reason: str
    """Of `never`, in words; otherwise how it was solved, where that needs to be said."""


def _shared(step: SyncStep) -> str:
    if step.workers == 1:
        return "one of the ranks computes, as in one process; start more ranks"
    return (
        f"{step.workers} ranks at once compute {step.crowding:.2f} times as long as one alone: "
        "they share what computes, and there is nothing left to gain"
    )


def batch_that_pays(step: SyncStep, cost: ComputeCost | None) -> Threshold:
    """The least samples of a worker, B, with which the inequality holds.

    T_sync does not know B, as gradients have the size of the parameters; T_comp(R) grows as
    T_comp(1) does. So (R - crowding) (fixed + per_sample B) > T_sync. What hides behind a longer
    backward pass is left out: B may be smaller than this says where exchanges overlap.
    """
    gain = step.workers - step.crowding
    if step.workers == 1 or gain <= 0:
        return Threshold(None, _shared(step))
    if step.exposed <= 0:
        return Threshold(1, "the ranks wait for no exchange")
    if cost is None:
        return Threshold(None, "twice the samples took no longer: computing has no price here")
    needed = (step.exposed / gain - cost.fixed) / cost.per_sample
    return Threshold(max(1, math.floor(needed) + 1), "")


def bandwidth_that_pays(step: SyncStep, bandwidth: float) -> Threshold:
    """The least bandwidth with which the inequality holds, in the unit of what there is.

    Of the whole exchange all but the latency goes with 1/bandwidth. What hides of it now is taken
    to hide as many seconds then; what is waited for beyond the exchange itself (slower ranks, cores
    that are shared) is taken to stay.

    Args:
        step: with `whole`.
        bandwidth: what there is.
    """
    if step.workers == 1 or step.room <= 0:
        return Threshold(None, _shared(step))
    if step.exposed <= 0:
        return Threshold(0.0, "the ranks wait for no exchange")
    if step.whole is None:
        return Threshold(None, "what the exchange takes by itself is not known")
    hidden, beyond = max(0.0, step.whole - step.exposed), max(0.0, step.exposed - step.whole)
    for seconds, what in (
        (step.latency - hidden, "the latency of the messages alone"),
        (beyond, "waiting for slower ranks, and for cores that exchanges share with computing"),
        (step.latency - hidden + beyond, "latency and waiting for slower ranks together"),
    ):
        if seconds >= step.room:
            return Threshold(
                None,
                f"{what}, {seconds:.2g} s, takes the {step.room:.2g} s that there are to win",
            )
    transfer = max(0.0, step.whole - step.latency)
    return Threshold(bandwidth * transfer / (step.room + hidden - beyond - step.latency), "")


def ranks_that_pay(step_of: Callable[[int], SyncStep], candidates: Iterable[int]) -> Threshold:
    """The least ranks with which the inequality holds.

    For a ring of replicas it has a closed form: T_sync is 2 (R-1) (a + S/(R b)), so it pays from
    R > 2 S / (b (T_comp - 2 a)) on, and never where two latencies are longer than T_comp. Here the
    steps are looked at one after the other, so that any technique's messages will do.

    Args:
        step_of: a step of so many ranks, as it is forecast.
        candidates: ascending, at least one.
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
    if best.room <= 0:
        return Threshold(None, _shared(best))
    return Threshold(
        None,
        f"up to {last.ranks} ranks the exchange grows with what they save: at best, with "
        f"{best.ranks}, they are {best.speedup:.2f} times as fast as one",
    )
