"""What every strategy ends in: a live model and optimizer that do one step at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from bigtrain.data.loader import MicroBatch
from bigtrain.tensors.shards import SavedTensor, StateTensor


class Runner(Protocol):
    """A live model and optimizer."""

    module: nn.Module
    """The model as the user wrote it: plain parameter names."""
    optimizer: torch.optim.Optimizer
    roots: Sequence[nn.Module]
    """What computes here: the model itself, or this rank's stages of it."""

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Run this rank's micro-batches of one global batch, forward and backward.

        Returns:
            The mean loss over the valid targets of the global batch, the same on every rank.

        Raises:
            NonFiniteError: the loss of some rank is not finite; the message names it.
        """

    def update(self) -> float:
        """Clip, step the optimizer and clear the gradients; return the global gradient norm."""

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

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """Take over, of all of a training state, what this rank holds. Collective.

        Raises:
            CheckpointError: it is another model's.
        """

    def close(self) -> None:
        """Let go of what outlives the objects (hooks, files, threads)."""
