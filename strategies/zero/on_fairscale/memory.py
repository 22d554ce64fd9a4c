"""The memory of a rank under fairscale's stages: its share of the states, gradients in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bigtrain.core.replicas import BUCKET_SIZE
from bigtrain.costs.forecast import Profile
from bigtrain.memory.timeline import Span, Timeline
from bigtrain.strategies.zero import Zero
from bigtrain.units import MIB


def bucket_mib(options: Zero) -> int:
    """Return the size of a bucket of stage 3 in whole MiB, as fairscale takes it.

    At least 1: fairscale has no buckets if the size is 0.
    """
    return max(1, (options.bucket_size or BUCKET_SIZE) // MIB)


def in_flight_bytes(options: Zero, gradient_bytes: int) -> int:
    """Return the bytes of other ranks' gradients that may be in flight during the backward pass."""
    return options.bucket_size or gradient_bytes // 32


@dataclass(frozen=True)
class RankShare:
    """The gradients in a profile for the parameters that one rank updates."""

    share: float
    """The fraction of all trained elements."""
    births: frozenset[int]
    """The ticks in the profile's first micro-batch at which these gradients are made."""

    def first_pass(self, timeline: Timeline, max_bytes: int) -> Timeline:
        """Return the first micro-batch, with other ranks' gradients only until they are sent.

        Args:
            timeline: the first micro-batch of one process.
            max_bytes: the most bytes of other ranks' gradients that are in flight.
        """
        others = [s for s in timeline.spans if s.kind == "gradients" and s.birth not in self.births]
        others.sort(key=lambda span: span.birth)
        ends: dict[int, int] = {}
        pending: deque[Span] = deque()
        born = sorted(s.birth for s in timeline.spans)
        for span in others:
            pending.append(span)
            # The gradient is still in flight when the next storage is allocated.
            gone_at = next((birth for birth in born if birth > span.birth), span.death)
            while sum(s.nbytes for s in pending) > max_bytes:
                ends[pending.popleft().birth] = gone_at
        spans = tuple(
            s._replace(kind="temporary", death=ends.get(s.birth, s.death))
            if s.kind == "gradients" and s.birth not in self.births
            else s
            for s in timeline.spans
        )
        return Timeline(spans, timeline.phases)


def assign_parameters(profile: Profile, ranks: int, max_shares: int = 8) -> list[RankShare]:
    """Assign parameters as OSS does: the largest first, each to the rank with the fewest elements.

    Returns:
        The shares of the fullest ranks, the fullest first, at most `max_shares`.
    """
    spans = [span for span in profile.passes["first"].spans if span.kind == "gradients"]
    # The backward pass makes gradients in about the reverse order of the parameters.
    spans.sort(key=lambda span: (-span.nbytes, -span.birth))
    loads, births = [0] * ranks, [set[int]() for _ in range(ranks)]
    owners = assign_to_least([span.nbytes for span in spans], ranks)
    for span, rank in zip(spans, owners, strict=True):
        loads[rank] += span.nbytes
        births[rank].add(span.birth)
    total = sum(loads)
    fullest = sorted(range(ranks), key=lambda rank: -loads[rank])[:max_shares]
    return [
        RankShare(loads[r] / total if total else 1 / ranks, frozenset(births[r])) for r in fullest
    ]


def assign_to_least(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assign each size, in order, to the first rank with the smallest sum; return the ranks."""
    loads, owners = [0] * ranks, []
    for size in sizes:
        owners.append(loads.index(min(loads)))
        loads[owners[-1]] += size
    return owners


def reduce_gradients(timeline: Timeline, ranks: int, most: int) -> Timeline:
    """Return the first micro-batch, with every gradient reduced to a piece on each rank.

    Args:
        timeline: the first micro-batch of one process.
        ranks: the number of ranks.
        most: the most bytes of whole gradients that are in flight.
    """
    pieces = tuple(
        s._replace(nbytes=s.nbytes // ranks) for s in timeline.spans if s.kind == "gradients"
    )
    sent = RankShare(1 / ranks, frozenset()).first_pass(timeline, most)
    return Timeline(sent.spans + pieces, timeline.phases)
