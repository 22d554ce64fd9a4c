"""What the papers count in closed forms: the oracles of forecasts, schedules and traffic.

Sources: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), sections 3, 5 and 7, for the states;
Korthikanti et al. 2022, Reducing Activation Recomputation (arXiv 2205.05198), section 4 and
Table 2, for the activations; Narayanan et al. 2021 (arXiv 2104.04473), section 5.1, for numbers
and operations of a model; Qi et al. 2023, Zero Bubble (arXiv 2401.10241), for split schedules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from bigtrain.costs.state_bytes import StateWidths
from bigtrain.costs.traffic import EXCHANGES, Traffic
from bigtrain.schedules.orders import IN_FLIGHT_CHANGE, Action, check_schedule

RecomputeLevel = Literal["none", "selective", "full"]
"""All is kept; all but the core of attention; only what comes into a layer."""
FP32 = StateWidths(4, 4, 8)
"""AdamW in fp32: two moments."""
AUTOCAST = StateWidths(4, 4, 8)
"""AdamW in bf16 runs whose parameters stay fp32; autocast's copies pass."""
BF16 = StateWidths(2, 2, 12)
"""AdamW in bf16 runs whose layers see bf16 parameters and whose optimizer has fp32 ones."""


def largest_model(memory_bytes: int, widths: StateWidths, stage: int, ranks: int) -> int:
    """The most trained numbers whose `min_state_bytes` is no more than a rank's memory."""
    whole, sharded = widths.whole(stage), widths.sharded(stage)
    # With a share of k numbers there are at most k * ranks, and as many as the rest has room for.
    crossing = int(memory_bytes / (whole * ranks + sharded))
    most = 0
    for share in (crossing, crossing + 1):
        left = math.floor(memory_bytes - sharded * share)
        if left >= 0:
            found = share * ranks
            most = max(most, min(found, int(left / whole)) if whole else found)
    return most


