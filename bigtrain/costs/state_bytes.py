"""Lower bounds on the bytes of parameters, gradients and optimizer state of a rank.

Source: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), sections 3 and 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StateWidths:
    """Bytes for each trained element of a model.

    The defaults are those of mixed precision Adam in the ZeRO paper, section 3.1.
    """

    parameters: float = 2
    gradients: float = 2
    optimizer: float = 12
    """Both moments of Adam, and the fp32 value if layers use a lower precision."""

    @property
    def total(self) -> float:
        """Bytes for each trained element if nothing is sharded."""
        return self.parameters + self.gradients + self.optimizer

    def whole(self, stage: int) -> float:
        """Return the bytes for each trained element that are not sharded, at a stage of ZeRO.

        Raises:
            ValueError: `stage` is not 0, 1, 2 or 3.
        """
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO has the stages 0 to 3, not {stage}")
        return (self.total, self.parameters + self.gradients, self.parameters, 0)[stage]

    def sharded(self, stage: int) -> float:
        """Return the bytes for each trained element that are sharded, at a stage of ZeRO.

        Raises:
            ValueError: `stage` is not 0, 1, 2 or 3.
        """
        return self.total - self.whole(stage)


def min_state_bytes(numbers: int, widths: StateWidths, stage: int, ranks: int) -> int:
    """Return the bytes of parameters, gradients and optimizer state on the fullest rank.

    The formulas are those of Figure 1 of the ZeRO paper, for P trained elements and N ranks, with
    K the optimizer's bytes (12): stage 0 (2+2+K)P, stage 1 4P + KP/N, stage 2 2P + (2+K)P/N,
    stage 3 (4+K)P/N. The formulas assume that all of these states exist at one moment of a step.
    With some engines the states do not: see `Traits.sharded_states`.

    Args:
        numbers: the number of trained elements of the model, before sharding.
        widths: bytes for each of these elements.
        stage: the stage of ZeRO, from 0 to 3; 0 if nothing is sharded.
        ranks: the number of ranks over which states are sharded.

    Raises:
        ValueError: `stage` is not 0, 1, 2 or 3.
    """
    share = -(-numbers // ranks)  # rounded up: the fullest rank has the remainder
    return math.floor(widths.whole(stage) * numbers + widths.sharded(stage) * share)
