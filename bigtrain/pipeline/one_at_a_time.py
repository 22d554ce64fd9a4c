"""One micro-batch at a time through all stages: naive model parallelism, and what is left over.

Each rank does its part of one order that all ranks share, so nobody waits for what comes later.
Sends are left open until the next one: the ranks of a pipeline overlap where the order lets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bigtrain.ranks.context import RunContext
from bigtrain.recorder.exchanges import note_message


class StageTransport:
    """Sends wires between the stages of a pipeline.

    Args:
        context: this rank, and the pp group.
        ranks: for each stage its pp rank.
    """

    def __init__(self, context: RunContext, ranks: Sequence[int]) -> None:
        self._device, self._group = context.device, context.pp_group
        members = context.ranks_of("pp")
        self._peers = [members[rank] for rank in ranks]
        self._here, self._recorder = context.rank, context.recorder
        self._open: list[tuple[dist.Work | None, Tensor]] = []
        self._local: dict[tuple[int, int], list[Tensor]] = {}

    def send(self, tensors: Sequence[Tensor], source: int, target: int) -> None:
        """Send tensors from a stage of this rank to a neighbour, which may be here, too."""
        if self._peers[target] == self._here:
            self._local[source, target] = [tensor.detach() for tensor in tensors]
            return
        self.wait_sends()
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            note_message(self._recorder, "send to", self._peers[target], sent)
            work = dist.isend(sent, dst=self._peers[target], group=self._group)
            self._open.append((work, sent))

    def receive(self, metas: Sequence[Tensor], source: int, target: int) -> list[Tensor]:
        """Receive tensors of these shapes and types from a neighbour."""
        if self._peers[source] == self._here:
            return self._local.pop((source, target))
        received = [
            torch.empty(meta.shape, dtype=meta.dtype, device=self._device) for meta in metas
        ]
        peer = self._peers[source]
        for tensor in received:
            note_message(self._recorder, "receive from", peer, tensor)
        for work in [dist.irecv(tensor, src=peer, group=self._group) for tensor in received]:
            if work is not None:
                work.wait()
        return received

    def wait_sends(self) -> None:
        """Wait until everything that was sent has arrived."""
        for work, _ in self._open:
            if work is not None:
                work.wait()
        self._open.clear()


def forward_through(
    relay: StageTransport,
    stages: Mapping[int, Any],
    shapes: Mapping[int, tuple[Sequence[Tensor], Sequence[Tensor]]],
    compute: Callable[[Any, Sequence[Tensor]], Any],
    *,
    keep: Callable[[int, Sequence[Tensor], Sequence[GradientEdge | None]], None] | None = None,
) -> Any:
    """One micro-batch forward through this rank's stages.

    Args:
        relay: to the neighbours.
        stages: this rank's, by number.
        shapes: for each of these stages the wires that come in and go out, on the meta device.
        compute: (stage, wires) -> wires, or what the last stage gives.
        keep: told (number, wires in, the graph's edges out) of each stage.

    Returns:
        What the last stage gives, None on the other ranks.
    """
    result = None
    for index in sorted(stages):
        stage = stages[index]
        inputs = relay.receive(shapes[index][0], index - 1, index) if index else []
        for wire, meta in zip(inputs, shapes[index][0], strict=True):
            wire.requires_grad_(meta.requires_grad and torch.is_grad_enabled())
        output = compute(stage, inputs)
        last = index == stage.count - 1
        outputs = (output,) if last or isinstance(output, Tensor) else tuple(output)
        if keep is not None:
            # What is sent on is let go; its edge is enough to come back.
            roots = [get_gradient_edge(out) if out.requires_grad else None for out in outputs]
            keep(index, inputs, roots)
        if last:
            result = output
        else:
            relay.send(outputs, index, index + 1)
    return result


def backward_through(
    relay: StageTransport,
    count: int,
    kept_graphs: dict[int, tuple[Sequence[Tensor], Sequence[GradientEdge | None]]],
    shapes: Mapping[int, tuple[Sequence[Tensor], Sequence[Tensor]]],
    backward: Callable[[], Callable[[], None]],
) -> None:
    """The backward pass of the micro-batch that went forward through `forward_through`.

    Args:
        relay: to the neighbours.
        count: stages in all.
        kept_graphs: for each stage of this rank the wires in and the edges out; emptied.
        shapes: as there.
        backward: entered before a stage's backward pass, what it returns is called after it.
    """
    for index in sorted(kept_graphs, reverse=True):
        wires, roots = kept_graphs.pop(index)
        incoming, outgoing = shapes[index]
        output_gradients: list[Tensor | None] = [None]
        if index < count - 1:
            awaited = [meta for meta in outgoing if meta.requires_grad]
            received = iter(relay.receive(awaited, index + 1, index))
            output_gradients = [next(received) if meta.requires_grad else None for meta in outgoing]
            # Who sends a gradient has what it is the gradient of.
            if awaited:
                relay.wait_sends()
        pairs = [
            (edge, g) for edge, g in zip(roots, output_gradients, strict=True) if edge is not None
        ]
        end_backward = backward()
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [g for _, g in pairs])
        end_backward()
        del roots, pairs, output_gradients
        if index:
            trained_inputs = [
                w for w, meta in zip(wires, incoming, strict=True) if meta.requires_grad
            ]
            input_gradients = [
                torch.zeros_like(w) if w.grad is None else w.grad for w in trained_inputs
            ]
            relay.send(input_gradients, index, index - 1)
