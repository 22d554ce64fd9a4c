"""Loops on fake tensors that differ from the plain loop: over one stage, or with a split backward.

A zero-bubble schedule splits the backward pass into an input backward and a weight backward. The
autograd graph of layers with weights, their saved tensors and the gradients of their outputs stay
alive from the input backward to the weight backward. So both parts are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from bigtrain.core.loop import LoopRunner
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import BoundaryBytes, CrossingBytes, Profile, TiedBytes
from bigtrain.cutting.cut import Cut
from bigtrain.cutting.layout import Layout
from bigtrain.cutting.stage import Stage
from bigtrain.cutting.stage_program import StageProgram
from bigtrain.cutting.traced_model import CallSite
from bigtrain.data.loader import MicroBatch
from bigtrain.devices import tracing_device
from bigtrain.losses.loss import Loss
from bigtrain.memory.timeline import Timeline
from bigtrain.memory.tracker import StorageTracker
from bigtrain.pipeline.stage_module import StageShapes
from bigtrain.pipeline.stage_passes import StagePasses
from bigtrain.pipeline.stage_worker import StageWorker
from bigtrain.prediction.profile_model import make_profile
from bigtrain.prediction.record import (
    FakeRun,
    profile_from_run,
    record_steps,
)
from bigtrain.prediction.whole_model import TakeStep, WholeModel
from bigtrain.schedules.orders import TORCH_SCHEDULES
from bigtrain.versions.torch_versions import backward_for_inputs, backward_for_weights

_NO_LOSS = torch.zeros(())


def profile_stage(workload: Workload, resolved: ResolvedPlan, index: int) -> Profile:
    """Run two optimizer steps of a stage on fake tensors, the second one of two micro-batches.

    Args:
        workload: a workload with an example.
        resolved: the plan, with a layout.
        index: the index of the stage.

    Returns:
        The profile of the stage. Its timelines contain the stage's inputs and the gradients of its
        outputs, which other stages make.

    Raises:
        ValueError: the plan does not cut the model.
        Exception: any exception that the model's code raises on tensors without values.
    """
    run, recorded = _record_stage(workload, resolved, index, splits_backward=False)
    profile, passes = profile_from_run(run, resolved.plan), {}
    if run.later is not None:
        passes = {"first_last": run.later.window(0), "later_last": run.later.window(1)}
    rest = profile.outside_blocks
    if rest is not None:  # the first micro-batch of the second step
        rest = replace(rest, backward=(rest.backward[0], recorded.loop.backward_ends[1]))
    return replace(
        profile,
        passes={**profile.passes, **passes},
        outside_blocks=rest,
        boundary=_boundary(recorded.boundary_bytes(), recorded.loop),
        crossing=_crossing(recorded, resolved, index),
        tensors=tuple(
            (name, parameter.nbytes, str(parameter.dtype))
            for name, parameter in recorded.stage.named_parameters()
            if parameter.requires_grad
        ),
        frozen_tensors=tuple(
            (name, parameter.nbytes)
            for name, parameter in recorded.stage.named_parameters()
            if not parameter.requires_grad
        ),
    )


def profile_joined_stages(workload: Workload, resolved: ResolvedPlan, layout: Layout) -> Profile:
    """Run two optimizer steps of all stages of one process as one stage, on fake tensors.

    The code between the modules runs as it was traced for the stages. It may differ from the code
    of the whole model. For example, a traced transformers model makes an attention mask, so its
    layers repeat keys and values.

    Args:
        workload: a workload with an example.
        resolved: the plan, with a layout.
        layout: the layout of the plan.

    Returns:
        The profile of all stages, or that of the whole model if the stages cannot run as one.
    """
    chosen = layout.chosen
    traced: Any = _JoinedModel(chosen.cut)
    owners: dict[str, tuple[int, ...]] = dict.fromkeys(chosen.cut.owners, (0,))
    cut = replace(chosen.cut, call_sites=(), owners=owners, traced_model=traced)
    joined = replace(layout, chosen=replace(chosen, cut=cut), ranks=(0,))
    try:
        return profile_stage(workload, replace(resolved, layout=joined), 0)
    except Exception:  # noqa: BLE001 - user code of any kind runs here
        return make_profile(workload, resolved)


class _JoinedModel:
    """The traced model of a cut, whose program runs all stages as one.

    Args:
        cut: the cut.
    """

    def __init__(self, cut: Cut) -> None:
        self._cut = cut

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cut.traced_model, name)

    def program(
        self, micro_batch: MicroBatch, *, training: bool, places: Sequence[CallSite]
    ) -> StageProgram:
        """See `TracedModel.program`."""
        del places
        cut = self._cut
        program = cut.traced_model.program(micro_batch, training=training, places=cut.call_sites)
        return replace(program, cuts=(), boundaries=(), used=dict.fromkeys(program.used, (0,)))


def add_input_weight_passes(
    profile: Profile, workload: Workload, resolved: ResolvedPlan, index: int
) -> Profile:
    """Return a stage's profile with passes whose backward is split into input and weight backward.

    Args:
        profile: the result of `profile_stage`.
        workload: see `profile_stage`.
        resolved: see `profile_stage`.
        index: see `profile_stage`.

    Raises:
        Exception: see `profile_stage`.
    """
    run, recorded = _record_stage(workload, resolved, index, splits_backward=True)
    begins = recorded.loop.weights_begin[1:3]  # the first is that of the first step
    first, later = (_with_weight_phase(run.window(n), begin) for n, begin in enumerate(begins))
    return replace(
        profile,
        passes={**profile.passes, "first_split": first, "later_split": later},
        # In a split backward pass autograd chooses the strides of the inputs' gradients. In a whole
        # backward pass the gradients have the inputs' strides. So the two passes copy different
        # gradients to make them contiguous.
        boundary=_boundary(profile.boundary, recorded.loop),
    )


def _record_stage(
    workload: Workload, resolved: ResolvedPlan, index: int, *, splits_backward: bool
) -> tuple[FakeRun, _OneStage]:
    subject = _OneStage(resolved, index, splits_backward=splits_backward)
    device = tracing_device(resolved.plan.device_type)
    return record_steps(workload, resolved, device, subject), subject


class _OneStage(WholeModel):
    """Records one stage of a cut model."""

    stage: Stage
    program: StageProgram
    loop: StageLoop

    def __init__(self, resolved: ResolvedPlan, index: int, *, splits_backward: bool) -> None:
        layout, traits = resolved.layout, resolved.plan.cut
        if layout is None or traits is None:
            raise ValueError("the model is not cut")
        self._layout, self._cut, self._index = layout, layout.chosen.cut, index
        self._splits_backward = splits_backward
        following = layout.ranks[index + 1 : index + 2]
        is_sent = traits.is_distributed and any(rank != layout.ranks[index] for rank in following)
        # torch's schedules wait for the send of an output after the backward pass of its
        # micro-batch, so the output stays alive until then.
        self._keeps_outputs = is_sent and traits.schedule in TORCH_SCHEDULES

    def placed(self, micro_batch: MicroBatch, plan: Plan) -> MicroBatch:
        """Return the micro-batch in the precision of the run; see `WholeModel.placed`."""
        if plan.precision == "fp64":
            micro_batch = micro_batch.double()
        cut, real = self._cut, replace(micro_batch, count=max(1, micro_batch.count))
        # Tracing the program enters a fake mode, so it comes before the recording enters one.
        self.program = cut.traced_model.program(real, training=True, places=cut.call_sites)
        return real

    def root(self, fake: nn.Module, loss: Loss, plan: Plan, device: torch.device) -> nn.Module:
        """Strip the fake model to the stage and return the stage; see `WholeModel.root`."""
        self._cut.strip(fake, [self._index], device)
        self.stage = self._cut.stage(fake, self._index, loss, device)
        if plan.cut is not None:
            self.stage.recompute = plan.cut.recompute
        return self.stage

    def runner(self, assembly: Assembly, tracker: StorageTracker) -> LoopRunner:
        """See `WholeModel.runner`."""
        group = None if assembly.slices is None else assembly.slices.group
        self.stage.crossings = self._layout.crossings(self._index, group)
        self.loop = StageLoop(
            assembly,
            self.stage,
            tracker,
            splits_backward=self._splits_backward,
            keeps_outputs=self._keeps_outputs,
        )
        return self.loop

    def boundary_bytes(self) -> BoundaryBytes:
        """Return the bytes of the stage's inputs and outputs and their gradients, from shapes."""
        inputs, outputs = (self.stage.boundary_metas(self.program, side) for side in (0, 1))
        return BoundaryBytes(
            incoming=_nbytes(inputs),
            incoming_gradients=_nbytes([t for t in inputs if t.requires_grad]),
            outgoing=_nbytes(outputs),
            outgoing_gradients=_nbytes([t for t in outputs if t.requires_grad]),
            gathered=self.stage.gathered_bytes(self.program),
        )

    def steps(
        self, runner: LoopRunner, batches: Sequence[MicroBatch], step: TakeStep
    ) -> list[tuple[int, ...]]:
        """Take all steps; see `WholeModel.steps`.

        If a stage recomputes all micro-batches but the last, one more step is recorded in which
        every micro-batch runs as the last one does.
        """
        marks = super().steps(runner, batches, step)
        if self.stage.recompute == "except_last":
            self.loop.final = True
            marks.append(step(runner, [*batches, *batches]))
        return marks


