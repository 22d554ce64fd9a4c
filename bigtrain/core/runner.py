"""The interface of a runner: a model and an optimizer, built by a strategy, that take steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from bigtrain.data.loader import MicroBatch
from bigtrain.losses.loss import Loss
from bigtrain.ranks.step_numbers import StepNumbers
from bigtrain.tensors.shards import SavedTensor, StateTensor


class StepLoss:
    """The mean loss of a global batch, on the device until it is read.

    Args:
        own_sum: 0-dim, the summed loss of this rank; None if it computes no loss.
        mean: returns the mean over all ranks, from this rank's sum. It is collective, and may
            raise.
    """

    def __init__(self, own_sum: Tensor | None, mean: Callable[[float], float]) -> None:
        self._own_sum, self._mean = own_sum, mean
        self._value: float | None = None

    @property
    def own_sum(self) -> Tensor | None:
        """The summed loss of this rank, 0-dim; None if it computes no loss or was read."""
        return self._own_sum

    def read(self) -> float:
        """Return the mean over the valid targets, the same on every rank.

        The first call is collective, and waits for the device.
        """
        if self._value is None:
            own_sum, self._own_sum = self._own_sum, None  # so that the tensor is freed
            self._value = self._mean(0.0 if own_sum is None else float(own_sum))
        return self._value

    def read_with(self, norm: Tensor) -> float:
        """Read this loss and a 0-dim norm with one wait for the device; return the norm."""
        mine = self._own_sum
        if self._value is not None or mine is None or mine.device != norm.device:
            self.read()
            return float(norm)
        own_sum, number = torch.stack([mine.double(), norm.double()]).tolist()
        self._value = self._mean(own_sum)
        return float(number)


class Runner(Protocol):
    """A model and its optimizer, ready to take steps. All ranks call each method."""

    module: nn.Module
    """The model as the user wrote it, with the user's parameter names."""
    optimizer: torch.optim.Optimizer
    roots: Sequence[nn.Module]
    """The modules that compute on this rank: the model, or the rank's stages."""
    loss: Loss
    numbers: StepNumbers
    """The exchange of the step's numbers, which `Engine.begin` begins."""

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> StepLoss:
        """Run this rank's micro-batches of one global batch, forward and backward.

        Returns:
            The loss. If the plan checks that losses are finite, it has been read, unless the
            device leaves out an update whose loss is not finite.

        Raises:
            NonFiniteError: the plan checks that losses are finite, and the loss of a rank is not;
                the message has the rank.
        """

    def update(self, loss: StepLoss | None = None) -> float:
        """Clip, step the optimizer and clear the gradients; return the global gradient norm.

        Args:
            loss: the loss of the step. If it has not been read, it is read here together with the
                norm, with one wait for the device.

        Raises:
            NonFiniteError: the plan checks the norm, and it is not finite.
        """

    def forget_gradients(self) -> None:
        """Drop the gradients of `forward_backward`; called if no `update` follows."""

    def gradients(self) -> dict[str, StateTensor]:
        """The gradients of this rank for the global batch, by name, before clipping.

        Available between `forward_backward` and `update`.
        """

    def predict(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor] | None:
        """Return (output, targets) on the device, computed without gradients.

        The caller sets `module` to evaluation mode.

        All ranks of one pipeline pass the same micro-batch. The rank of the last stage returns the
        pair, and the other ranks return None.
        """

    def state(self) -> dict[str, StateTensor]:
        """The part of the training state on this rank, as `model.NAME` and `optimizer.NAME.KEY`.

        Weights have the precision in which they are updated: fp32 if only the computation is in
        bf16.
        """

    def label_state(self) -> None:
        """Label the optimizer's state for the memory meter."""
        ...

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """Load this rank's part of a training state. Collective.

        Args:
            saved: the tensors of a checkpoint, under the names of `state`.

        Raises:
            CheckpointError: the state is of another model.
        """

    def close(self) -> None:
        """Remove the runner's hooks and marks from the model, and release its files and threads.

        These would otherwise outlive the runner.
        """
