"""What a rank holds at the least: closed forms for its states, no forecast. And what outdoes what.

A plan whose floor is above the memory there is need not be forecast. Nothing here runs anything;
the forecast of `prediction.predict`, which has run the step on fake tensors, is what is believed.

Source: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), sections 3 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bigtrain.prediction.compose import wire_bytes
from bigtrain.prediction.sections import Section, concatenate_sections


@dataclass(frozen=True)
class StateWidths:
    """Bytes for each trained number: mixed precision Adam as in ZeRO, section 3.1, by default."""

    parameters: float = 2
    gradients: float = 2
    optimizer: float = 12
    """Both moments, and the fp32 value where the layers see another."""

    @property
    def total(self) -> float:
        """Bytes for each number where nothing is sharded."""
        return self.parameters + self.gradients + self.optimizer

    def whole(self, stage: int) -> float:
        """Bytes for each number on every rank, at a stage of ZeRO.

        Raises:
            ValueError: there is no such stage.
        """
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO has the stages 0 to 3, not {stage}")
        kept = (self.total, self.parameters + self.gradients, self.parameters, 0)
        return kept[stage]

    def sharded(self, stage: int) -> float:
        """Bytes for each number that are dealt out over the ranks, at a stage of ZeRO."""
        return self.total - self.whole(stage)


def min_state_bytes(numbers: int, widths: StateWidths, stage: int, ranks: int) -> int:
    """Bytes of parameters, gradients and optimizer state on the fullest rank, all there at once.

    The formulas of ZeRO's Figure 1, with K the optimizer's bytes (12): stage 0 (2+2+K)P, stage 1
    4P + KP/N, stage 2 2P + (2+K)P/N, stage 3 (4+K)P/N. They count what exists over a whole step.
    Not every engine holds all of that at one moment: see `Traits.sharded_states`.

    Args:
        numbers: trained, on all ranks together.
        widths: bytes of each.
        stage: 0 for replicas.
        ranks: over which the states are sharded.
    """
    share = -(-numbers // ranks)  # numbers are not divided: one rank has the remainder
    return math.floor(widths.whole(stage) * numbers + widths.sharded(stage) * share)


def smaller_in_slices(sections: Sequence[Section], others: Sequence[Section], tp: int) -> bool:
    """Whether no part of a model in some slices saves more or is sent more than in others.

    And none of all has a higher moment than the highest of those: every stage has a block.

    Args:
        sections: of the whole model.
        others: of the same model in other slices.
        tp: ranks that slice it.
    """
    pairs = {(id(a.passes), id(b.passes)): (a, b) for a, b in zip(sections, others, strict=True)}
    figures = [[_figures(one, tp) for one in pair] for pair in pairs.values()]
    kept = (zip(mine[1:], theirs[1:], strict=True) for mine, theirs in figures)
    highest, theirs = (max(pair[side][0] for pair in figures) for side in (0, 1))
    return highest <= theirs and all(a <= b for pair in kept for a, b in pair)


def _figures(section: Section, tp: int) -> tuple[int, ...]:
    """Bytes at the highest moment; that are saved, and sent to it, forward and back."""
    alone = (concatenate_sections([one], begins=False, is_sent=False)[0] for one in section.passes)
    highest = max(max(timeline.steps()[1], default=0) for timeline in alone)
    return (highest, *(one.saved for one in section.passes), *wire_bytes(section, tp))
