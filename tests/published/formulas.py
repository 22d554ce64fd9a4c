"""Closed formulas of the papers: the reference for forecasts, schedules and traffic.

Sources: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), sections 3, 5 and 7, for model states;
Korthikanti et al. 2022, Reducing Activation Recomputation (arXiv 2205.05198), section 4 and Table
2, for activations; Narayanan et al. 2021 (arXiv 2104.04473), section 5.1, for parameters and FLOPs
of a model; Qi et al. 2023, Zero Bubble (arXiv 2401.10241), for split backward passes.
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
"""Nothing is recomputed; the core of attention is; everything except a layer's input is."""
FP32 = StateWidths(4, 4, 8)
"""AdamW in fp32: two moments."""
AUTOCAST = StateWidths(4, 4, 8)
"""AdamW in bf16 runs with fp32 parameters; autocast's bf16 copies are temporary."""
BF16 = StateWidths(2, 2, 12)
"""AdamW in bf16 runs with bf16 parameters in the layers and fp32 copies in the optimizer."""


def largest_model(memory_bytes: int, widths: StateWidths, stage: int, ranks: int) -> int:
    """The largest number of parameters whose `min_state_bytes` fits into a rank's memory."""
    whole, sharded = widths.whole(stage), widths.sharded(stage)
    # With a shard of k numbers there are at most k * ranks, and at most as many as the rest has
    # room for.
    crossing = int(memory_bytes / (whole * ranks + sharded))
    most = 0
    for share in (crossing, crossing + 1):
        left = math.floor(memory_bytes - sharded * share)
        if left >= 0:
            numbers = share * ranks
            most = max(most, min(numbers, int(left / whole)) if whole else numbers)
    return most


def numbers_sent(numbers: int, stage: int, micro_batches: int = 1) -> int:
    """Numbers that each rank sends in a step: ZeRO, section 7, for one micro-batch.

    Replicas and stages 1 and 2 send each number twice (a reduce-scatter of gradients, an all-gather
    of sums or parameters), stage 3 three times (two all-gathers of parameters). With accumulation,
    replicas and stage 1 exchange only at the last micro-batch, stage 2 reduces at each, and stage 3
    repeats everything at each.

    Raises:
        ValueError: `stage` is not 0 to 3.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO has the stages 0 to 3, not {stage}")
    return numbers * (2, 2, micro_batches + 1, 3 * micro_batches)[stage]


def micro_batches_in_flight(
    schedule: str, pp: int, rank: int, micro_batches: int, stages_per_rank: int = 1
) -> float:
    """The largest number of micro-batches whose activations a rank holds at one time.

    `stages_per_rank` times this is `in_flight_together` of the rank's actions, which counts pairs
    of a stage and a micro-batch. With p ranks, m micro-batches, v stages per rank and g
    micro-batches in a round (p, if p divides m): GPipe and LoopedBFS m; 1F1B min(m, p - r);
    interleaved ((v-1)g + 2(p-1-r) + 1)/v, which on rank 0 and for g = p is p(1 + (p-1)/(pv)) of
    arXiv 2205.05198, section 4.2.3; interleaved zero bubble ((v-1)g + p)/v; ZBV p; DualPipeV p +
    1/2.

    Args:
        schedule: one of `orders.SCHEDULES`.
        pp: number of ranks of the pipeline.
        rank: the rank on the pp axis.
        micro_batches: number in a step.
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
    """The largest number of pairs of a stage and a micro-batch that a rank holds at one time."""
    return max(accumulate(IN_FLIGHT_CHANGE[action.kind] for action in actions), default=0)


