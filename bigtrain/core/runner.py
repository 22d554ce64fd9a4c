"""The runner, into which every strategy builds: a live model and optimizer that take steps."""

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
        own_sum: 0-dim, the sum on this rank; None if it computes no loss.
        mean: returns the mean over all ranks, from this rank's sum. Collective; may raise.
    """

    def __init__(self, own_sum: Tensor | None, mean: Callable[[float], float]) -> None:
        self._own_sum, self._mean = own_sum, mean
        self._value: float | None = None

    def read(self) -> float:
        """The mean over the valid targets, the same on every rank. The first call is collective."""
        if self._value is None:
            own_sum, self._own_sum = self._own_sum, None  # so that the tensor is freed
            self._value = self._mean(0.0 if own_sum is None else float(own_sum))
        return self._value

    def read_with(self, norm: Tensor) -> float:
        """Read the loss and a 0-dim norm, and return the norm: the host waits once for both."""
        mine = self._own_sum
        if self._value is not None or mine is None or mine.device != norm.device:
            self.read()
            return float(norm)
        own_sum, number = torch.stack([mine.double(), norm.double()]).tolist()
        self._value = self._mean(own_sum)
        return float(number)


class Runner(Protocol):
    """A live model and optimizer. All ranks call each method."""

    module: nn.Module
    """The model as the user wrote it, with its parameter names."""
    optimizer: torch.optim.Optimizer
    roots: Sequence[nn.Module]
    """The modules that compute on this rank: the model, or the rank's stages."""
    loss: Loss

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> StepLoss:
        """Run this rank's micro-batches of one global batch, forward and backward.

        Returns:
            The loss; it is read already if the plan checks that it is finite.

        Raises:
            NonFiniteError: the plan checks it, and a rank's loss is not finite; names the rank.
        """

    def update(self, loss: StepLoss | None = None) -> float:
        """Clip, step the optimizer and clear the gradients; return the global gradient norm.

        Args:
            loss: the loss of the step; if it was not read yet, it is read here, together with the
                norm.

        Raises:
            NonFiniteError: the plan checks the norm, and it is not finite.
        """

    def forget_gradients(self) -> None:
        """Drop the gradients of `forward_backward` if no `update` follows."""

    def gradients(self) -> dict[str, StateTensor]:
        """The gradients of this rank for the global batch, by name, before clipping.

        Available between `forward_backward` and `update`.
        """

    def predict(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor] | None:
        """Return (output, targets) on the device, without gradients, in evaluation mode.

        The ranks of one pipeline pass the same micro-batch; the rank of the last stage returns
        the pair, the others None.
        """

    def state(self) -> dict[str, StateTensor]:
        """The part of the training state on this rank: `model.NAME`, `optimizer.NAME.KEY`.

        Weights are in the precision in which they are updated (fp32 if only the computation is in
        bf16).
        """

    def label_state(self) -> None:
        """Label the optimizer's state for the memory meter."""
        ...

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """Load this rank's part of a training state. Collective.

        Raises:
            CheckpointError: the state is of another model.
        """

    def close(self) -> None:
        """Release resources that outlive the objects: hooks, files, threads."""
