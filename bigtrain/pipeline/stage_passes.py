"""Forward and backward passes of one stage, and the graphs that are saved between them.

A run and its memory forecast compute a stage by the same code, so they save the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from bigtrain.pipeline.stage_module import StageModule, StageShapes, is_sharded
from bigtrain.pipeline.stage_worker import StageWorker
from bigtrain.versions.torch_versions import backward_for_inputs, backward_for_weights

Root = Tensor | GradientEdge
"""Where a backward pass begins: the loss, or the edge of an output that is released."""


@dataclass(frozen=True)
class _Saved:
    """The inputs and the roots of a micro-batch's graph, from its forward to its backward pass."""

    inputs: Sequence[Tensor]
    roots: Sequence[Root | None]


@dataclass(frozen=True)
class _WeightsLeft:
    """A backward pass that has reached the inputs, and not the weights.

    Inputs and gradients stay alive until the weights are done, as in torch's own stage.
    """

    inputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    roots: Sequence[Root | None] = ()
    groups: Sequence[dict[str, Any]] = ()


class StagePasses:
    """The passes of one stage.

    Args:
        worker: computes the forward pass.
        stage: one of the worker's.
        shapes: the shapes of its inputs and outputs.
    """

    def __init__(self, worker: StageWorker, stage: StageModule, shapes: StageShapes) -> None:
        self.stage = stage
        self.incoming, self.outgoing = shapes
        self._worker = worker
        # fully_shard gathers and frees parameters around whole backward passes only.
        self._splits_backward = not is_sharded(stage)
        self._missed = _MissedWeights(stage)
        self._saved: dict[int, _Saved] = {}
        self._weights_left: dict[int, _WeightsLeft | None] = {}

    @property
    def last(self) -> bool:
        """Whether it is the last stage of the model."""
        return self.stage.index == self.stage.count - 1

    @property
    def needs_input_gradients(self) -> bool:
        """Whether the stage before it, if there is one, has a backward pass."""
        return any(meta.requires_grad for meta in self.incoming)

    def clear(self) -> None:
        """Release the graphs that a failed step has left."""
        self._saved.clear()
        self._weights_left.clear()

    def forward(self, number: int, inputs: Sequence[Tensor]) -> list[Any]:
        """Compute a micro-batch; return the outputs detached from the graph, which is saved.

        The graph is saved by the edges of the outputs: an output that was sent can be released
        before its gradient arrives. Under `no_grad` nothing is saved.
        """
        needs_graph = torch.is_grad_enabled()
        for tensor, meta in zip(inputs, self.incoming, strict=True):
            tensor.requires_grad_(meta.requires_grad and needs_graph)
        output = self._worker.forward(self.stage, number, inputs)
        single = self.last or isinstance(output, Tensor)
        outputs: Sequence[Any] = (output,) if single else tuple(output)
        if not needs_graph:
            return list(outputs)
        roots: list[Root | None] = [
            (out if self.last else get_gradient_edge(out)) if out.requires_grad else None
            for out in outputs
        ]
        self._saved[number] = _Saved(inputs, roots)
        return [out.detach() for out in outputs]

    def backward(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Run the whole backward pass.

        Args:
            number: the number of the micro-batch.
            gradients: one for each output; None where it needs none, and for the loss.

        Returns:
            The gradients of the inputs that need one, contiguous.
        """
        saved = self._saved.pop(number)
        with self._worker.backward_pass():
            _run_backward(saved.roots, gradients)
            input_gradients = [tensor.grad for tensor in saved.inputs]
            for tensor in saved.inputs:
                tensor.grad = None
            return self.contiguous_gradients(input_gradients)

    def input_backward(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Run the backward pass for the inputs; a sharded stage runs the whole of it.

        See `backward` for arguments and result. If no input needs a gradient, as in the first stage
        and after frozen ones, all of the backward pass is left to `weight_backward`.
        """
        if not self._splits_backward:
            self._weights_left[number] = None
            return self.backward(number, gradients)
        saved = self._saved.pop(number)
        if not self.needs_input_gradients:
            left = _WeightsLeft(saved.inputs, gradients, roots=saved.roots)
            self._weights_left[number] = left
            return []
        with self._worker.backward_pass():
            groups = self._backward_to_inputs(saved, gradients)
            self._weights_left[number] = _WeightsLeft(saved.inputs, gradients, groups=groups)
            return self.contiguous_gradients([tensor.grad for tensor in saved.inputs])

    def _backward_to_inputs(
        self, saved: _Saved, gradients: Sequence[Tensor | None]
    ) -> list[dict[str, Any]]:
        pairs = _pairs(saved.roots, gradients)
        if not pairs:
            return []
        roots, root_gradients = [root for root, _ in pairs], [gradient for _, gradient in pairs]
        edges = [r if isinstance(r, GradientEdge) else get_gradient_edge(r) for r in roots]
        output_gradients = None if self.last else cast(list[Tensor], root_gradients)
        try:
            _, groups = backward_for_inputs(
                roots, output_gradients, saved.inputs, self.stage.parameters()
            )
        except RuntimeError as error:  # torch wraps the error that the stage itself has raised
            cause = error.__cause__
            raise (cause if isinstance(cause, Exception) else error) from None
        self._missed.add_gradients(edges, root_gradients, groups)
        return groups

    def weight_backward(self, number: int) -> None:
        """Run the part of the backward pass that `input_backward` has left."""
        left = self._weights_left.pop(number)
        if left is None:
            return
        with self._worker.backward_pass():
            if not self.needs_input_gradients:
                _run_backward(left.roots, left.gradients)
            else:
                backward_for_weights(self.stage.parameters(), left.groups)

    def contiguous_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Gradients of the inputs as they are sent; zeros where no output depends on an input."""
        return [
            torch.zeros(meta.shape, dtype=meta.dtype, device=self._worker.device)
            if gradient is None
            else gradient.contiguous()
            for meta, gradient in zip(self.incoming, gradients, strict=True)
            if meta.requires_grad
        ]


class _MissedWeights:
    """Parameters that torch's backward pass for the inputs, and so that for the weights, misses.

    torch looks for parameters where the graph of the inputs joins theirs: it misses those on a part
    of the graph that no input reaches.

    Args:
        stage: whose parameters they are.
    """

    def __init__(self, stage: StageModule) -> None:
        self._stage = stage
        self._missed: list[nn.Parameter] | None = None

    def add_gradients(
        self,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor | None],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Add their gradients after the backward pass for the inputs, which has found `groups`."""
        if self._missed is None:
            covered = set().union(*(group["params"] for group in groups))
            reached = _nodes(roots)
            trained = (p for p in self._stage.parameters() if p.requires_grad)
            nodes = {get_gradient_edge(p).node: p for p in trained}
            self._missed = [
                p for node, p in nodes.items() if node in reached and node not in covered
            ]
        if not self._missed:
            return
        added = torch.autograd.grad(
            cast(Any, roots), self._missed, gradients, retain_graph=True, allow_unused=True
        )
        for parameter, gradient in zip(self._missed, added, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _nodes(roots: Sequence[GradientEdge]) -> set[Node]:
    """Every node of the graph behind these edges."""
    visited: set[Node] = set()
    pending = [edge.node for edge in roots]
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        pending.extend(following for following, _ in node.next_functions if following is not None)
    return visited


def _pairs(
    roots: Sequence[Root | None], gradients: Sequence[Tensor | None]
) -> list[tuple[Root, Tensor | None]]:
    return [
        (root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
        if root is not None
    ]


def _run_backward(roots: Sequence[Root | None], gradients: Sequence[Tensor | None]) -> None:
    pairs = _pairs(roots, gradients)
    if pairs:
        torch.autograd.backward(
            cast(Any, [root for root, _ in pairs]), [gradient for _, gradient in pairs]
        )