def numbers_sent(numbers: int, stage: int, micro_batches: int = 1) -> int:
    """Numbers that each rank sends in a step: ZeRO, section 7, for one micro-batch.

    Replicas and stages 1 and 2 send each twice (a reduce-scatter of gradients, an all-gather of
    sums or parameters), stage 3 three times (two all-gathers of parameters). With accumulation,
    replicas and stage 1 exchange at the last micro-batch alone, stage 2 reduces at each, and stage
    3 does all of it at each.

    Raises:
        ValueError: there is no such stage.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO has the stages 0 to 3, not {stage}")
    return numbers * (2, 2, micro_batches + 1, 3 * micro_batches)[stage]


def micro_batches_in_flight(
    schedule: str, pp: int, rank: int, micro_batches: int, stages_per_rank: int = 1
) -> float:
    """The most micro-batches' worth of its own activations that a rank holds at one moment.

    `stages_per_rank` times this is `in_flight_together` of the rank's actions: pairs of a
    stage and a micro-batch. With p ranks, m micro-batches, v stages a rank and g micro-batches in
    a round (p, where p divides m): GPipe and LoopedBFS m; 1F1B min(m, p - r); interleaved
    ((v-1)g + 2(p-1-r) + 1)/v, on rank 0 and for g = p the p(1 + (p-1)/(pv)) of arXiv 2205.05198,
    section 4.2.3; interleaved zero bubble ((v-1)g + p)/v; ZBV p; DualPipeV p + 1/2.

    Args:
        schedule: one of `orders.SCHEDULES`.
        pp: number of ranks.
        rank: which of them.
        micro_batches: of one step.
        stages_per_rank: as in `orders.schedule_orders`.

    Raises:
        ConfigError: see `orders.check_schedule`.
    """
    check_schedule(schedule, pp, stages_per_rank, micro_batches)
    m, v = micro_batches, stages_per_rank
    in_round = m // max(1, m // pp)
    pairs = {
        "naive": 1,
        "gpipe": m,
        "1f1b": pp - rank,
        "looped_bfs": m * v,
        "interleaved_1f1b": (v - 1) * in_round + 2 * (pp - 1 - rank) + 1,
        "interleaved_zero_bubble": (v - 1) * in_round + pp,
        "zbv_zero_bubble": min(2 * pp, m + 1 + rank),
        "dualpipev": 2 * pp + 1,
    }[schedule]
    return min(pairs, m * v) / v


def in_flight_together(actions: Sequence[Action]) -> int:
    """The most that a rank holds: pairs of a stage and a micro-batch, at one moment."""
    return max(accumulate(IN_FLIGHT_CHANGE[action.kind] for action in actions), default=0)


def theory_elements(found: Sequence[Traffic], micro_batches: int, size: int) -> float:
    """The volume of a step as the ZeRO paper counts it: an all-reduce twice, others once.

    Args:
        found: what a rank exchanges; moves are left out.
        micro_batches: of a step.
        size: bytes of a number.

    Returns:
        Numbers that a rank sends on a large group (Rajbhandari et al. 2020, section 7).
    """
    return sum(
        t.step_bytes(micro_batches) * (2 if t.kind == "all_reduce" else 1) / size
        for t in found
        if t.kind in EXCHANGES
    )


@dataclass(frozen=True)
class Transformer:
    """A GPT as the papers count it: learned positions, biases, output tied to the embedding.

    Activations are those of arXiv 2205.05198: 16 bits, dropout masks of one byte, attention that is
    not fused, in which softmax and dropout each keep (heads, seq, seq).
    """

    num_layers: int
    width: int
    num_heads: int
    sequence_length: int
    vocab_size: int

    @property
    def parameters(self) -> int:
        """P = 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h)): equation 2 of arXiv 2104.04473."""
        h = self.width
        embeddings = (self.vocab_size + self.sequence_length) * h
        return self.num_layers * (12 * h + 13) * h + embeddings

    def activation_bytes(
        self,
        micro_batch: int,
        tensor: int = 1,
        sequence_parallel: bool = False,
        recompute: RecomputeLevel = "none",
    ) -> int:
        """Bytes that one layer keeps of one micro-batch, on each rank: Table 2 of arXiv 2205.05198.

        sbh(34 + 5as/h), with tensor parallelism sbh(10 + 24/t + 5as/(ht)), with sequence
        parallelism all of it over t; selective recomputation is without the term in s, full
        recomputation keeps 2sbh. Means and deviations of the norms are left out there and here.

        Args:
            micro_batch: samples.
            tensor: ranks over which a layer's matrices are cut.
            sequence_parallel: whether these share the rest of the layer, too.
            recompute: what is computed again in the backward pass.
        """
        b, s, t = micro_batch, self.sequence_length, tensor
        sbh = s * b * self.width
        if recompute == "full":
            return 2 * sbh // t if sequence_parallel else 2 * sbh
        core = 5 * b * self.num_heads * s * s if recompute == "none" else 0
        if sequence_parallel:
            return (34 * sbh + core) // t
        return 10 * sbh + (24 * sbh + core) // t

    def first_stage_activation_bytes(
        self,
        micro_batch: int,
        tensor: int = 1,
        sequence_parallel: bool = False,
        recompute: RecomputeLevel = "none",
        *,
        pp: int = 1,
        stages_per_rank: int = 1,
        micro_batches: int | None = None,
        ends: bool = False,
    ) -> int:
        """Bytes of activations on a pipeline's first rank.

        arXiv 2205.05198, sections 4.2.3 and 4.3: 1F1B there holds min(m, p) micro-batches of L/p
        layers, that is, of L layers where m is enough; the interleaved schedule 1 + (p-1)/(pv)
        times that.

        Args:
            micro_batch: samples.
            tensor: as in `activation_bytes`.
            sequence_parallel: as in `activation_bytes`.
            recompute: as in `activation_bytes`.
            pp: ranks of the pipeline.
            stages_per_rank: more than one for the interleaved schedule.
            micro_batches: of a step; left out, enough for the most that is held.
            ends: with the mask of the embedding's dropout, and in a pipeline of one rank the last
                norm, the head's input and fp32 logits; where there is sequence parallelism.
        """
        schedule = "interleaved_1f1b" if stages_per_rank > 1 else "1f1b"
        held = micro_batches_in_flight(schedule, pp, 0, micro_batches or 2 * pp, stages_per_rank)
        layer = self.activation_bytes(micro_batch, tensor, sequence_parallel, recompute)
        total = held * self.num_layers * layer / pp
        if ends:
            sbh = self.sequence_length * micro_batch * self.width
            total += sbh * pp / tensor
            if pp == 1:
                total += 4 * sbh / tensor * (1 + self.vocab_size / self.width)
        return math.floor(total)

    def model_flops(self, batch: int) -> float:
        """Operations of a step on whole samples: 72 B L s h^2 (1 + s/(6h) + V/(12hL)).

        Each multiplication and each addition counts; recomputation does not. Equation 7 and
        Appendix A of arXiv 2205.05198.
        """
        return self._flops(batch, 72, 1 / 6, 1 / 12)

    def hardware_flops(self, batch: int, recompute: RecomputeLevel = "none") -> float:
        """The same with what is computed again.

        Selective: s/(3h) for s/(6h), equation 8 of arXiv 2205.05198. Full: 96 B L s h^2 (1 + s/(6h)
        + V/(16hL)), equation 3 of arXiv 2104.04473.
        """
        if recompute == "full":
            return self._flops(batch, 96, 1 / 6, 1 / 16)
        return self._flops(batch, 72, 1 / 3 if recompute == "selective" else 1 / 6, 1 / 12)

    def _flops(self, batch: int, factor: int, attention: float, head: float) -> float:
        h, s = self.width, self.sequence_length
        inner = 1 + attention * s / h + head * self.vocab_size / (h * self.num_layers)
        return factor * batch * self.num_layers * s * h * h * inner
