"""Run a pipeline's step event by event, with all versions of torch.

The order of events is that of torch 2.15's schedules. torch's own runtime of these schedules, with
its `PipelineStage`, is not used, because:

* Before 2.15, it allocates the memory for all receives of a step in advance. It keeps an output
  until the gradient of its micro-batch arrives, and all tensors that it sends until the step is
  over. In this module, a receive allocates memory when it begins, and a sent tensor is released
  when its send is complete. The backward pass needs only the gradient edge of an output.
* For an FSDP module, it keeps whole parameters from the first forward pass to the end of the step,
  and whole, unreduced gradients. That is the memory that sharding is to save. In this module, each
  micro-batch gathers parameters and reduces gradients, as without a pipeline.
* It detaches an output for a stage on the same rank in place, which raises for a view.
* It wraps the error of a stage in a long error, and then waits for its open sends, while the other
  rank may wait for this rank.

On an accelerator the host queues passes and messages, and goes on. A message uses its tensor on
another stream. When the host releases the tensor, its memory stays in use until the device is past
the message. A host that queued a whole step would keep the tensors of all micro-batches in this
way. Therefore the host waits: it queues only one micro-batch more than the schedule has in flight.
This one is enough for the device to always have work.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from bigtrain.core.strategy import BeforeBackward
from bigtrain.devices import current_stream, is_accelerator
from bigtrain.pipeline.stage_module import StageShapes
from bigtrain.pipeline.stage_passes import StagePasses
from bigtrain.pipeline.stage_worker import StageWorker
from bigtrain.pipeline.transport import StageTransport
from bigtrain.schedules.events import EventRow, StepEvent


class HostPace:
    """Lets the host wait for the device between micro-batches; without effect on a CPU.

    All loops of a rank share one, because the device may still run micro-batches of another loop.

    Args:
        device: the device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_needed = device, is_accelerator(device)
        self._ends: deque[Any] = deque()
        """Events at the ends of micro-batches, in the order in which they were queued."""
        self._queued = 0

    def clear(self) -> None:
        """Forget the micro-batches that a failed step began to queue and did not finish."""
        self._queued = len(self._ends)

    def begin(self, in_flight: int) -> None:
        """Wait until the host may queue the next micro-batch.

        Args:
            in_flight: see `ScheduleLoop.in_flight`. Afterwards at most this number of micro-batches
                and the next one are queued and not finished.
        """
        while self._ends and self._queued > in_flight:
            self._ends.popleft().synchronize()
            self._queued -= 1
        self._queued += 1

    def end(self) -> None:
        """Note that the host has queued all passes and messages of a micro-batch."""
        if self._is_needed:
            self._ends.append(current_stream(self._device).record_event())


class ScheduleLoop:
    """Runs this rank's events of a step.

    Args:
        events: this rank's row of `events.schedule_events`, `events.one_at_a_time_events` or
            `events.forward_events`.
        worker: computes the stages; its `begin` sets the micro-batches of each run.
        shapes: the inputs and outputs of each of the worker's stages, as meta tensors.
        transport: sends and receives the tensors between stages.
        pace: lets the host wait for the device.
        before_backward: called before each backward pass of a stage.
    """

    def __init__(
        self,
        events: EventRow,
        worker: StageWorker,
        shapes: Mapping[int, StageShapes],
        transport: StageTransport,
        pace: HostPace,
        before_backward: Sequence[BeforeBackward] = (),
    ) -> None:
        self._events, self._transport, self._pace = events, transport, pace
        self._before_backward = before_backward
        backward = [e for together in events for e in together if e.kind in ("B", "I")]
        self._last_backward = {event.stage: event.micro_batch for event in backward}
        spans: dict[int, range] = {}
        for place, together in enumerate(events):
            for event in together:
                begin = spans[event.micro_batch].start if event.micro_batch in spans else place
                spans[event.micro_batch] = range(begin, place + 1)
        self._begins = Counter(span.start for span in spans.values())
        self._ends = Counter(span.stop - 1 for span in spans.values())
        everywhere = Counter(place for span in spans.values() for place in span)
        self.in_flight = max(everywhere.values(), default=0)
        """The most micro-batches between their first and their last event on this rank."""
        self._stages = {
            index: StagePasses(worker, stage, shapes[index])
            for index, stage in worker.stages.items()
        }

    def run(self) -> list[Any]:
        """Run all events.

        Returns:
            The detached results of the last stage, one for each micro-batch; [] on other ranks.
        """
        for passes in self._stages.values():
            passes.clear()
        results: list[Any] = []
        for place, together in enumerate(self._events):
            for _ in range(self._begins[place]):
                self._pace.begin(self.in_flight)
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
            for _ in range(self._ends[place]):
                self._pace.end()
        return results

    def _compute(self, event: StepEvent) -> list[Any]:
        """Run one pass. Return the result of a forward pass of the last stage, otherwise []."""
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
            is_last = self._last_backward[event.stage] == event.micro_batch
            for announce in self._before_backward:
                announce(cast(nn.Module, passes.stage), is_last)
            run_backward = passes.backward if event.kind == "B" else passes.input_backward
            gradients = run_backward(event.micro_batch, self._output_gradients(event))
            if event.stage:
                self._transport.post(event._replace(kind="SEND_B"), gradients)
        return []

    def _output_gradients(self, event: StepEvent) -> list[Tensor | None]:
        """Return each output's gradient; None for the loss and for outputs without a gradient."""
        passes = self._stages[event.stage]
        if passes.last:
            return [None]
        received = iter(self._transport.take(event._replace(kind="RECV_B")))
        return [next(received) if meta.requires_grad else None for meta in passes.outgoing]

    def _received(self, receive: StepEvent) -> list[Tensor]:
        """Return the tensors of a receive, as meta tensors."""
        passes = self._stages[receive.stage]
        if receive.kind == "RECV_F":
            return list(passes.incoming)
        return [meta for meta in passes.outgoing if meta.requires_grad]
