"""The accuracy on training batches, from the logits that a step computes anyway."""

from __future__ import annotations

import torch
from torch import Tensor


class TrainingAccuracy:
    """Counts the correct targets of a training step, from logits that a `CrossEntropy` passes.

    Between `end` and the next `begin` it counts nothing, because forecasts, validations and checks
    call the loss, too.
    """

    def __init__(self) -> None:
        self._counting = False
        self._counts: list[tuple[float | Tensor, float | Tensor]] = []

    def begin(self) -> None:
        """Start to count the targets of a step."""
        self._counting, self._counts = True, []

    @torch.no_grad()
    def see(self, logits: Tensor, target: Tensor, ignore_index: int, count: float | None) -> None:
        """Count the targets of one micro-batch, unless its forward pass is recomputed.

        Args:
            logits: (..., classes).
            target: (...).
            ignore_index: targets of this value are not counted.
            count: the number of valid targets, or None if it is not known; with 0, as for padding,
                nothing is counted.
        """
        # A recomputed forward pass runs inside of the backward pass, which has a task id.
        if not self._counting or count == 0 or torch._C._current_graph_task_id() != -1:
            return
        valid = target != ignore_index
        right = ((logits.argmax(-1) == target) & valid).sum()
        if logits.device.type == "cpu":  # numbers, so that no tensor outlives the forward pass
            self._counts.append((float(right), float(valid.sum())))
        else:
            self._counts.append((right, valid.sum()))

    def end(self) -> tuple[float, float]:
        """Return the numbers of correct and of valid targets of the step on this rank.

        This waits for the device.
        """
        self._counting = False
        counts, self._counts = self._counts, []
        return sum(float(right) for right, _ in counts), sum(float(valid) for _, valid in counts)
