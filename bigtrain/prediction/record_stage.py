"""The memory of one stage of a cut model before anything runs: one micro-batch on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from bigtrain.activations.policy import apply_policies, recomputed_names
from bigtrain.core.loop import LoopRunner
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import BoundaryBytes, Profile
from bigtrain.cutting.layout import Layout
from bigtrain.cutting.stage import Stage
from bigtrain.cutting.stage_program import StageProgram
from bigtrain.data.loader import MicroBatch
from bigtrain.memory.timeline import Timeline
from bigtrain.memory.tracker import StorageTracker
from bigtrain.models.bf16_parameters import bf16_parameter_names
from bigtrain.optim.update import state_bytes_by_slot
from bigtrain.prediction.block_ticks import BlockTickRecorder
from bigtrain.prediction.record import (
    FakeMeter,
    block_windows,
    fake_safe_optimizer,
    optimizer_state_figures,
    state_bytes,
    storage_bytes,
    timeline_window,
)
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.fake import fake_model, fake_tensor
from bigtrain.tensors.tree import map_tensors


def profile_stage(
    workload: Workload, resolved: ResolvedPlan, index: int, *, split: bool = False
) -> Profile:
    """Run two micro-batches and two optimizer steps of a stage on fake tensors.

    Args:
        workload: with an example.
        resolved: with a layout.
        index: the stage.
        split: whether the backward pass is two phases, for the inputs and for the weights.

    Returns:
        As `record.make_profile`, with what comes in and the gradients that come back.
    """
    plan, layout = resolved.plan, resolved.layout
    if layout is None:
        raise ValueError("the model is not cut")
    device = torch.device(plan.device_type)
    real = _placed(workload.micro_batch, double=plan.precision == "fp64")
    cut = layout.chosen.cut
    # The script is traced under a fake mode of its own, so before ours.
    script = cut.traced_model.program(real, training=True, places=cut.call_sites)
    widths = state_bytes_by_slot(workload.make_optimizer)
    tracker = StorageTracker(fake=True)
    meter = FakeMeter(tracker, device)
    with FakeTensorMode(), tracker:
        stage, fake = _fake_stage(workload, resolved, layout, index)
        batch = _faked(real, device)
        choices = {n: c for n, c in resolved.policies.items() if n not in stage.cut_through}
        visits, followed = (
            BlockTickRecorder(stage, tracker),
            BlockTickRecorder(stage, tracker, choices),
        )
        runner = _runner(stage, fake, workload, plan, meter)
        taking = _StageRecorder(stage, batch, runner, meter, tracker, split=split)
        taking.step()  # the optimizer makes its state in it
        marks, parts = taking.step()
        final = taking.step(final=True)[0] if stage.recompute == "except_last" else None
        timeline = tracker.timeline()
        states = state_bytes(fake, runner.optimizer)
    blocks = zip(*(visits.blocks(marks[n], marks[n + 1]) for n in (0, 1)), strict=True)
    held = (states.parameters, states.gradients, states.buffers, states.optimizer)
    return Profile(
        *held,
        storage_bytes(tree_leaves((batch.inputs, batch.targets))),
        **optimizer_state_figures(fake, runner.optimizer, widths),
        first=_split(timeline_window(timeline, marks[0], marks[1]), parts[0]),
        next=_split(timeline_window(timeline, marks[1], marks[2]), parts[1]),
        step=timeline_window(timeline, marks[2], marks[3]),
        blocks=tuple(blocks),
        outside_blocks=visits.outside_blocks(*marks[:2]),
        boundary=replace(_wires(script, index), outgoing=taking.only_sent),
        windows=block_windows(followed, marks),
        recomputed=recomputed_names(choices),
        tensors=tuple(
            (n, p.nbytes, str(p.dtype)) for n, p in stage.named_parameters() if p.requires_grad
        ),
        last=_passes(timeline, final) if final else None,
    )


def _runner(
    stage: Stage, fake: nn.Module, workload: Workload, plan: Plan, meter: FakeMeter
) -> LoopRunner:
    assembly = Assembly(
        context=RunContext.alone(meter.device),
        plan=plan,
        loss=workload.loss,
        meter=meter,
        model=fake,
        make_optimizer=fake_safe_optimizer(workload.make_optimizer),
        module=stage,
        materialize=lambda _names: None,
    )
    return LoopRunner(assembly)


def _passes(timeline: Timeline, marks: Sequence[int]) -> tuple[Timeline, Timeline]:
    return timeline_window(timeline, marks[0], marks[1]), timeline_window(
        timeline, marks[1], marks[2]
    )


def _fake_stage(
    workload: Workload, resolved: ResolvedPlan, layout: Layout, index: int
) -> tuple[Stage, nn.Module]:
    """The stage of a fake copy of the model, and that copy."""
    plan, cut = resolved.plan, layout.chosen.cut
    device = torch.device(plan.device_type)
    fake = fake_model(workload.model, device, double=plan.precision == "fp64")
    for name in bf16_parameter_names(fake) if plan.bf16_parameters else ():
        parameter = fake.get_parameter(name)
        parameter.data = parameter.data.to(torch.bfloat16)
    cut.strip(fake, [index], device)
    stage = cut.stage(fake, index, workload.loss, device)
    if plan.cut is not None:
        stage.recompute = plan.cut.recompute
    apply_policies(stage, resolved.policies, plan.make_offloader(device, fake=True))
    return stage, fake


def _faked(batch: MicroBatch, device: torch.device) -> MicroBatch:
    def fake(tensor: Tensor) -> Tensor:
        twin: Tensor = fake_tensor(tensor, device)
        return twin

    inputs, targets = (map_tensors(tree, fake) for tree in (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets)


def _wires(script: StageProgram, index: int) -> BoundaryBytes:
    sides = [(), *script.boundaries, ()][index : index + 2]
    sizes = []
    for side in sides:
        sent = [wire.packed_meta for wire in side]
        sizes.append(sum(t.numel() * t.element_size() for t in sent))
        sizes.append(sum(t.numel() * t.element_size() for t in sent if t.requires_grad))
    return BoundaryBytes(*sizes)


def _placed(micro_batch: MicroBatch, *, double: bool) -> MicroBatch:
    def change(tensor: Tensor) -> Tensor:
        return tensor.double() if double and tensor.is_floating_point() else tensor

    return replace(
        micro_batch,
        inputs=map_tensors(micro_batch.inputs, change),
        targets=map_tensors(micro_batch.targets, change),
        count=max(1, micro_batch.count),
    )


def _split(timeline: Timeline, at: int | None) -> Timeline:
    if at is None:
        return timeline
    return replace(timeline, phases=(*timeline.phases, (at, "backward")))


class _StageRecorder:
    """Takes micro-batches through a stage, between made-up neighbours."""

    def __init__(
        self,
        stage: Stage,
        batch: MicroBatch,
        runner: LoopRunner,
        meter: FakeMeter,
        tracker: StorageTracker,
        *,
        split: bool,
    ) -> None:
        self._stage, self._batch, self._runner = stage, batch, runner
        self._meter, self._tracker, self._split = meter, tracker, split
        self.only_sent = 0
        """Bytes of what goes out and is not kept for the backward pass."""

    def step(self, *, final: bool = False) -> tuple[list[int], list[int | None]]:
        """Two micro-batches and an optimizer step; the ticks between, and where W begins."""
        marks, parts = [self._tracker.clock], []
        for _ in range(2):
            parts.append(self._through(final=final))
            marks.append(self._tracker.clock)
        self._meter.phase("step")
        self._runner.clip()
        self._runner.apply_step()
        return [*marks, self._tracker.clock], parts

    def _through(self, *, final: bool) -> int | None:
        stage = self._stage
        self._meter.phase("forward")
        wires = [self._arrived(meta) for meta in stage.incoming(self._batch)]
        with self._runner.autocast():
            output = stage(*wires, micro_batch=self._batch, scale=1.0, final=final)
        outputs = [output] if isinstance(output, Tensor) else list(output)
        wanted = [out for out in outputs if out.requires_grad]
        shapes = [(out.shape, out.dtype) for out in wanted]
        sent = {out.untyped_storage()._cdata: out.untyped_storage().nbytes() for out in outputs}
        del output, outputs
        # What is sent on is let go; the graph is kept by its edges, as torch's stages do.
        roots: list[Any] = wanted if stage.last else [get_gradient_edge(out) for out in wanted]
        del wanted
        self.only_sent = sum(size for key, size in sent.items() if not self._tracker.lives(key))
        self._meter.phase("backward")
        gradients = None
        if not stage.last:
            gradients = [torch.empty(*s, dtype=d, device=stage.device) for s, d in shapes]
        backward = self._in_parts if self._split and stage.index > 0 else self._whole
        part = backward(roots, gradients, wires) if roots else self._tracker.clock
        self._meter.label((p.grad for p in stage.parameters()), "gradients")
        return part if self._split else None

    def _whole(self, roots: list[Any], gradients: list[Tensor] | None, wires: Any) -> int:
        del wires
        begin = self._tracker.clock
        torch.autograd.backward(roots, gradients)
        return begin  # a first stage's inputs want nothing: all of it is for the weights

    def _in_parts(
        self, roots: list[Any], gradients: list[Tensor] | None, wires: list[Tensor]
    ) -> int:
        from torch.distributed.pipelining import _backward

        for_inputs: Callable[..., Any] = _backward.stage_backward_input
        for_weights: Callable[..., Any] = _backward.stage_backward_weight
        _, groups = for_inputs(roots, gradients, wires, self._stage.parameters())
        begin = self._tracker.clock
        for_weights(self._stage.parameters(), groups)
        return begin

    def _arrived(self, meta: Tensor) -> Tensor:
        wire = torch.empty(meta.shape, dtype=meta.dtype, device=self._stage.device)
        return wire.requires_grad_(meta.requires_grad)
