"""A model's memory before anything runs: the plain loop, once over on fake tensors.

The same loop, loss and optimizer as in the run, under the same tracker; only the numbers in
the tensors are missing. So the timelines are those of the run, storage by storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bigtrain.activations.policy import BlockPolicy, apply_policies, recomputed_names
from bigtrain.core.loop import LoopRunner
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Profile
from bigtrain.data.loader import MicroBatch
from bigtrain.losses.chunked_cross_entropy import attach_head
from bigtrain.memory.meter import MemoryMeter
from bigtrain.memory.timeline import BlockTicks, Breakdown, Phase, Span, Timeline
from bigtrain.memory.tracker import StorageTracker
from bigtrain.models.bf16_parameters import bf16_parameter_names
from bigtrain.optim.update import MakeOptimizer, state_bytes_by_slot
from bigtrain.prediction.block_ticks import BlockTickRecorder
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.fake import fake_model, fake_tensor


class FakeMeter(MemoryMeter):
    """A meter that does nothing but track."""

    def __init__(self, tracker: StorageTracker, device: torch.device) -> None:  # no super: no reset
        self.device = device
        self._tracker = tracker


def make_profile(workload: Workload, resolved: ResolvedPlan) -> Profile:
    """Run two optimizer steps on fake tensors, the second one of two micro-batches.

    Args:
        workload: with an example.
        resolved: for the precision, the clipping, the device and what blocks keep.

    Returns:
        The profile; with only the states in it, and the reason, where the model cannot run so.
    """
    try:
        device = torch.device(resolved.plan.device_type)
        return profile_from_run(record_steps(workload, resolved, device), resolved.plan)
    except Exception as error:  # noqa: BLE001 - user code of any kind runs here
        return profile_states_only(workload.model, workload.micro_batch, untraceable_reason(error))


@dataclass(frozen=True)
class FakeRun:
    """Two steps on fake tensors, the second of two micro-batches, and what was noted meanwhile."""

    model: nn.Module
    """The fake twin."""
    optimizer: torch.optim.Optimizer
    choices: Mapping[str, BlockPolicy]
    timeline: Timeline
    marks: tuple[int, ...]
    """The ticks of the second step: its begin, the ends of its micro-batches, its end."""
    visits: BlockTickRecorder
    followed: BlockTickRecorder
    """The modules of which something else than all is kept, or may be."""
    batch_bytes: int
    widths: Mapping[str, float]
    first_step: FakeRun | None = None
    """The first step, where it was taken with two micro-batches of another size."""

    def window(self, number: int) -> Timeline:
        """The first micro-batch, the next, or the step: 0, 1, 2."""
        return timeline_window(self.timeline, *self.marks[number : number + 2])


InstallHooks = Callable[[nn.Module, StorageTracker], AbstractContextManager[object]]
"""Given the fake twin and the clock; entered around all passes."""


def record_steps(
    workload: Workload,
    resolved: ResolvedPlan,
    device: torch.device,
    watch: InstallHooks | None = None,
    before: MicroBatch | None = None,
    make_runner: Callable[[Assembly], LoopRunner] = LoopRunner,
) -> FakeRun:
    """Run the plain loop on a fake twin of a model.

    Args:
        workload: with an example.
        resolved: as in the run; its layout is not looked at.
        device: whose kernels decide what is saved.
        watch: what else is noted.
        before: a micro-batch of another size, for the first step.
        make_runner: of the loop.

    Raises:
        Exception: of any kind that the model's own code raises where it sees no numbers.
    """
    plan, model, loss = resolved.plan, workload.model, workload.loss
    widths = state_bytes_by_slot(workload.make_optimizer)
    tracker = StorageTracker(fake=True)
    meter = FakeMeter(tracker, device)
    with FakeTensorMode(), tracker:
        fake = fake_model(model, device, double=plan.precision == "fp64")
        attach_head(loss, fake)
        if plan.bf16_parameters:
            for name in bf16_parameter_names(fake):
                parameter = fake.get_parameter(name)
                parameter.data = parameter.data.to(torch.bfloat16)
        last = workload.micro_batch
        batches = [_faked(given, device) for given in (before or last, last)]
        choices = resolved.policies
        apply_policies(fake, choices, plan.make_offloader(device, fake=True))
        visits, followed = (
            BlockTickRecorder(fake, tracker),
            BlockTickRecorder(fake, tracker, choices),
        )
        runner = make_runner(
            Assembly(
                context=RunContext.alone(device),
                plan=plan,
                loss=loss,
                meter=meter,
                model=fake,
                make_optimizer=fake_safe_optimizer(workload.make_optimizer),
                module=fake,
                materialize=lambda _names: None,
            )
        )
        with watch(fake, tracker) if watch is not None else nullcontext():
            # The optimizer makes its state in the first step.
            small = batches[:1] if before is None else batches[:1] * 2
            marks = [_step(runner, small, tracker), _step(runner, batches[1:] * 2, tracker)]
        timeline = tracker.timeline()
        sizes = [storage_bytes(tree_leaves((batch.inputs, batch.targets))) for batch in batches]
    given = (fake, runner.optimizer, choices, timeline)
    noted = (visits, followed)
    earlier = None
    if before is not None:
        earlier = FakeRun(*given, marks[0], *noted, sizes[0], widths)
    return FakeRun(*given, marks[1], *noted, sizes[1], widths, earlier)


def _step(
    runner: LoopRunner, batches: Sequence[MicroBatch], tracker: StorageTracker
) -> tuple[int, ...]:
    """One step; the ticks of its begin, the ends of its micro-batches, its end."""
    ticks = [tracker.clock]
    for batch in batches:
        runner.begin_step()  # where gradients are released there is no second one
        runner.run_micro_batch(batch, 1.0)
        ticks.append(tracker.clock)
    runner.meter.phase("step")
    runner.clip()
    runner.apply_step()
    return (*ticks, tracker.clock)


def _faked(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    def fake(leaf: Any) -> Any:
        return fake_tensor(leaf, device)

    inputs, targets = tree_map(fake, (micro_batch.inputs, micro_batch.targets))
    return MicroBatch(inputs, targets, max(1, micro_batch.count), micro_batch.rows)


def profile_from_run(run: FakeRun, plan: Plan) -> Profile:
    """What a run on fake tensors says of a whole model."""
    states = state_bytes(run.model, run.optimizer)
    passes = tuple(pairwise(run.marks[:3]))
    return Profile(
        parameter_bytes=states.parameters,
        gradient_bytes=0 if plan.release_gradients else states.gradients,
        buffer_bytes=states.buffers,
        optimizer_bytes=states.optimizer,
        batch_bytes=run.batch_bytes,
        **optimizer_state_figures(run.model, run.optimizer, run.widths),
        first=run.window(0),
        next=run.window(1),
        step=run.window(2),
        blocks=tuple(zip(*(run.visits.blocks(*w) for w in passes), strict=True)),
        outside_blocks=run.visits.outside_blocks(*passes[0]),
        windows=block_windows(run.followed, run.marks),
        recomputed=recomputed_names(run.choices),
    )


def block_windows(
    visits: BlockTickRecorder, marks: Sequence[int]
) -> tuple[tuple[str, BlockTicks, BlockTicks], ...]:
    """When the followed modules ran in the first and the second micro-batch."""
    first, second = (visits.named(start, stop) for start, stop in pairwise(marks[:3]))
    return tuple((name, first[name], second[name]) for name in first if name in second)


def timeline_window(timeline: Timeline, start: int, stop: int) -> Timeline:
    """The spans born in one stretch; what outlives it is cut off at its end."""
    spans = tuple(
        Span(s.nbytes, s.kind, s.birth, min(s.death, stop + 1))
        for s in timeline.spans
        if start < s.birth <= stop and s.kind != "buffers"
    )
    before: Phase = timeline.phase_at(start + 1)
    inside = tuple(p for p in timeline.phases if start < p[0] <= stop)
    return Timeline(spans, ((start, before), *inside))


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Breakdown:
    """Bytes of parameters, their gradients, buffers and optimizer state."""
    slots = optimizer.state.values() if optimizer else ()
    return Breakdown(
        parameters=storage_bytes(model.parameters()),
        gradients=storage_bytes(p for p in model.parameters() if p.requires_grad),
        buffers=storage_bytes(model.buffers()),
        optimizer=storage_bytes(value for state in slots for value in state.values()),
    )


class _ScalarOnes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers 1 where an optimizer reads a number from a tensor: fake ones have none."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        return func(*args, **(kwargs or {}))


def fake_safe_optimizer(make_optimizer: MakeOptimizer) -> MakeOptimizer:
    """Make the optimizer such that its step runs on fake tensors."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make_optimizer(parameters)
        plain = optimizer.step

        def step() -> None:
            with _ScalarOnes():  # type: ignore[no-untyped-call]
                plain()

        optimizer.step = step  # type: ignore[assignment, method-assign]
        return optimizer

    return make


