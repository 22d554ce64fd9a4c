"""The forward and backward passes of one stage, and the graphs that are saved between them.

A run and its memory forecast compute stages with this code, so they save the same tensors.
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
"""The begin of a backward pass: the loss, or the gradient edge of an output that may be freed."""


@dataclass(frozen=True)
class _Saved:
    """The inputs and the roots of a micro-batch's graph, saved for its backward pass."""

    inputs: Sequence[Tensor]
    roots: Sequence[Root | None]


@dataclass(frozen=True)
class _WeightsLeft:
    """A backward pass whose gradients of the weights are not computed yet.

    The inputs and the gradients of the outputs stay alive until then, as in torch's own stage.
    """

    inputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    roots: Sequence[Root | None] = ()
    groups: Sequence[dict[str, Any]] = ()


class StagePasses:
    """The passes of one stage.

    Args:
        worker: computes the forward pass.
        stage: one of the worker's stages.
        shapes: the inputs and outputs of the stage, as meta tensors.
    """

    def __init__(self, worker: StageWorker, stage: StageModule, shapes: StageShapes) -> None:
        self.stage = stage
        self.incoming, self.outgoing = shapes
        self._worker = worker
        # fully_shard gathers and frees parameters only around whole backward passes.
        self._splits_backward = not is_sharded(stage)
        self._missed = _MissedWeights(stage)
        self._saved: dict[int, _Saved] = {}
        self._weights_left: dict[int, _WeightsLeft | None] = {}

    @property
    def last(self) -> bool:
        """Whether this is the last stage of the model."""
        return self.stage.index == self.stage.count - 1

    @property
    def needs_input_gradients(self) -> bool:
        """Whether gradients are sent to a previous stage, because an input requires one."""
        return any(meta.requires_grad for meta in self.incoming)

    def clear(self) -> None:
        """Release the graphs that a failed step has left behind."""
        self._saved.clear()
        self._weights_left.clear()

    def forward(self, number: int, inputs: Sequence[Tensor]) -> list[Any]:
        """Compute a micro-batch, save its graph, and return the detached outputs.

        The graph is saved by the gradient edges of the outputs, so an output that was sent can be
        freed before its gradient arrives. Under `no_grad` nothing is saved.

        Args:
            number: the index of the micro-batch.
            inputs: the inputs from the previous stage.

        Returns:
            The outputs for the next stage; from the last stage the loss, or the model's output.
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
        """Run the whole backward pass of a micro-batch.

        Args:
            number: the index of the micro-batch.
            gradients: the gradient of each output; None for an output that needs no gradient, and
                for the loss.

        Returns:
            The gradients of the inputs that require a gradient, contiguous.
        """
        saved = self._saved.pop(number)
        with self._worker.backward_pass():
            _run_backward(saved.roots, gradients)
            input_gradients = [tensor.grad for tensor in saved.inputs]
            for tensor in saved.inputs:
                tensor.grad = None
            return self.contiguous_gradients(input_gradients)

    def input_backward(self, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Run the backward pass for the inputs; a sharded stage runs the whole backward pass.

        If no input requires a gradient, as in the first stage and after frozen stages, the whole
        backward pass is left to `weight_backward`. For arguments and result see `backward`.
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
        except RuntimeError as error:  # torch wraps an error that the stage has raised
            cause = error.__cause__
            raise (cause if isinstance(cause, Exception) else error) from None
        self._missed.add_gradients(edges, root_gradients, groups)
        return groups

    def weight_backward(self, number: int) -> None:
        """Run the rest of the backward pass of a micro-batch, after `input_backward`."""
        left = self._weights_left.pop(number)
        if left is None:
            return
        with self._worker.backward_pass():
            if not self.needs_input_gradients:
                _run_backward(left.roots, left.gradients)
            else:
                backward_for_weights(self.stage.parameters(), left.groups)

    def contiguous_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradients of the inputs as they are sent.

        Gradients of inputs on which no output depends are zeros. Inputs that require no gradient
        are left out.

        Args:
            gradients: the gradient of each input, or None.
        """
        return [
            torch.zeros(meta.shape, dtype=meta.dtype, device=self._worker.device)
            if gradient is None
            else gradient.contiguous()
            for meta, gradient in zip(self.incoming, gradients, strict=True)
            if meta.requires_grad
        ]


class _MissedWeights:
    """The parameters of a stage to which torch's split backward passes give no gradient.

    torch looks for parameters where their graph joins the graph of the inputs. So it misses
    parameters in a part of the graph that no input reaches.

    Args:
        stage: the stage.
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
        """Add the gradients of these parameters, after the backward pass for the inputs.

        Args:
            roots: the gradient edges of the outputs.
            gradients: the gradients of the outputs.
            groups: the groups of parameters that torch's backward pass for the inputs returned.
        """
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
    """Return every node of the autograd graph that these edges reach."""
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
