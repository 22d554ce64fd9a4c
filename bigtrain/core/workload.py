"""What is trained, whatever the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from bigtrain.data.loader import MicroBatch
from bigtrain.losses.loss import Loss
from bigtrain.optim.update import MakeOptimizer
from bigtrain.tracing.parameter_uses import ParameterUses, parameter_uses


@dataclass(frozen=True)
class Workload:
    """A model with its loss, its optimizer and one micro-batch of its data."""

    model: nn.Module
    """Whole, as the user wrote it, on any device, the meta device too; it is left as it is."""
    example: MicroBatch | None
    """One micro-batch of the size of the plan, of which only shapes matter; None until the first
    step of a run that was given none."""
    loss: Loss
    make_optimizer: MakeOptimizer
    whole_bytes: int = 0
    """Bytes of the model where each rank builds it whole; 0 where tensors get values one by one."""
    repeats: Mapping[str, int] = field(default_factory=dict)
    """For how many blocks of what is trained a block of the model stands, where that is a shorter
    one; others stand for themselves."""
    notes: tuple[str, ...] = ()
    """What there is to say of the model as it is trained."""

    @cached_property
    def parameter_uses(self) -> ParameterUses | None:
        """What a forward pass does with parameters; None without an example that shows it."""
        if self.example is None:
            return None
        return parameter_uses(self.model, self.example, self.loss)

    @property
    def micro_batch(self) -> MicroBatch:
        """The example.

        Raises:
            ValueError: there is none yet.
        """
        if self.example is None:
            raise ValueError("this workload has no example")
        return self.example