class StageLoop(LoopRunner):
    """The plain loop over one stage, with made-up inputs and gradients of its outputs.

    Args:
        assembly: an assembly whose module is the stage.
        stage: the stage.
        tracker: the tracker of the storages.
        splits_backward: whether the backward pass runs in two parts, inputs and weights.
        keeps_outputs: whether outputs stay alive until their gradients have been used, as in
            torch's schedules, which wait for a send after the same micro-batch's backward pass.
    """

    def __init__(
        self,
        assembly: Assembly,
        stage: Stage,
        tracker: StorageTracker,
        *,
        splits_backward: bool,
        keeps_outputs: bool,
    ) -> None:
        super().__init__(assembly)
        self._stage, self._tracker = stage, tracker
        self._splits_backward, self._keeps_outputs = splits_backward, keeps_outputs
        self._worker = StageWorker(self, {stage.index: stage})
        self.final = False
        """Whether each micro-batch runs as the last one of a step does."""
        self.only_sent = 0
        """Bytes of the outputs that nothing but their send keeps alive after the forward pass."""
        self.input_gradient_bytes = 0
        """Bytes of the inputs' gradients that are sent. A storage of several inputs counts once."""
        self.copied_gradient_bytes = 0
        """Bytes of the inputs' gradients that were copied because they were not contiguous."""
        self.weights_begin: list[int] = []
        """For each micro-batch the tick at which the backward pass for the weights begins. Empty
        if the backward pass is not split."""
        self.backward_ends: list[int] = []
        """For each micro-batch the last tick of its whole backward pass. After it the stage copies
        gradients that are sent, and frees its outputs and what it received."""

    def run_micro_batch(
        self, micro_batch: MicroBatch, scale: float, *, check: bool = False
    ) -> Tensor:
        """Run a micro-batch; see `LoopRunner.run_micro_batch`.

        Returns:
            Zero, because a loss on fake tensors has no value.
        """
        del check
        self.meter.phase("forward")
        self._worker.begin([micro_batch], scale, final=self.final)
        shapes = self._shapes(micro_batch)
        passes = _MeasuredPasses(self._worker, self._stage, shapes, self._tracker)
        outputs = passes.forward(0, [self._received(meta) for meta in passes.incoming])
        sent = _storages(outputs)
        if not self._keeps_outputs:
            outputs.clear()
        self.only_sent = sum(size for key, size in sent.items() if not self._tracker.lives(key))
        self.meter.phase("backward")
        gradients = [
            self._received(meta) if meta.requires_grad else None for meta in passes.outgoing
        ]
        if self._stage.last:
            gradients = [None]
        if not self._splits_backward:
            passes.backward(0, gradients)
            self.backward_ends.append(passes.ended)
        else:
            if not passes.needs_input_gradients:  # then the weight backward is the whole pass
                outputs.clear()
            passes.input_backward(0, gradients)
            outputs.clear()
            self.weights_begin.append(self._tracker.mark())
            passes.weight_backward(0)
        self.input_gradient_bytes = passes.sent_bytes
        self.copied_gradient_bytes = passes.copied_bytes
        return _NO_LOSS

    def _shapes(self, micro_batch: MicroBatch) -> StageShapes:
        return self._worker.shapes(micro_batch)[self._stage.index]

    def _received(self, meta: Tensor) -> Tensor:
        return torch.empty(meta.shape, dtype=meta.dtype, device=self._stage.device)


