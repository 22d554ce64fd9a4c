"""The share of a training batch that was right, from the logits that the step makes anyhow."""

from __future__ import annotations

import torch
from torch import Tensor


class TrainingAccuracy:
    """Counts what is right while a step trains; a `CrossEntropy` shows it its logits.

    Between steps it counts nothing: forecasts, validations and checks pass their own batches.
    """

    def __init__(self) -> None:
        self._counting = False
        self._counts: list[tuple[float | Tensor, float | Tensor]] = []

    def begin(self) -> None:
        """A step begins."""
        self._counting, self._counts = True, []

    @torch.no_grad()
    def see(self, logits: Tensor, target: Tensor, ignore_index: int, count: float | None) -> None:
        """Count one micro-batch of (rows, classes) and (rows,); a second forward is left out."""
        # What is computed again for the backward pass is computed inside of it.
        if not self._counting or count == 0 or torch._C._current_graph_task_id() != -1:
            return
        valid = target != ignore_index
        right = ((logits.argmax(-1) == target) & valid).sum()
        if logits.device.type == "cpu":  # a number is no tensor that outlives the forward pass
            self._counts.append((float(right), float(valid.sum())))
        else:
            self._counts.append((right, valid.sum()))

    def end(self) -> tuple[float, float]:
        """The right and the valid targets of the step on this rank; waits for the device."""
        self._counting = False
        counts, self._counts = self._counts, []
        return sum(float(right) for right, _ in counts), sum(float(valid) for _, valid in counts)
