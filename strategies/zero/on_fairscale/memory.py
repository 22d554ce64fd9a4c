"""What a rank holds under fairscale's stages: who gets which parameter, what is on its way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bigtrain.costs.forecast import Profile
from bigtrain.memory.timeline import Span, Timeline
from bigtrain.strategies.zero import Zero


def in_flight_bytes(options: Zero, gradient_bytes: int) -> int:
    """Bytes of other ranks' gradients that may be on their way while backward goes on."""
    return options.bucket_size or gradient_bytes // 32


@dataclass(frozen=True)
class RankShare:
    """What falls to one rank of the gradients of a profile."""

    share: float
    """Of all trained elements."""
    mine: frozenset[int]
    """Births, in the profile's first micro-batch, of the gradients that this rank keeps."""

    def passing(self, timeline: Timeline, max_bytes: int) -> Timeline:
        """The first micro-batch, in which others' gradients live only until they are sent."""
        others = [s for s in timeline.spans if s.kind == "gradients" and s.birth not in self.mine]
        others.sort(key=lambda span: span.birth)
        ends: dict[int, int] = {}
        pending: deque[Span] = deque()
        born = sorted(s.birth for s in timeline.spans)
        for span in others:
            pending.append(span)
            # It is on its way when the next storage is made.
            gone_at = next((birth for birth in born if birth > span.birth), span.death)
            while sum(s.nbytes for s in pending) > max_bytes:
                ends[pending.popleft().birth] = gone_at
        spans = tuple(
            s._replace(kind="temporary", death=ends.get(s.birth, s.death))
            if s.kind == "gradients" and s.birth not in self.mine
            else s
            for s in timeline.spans
        )
        return Timeline(spans, timeline.phases)


def deal_parameters(profile: Profile, ranks: int, max_shares: int = 8) -> list[RankShare]:
    """Deal as OSS does: the largest first, each to the rank with least so far.

    Returns:
        Those of the fullest ranks, the very fullest first.
    """
    spans = [span for span in profile.passes["first"].spans if span.kind == "gradients"]
    # The backward pass makes them in about the reverse of the parameters' order.
    spans.sort(key=lambda span: (-span.nbytes, -span.birth))
    loads, births = [0] * ranks, [set[int]() for _ in range(ranks)]
    for span in spans:
        rank = loads.index(min(loads))
        loads[rank] += span.nbytes
        births[rank].add(span.birth)
    total = sum(loads)
    fullest = sorted(range(ranks), key=lambda rank: -loads[rank])[:max_shares]
    return [
        RankShare(loads[r] / total if total else 1 / ranks, frozenset(births[r])) for r in fullest
    ]


def reduce_gradients(timeline: Timeline, ranks: int, most: int) -> Timeline:
    """The first micro-batch where every gradient is reduced to a part of it on each rank."""
    kept = tuple(
        s._replace(nbytes=s.nbytes // ranks) for s in timeline.spans if s.kind == "gradients"
    )
    sent = RankShare(1 / ranks, frozenset()).passing(timeline, most)
    return Timeline(sent.spans + kept, timeline.phases)