def optimizer_state_figures(
    model: nn.Module, optimizer: torch.optim.Optimizer, widths: Mapping[str, float]
) -> dict[str, Any]:
    """How the optimizer's state goes with the number of trained elements.

    Args:
        model: profiled.
        optimizer: after a step on it.
        widths: of `state_bytes_by_slot`: those who shard state update bf16 parameters in fp32.
    """
    elements, numbers, scalars = 0, 0.0, 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        elements += parameter.numel()
        low = parameter.dtype == torch.bfloat16
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                width = value.element_size() / parameter.element_size()
                numbers += value.numel() * (widths.get(key, 4.0) / 4 if low else width)
            elif isinstance(value, Tensor):
                scalars += value.numel() * value.element_size()
    slots = numbers / elements if elements else 0.0
    return {"trained_elements": elements, "state_slots": slots, "state_scalars": scalars}


def storage_bytes(leaves: Iterable[object]) -> int:
    """Bytes of the distinct storages below some tensors; a meta tensor counts as if real."""
    seen: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def profile_states_only(model: nn.Module, micro_batch: MicroBatch, reason: str) -> Profile:
    """The profile of a model that cannot run on fake tensors."""
    states = state_bytes(model, None)
    return Profile(
        parameter_bytes=states.parameters,
        gradient_bytes=states.gradients,
        buffer_bytes=states.buffers,
        optimizer_bytes=0,
        batch_bytes=storage_bytes(tree_leaves((micro_batch.inputs, micro_batch.targets))),
        untraceable=reason,
    )


def untraceable_reason(error: Exception) -> str:
    """One line on why a model cannot run without its numbers."""
    name = type(error).__name__
    if name in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return f"the value of a tensor decides what it does: {error}"
    lines = str(error).strip().splitlines()
    return f"{name}: {lines[0]}" if lines else name