def theory_elements(exchanges: Sequence[Traffic], micro_batches: int, size: int) -> float:
    """The volume of a step as the ZeRO paper counts it: an all-reduce twice, others once.

    Args:
        exchanges: the exchanges of a rank; copies between device and host are ignored.
        micro_batches: number in a step.
        size: bytes of a number.

    Returns:
        Numbers that a rank sends in a large group (Rajbhandari et al. 2020, section 7).
    """
    return sum(
        t.step_bytes(micro_batches) * (2 if t.kind == "all_reduce" else 1) / size
        for t in exchanges
        if t.kind in EXCHANGES
    )


@dataclass(frozen=True)
class Transformer:
    """A GPT as the papers define it: learned positions, biases, output tied to the embedding.

    Activations are those of arXiv 2205.05198: 16 bits, dropout masks of one byte, attention that is
    not fused, in which softmax and dropout save (heads, seq, seq) each.
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
        """Bytes that one layer saves for one micro-batch on each rank: Table 2 of arXiv 2205.05198.

        sbh(34 + 5as/h), with tensor parallelism sbh(10 + 24/t + 5as/(ht)), with sequence
        parallelism all of it divided by t; selective recomputation removes the term in s, full
        recomputation saves 2sbh. Means and deviations of the norms are neglected in the paper and
        here.

        Args:
            micro_batch: number of samples.
            tensor: ranks over which a layer's matrices are sliced.
            sequence_parallel: whether these ranks also divide the rest of the layer.
            recompute: the part that is recomputed in the backward pass.
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
        """Bytes of activations on the first rank of a pipeline.

        arXiv 2205.05198, sections 4.2.3 and 4.3: 1F1B holds min(m, p) micro-batches of L/p layers
        there, which is L layers if m is large enough; the interleaved schedule holds 1 + (p-1)/(pv)
        times as much.

        Args:
            micro_batch: number of samples.
            tensor: as in `activation_bytes`.
            sequence_parallel: as in `activation_bytes`.
            recompute: as in `activation_bytes`.
            pp: ranks of the pipeline.
            stages_per_rank: more than one for the interleaved schedule.
            micro_batches: number in a step; the default is large enough for the maximum.
            ends: include the dropout mask of the embedding, and in a pipeline of one rank the last
            norm,
            the head's input and the fp32 logits; these formulas assume sequence parallelism.
        """
        schedule = "interleaved_1f1b" if stages_per_rank > 1 else "1f1b"
        micro_batches_held = micro_batches_in_flight(
            schedule, pp, 0, micro_batches or 2 * pp, stages_per_rank
        )
        layer = self.activation_bytes(micro_batch, tensor, sequence_parallel, recompute)
        total = micro_batches_held * self.num_layers * layer / pp
        if ends:
            sbh = self.sequence_length * micro_batch * self.width
            total += sbh * pp / tensor
            if pp == 1:
                total += 4 * sbh / tensor * (1 + self.vocab_size / self.width)
        return math.floor(total)

    def model_flops(self, batch: int) -> float:
        """FLOPs of a step on whole samples: 72 B L s h^2 (1 + s/(6h) + V/(12hL)).

        Multiplications and additions count separately; recomputation does not count. Equation 7 and
        Appendix A of arXiv 2205.05198.
        """
        return self._flops(batch, 72, 1 / 6, 1 / 12)

    def hardware_flops(self, batch: int, recompute: RecomputeLevel = "none") -> float:
        """The FLOPs of a step including recomputation.

        Selective: s/(3h) in place of s/(6h), equation 8 of arXiv 2205.05198. Full: 96 B L s h^2 (1
        + s/(6h) + V/(16hL)), equation 3 of arXiv 2104.04473.
        """
        if recompute == "full":
            return self._flops(batch, 96, 1 / 6, 1 / 16)
        return self._flops(batch, 72, 1 / 3 if recompute == "selective" else 1 / 6, 1 / 12)

    def _flops(self, batch: int, factor: int, attention: float, head: float) -> float:
        h, s = self.width, self.sequence_length
        inner = 1 + attention * s / h + head * self.vocab_size / (h * self.num_layers)
        return factor * batch * self.num_layers * s * h * h * inner
