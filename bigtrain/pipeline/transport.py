"""Messages between the stages of a pipeline: boundary tensors and their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from bigtrain.ranks.context import RunContext
from bigtrain.recorder.exchanges import note_message
from bigtrain.schedules.events import StepEvent


@dataclass
class _Message:
    """Tensors that are being sent or received, or that will be sent."""

    tensors: list[Tensor]
    works: list[dist.Work] = field(default_factory=list)
    """The handles of all messages that began together with this message."""

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


class StageTransport:
    """Sends and receives boundary tensors and gradients of this rank's stages.

    A message is identified by its event: stage, kind and micro-batch. The tensors of a message
    between two stages of this rank are passed on without a copy.

    Args:
        context: this rank, and the pp group.
        ranks: the pp rank of each stage.
    """

    def __init__(self, context: RunContext, ranks: Sequence[int]) -> None:
        members = context.ranks_of("pp")
        self._peers = [members[rank] for rank in ranks]
        self._rank, self._recorder = context.rank, context.recorder
        self._device, self._group = context.device, context.pp_group
        self._messages: dict[StepEvent, _Message] = {}

    def clear(self) -> None:
        """Release the messages that a failed step has left behind."""
        self._messages.clear()

    def post(self, send: StepEvent, tensors: list[Tensor]) -> None:
        """Set the tensors of a send, which `begin` starts.

        If the receiver is a stage of this rank, it gets the tensors without `begin`. If an earlier
        send with the same event is open, this call first waits for that send.

        Args:
            send: the event of the send.
            tensors: the tensors.
        """
        target = send.stage + (1 if send.kind == "SEND_F" else -1)
        if self._peers[target] == self._rank:
            receive = StepEvent(
                target, "RECV_F" if send.kind == "SEND_F" else "RECV_B", send.micro_batch
            )
            self._messages[receive] = _Message(tensors)
            return
        if send in self._messages:
            self.wait(send)
        self._messages[send] = _Message(tensors)

    def begin(
        self, messages: Sequence[StepEvent], received: Mapping[StepEvent, Sequence[Tensor]]
    ) -> None:
        """Begin sends and receives together.

        Args:
            messages: the events of sends that were posted, and of receives.
            received: the tensors of each receive, as meta tensors. Memory for them is allocated
                here.
        """
        works: list[dist.Work] = []
        operations: list[dist.P2POp] = []
        for message in messages:
            sends = message.kind in ("SEND_F", "SEND_B")
            tensors = (
                self._messages[message].tensors
                if sends
                else [
                    torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
                    for meta in received[message]
                ]
            )
            self._messages[message] = _Message(tensors, works)
            peer = self._peers[message.stage + (1 if message.kind in ("SEND_F", "RECV_B") else -1)]
            for tensor in tensors:
                note_message(self._recorder, "send to" if sends else "receive from", peer, tensor)
            call = dist.isend if sends else dist.irecv
            operations += [dist.P2POp(call, tensor, peer, self._group) for tensor in tensors]
        if len({operation.op for operation in operations}) > 1:
            works += dist.batch_isend_irecv(operations)
            return
        # Messages of one direction begin one by one: so they do not wait for each other on a GPU.
        begun = [op.op(op.tensor, op.peer, op.group) for op in operations]
        works += [work for work in begun if work is not None]

    def take(self, receive: StepEvent) -> list[Tensor]:
        """Wait for a receive and return its tensors."""
        message = self._messages.pop(receive)
        message.wait()
        return message.tensors

    def wait(self, send: StepEvent) -> None:
        """Wait until a send is complete, and release its tensors."""
        self._messages.pop(send).wait()

    def wait_sends(self) -> None:
        """Wait until every send that has begun is complete, and release all messages."""
        for message in self._messages.values():
            message.wait()
        self._messages.clear()
