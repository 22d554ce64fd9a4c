"""A pipeline's step, event by event: the one executor of stages, for all versions of torch.

The order of events is that of torch 2.15's schedules. torch's own runtime of them, with its
`PipelineStage`, is not used, because:

* before 2.15 it allocates the memory for all that a step receives beforehand, and keeps outputs
  until their micro-batch's gradient arrives and everything it sends until the step is over. Here a
  receive allocates when it begins, a send is released when it has arrived, and the edge of an
  output is enough for the backward pass;
* for an FSDP module it keeps parameters whole from the first forward pass to the end of the step,
  and gradients whole and unreduced, too: the memory that sharding is to save. Here each micro-batch
  gathers and reduces, as without a pipeline;
* it detaches outputs for a stage on the same rank in place, which a view refuses;
* it wraps an error of a stage in a long one, and then waits for its open sends while the peer may
  wait for this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bigtrain.pipeline.stage_module import StageShapes
from bigtrain.pipeline.stage_passes import StagePasses
from bigtrain.pipeline.stage_worker import StageWorker
from bigtrain.pipeline.transport import StageTransport
from bigtrain.schedules.events import EventRow, StepEvent


class ScheduleLoop:
    """Runs this rank's events of a step.

    Args:
        events: this rank's row of `events.schedule_events` or of its siblings.
        worker: computes the stages; its `begin` gives the micro-batches of each run.
        shapes: the shapes of the inputs and outputs of each of the worker's stages.
        transport: the transport to the neighbours.
    """

    def __init__(
        self,
        events: EventRow,
        worker: StageWorker,
        shapes: Mapping[int, StageShapes],
        transport: StageTransport,
    ) -> None:
        self._events, self._transport = events, transport
        self._stages = {
            index: StagePasses(worker, stage, shapes[index])
            for index, stage in worker.stages.items()
        }

    def run(self) -> list[Any]:
        """Run all events.

        Returns:
            The last stage's results, one for each micro-batch, detached; [] on the other ranks.
        """
        for passes in self._stages.values():
            passes.clear()
        results: list[Any] = []
        for together in self._events:
            event = together[0]
            if event.kind in ("F", "I", "B", "W"):
                results += self._compute(event)
            elif event.kind == "WAIT_SEND_F":
                self._transport.wait(event._replace(kind="SEND_F"))
            elif event.kind == "WAIT_SEND_B":
                self._transport.wait(event._replace(kind="SEND_B"))
            else:
                receives = [e for e in together if e.kind in ("RECV_F", "RECV_B")]
                self._transport.begin(together, {e: self._received(e) for e in receives})
        return results

    def _compute(self, event: StepEvent) -> list[Any]:
        """Run one pass; return the result of a forward pass of the last stage."""
        passes = self._stages[event.stage]
        if event.kind == "F":
            receive = event._replace(kind="RECV_F")
            inputs = self._transport.take(receive) if event.stage else []
            outputs = passes.forward(event.micro_batch, inputs)
            if passes.last:
                return outputs
            self._transport.post(event._replace(kind="SEND_F"), outputs)
        elif event.kind == "W":
            passes.weight_backward(event.micro_batch)
        else:
            run_backward = passes.backward if event.kind == "B" else passes.input_backward
            gradients = run_backward(event.micro_batch, self._output_gradients(event))
            if event.stage:
                self._transport.post(event._replace(kind="SEND_B"), gradients)
        return []

    def _output_gradients(self, event: StepEvent) -> list[Tensor | None]:
        """One gradient for each output of a stage: None where it needs none, and for the loss."""
        passes = self._stages[event.stage]
        if passes.last:
            return [None]
        received = iter(self._transport.take(event._replace(kind="RECV_B")))
        return [next(received) if meta.requires_grad else None for meta in passes.outgoing]

    def _received(self, receive: StepEvent) -> list[Tensor]:
        """The tensors of a receive, on the meta device."""
        passes = self._stages[receive.stage]
        if receive.kind == "RECV_F":
            return list(passes.incoming)
        return [meta for meta in passes.outgoing if meta.requires_grad]