class _MeasuredPasses(StagePasses):
    """The passes of a stage. They measure the bytes of the gradients that the stage sends."""

    sent_bytes = copied_bytes = 0
    ended = 0
    """The tick at which autograd has returned."""

    def __init__(
        self, worker: StageWorker, stage: Stage, shapes: StageShapes, tracker: StorageTracker
    ) -> None:
        super().__init__(worker, stage, shapes)
        self._tracker = tracker

    def contiguous_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        self.ended = self._tracker.clock
        contiguous = super().contiguous_gradients(gradients)
        computed = _storages([gradient for gradient in gradients if gradient is not None])
        sent = _storages(contiguous)
        self.sent_bytes = sum(sent.values())
        self.copied_bytes = sum(size for key, size in sent.items() if key not in computed)
        return contiguous


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def _boundary(boundary: BoundaryBytes, loop: StageLoop) -> BoundaryBytes:
    """Return the boundary's bytes with three figures from a run of the stage on fake tensors.

    They are the outputs that are only sent, the gradients of the inputs, and the copied part of
    these gradients.
    """
    return replace(
        boundary,
        outgoing=loop.only_sent,
        incoming_gradients=loop.input_gradient_bytes,
        incoming_copied=loop.copied_gradient_bytes,
    )


def _with_weight_phase(timeline: Timeline, at: int) -> Timeline:
    """Add a second backward phase, the weight backward, that begins at a tick."""
    return replace(timeline, phases=(*timeline.phases, (at, "backward")))


