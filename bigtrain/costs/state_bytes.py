"""Lower bounds on the bytes of parameters, gradients and optimizer state of a rank.

Source: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), sections 3 and 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StateWidths:
    """Bytes for each trained number: mixed precision Adam as in ZeRO, section 3.1, by default."""

    parameters: float = 2
    gradients: float = 2
    optimizer: float = 12
    """Both moments, and the fp32 value if layers use a lower precision."""

    @property
    def total(self) -> float:
        """Bytes for each trained number if nothing is sharded."""
        return self.parameters + self.gradients + self.optimizer

    def whole(self, stage: int) -> float:
        """Bytes for each trained number that every rank has whole, at a stage of ZeRO.

        Raises:
            ValueError: there is no such stage.
        """
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO has the stages 0 to 3, not {stage}")
        return (self.total, self.parameters + self.gradients, self.parameters, 0)[stage]

    def sharded(self, stage: int) -> float:
        """Bytes for each trained number that are sharded over the ranks, at a stage of ZeRO."""
        return self.total - self.whole(stage)


def min_state_bytes(numbers: int, widths: StateWidths, stage: int, ranks: int) -> int:
    """Bytes of parameters, gradients and optimizer state on the fullest rank, all at one moment.

    The formulas of ZeRO's Figure 1, with K the optimizer's bytes (12): stage 0 (2+2+K)P, stage 1
    4P + KP/N, stage 2 2P + (2+K)P/N, stage 3 (4+K)P/N. They count what exists over a whole step.
    Not every engine holds all of that at one moment: see `Traits.sharded_states`.

    Args:
        numbers: trained, on all ranks together.
        widths: bytes of each.
        stage: 0 for replicas.
        ranks: the number of ranks that share the sharded states.
    """
    share = -(-numbers // ranks)  # one rank has the remainder
    return math.floor(widths.whole(stage) * numbers + widths.sharded(stage) * share)
