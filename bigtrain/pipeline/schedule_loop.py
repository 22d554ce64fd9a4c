"""A pipeline's step, event by event, in the order and with the memory of torch 2.15's schedules.

Those of earlier versions make room for all that a step receives beforehand, keep an output until
its micro-batch has come back, and all that is sent until the step is over. Here a receive makes its
room when it begins, what is sent goes when it has arrived, and an output's edge is what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bigtrain.pipeline.torch_stage import (
    LostGradients,
    StageCaller,
    StageFailure,
    StageModule,
    StageShapes,
    is_sharded,
)
from bigtrain.ranks.context import RunContext
from bigtrain.recorder.exchanges import note_message
from bigtrain.schedules.events import EventRow, StepEvent, schedule_events
from bigtrain.schedules.orders import stage_ranks
from bigtrain.versions.torch_versions import backward_for_inputs, backward_for_weights

Root = Tensor | GradientEdge
"""Where a backward pass begins: the loss, or the edge of an output that is gone."""


@dataclass(frozen=True)
class _Rest:
    """What waits for the weights' part of a backward pass. torch keeps wires and gradients, too."""

    wires: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    roots: Sequence[Root | None] = ()
    groups: Sequence[dict[str, Any]] = ()


class StagePasses:
    """The passes of one stage's micro-batches, and what is kept of them in between.

    Args:
        call: the stage.
        shapes: of its wires.
        device: where it computes.
        backward: entered before each backward pass, and what it returns called after it.
    """

    def __init__(
        self,
        call: StageCaller,
        shapes: StageShapes,
        device: torch.device,
        backward: Callable[[], Callable[[], None]],
    ) -> None:
        self.stage = cast(StageModule, call.stage)
        self.incoming, self.outgoing = shapes
        self._call, self._device, self._backward = call, device, backward
        # fully_shard frees and fills parameters around whole backward passes only.
        self._splits = not is_sharded(self.stage)
        self._lost = LostGradients(call)
        self._kept: dict[int, tuple[Sequence[Tensor], Sequence[Root | None]]] = {}
        self._rest: dict[int, _Rest | None] = {}

    @property
    def last(self) -> bool:
        """Whether it is the last stage of the model."""
        return self.stage.index == self.stage.count - 1

    def clear(self) -> None:
        """Let go of what a step that failed has left."""
        self._kept.clear()
        self._rest.clear()

    def forward(
        self, number: int, wires: Sequence[Tensor], arguments: Mapping[str, Any]
    ) -> list[Tensor]:
        """Compute a micro-batch from what came in; what goes out, without its graph."""
        for wire, meta in zip(wires, self.incoming, strict=True):
            wire.requires_grad_(meta.requires_grad)
        output = self._call(*wires, **arguments)
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        roots: list[Root | None] = [
            (out if self.last else get_gradient_edge(out)) if out.requires_grad else None
            for out in outputs
        ]
        self._kept[number] = wires, roots
        return [out.detach() for out in outputs]

    def backward(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The whole backward pass; the gradients of the wires that want one, contiguous."""
        wires, roots = self._kept.pop(number)
        with self._pass():
            _go_back(roots, gradients)
            found = [wire.grad for wire in wires]
            for wire in wires:
                wire.grad = None
            return self._contiguous(found)

    def backward_inputs(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The part of it for the wires, where that can be told apart."""
        if not self._splits:
            self._rest[number] = None
            return self.backward(number, gradients)
        wires, roots = self._kept.pop(number)
        if self.stage.index == 0:  # nobody wants them
            self._rest[number] = _Rest(wires, gradients, roots=roots)
            return []
        with self._pass():
            groups = self._go_back_to(wires, roots, gradients)
            self._rest[number] = _Rest(wires, gradients, groups=groups)
            return self._contiguous([wire.grad for wire in wires])

    def _go_back_to(
        self,
        wires: Sequence[Tensor],
        roots: Sequence[Root | None],
        gradients: Sequence[Tensor | None],
    ) -> list[dict[str, Any]]:
        pairs = _pairs(roots, gradients)
        if not pairs:
            return []
        begins, come = [root for root, _ in pairs], [gradient for _, gradient in pairs]
        edges = [r if isinstance(r, GradientEdge) else get_gradient_edge(r) for r in begins]
        given = None if self.last else cast(list[Tensor], come)
        try:
            _, groups = backward_for_inputs(begins, given, wires, self._call.parameters())
        except RuntimeError as error:  # torch's words for what a stage itself has raised
            cause = error.__cause__
            raise (cause if isinstance(cause, Exception) else error) from None
        self._lost.add(edges, come, groups)
        return groups

    def backward_weights(self, number: int) -> None:
        """What `backward_inputs` has left."""
        rest = self._rest.pop(number)
        if rest is None:
            return
        with self._pass():
            if self.stage.index == 0:
                _go_back(rest.roots, rest.gradients)
            else:
                backward_for_weights(self._call.parameters(), rest.groups)

    @contextmanager
    def _pass(self) -> Iterator[None]:
        end_backward = self._backward()
        try:
            yield
        finally:
            end_backward()

    def _contiguous(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """To be sent: where nothing here depends on a wire that wants a gradient, zeros."""
        return [
            torch.zeros(meta.shape, dtype=meta.dtype, device=self._device)
            if gradient is None
            else gradient.contiguous()
            for meta, gradient in zip(self.incoming, gradients, strict=True)
            if meta.requires_grad
        ]


def _pairs(
    roots: Sequence[Root | None], gradients: Sequence[Tensor | None]
) -> list[tuple[Root, Tensor | None]]:
    return [
        (root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
        if root is not None
    ]


def _go_back(roots: Sequence[Root | None], gradients: Sequence[Tensor | None]) -> None:
    pairs = _pairs(roots, gradients)
    if pairs:
        begins: Any = [root for root, _ in pairs]
        torch.autograd.backward(begins, [gradient for _, gradient in pairs])


@dataclass
class _Parcel:
    """Tensors on their way, or to be sent: they stay until it is let go."""

    tensors: list[Tensor]
    works: list[dist.Work] = field(default_factory=list)
    """Of all that began together."""

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


class ScheduleLoop:
    """A step on the schedules of `schedule_events`; for its arguments see `TorchSchedule`."""

    def __init__(
        self,
        schedule: str,
        calls: Mapping[int, StageCaller],
        shapes: Mapping[int, StageShapes],
        micro_batches: int,
        context: RunContext,
        backward: Callable[[], Callable[[], None]],
    ) -> None:
        pp, per_rank = context.pp_size, len(calls)
        rows = schedule_events(schedule, pp, per_rank, micro_batches)
        self._events: EventRow = rows[context.pp_rank]
        members = context.ranks_of("pp")
        self._peers = [members[rank] for rank in stage_ranks(schedule, pp, per_rank)]
        self._stages = {
            index: StagePasses(call, shapes[index], context.device, backward)
            for index, call in calls.items()
        }
        self._device, self._group = context.device, context.pp_group
        self._recorder = context.recorder
        self._parcels: dict[StepEvent, _Parcel] = {}

    def step(self, arguments: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """See `TorchSchedule.step`."""
        self._parcels.clear()
        for passes in self._stages.values():
            passes.clear()
        losses: list[Tensor] = []
        try:
            for together in self._events:
                event = together[0]
                if event.kind in ("F", "I", "B", "W"):
                    losses += self._act(event, arguments)
                elif event.kind in ("WAIT_SEND_F", "WAIT_SEND_B"):
                    sent = event._replace(kind="SEND_F" if event.kind[-1] == "F" else "SEND_B")
                    self._parcels.pop(sent).wait()
                else:
                    self._begin(together)
        except StageFailure as failure:
            raise failure.error from None
        return losses

    def _act(self, event: StepEvent, arguments: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Compute; the loss, where it was the forward pass of the last stage."""
        index, kind, number = event
        passes = self._stages[index]
        if kind == "W":
            passes.backward_weights(number)
        elif kind == "F":
            wires = self._arrived(event._replace(kind="RECV_F")) if index else []
            outputs = passes.forward(number, wires, arguments[number])
            if passes.last:
                return outputs
            self._hand_on(event._replace(kind="SEND_F"), outputs)
        else:
            go_back = passes.backward if kind == "B" else passes.backward_inputs
            sent = go_back(number, self._gradients(event))
            if index:
                self._hand_on(event._replace(kind="SEND_B"), sent)
        return []

    def _gradients(self, event: StepEvent) -> list[Tensor | None]:
        """One for each output of a stage: None where none is wanted, and for the loss."""
        passes = self._stages[event.stage]
        if passes.last:
            return [None]
        received = iter(self._arrived(event._replace(kind="RECV_B")))
        return [next(received) if meta.requires_grad else None for meta in passes.outgoing]

    def _arrived(self, received: StepEvent) -> list[Tensor]:
        parcel = self._parcels.pop(received)
        parcel.wait()
        return parcel.tensors

    def _hand_on(self, sent: StepEvent, tensors: list[Tensor]) -> None:
        """To a stage on this rank, or to be sent."""
        target = sent.stage + (1 if sent.kind == "SEND_F" else -1)
        if target in self._stages:
            sent = StepEvent(
                target, "RECV_F" if sent.kind == "SEND_F" else "RECV_B", sent.micro_batch
            )
        self._parcels[sent] = _Parcel(tensors)

    def _begin(self, messages: Sequence[StepEvent]) -> None:
        """Send and receive, all of them at once."""
        works: list[dist.Work] = []
        operations: list[dist.P2POp] = []
        for message in messages:
            sends = message.kind in ("SEND_F", "SEND_B")
            tensors = self._parcels[message].tensors if sends else self._room(message)
            self._parcels[message] = _Parcel(tensors, works)
            peer = self._peers[message.stage + (1 if message.kind in ("SEND_F", "RECV_B") else -1)]
            for tensor in tensors:
                note_message(self._recorder, "send to" if sends else "receive from", peer, tensor)
            call = dist.isend if sends else dist.irecv
            operations += [dist.P2POp(call, tensor, peer, self._group) for tensor in tensors]
        if len({operation.op for operation in operations}) > 1:
            works += dist.batch_isend_irecv(operations)
            return
        # One after the other they do not wait for each other on a GPU.
        begun = [op.op(op.tensor, op.peer, op.group) for op in operations]
        works += [work for work in begun if work is not None]

    def _room(self, received: StepEvent) -> list[Tensor]:
        passes = self._stages[received.stage]
        if received.kind == "RECV_F":
            metas = list(passes.incoming)
        else:
            metas = [meta for meta in passes.outgoing if meta.requires_grad]
        return [torch.empty(m.shape, dtype=m.dtype, device=self._device) for m in metas]