def _crossing(recorded: _OneStage, resolved: ResolvedPlan, index: int) -> CrossingBytes:
    """Return the bytes that a stage's rank exchanges with other pp ranks for the stage."""
    layout = resolved.layout
    if layout is None or not resolved.plan.pp > 1:
        return CrossingBytes()
    own_rank, boundary = layout.ranks[index], recorded.boundary_bytes()
    before, after = layout.between_ranks(index)
    tied: list[TiedBytes] = []
    trained = {n: p for n, p in recorded.stage.named_parameters() if p.requires_grad}
    for name, stages in layout.chosen.cut.ties:
        owners = {layout.ranks[stage] for stage in stages}
        first_here = min((s for s in stages if layout.ranks[s] == own_rank), default=None)
        if first_here == index and name in trained and len(owners) > 1:
            parameter = trained[name]
            nbytes = resolved.plan.gradient_bytes(parameter.nbytes, parameter.numel())
            tied.append(TiedBytes.of(parameter.shape, nbytes, len(owners) - 1))
    return CrossingBytes(
        sent=after * boundary.outgoing + before * boundary.incoming_gradients,
        received=before * boundary.incoming + after * boundary.outgoing_gradients,
        tied=tuple(tied),
    )


class InputThenWeightBackward(WholeModel):
    """Records a whole model whose backward pass is split into input backward and weight backward.

    Args:
        names: the names of the blocks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.first_inputs: list[Tensor] = []
        """The first block's inputs in this micro-batch, detached from the earlier graph."""
        self.starts: list[int] = []
        """For each micro-batch the tick at which the backward pass for the weights begins."""
        self.done: list[tuple[int, str]] = []
        """The (tick, block) at which a block's weight backward ends. The block is "" for weights
        outside of all blocks."""

    def runner(self, assembly: Assembly, tracker: StorageTracker) -> LoopRunner:
        """Return the plain loop with a split backward pass."""
        self._tracker = tracker
        return _InputThenWeightLoop(assembly, self)

    def root(self, fake: nn.Module, loss: Loss, plan: Plan, device: torch.device) -> nn.Module:
        """Return the whole model; see `WholeModel.root`.

        A hook detaches the first block's inputs before all other hooks run.
        """
        for name in self._names:
            block = fake.get_submodule(name)
            block.register_forward_pre_hook(self._detach_inputs, with_kwargs=True)
        return super().root(fake, loss, plan, device)

    def _detach_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.first_inputs:
            return None
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        trained = [t for t in leaves if t.requires_grad]
        ids = {id(t) for t in trained or [t for t in leaves if t.is_floating_point()]}

        def cut(leaf: Any) -> Any:
            if id(leaf) not in ids:
                return leaf
            first_input = leaf.detach().requires_grad_()
            self.first_inputs.append(first_input)
            return first_input

        return tree_map(cut, (args, kwargs))

    def backward(self, loss: Tensor, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Run the backward pass in two parts: for the inputs, then for the weights.

        Weights outside of all blocks come last, so that their autograd graph lives longest.

        Args:
            loss: the loss of the micro-batch.
            named: the trained parameters with their names.
        """
        parameters = [parameter for _, parameter in named]
        first_inputs, self.first_inputs = self.first_inputs, []
        _, groups = backward_for_inputs([loss], None, first_inputs, iter(parameters))
        owners = {get_gradient_edge(p).node: self._block(name) for name, p in named}
        by_node = dict(zip(owners, parameters, strict=True))
        positions = {name: position for position, name in enumerate(self._names)}

        def position_of(group: Any) -> tuple[int, str]:
            blocks = (owners[node] for node in group["params"])
            return min((positions.get(block, len(positions)), block) for block in blocks)

        self.starts.append(self._tracker.mark())
        for group in sorted(groups, key=position_of):
            name = position_of(group)[1]
            # torch makes a view of each parameter that is passed, so only the group's are passed.
            backward_for_weights((by_node[node] for node in group["params"]), [group])
            self.done.append((self._tracker.mark(), name))

    def _block(self, parameter: str) -> str:
        return next((n for n in self._names if parameter.startswith(f"{n}.")), "")


class _InputThenWeightLoop(LoopRunner):
    def __init__(self, assembly: Assembly, subject: InputThenWeightBackward) -> None:
        super().__init__(assembly)
        self._subject = subject

    def backward(self, loss: Tensor) -> None:
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        self._subject.backward(loss, named)
