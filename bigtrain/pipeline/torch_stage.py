"""One stage of a pipeline as torch's schedules run it, and what they get wrong put right.

Facts of torch 2.15 (`torch.distributed.pipelining`) that this answers; earlier versions are not
asked, see `schedule_loop`:

* An error in a stage is wrapped in a long one, and the schedule waits for its open sends before
  it lets it go, while the peer may wait for this rank. `StageFailure` is no Exception: it passes.
* For an FSDP module torch keeps parameters whole from the first forward pass to the end of the
  step, and gradients whole and unreduced, too: what sharding is to save. Here the stage is inside
  a plain module, so each micro-batch gathers and reduces for itself, as without a pipeline.
* Before a schedule's first step torch clears the gradients inside FSDP modules, as if it had made
  them itself to learn the shapes: those of the schedule before, in a step of several.
* The backward pass for the inputs alone leaves out parameters whose part of the graph no input
  reaches, and may give gradients that are not contiguous, which gloo does not send.
* Outputs that go to a stage on the same rank stay alive until the backward pass, and are then
  detached in place, which a view refuses; the gradient's edge is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from bigtrain.data.loader import MicroBatch
from bigtrain.ranks.context import RunContext
from bigtrain.schedules.orders import TORCH_SCHEDULES


class StageModule(Protocol):
    """A module that is one stage of a model: its own parameters under the model's plain names.

    A parameter that several stages of one rank share is one object in all of them.
    """

    index: int
    """Which stage, from 0."""
    count: int
    """Stages in all."""
    training: bool

    def __call__(
        self,
        *wires: Tensor,
        micro_batch: MicroBatch,
        scale: float | None = None,
        final: bool = True,
    ) -> Any:
        """Compute this stage's part: the wires for the next one, contiguous tensors.

        The last stage gives the summed loss times `scale`, or without a scale the model's output.
        `final` is said of the last micro-batch of a step.
        """

    def incoming(self, micro_batch: MicroBatch) -> Sequence[Tensor]:
        """The wires that come in, on the meta device: shape, type, whether gradients go back."""

    def outgoing(self, micro_batch: MicroBatch) -> Sequence[Tensor]:
        """The wires that go out, likewise; not asked of the last stage."""

    def train(self, mode: bool = True) -> Any:  # noqa: FBT001, FBT002 - as nn.Module has it
        """See `nn.Module.train`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """See `nn.Module.parameters`."""

    def named_parameters(
        self, *, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """See `nn.Module.named_parameters`."""

    def buffers(self) -> Iterator[Tensor]:
        """See `nn.Module.buffers`."""

    def modules(self) -> Iterator[nn.Module]:
        """See `nn.Module.modules`."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """See `nn.Module.state_dict`."""


StageShapes = tuple[Sequence[Tensor], Sequence[Tensor]]
"""The wires that come into a stage and go out of it, on the meta device."""
_CLASSES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", **TORCH_SCHEDULES}


class StageFailure(BaseException):
    """An error of a stage on its way through torch's schedule."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


ComputeFn = Callable[..., Any]
"""A stage's forward pass with all that is around it: (stage, wires, micro_batch, scale, final)."""


class StageCaller(nn.Module):
    """A stage as the schedule calls it: the runner's surroundings, and errors as they are."""

    def __init__(self, stage: StageModule, compute: ComputeFn) -> None:
        super().__init__()
        self.stage = cast(nn.Module, stage)
        self._compute = compute

    def forward(self, *wires: Tensor, micro_batch: MicroBatch, scale: float, final: bool) -> Any:
        """Compute the stage's part."""
        try:
            return self._compute(self.stage, wires, micro_batch, scale, final)
        except Exception as error:
            raise StageFailure(error) from error


def is_sharded(stage: StageModule) -> bool:
    """Whether `fully_shard` has a hand in the stage: its ranks exchange in each pass."""
    return any(isinstance(module, FSDPModule) for module in stage.modules())


class LostGradients:
    """Gives gradients to the parameters that torch's search from the inputs has not found.

    Args:
        module: the stage.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._lost: list[nn.Parameter] | None = None

    def add(
        self,
        roots: Sequence[GradientEdge],
        output_gradients: Sequence[Tensor | None],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Add them after the backward pass for the inputs, which has found `groups`."""
        if self._lost is None:
            covered = set().union(*(group["params"] for group in groups))
            reached = _nodes(roots)
            nodes = {_node(p): p for p in self._module.parameters() if p.requires_grad}
            self._lost = [p for node, p in nodes.items() if node in reached and node not in covered]
        if not self._lost:
            return
        added = torch.autograd.grad(
            cast(Any, roots), self._lost, output_gradients, retain_graph=True, allow_unused=True
        )
        for parameter, gradient in zip(self._lost, added, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class FixedShapeStage(PipelineStage):
    """torch's stage with fixed shapes: nothing is sent but wires and their gradients.

    Args:
        call: the stage.
        incoming: meta tensors of the wires that come in.
        outgoing: meta tensors of the wires that go out; any one tensor for the last stage.
        device: where it computes.
        group: the ranks of the pipeline.
        backward: entered before each backward pass, and what it returns called after it.
    """

    def __init__(
        self,
        call: StageCaller,
        incoming: Sequence[Tensor],
        outgoing: Sequence[Tensor],
        device: torch.device,
        group: dist.ProcessGroup | None,
        backward: Callable[[], Callable[[], None]],
    ) -> None:
        stage = cast(StageModule, call.stage)
        super().__init__(
            call,
            stage.index,
            stage.count,
            device,
            input_args=tuple(incoming),
            output_args=tuple(outgoing),
            group=group,
        )
        self._backward = backward
        # fully_shard frees and fills parameters around whole backward passes only.
        self._splits = not is_sharded(stage)
        self._done: set[int] = set()
        self._lost = LostGradients(call)

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was inferred: the shapes are given, and the gradients are the step's."""

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,  # noqa: FBT001, FBT002 - torch's own
        last_backward: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """See `_PipelineStageBase.backward_one_chunk`."""
        own: Any = self
        state = own._forward_chunk_states[bwd_chunk_id]
        for place, releasable in enumerate(state.releasable):
            if releasable:
                state.live_outputs[place] = None
        del state
        if not full_backward and not self._splits:
            self._done.add(bwd_chunk_id)
            full_backward = True
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:  # noqa: FBT001, FBT002
        """See `_PipelineStageBase.backward_weight_one_chunk`."""
        if bwd_chunk_id in self._done:
            self._done.remove(bwd_chunk_id)
            return
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(
        self,
        backward_type: str,
        bwd_kwargs: dict[str, Any],
        last_backward: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run (a part of) the backward pass of one micro-batch."""
        end_backward = self._backward()
        try:
            if backward_type == "weight":
                return super().backward_maybe_with_nosync(
                    backward_type, bwd_kwargs, last_backward=last_backward
                )
            roots, output_gradients = _roots(bwd_kwargs)
            if not roots:  # nothing here has a part in the loss
                return (None,) * len(bwd_kwargs["input_values"]), []
            gradients, groups = super().backward_maybe_with_nosync(
                backward_type, bwd_kwargs, last_backward=last_backward
            )
            if groups is not None:
                self._lost.add(roots, output_gradients, groups)
            return tuple(g if g is None else g.contiguous() for g in gradients), groups
        except Exception as error:
            cause = error.__cause__
            raise StageFailure(cause if isinstance(cause, Exception) else error) from error
        finally:
            end_backward()


def _roots(bwd_kwargs: dict[str, Any]) -> tuple[list[GradientEdge], list[Tensor | None]]:
    """Where a backward pass begins, and the gradients there; None is 1 (the loss)."""
    outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    roots: list[GradientEdge] = []
    output_gradients: list[Tensor | None] = []
    for position, output in enumerate(outputs):
        if isinstance(output, Tensor) and output.requires_grad:
            roots.append(get_gradient_edge(output))
        elif isinstance(output, GradientEdge):
            roots.append(output)
        else:
            continue
        output_gradients.append(None if gradients is None else gradients[position])
    return roots, output_gradients


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


def _node(parameter: nn.Parameter) -> Node:
    return get_gradient_edge(parameter).node


class TorchSchedule:
    """A step on torch's own schedule. Its first one is collective.

    Args:
        schedule: not `naive`.
        calls: this rank's stages, in order.
        shapes: of each of them.
        micro_batches: of a step.
        context: this rank, and the pp group.
        backward: see `FixedShapeStage`.
    """

    def __init__(
        self,
        schedule: str,
        calls: Mapping[int, StageCaller],
        shapes: Mapping[int, StageShapes],
        micro_batches: int,
        context: RunContext,
        backward: Callable[[], Callable[[], None]],
    ) -> None:
        self._micro_batches = micro_batches
        stages = []
        for index, call in calls.items():
            incoming, outgoing = shapes[index]
            if index == cast(StageModule, call.stage).count - 1:
                outgoing = (torch.empty((), device="meta"),)  # goes nowhere
            group = context.pp_group
            stages.append(
                FixedShapeStage(call, incoming, outgoing, context.device, group, backward)
            )
        make = getattr(torch_schedules, _CLASSES[schedule])
        self._schedule = make(
            stages if schedule in TORCH_SCHEDULES else stages[0],
            micro_batches,
            loss_fn=lambda output, _target: output,
            scale_grads=False,
        )

    def step(self, arguments: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Run a step.

        Args:
            arguments: of each micro-batch, beside its wires, for all of the stages.

        Returns:
            What the last stage has given, on its rank.
        """
        losses: list[Tensor] = []
        try:
            self._schedule.step(
                arg_mbs=[()] * self._micro_batches,
                kwarg_mbs=list(arguments),
                target_mbs=[None] * self._micro_batches,
                losses=losses,
                return_outputs=False,
            )
        except StageFailure as failure:
            raise failure.error from None
        return [loss.detach() for loss in losses]
