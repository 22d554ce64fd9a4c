"""The memory of one stage of a cut model before anything runs: one micro-batch on fake tensors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from bigtrain.cutting.stage import Stage
from bigtrain.cutting.structure import map_tensors
from bigtrain.data.loader import MicroBatch
from bigtrain.distributed import RunContext
from bigtrain.fakes import fake_model, fake_tensor
from bigtrain.forecast import Profile
from bigtrain.layout import Layout
from bigtrain.memory import StorageTracker
from bigtrain.precision import low_precision_names
from bigtrain.profiles import FakeMeter, bytes_of, piece_of, slots_of, states_of
from bigtrain.runner import LoopRunner
from bigtrain.strategy import Assembly, CutStrategy, Plan
from bigtrain.tasks import Loss
from bigtrain.update import MakeOptimizer
from bigtrain.visits import Visits


def profile_stage(
    layout: Layout,
    index: int,
    model: nn.Module,
    micro_batch: MicroBatch,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    plan: Plan,
    device: torch.device,
) -> Profile:
    """Run two micro-batches and two optimizer steps of a stage on fake tensors.

    Args:
        layout: how the model is cut.
        index: the stage.
        model: on any device, the meta device too; it is not changed.
        micro_batch: one real micro-batch of the size of the plan; only its shapes matter.
        loss: as in the run.
        make_optimizer: as in the run.
        plan: for the precision and the clipping.
        device: whose kernels decide what is saved.

    Returns:
        As `profiles.make_profile`, of what this stage holds and computes. The tensors that come
        in and the gradients that come back are in its timelines.
    """
    double = plan.precision == "fp64"

    def placed(tensor: Tensor) -> Tensor:
        return tensor.double() if double and tensor.is_floating_point() else tensor

    real = MicroBatch(
        map_tensors(micro_batch.inputs, placed),
        map_tensors(micro_batch.targets, placed),
        max(1, micro_batch.count),
        micro_batch.rows,
    )
    cut = layout.chosen.cut
    # The script is traced under a fake mode of its own, so before ours.
    cut.rehearsal.script(real, training=True, places=cut.places)
    tracker = StorageTracker(fake=True)
    meter = FakeMeter(tracker, device)
    with FakeTensorMode(), tracker:
        fake = fake_model(model, device, double=double)
        for name in low_precision_names(fake) if plan.bf16_parameters else ():
            parameter = fake.get_parameter(name)
            parameter.data = parameter.data.to(torch.bfloat16)
        cut.strip(fake, [index], device)
        batch = MicroBatch(
            map_tensors(real.inputs, lambda t: fake_tensor(t, device)),
            map_tensors(real.targets, lambda t: fake_tensor(t, device)),
            real.count,
            real.rows,
        )
        stage = cut.stage(fake, index, loss, device)
        stage.recompute = _recompute(plan)
        visits = Visits(stage, tracker)
        runner = LoopRunner(
            Assembly(
                context=RunContext.alone(device),
                plan=plan,
                loss=loss,
                meter=meter,
                model=fake,
                make_optimizer=make_optimizer,
                module=stage,
                materialize=lambda _names: None,
            )
        )
        marks = []
        for _ in range(2):  # the optimizer makes its state in the first step
            marks = [tracker.clock]
            for _ in range(2):
                _through(stage, batch, runner, meter)
                marks.append(tracker.clock)
            meter.phase("step")
            runner.clip()
            runner.apply_step()
            marks.append(tracker.clock)
        timeline = tracker.timeline()
        states = states_of(fake, runner.optimizer)
        batch_bytes = bytes_of(tree_leaves((batch.inputs, batch.targets)))
    blocks = [visits.blocks(marks[n], marks[n + 1]) for n in (0, 1)]
    return Profile(
        parameter_bytes=states.parameters,
        gradient_bytes=states.gradients,
        buffer_bytes=states.buffers,
        optimizer_bytes=states.optimizer,
        batch_bytes=batch_bytes,
        **slots_of(fake, runner.optimizer),
        first=piece_of(timeline, marks[0], marks[1]),
        next=piece_of(timeline, marks[1], marks[2]),
        step=piece_of(timeline, marks[2], marks[3]),
        blocks=tuple(zip(*blocks, strict=True)),
        rest=visits.rest(*marks[:2]),
    )


def _recompute(plan: Plan) -> Literal["never", "except_last", "always"]:
    cut = plan.techniques.get("cut")
    return cut.recompute if isinstance(cut, CutStrategy) else "never"


def _through(stage: Stage, batch: MicroBatch, runner: LoopRunner, meter: FakeMeter) -> None:
    """One micro-batch forward and backward, with made-up neighbours."""
    meter.phase("forward")
    wires = [_arrived(meta, stage) for meta in stage.incoming(batch)]
    with runner.autocast():
        output = stage(*wires, micro_batch=batch, scale=1.0, final=False)
    meter.phase("backward")
    outputs = [output] if isinstance(output, Tensor) else list(output)
    wanted = [out for out in outputs if out.requires_grad]
    if stage.last:
        torch.autograd.backward(wanted)
    elif wanted:
        torch.autograd.backward(wanted, [torch.empty_like(out) for out in wanted])
    meter.own((p.grad for p in stage.parameters()), "gradients")


def _arrived(meta: Tensor, stage: Stage) -> Tensor:
    wire = torch.empty(meta.shape, dtype=meta.dtype, device=stage.device)
    return wire.requires_grad_(meta.requires_grad)
