"""Compute the forward passes of this rank's stages: place batches, enter autocast, label memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bigtrain.core.loop import StepRunner
from bigtrain.data.loader import MicroBatch
from bigtrain.pipeline.stage_module import StageModule, StageShapes
from bigtrain.slicing.sliced_tensor import whole_of


class StageWorker:
    """Computes the stages of one rank, one micro-batch and one pass at a time.

    Args:
        runner: places batches, enters autocast and labels memory.
        stages: the stages of this rank, by index.
    """

    def __init__(self, runner: StepRunner, stages: Mapping[int, StageModule]) -> None:
        self.stages = stages
        self._runner = runner
        self._micro_batches: Sequence[MicroBatch] = ()
        self._scale: float | None = None
        self._final = True
        self._placed: dict[int, tuple[MicroBatch, int]] = {}

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._runner.context.device

    def begin(
        self, micro_batches: Sequence[MicroBatch], scale: float | None = None, *, final: bool = True
    ) -> None:
        """Set the micro-batches of the next passes, which are indexed in this order.

        Args:
            micro_batches: the micro-batches as loaded. Each is copied to the device when the first
                stage of this rank computes it.
            scale: the factor of the summed loss; None for the model's output instead of the loss.
            final: whether the last of these micro-batches is the last one of the step.
        """
        self._micro_batches, self._scale, self._final = micro_batches, scale, final
        self._placed.clear()  # a step that failed may have left micro-batches behind

    def end(self) -> None:
        """Release the micro-batches after their passes."""
        self._micro_batches = ()
        self._placed.clear()

    def forward(self, stage: StageModule, number: int, inputs: Sequence[Tensor]) -> Any:
        """Run the forward pass of a stage, and return the result of the stage.

        Args:
            stage: one of `stages`.
            number: the index of the micro-batch.
            inputs: the inputs from the previous stage.
        """
        self._runner.meter.phase("forward")
        placed = self._batch_on_device(number)
        last = number == len(self._micro_batches) - 1
        with self._runner.autocast():
            return whole_of(
                stage(*inputs, micro_batch=placed, scale=self._scale, final=self._final and last)
            )

    def _batch_on_device(self, number: int) -> MicroBatch:
        """Return a micro-batch on the device; the last of this rank's stages releases it."""
        placed, num_left = self._placed.pop(number, (None, len(self.stages)))
        if placed is None:
            placed = self._runner.place_batch(self._micro_batches[number])
            self._runner.label_batch(placed)
        if num_left > 1:
            self._placed[number] = placed, num_left - 1
        return placed

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """A context for a backward pass of a stage, or for a part of it: labels memory."""
        self._runner.meter.phase("backward")
        try:
            yield
        finally:
            self._runner.label_gradients()

    def shapes(self, placed: MicroBatch) -> dict[int, StageShapes]:
        """Return the inputs and outputs of each stage of this rank, as meta tensors.

        Args:
            placed: a micro-batch on the device.
        """
        with self._runner.autocast():
            return {
                index: (
                    tuple(stage.incoming(placed)) if index else (),
                    tuple(stage.outgoing(placed)) if index < stage.count - 1 else (),
                )
                for index, stage in self.stages.items()
            }
