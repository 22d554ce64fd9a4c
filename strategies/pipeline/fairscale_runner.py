"""Stages inside fairscale's Pipe, and the runner that calls it once a step.

Facts of fairscale 0.4.13 under torch 2.15 that this answers:

* `Pipe.forward` cuts a batch along dim 0 and puts the outputs together again: one more copy of the
  batch and of all outputs, and no two sizes in a step. The micro-batches, which are there already,
  go straight into its pipeline, and the last stage computes its own loss.
* Its worker threads have none of the caller's modes: no autocast, no tracked memory; and the random
  numbers that they draw come in no fixed order. Here each task is done where it is given, in the
  order of the clock. The kernels of several GPUs overlap all the same, being asynchronous.
* Its checkpointing pairs gradients with outputs by position, and counts those that want none only
  on one side: integers and what is not trained fail. Behind a first output that wants no gradient
  nothing is computed again in time. So all that crosses a cut is floating point, what is trained
  stands first, and what only rides along wants a gradient, too, in a second pass.
* The second pass moves BatchNorm's running statistics a second time, and autocast is not entered
  in it: see `_Part`.
* The first pass of what is computed again runs without gradients: nothing may be worked out in it
  for the first time that depends on them.
* `Pipeline.__del__` waits for its workers, so the queues here answer a farewell.
* Its DeferredBatchNorm is another module with other buffers, has the biased variance, and waits
  for as many micro-batches as it was told of, also in a step with fewer. It is not used.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.activations.recompute import freeze_running_statistics
from bigtrain.core.loop import LoopRunner
from bigtrain.core.runner import StepLoss
from bigtrain.core.traits import StageRecompute
from bigtrain.cutting.stage import Stage
from bigtrain.data.loader import MicroBatch
from bigtrain.pipeline.local_chain import StageChain
from bigtrain.strategies.fairscale_adapter import do_without_workers, is_second_pass, run_pipe
from bigtrain.strategies.pipeline.boundary_format import BoundaryFormat
from bigtrain.tensors.not_a_child import NotAChild


class _StepState:
    """What the parts need to know of the step that is done."""

    def __init__(self) -> None:
        self.batches: Sequence[MicroBatch] = ()
        self.scale = 1.0


class _Part(nn.Module):
    """A stage as Pipe calls it: one tuple of tensors in, one out.

    The last tensor is a mark without numbers: the length of its first dim is the how manieth
    micro-batch this is, which costs no read from a device.
    """

    def __init__(
        self,
        stage: Stage,
        device: torch.device,
        now: _StepState,
        around: AbstractContextManager[Any],
    ) -> None:
        super().__init__()
        self.stage = stage
        self._device, self._now, self._around = device, now, around

    def forward(self, boundary: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute the stage's part for the micro-batch of the mark."""
        stage, recomputing = self.stage, is_second_pass()
        *sent, mark = boundary
        batch = self._now.batches[mark.shape[0]].to(self._device, non_blocking=True)
        with self._around, freeze_running_statistics(stage) if recomputing else nullcontext():
            wires = BoundaryFormat(stage.incoming(batch)).unpack(sent)
            output = stage(*wires, micro_batch=batch, scale=self._now.scale)
            if stage.last:
                sent = [output]
            else:
                sent = BoundaryFormat(stage.outgoing(batch)).pack(output)
        sent.append(mark.detach())
        if recomputing:
            sent = [t if t.requires_grad else t.detach().requires_grad_() for t in sent]
        return tuple(sent)


class PipedStages(StageChain):
    """All stages of a model: one micro-batch after the other, or a whole step through Pipe.

    Args:
        stages: of the whole model; their parameters are moved to their devices.
        devices: one for each.
        model: whose tensors these are.
        chunks: the most micro-batches of a step.
        checkpoint: Pipe's: which micro-batches are computed again.
        autocast: whether stages compute in bf16.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        devices: Sequence[torch.device],
        model: nn.Module,
        chunks: int,
        checkpoint: StageRecompute,
        *,
        autocast: bool,
    ) -> None:
        from fairscale.nn.pipe import Pipe

        super().__init__(stages, devices, model)
        self._now = _StepState()
        self._checkpoint, self._home = checkpoint, devices[0]
        parts = [
            _Part(stage, device, self._now, torch.autocast(device.type, torch.bfloat16))
            if autocast
            else _Part(stage, device, self._now, nullcontext())
            for stage, device in zip(stages, devices, strict=True)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has moved to torch, where it is no more
            pipe = Pipe(
                nn.Sequential(*parts),
                balance=[1] * len(parts),
                devices=list(devices),
                chunks=chunks,
                checkpoint=checkpoint,
            )
        do_without_workers(pipe, devices)
        self._pipe = NotAChild(pipe)

    def train(self, mode: bool = True) -> PipedStages:  # noqa: FBT001, FBT002 - as nn.Module has it
        """See `nn.Module.train`."""
        super().train(mode)
        self._pipe.module.train(mode)
        return self

    def forward(self, inputs: Any, scale: float | None = None) -> Any:
        """Compute the losses of micro-batches, or without a scale the model's output.

        Args:
            inputs: the micro-batches of a step; without a scale the inputs of one.
            scale: what summed losses are multiplied by.
        """
        if scale is None:
            return super().forward(inputs)
        self.follow_mode()
        for batch in inputs:  # a shape is rehearsed once: here, where gradients are wanted
            self._stages[-1].incoming(batch)
        self._now.batches, self._now.scale = inputs, scale
        number = len(inputs)
        recomputed = {"never": 0, "except_last": number - 1, "always": number}[self._checkpoint]
        marks = [torch.empty((place, 0), device=self._home) for place in range(number)]
        return torch.stack(run_pipe(self._pipe.module, marks, recomputed))


class FairscaleRunner(LoopRunner):
    """All micro-batches of a step through a `PipedStages`, wrapped or not, and back."""

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> StepLoss:
        """See `Runner.forward_backward`."""
        total = self.count_targets(micro_batches)
        scale = self.sum_scale(total)
        self.meter.phase("forward")
        placed = [self.place_batch(micro_batch) for micro_batch in micro_batches]
        for micro_batch in (*micro_batches, *placed):
            self.label_batch(micro_batch)
        with self._sync(True):  # noqa: FBT003 - the last one of the step, and the only one
            losses = self._wrapped(placed, scale)
            self.meter.phase("backward")
            losses.sum().backward()
        self.label_gradients()
        own_sum = losses.detach().double().sum()
        return self.step_loss(own_sum, lambda own: self.mean_loss(own / scale, total))
