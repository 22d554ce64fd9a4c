"""What every strategy ends in: a live model and optimizer that do one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from bigtrain.data.loader import MicroBatch
from bigtrain.losses.loss import Loss
from bigtrain.tensors.shards import SavedTensor, StateTensor


class StepLoss:
    """The mean loss of a global batch, on the device until it is read.

    Args:
        own_sum: 0-dim, this rank's; None where it has nothing of it.
        mean: makes this rank's sum the mean over all ranks. Collective; may refuse what it finds.
    """

    def __init__(self, own_sum: Tensor | None, mean: Callable[[float], float]) -> None:
        self._own_sum, self._mean = own_sum, mean
        self._value: float | None = None

    def read(self) -> float:
        """The mean over the valid targets, the same on every rank. The first call is collective."""
        if self._value is None:
            own_sum, self._own_sum = self._own_sum, None  # no tensor that outlives its number
            self._value = self._mean(0.0 if own_sum is None else float(own_sum))
        return self._value

    def read_with(self, norm: Tensor) -> float:
        """Read the loss, and a 0-dim norm, which is returned: the host waits once for both."""
        mine = self._own_sum
        if self._value is not None or mine is None or mine.device != norm.device:
            self.read()
            return float(norm)
        own_sum, number = torch.stack([mine.double(), norm.double()]).tolist()
        self._value = self._mean(own_sum)
        return float(number)


class Runner(Protocol):
    """A live model and optimizer."""

    module: nn.Module
    """The model as the user wrote it: plain parameter names."""
    optimizer: torch.optim.Optimizer
    roots: Sequence[nn.Module]
    """What computes here: the model itself, or this rank's stages of it."""
    loss: Loss

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> StepLoss:
        """Run this rank's micro-batches of one global batch, forward and backward.

        Returns:
            The loss, which is read already where the plan checks that it is finite.

        Raises:
            NonFiniteError: it does, and the loss of some rank is not; the message names it.
        """

    def update(self, loss: StepLoss | None = None) -> float:
        """Clip, step the optimizer and clear the gradients; return the global gradient norm.

        Args:
            loss: the step's, which is read here, if it was not yet, together with the norm.

        Raises:
            NonFiniteError: the plan checks the norm, and it is not finite.
        """

    def forget_gradients(self) -> None:
        """Drop what `forward_backward` has made, where no `update` is to follow."""

    def gradients(self) -> dict[str, StateTensor]:
        """What this rank has of the gradients of the global batch by plain names, before clipping.

        There between `forward_backward` and `update`.
        """

    def predict(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor] | None:
        """Return (output, targets) on the device, without gradients, in evaluation mode.

        The ranks of one pipeline give the same micro-batch; the rank of its last stage returns,
        the others return None.
        """

    def state(self) -> dict[str, StateTensor]:
        """What this rank holds of the training state: `model.NAME`, `optimizer.NAME.KEY`.

        Weights are in the precision that is updated (fp32, where bf16 is only computed with).
        """

    def label_state(self) -> None:
        """Say of the optimizer's state that it is that, where memory is tracked."""
        ...

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """Take over, of all of a training state, what this rank holds. Collective.

        Raises:
            CheckpointError: it is another model's.
        """

    def close(self) -> None:
        """Let go of what outlives the objects (hooks, files, threads)."""
