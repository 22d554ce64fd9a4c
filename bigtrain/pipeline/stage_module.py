"""A stage of a model as a pipeline runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bigtrain.data.loader import MicroBatch


class StageModule(Protocol):
    """A module that is one stage of a model: its own parameters under the model's plain names.

    A parameter that several stages of one rank share is one object in all of them.
    """

    index: int
    """The number of the stage, from 0."""
    count: int
    """Stages of the whole model."""
    training: bool

    def __call__(
        self,
        *stage_inputs: Tensor,
        micro_batch: MicroBatch,
        scale: float | None = None,
        final: bool = True,
    ) -> Any:
        """Compute this stage's part: contiguous boundary tensors for the next stage.

        The last stage returns the summed loss times `scale`, or without a scale the model's output.
        `final` is true for the last micro-batch of a step.
        """

    def incoming(self, micro_batch: MicroBatch) -> Sequence[Tensor]:
        """The stage's inputs on the meta device: shape, type, whether they need a gradient."""

    def outgoing(self, micro_batch: MicroBatch) -> Sequence[Tensor]:
        """The stage's outputs on the meta device; not called for the last stage."""

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
"""The inputs and outputs of a stage, on the meta device."""


def is_sharded(stage: StageModule) -> bool:
    """Whether `fully_shard` wraps a module of the stage: replicas exchange in each pass then."""
    return any(isinstance(module, FSDPModule) for module in stage.modules())
