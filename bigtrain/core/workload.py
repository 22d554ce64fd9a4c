"""A workload: the model, its loss, its optimizer and an example, independent of the plan."""

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
    """The whole model as the user wrote it, on any device (also meta). Its modules are not
    changed."""
    example: MicroBatch | None
    """One micro-batch of the plan's size, of which only shapes matter. None before the first step
    of a run that was given no example."""
    loss: Loss
    make_optimizer: MakeOptimizer
    whole_bytes: int = 0
    """Bytes of the whole model if each rank builds it whole. 0 if tensors are materialised one by
    one."""
    read_widths: Mapping[str, int] = field(default_factory=dict)
    """See `Blueprint.read_widths`."""
    repeats: Mapping[str, int] = field(default_factory=dict)
    """For a shortened model, the number of equal blocks that a block represents, by name. Blocks
    that are not named represent only themselves."""
    notes: tuple[str, ...] = ()
    """Lines for the user about the model."""
    known_uses: ParameterUses | None = None
    """How a forward pass uses parameters, if that is known without a pass of the whole model."""

    @cached_property
    def parameter_uses(self) -> ParameterUses | None:
        """How a forward pass uses parameters.

        None without an example, or if the model does not run without values.
        """
        if self.example is None or self.known_uses is not None:
            return self.known_uses
        return parameter_uses(self.model, self.example, self.loss)

    @property
    def micro_batch(self) -> MicroBatch:
        """The example.

        Raises:
            ValueError: the workload has no example.
        """
        if self.example is None:
            raise ValueError("this workload has no example")
        return self.example
