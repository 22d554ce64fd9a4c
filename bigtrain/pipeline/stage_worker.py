"""One forward pass of a stage of this rank, with the placing and autocast that surround it."""

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
        stages: those of this rank, by number.
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
        """Take the micro-batches of the next passes, which are numbered in this order.

        Args:
            micro_batches: the micro-batches as loaded; each is placed when the first stage here
                computes it.
            scale: factor of the summed loss; without one the last stage returns the output.
            final: whether the last of them is the last one of the step.
        """
        self._micro_batches, self._scale, self._final = micro_batches, scale, final
        self._placed.clear()  # a step that failed may have left some

    def end(self) -> None:
        """Release the micro-batches once their passes are done."""
        self._micro_batches = ()
        self._placed.clear()

    def forward(self, stage: StageModule, number: int, inputs: Sequence[Tensor]) -> Any:
        """Run a stage's forward pass of a micro-batch; return whatever the stage returns."""
        self._runner.meter.phase("forward")
        placed = self._batch_on_device(number)
        last = number == len(self._micro_batches) - 1
        with self._runner.autocast():
            return whole_of(
                stage(*inputs, micro_batch=placed, scale=self._scale, final=self._final and last)
            )

    def _batch_on_device(self, number: int) -> MicroBatch:
        """The micro-batch on the device; it is released once all stages here have computed it."""
        placed, num_left = self._placed.pop(number, (None, len(self.stages)))
        if placed is None:
            placed = self._runner.place_batch(self._micro_batches[number])
            self._runner.label_batch(placed)
        if num_left > 1:
            self._placed[number] = placed, num_left - 1
        return placed

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Surround a stage's backward pass, or a part of it: tell the meter of it."""
        self._runner.meter.phase("backward")
        try:
            yield
        finally:
            self._runner.label_gradients()

    def shapes(self, placed: MicroBatch) -> dict[int, StageShapes]:
        """The inputs and outputs of each stage here for a micro-batch that is on the device."""
        with self._runner.autocast():
            return {
                index: (
                    tuple(stage.incoming(placed)) if index else (),
                    tuple(stage.outgoing(placed)) if index < stage.count - 1 else (),
                )
                for index, stage in self.stages.items()
            }
