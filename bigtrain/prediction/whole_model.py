"""The part of a model that a run on fake tensors records: by default the whole model."""

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
"""(loop, micro-batches) -> `FakeRun.marks`, after one step over these micro-batches."""


class WholeModel:
    """Runs a whole model in the loop. Subclasses run a part of it, or run it in another way."""

    def placed(self, micro_batch: MicroBatch, plan: Plan) -> MicroBatch:  # noqa: ARG002
        """Return the micro-batch for the loop, before it is replaced by fake tensors."""
        return micro_batch

    def root(self, fake: nn.Module, loss: Loss, plan: Plan, device: torch.device) -> nn.Module:
        """Return the module that the forward pass calls.

        Args:
            fake: a copy of the whole model on fake tensors, which may be changed.
            loss: the loss of the run; if it is chunked, it is attached to the head.
            plan: the plan of the run.
            device: the device whose kernels are assumed.
        """
        del plan, device
        attach_head(loss, fake)
        return fake

    def runner(self, assembly: Assembly, tracker: StorageTracker) -> LoopRunner:  # noqa: ARG002
        """Return the loop that runs the micro-batches."""
        return LoopRunner(assembly)

    def steps(
        self, runner: LoopRunner, batches: Sequence[MicroBatch], step: TakeStep
    ) -> list[tuple[int, ...]]:
        """Take a first step, in which the optimizer makes its state, and a second step.

        The second step has two micro-batches of the last size. With two sizes, the first step has
        two micro-batches of the first size; otherwise it has one micro-batch.

        Args:
            runner: the result of the method `runner`.
            batches: one micro-batch, or two of different sizes.
            step: takes one step.

        Returns:
            The marks of each step; see `FakeRun.marks`.
        """
        first, last = batches[0], batches[-1]
        small = [first] if len(batches) == 1 else [first, first]
        return [step(runner, small), step(runner, [last, last])]


WHOLE_MODEL = WholeModel()
