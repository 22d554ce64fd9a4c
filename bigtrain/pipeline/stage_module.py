"""The interface of a stage that a pipeline runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bigtrain.data.loader import MicroBatch


class StageModule(Protocol):
    """A module that is one stage of a model, with its parameters under their names in the model.

    A parameter that several stages of one rank share is the same object in these stages.
    """

    index: int
    """The index of the stage, from 0."""
    count: int
    """The number of stages of the whole model."""
    training: bool

    def __call__(
        self,
        *stage_inputs: Tensor,
        micro_batch: MicroBatch,
        scale: float | None = None,
        final: bool = True,
    ) -> Any:
        """Compute this stage's part of the forward pass.

        Args:
            stage_inputs: the inputs from the previous stage.
            micro_batch: the inputs and targets of the model, on the device.
            scale: the factor of the summed loss; None for the model's output instead of the loss.
            final: whether this is the last micro-batch of a step.

        Returns:
            Contiguous boundary tensors for the next stage. The last stage returns the summed loss
            times `scale`, or the model's output if `scale` is None.
        """

    def incoming(self, micro_batch: MicroBatch) -> Sequence[Tensor]:
        """Return the stage's inputs as meta tensors: shape, dtype, and `requires_grad`."""

    def outgoing(self, micro_batch: MicroBatch) -> Sequence[Tensor]:
        """Return the stage's outputs as meta tensors; not called for the last stage."""

    def train(self, mode: bool = True) -> Any:  # noqa: FBT001, FBT002 - as nn.Module has it
        """See `nn.Module.train`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """See `nn.Module.parameters`."""

    def named_parameters(
        self, *, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """See `nn.Module.named_parameters`."""

    def buffers(self) -> Iterator[Tensor]:
        """See `nn.Module.buffers`."""

    def modules(self) -> Iterator[nn.Module]:
        """See `nn.Module.modules`."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """See `nn.Module.state_dict`."""


StageShapes = tuple[Sequence[Tensor], Sequence[Tensor]]
"""The inputs and the outputs of a stage, as meta tensors."""


def is_sharded(stage: StageModule) -> bool:
    """Whether `fully_shard` wraps a module of the stage, so that replicas exchange in each pass."""
    return any(isinstance(module, FSDPModule) for module in stage.modules())
