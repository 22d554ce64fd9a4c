"""Stages inside fairscale's Pipe, and the runner that calls it once a step.

The code here works around these facts of fairscale 0.4.13 under torch 2.15:

* `Pipe.forward` splits a batch along dim 0 and concatenates the outputs. This needs another copy of
  the batch and of all outputs. All micro-batches of a step get one size. Here the existing
  micro-batches are passed to Pipe's pipeline directly, and the last stage computes the loss.
* Pipe's worker threads have none of the caller's modes (no autocast, no tracked memory), and draw
  random numbers in no fixed order. Here each task runs in the calling thread, in the order of the
  clock cycles. The kernels of several GPUs still overlap, because they are asynchronous.
* Pipe's checkpointing pairs gradients with outputs by position, and skips tensors without a
  gradient on one side only: integers and untrained tensors fail. If the first output has no
  gradient, Pipe recomputes too late. So all boundary tensors are floating point, tensors with a
  gradient come first, and in a recomputing pass the other tensors require a gradient, too.
* The recomputing pass updates BatchNorm's running statistics a second time, and does not enter
  autocast. `_Part` freezes the statistics and enters autocast.
* The first pass of a recomputed stage runs without gradients. Programs that depend on gradients
  have to be traced before it.
* The destructor of Pipe's Pipeline waits for its workers, so the queues here answer its last
  message.
* fairscale's DeferredBatchNorm is another module with other buffers. It uses the biased variance,
  and waits for a fixed number of micro-batches, also in a step with fewer. It is not used.
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
    """The micro-batches and the scale of the current step."""

    def __init__(self) -> None:
        self.batches: Sequence[MicroBatch] = ()
        self.scale = 1.0


class _Part(nn.Module):
    """A stage as a layer of Pipe, which maps a tuple of tensors to another tuple.

    The last tensor is a marker without elements. The length of its first dim is the number of the
    micro-batch, so that the number is known without a read from a device.
    """

    def __init__(
        self,
        stage: Stage,
        device: torch.device,
        step: _StepState,
        around: AbstractContextManager[Any],
    ) -> None:
        super().__init__()
        self.stage = stage
        self._device, self._step, self._around = device, step, around

    def forward(self, boundary: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute the stage's part of the micro-batch whose number the marker has."""
        stage, recomputing = self.stage, is_second_pass()
        *sent, marker = boundary
        batch = self._step.batches[marker.shape[0]].to(self._device, non_blocking=True)
        with self._around, freeze_running_statistics(stage) if recomputing else nullcontext():
            inputs = BoundaryFormat(stage.incoming(batch)).unpack(sent)
            output = stage(*inputs, micro_batch=batch, scale=self._step.scale)
            if stage.last:
                sent = [output]
            else:
                sent = BoundaryFormat(stage.outgoing(batch)).pack(output)
        sent.append(marker.detach())
        if recomputing:
            sent = [t if t.requires_grad else t.detach().requires_grad_() for t in sent]
        return tuple(sent)


class PipedStages(StageChain):
    """All stages of a model: one micro-batch after the other, or a whole step through Pipe.

    Args:
        stages: the stages of the whole model; their parameters are moved to their devices.
        devices: the device of each stage.
        model: the whole model, with the parameters of the stages.
        chunks: the largest number of micro-batches in a step.
        checkpoint: the micro-batches that Pipe recomputes.
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
        self._step = _StepState()
        self._checkpoint, self._home = checkpoint, devices[0]
        parts = [
            _Part(stage, device, self._step, torch.autocast(device.type, torch.bfloat16))
            if autocast
            else _Part(stage, device, self._step, nullcontext())
            for stage, device in zip(stages, devices, strict=True)
        ]
        with warnings.catch_warnings():
            # fairscale warns that Pipe has moved to torch, which has dropped it.
            warnings.simplefilter("ignore")
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
        """Compute the losses of micro-batches or, without a scale, the model's output.

        Args:
            inputs: the micro-batches of a step; without a scale, the inputs of one micro-batch.
            scale: the factor by which each summed loss is multiplied.

        Returns:
            The scaled loss of each micro-batch, as a 1-dim tensor; without a scale, the output.
        """
        if scale is None:
            return super().forward(inputs)
        self.follow_mode()
        for batch in inputs:  # traced here, where gradients are enabled, once for each shape
            self._stages[-1].incoming(batch)
        self._step.batches, self._step.scale = inputs, scale
        count = len(inputs)
        recomputed = {"never": 0, "except_last": count - 1, "always": count}[self._checkpoint]
        markers = [torch.empty((number, 0), device=self._home) for number in range(count)]
        return torch.stack(run_pipe(self._pipe.module, markers, recomputed))


class FairscaleRunner(LoopRunner):
    """Runs all micro-batches of a step by one call of `PipedStages`, which DDP may wrap."""

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> StepLoss:
        """See `Runner.forward_backward`."""
        total = self.count_targets(micro_batches)
        scale = self.sum_scale(total)
        self.meter.phase("forward")
        placed = [self.place_batch(micro_batch) for micro_batch in micro_batches]
        for micro_batch in (*micro_batches, *placed):
            self.label_batch(micro_batch)
        with self._sync(True):  # noqa: FBT003 - it is the last and only one of the step
            losses = self._wrapped(placed, scale)
            self.meter.phase("backward")
            losses.sum().backward()
        self.label_gradients()
        own_sum = losses.detach().double().sum()
        return self.step_loss(own_sum, lambda own: self.mean_loss(own / scale, total))
