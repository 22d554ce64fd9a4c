"""The accuracy on training batches, from the logits that a step computes anyway."""

from __future__ import annotations

import torch
from torch import Tensor


class TrainingAccuracy:
    """Counts correct targets during a training step; a `CrossEntropy` passes it the logits.

    Between steps it counts nothing, because forecasts, validations and checks call the loss too.
    """

    def __init__(self) -> None:
        self._counting = False
        self._counts: list[tuple[float | Tensor, float | Tensor]] = []

    def begin(self) -> None:
        """Start a step."""
        self._counting, self._counts = True, []

    @torch.no_grad()
    def see(self, logits: Tensor, target: Tensor, ignore_index: int, count: float | None) -> None:
        """Count one micro-batch of (rows, classes) and (rows,); skip a recomputed forward pass."""
        # Recomputation runs inside of the backward pass.
        if not self._counting or count == 0 or torch._C._current_graph_task_id() != -1:
            return
        valid = target != ignore_index
        right = ((logits.argmax(-1) == target) & valid).sum()
        if logits.device.type == "cpu":  # as numbers, so that no tensor outlives the forward pass
            self._counts.append((float(right), float(valid.sum())))
        else:
            self._counts.append((right, valid.sum()))

    def end(self) -> tuple[float, float]:
        """Return (correct, valid) targets of the step on this rank; waits for the device."""
        self._counting = False
        counts, self._counts = self._counts, []
        return sum(float(right) for right, _ in counts), sum(float(valid) for _, valid in counts)
