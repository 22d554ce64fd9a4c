"""The part of a model that a run on fake tensors takes through the loop: here, all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from bigtrain.core.loop import LoopRunner
from bigtrain.core.strategy import Assembly, Plan
from bigtrain.data.loader import MicroBatch
from bigtrain.losses.chunked_cross_entropy import attach_head
from bigtrain.losses.loss import Loss
from bigtrain.memory.tracker import StorageTracker

TakeStep = Callable[[LoopRunner, Sequence[MicroBatch]], tuple[int, ...]]
"""Takes one step of a loop over these micro-batches; returns `FakeRun.marks`."""


class WholeModel:
    """A whole model in the loop; subclasses run a part of it."""

    def placed(self, micro_batch: MicroBatch, plan: Plan) -> MicroBatch:  # noqa: ARG002
        """The micro-batch as the loop takes it, before fake tensors are made."""
        return micro_batch

    def root(self, fake: nn.Module, loss: Loss, plan: Plan, device: torch.device) -> nn.Module:
        """The module that the forward pass calls, from a fake copy of the whole model."""
        del plan, device
        attach_head(loss, fake)
        return fake

    def runner(self, assembly: Assembly, tracker: StorageTracker) -> LoopRunner:  # noqa: ARG002
        """The loop."""
        return LoopRunner(assembly)

    def steps(
        self, runner: LoopRunner, batches: Sequence[MicroBatch], step: TakeStep
    ) -> list[tuple[int, ...]]:
        """Take all steps; the optimizer makes its state in the first.

        Args:
            runner: the result of `runner`.
            batches: one, or two of different sizes.
            step: takes one step.

        Returns:
            The marks of each step.
        """
        first, last = batches[0], batches[-1]
        small = [first] if len(batches) == 1 else [first, first]
        return [step(runner, small), step(runner, [last, last])]


WHOLE_MODEL = WholeModel()
