"""Record a model's memory before a run, by the plain loop on fake tensors.

The loop, the loss and the optimizer are those of a run in one process, and so is the tracker. Only
the values in the tensors are missing. So the timelines equal those of the run, storage by storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from bigtrain.activations.policy import BlockPolicy, apply_policies, recomputed_names
from bigtrain.core.loop import LoopRunner
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import GatheredUse, Profile
from bigtrain.data.loader import MicroBatch
from bigtrain.memory.meter import MemoryMeter
from bigtrain.memory.timeline import Phase, Span, Timeline
from bigtrain.memory.tracker import StorageTracker
from bigtrain.models.blocks import independent_blocks
from bigtrain.models.compiled import programs_for_every_size
from bigtrain.models.parameters import low_names
from bigtrain.optim.step_memory import StepMemory, fake_safe_optimizer, group_options
from bigtrain.optim.update import state_bytes_by_slot
from bigtrain.prediction.block_ticks import BlockTickRecorder
from bigtrain.prediction.state_figures import (
    optimizer_state_figures,
    state_bytes,
    storage_bytes,
    updated_shapes,
)
from bigtrain.prediction.whole_model import WHOLE_MODEL, WholeModel
from bigtrain.ranks.context import RunContext
from bigtrain.recorder.ring import FlightRecorder
from bigtrain.slicing.exchange import ExchangeLog, TensorExchange
from bigtrain.slicing.install import slice_modules, slice_tensors
from bigtrain.slicing.state import SlicedState
from bigtrain.tensors.cuda_program import cuda_program, stands_for_cuda
from bigtrain.tensors.fake import fake_model
from bigtrain.tensors.fake_mode import FakeMode
from bigtrain.tensors.kernel_workspaces import workspaces_of
from bigtrain.tensors.memory_format import set_channels_last
from bigtrain.tensors.replaced_products import ReplacedProducts
from bigtrain.tracing.watch import untraceable_reason


class FakeMeter(MemoryMeter):
    """A memory meter that only tracks storages, and reads no counters of a process or device."""

    # The base class is not initialized, because that resets the device's counters.
    def __init__(self, tracker: StorageTracker, device: torch.device) -> None:
        self.device = device
        self._tracker = tracker
        self.recorder = FlightRecorder()


@dataclass(frozen=True)
class GradientTicks:
    """The ticks at which one micro-batch makes gradients; see the fields of `Profile`."""

    gradient_births: tuple[int, ...]
    viewed_births: tuple[tuple[int, int], ...]
    module_births: tuple[tuple[int, ...], ...]
    module_begins: tuple[int | None, ...]
    module_passes: tuple[tuple[tuple[int, int], ...], ...]
    gathered_uses: tuple[GatheredUse, ...]
    exchanges: tuple[TensorExchange, ...]


@dataclass(frozen=True)
class FakeRun:
    """The record of two steps on fake tensors, the second one of two micro-batches."""

    model: nn.Module
    """The copy of the model without values."""
    runner: LoopRunner
    choices: Mapping[str, BlockPolicy]
    """The policies by the name of the module."""
    timeline: Timeline
    """The storages of all steps."""
    marks: tuple[int, ...]
    """The ticks of the second step: its beginning, the ends of its micro-batches, its end."""
    ticks: BlockTickRecorder
    """The recorder of the blocks' ticks in all steps."""
    batch_bytes: int
    """Bytes of one micro-batch."""
    widths: Mapping[str, float]
    """See `state_bytes_by_slot`."""
    gradients: GradientTicks
    """The ticks at which the first micro-batch of the second step makes gradients."""
    exchange_log: Sequence[tuple[int, TensorExchange]] = ()
    """The exchanges over the tp axis in all steps, each with its tick."""
    first_step: FakeRun | None = None
    """The record of the first step, if it had two micro-batches of another size; else None."""
    later: FakeRun | None = None
    """The record of the third step; None if there was none."""
    not_compiled: str | None = None
    """See `Profile.not_compiled`."""
    step_memory: StepMemory | None = None
    """See `Profile.step_memory`."""
    early_share: float = 0.0
    """See `Profile.early_share`."""
    late: frozenset[str] = frozenset()
    """See `late_names`."""

    def window(self, number: int) -> Timeline:
        """Return a part of the step's timeline; see `timeline_window`.

        Args:
            number: 0 for the first micro-batch, 1 for the second, 2 for the optimizer's step.
        """
        return timeline_window(self.timeline, *self.marks[number : number + 2])


InstallHooks = Callable[[nn.Module, StorageTracker], AbstractContextManager[object]]
"""(fake model, tracker) -> a context manager that is active during all passes."""


def record_steps(
    workload: Workload,
    resolved: ResolvedPlan,
    device: torch.device,
    unit: WholeModel = WHOLE_MODEL,
    hooks: Sequence[InstallHooks] = (),
    earlier_batch: MicroBatch | None = None,
) -> FakeRun:
    """Run two steps of a model, or of a part of it, on fake tensors in the plain loop.

    If the plan compiles blocks, the compiled programs are run. If torch cannot compile the blocks
    on fake tensors, they are run as written, and `FakeRun.not_compiled` has the reason.

    Args:
        workload: a workload with an example.
        resolved: the plan of the run; its layout is ignored.
        device: the device whose kernels are assumed; they decide which tensors are saved.
        unit: the part of the model that is run, and its steps.
        hooks: further recorders, which add hooks to the fake model.
        earlier_batch: a micro-batch of another size, for the first step; None for the example.

    Returns:
        The record of the second step; of the only step if `unit` runs one.

    Raises:
        Exception: any exception that the model's code raises on tensors without values.
    """
    if not resolved.plan.compiles_blocks:
        return _record(workload, resolved, device, unit, hooks, earlier_batch)
    try:
        with programs_for_every_size():
            return _record(workload, resolved, device, unit, hooks, earlier_batch)
    except Exception as error:  # noqa: BLE001 - of the compiler, or of the user's code
        as_written = replace(resolved, plan=replace(resolved.plan, compiles_blocks=False))
        run = _record(workload, as_written, device, unit, hooks, earlier_batch)
        return replace(run, not_compiled=untraceable_reason(error))


def _step_memory(
    workload: Workload, device: torch.device, plan: Plan, optimizer: torch.optim.Optimizer
) -> StepMemory:
    options, kind = group_options(optimizer), type(optimizer).__name__
    return StepMemory(workload.make_optimizer, device, plan.device_type, options, kind)


def late_names(resolved: ResolvedPlan) -> frozenset[str]:
    """Return the names of unused parameters that the run trains once a pass uses them."""
    return frozenset(resolved.unreached if resolved.plan.trains_late else ())


def _fake_model(
    workload: Workload, resolved: ResolvedPlan, device: torch.device, exchanges: ExchangeLog
) -> tuple[nn.Module, SlicedState | None]:
    """Return the model without values, with the dtypes, memory format and slices of the run."""
    plan = resolved.plan
    fake = fake_model(workload.model, device, double=plan.precision == "fp64")
    low, frozen = plan.bf16_parameters, plan.frozen_in_bf16
    for name in low_names(fake, bf16_parameters=low, frozen_in_bf16=frozen):
        parameter = fake.get_parameter(name)
        parameter.data = parameter.data.to(torch.bfloat16)
    if plan.uses_channels_last:
        set_channels_last(fake)
    slices = resolved.slices.on(plan.tp_rank, None) if resolved.slices is not None else None
    if slices is not None:
        gloo = plan.device_type == "cpu"
        slices = replace(slices, group=replace(slices.group, exchanges=exchanges, gloo=gloo))
        slice_tensors(fake, slices.by_name, slices.group)
        slice_modules(fake, slices.by_name, slices.group, slices.model.gathered)
    return fake, slices


def _cast_inputs(root: nn.Module, plan: Plan) -> None:
    """Cast floating-point inputs of the model and its blocks to bf16, if a technique does so."""
    if not (plan.bf16_parameters and plan.replicate.casts_inputs):
        return

    def low(leaf: object) -> object:
        is_wide = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(torch.bfloat16) if is_wide and isinstance(leaf, Tensor) else leaf

    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        del module
        return tree_map(low, args), tree_map(low, kwargs)

    for module in (root, *(block for _, block in independent_blocks(root))):
        if not isinstance(module, _NormBase):  # layers with batch statistics stay in fp32
            module.register_forward_pre_hook(cast, with_kwargs=True)


def _record(
    workload: Workload,
    resolved: ResolvedPlan,
    device: torch.device,
    unit: WholeModel,
    hooks: Sequence[InstallHooks],
    earlier_batch: MicroBatch | None,
) -> FakeRun:
    plan, last = resolved.plan, workload.micro_batch
    real = [
        unit.placed(batch, plan)
        for batch in ([last] if earlier_batch is None else [earlier_batch, last])
    ]
    widths = state_bytes_by_slot(workload.make_optimizer)
    tracker = StorageTracker(fake=True, inside=workspaces_of(plan.device_type))
    exchanges = ExchangeLog(lambda: tracker.clock)
    of_cuda = stands_for_cuda(plan.device_type, device)
    program = cuda_program() if of_cuda else nullcontext()
    mode = FakeMode(of_cuda=of_cuda)
    # A compiled program is seen by a dispatch mode, but not by a tracker behind the fake mode.
    watching = tracker if plan.compiles_blocks else tracker.behind(mode)
    with program, mode, watching:
        fake, slices = _fake_model(workload, resolved, device, exchanges)
        root = unit.root(fake, workload.loss, plan, device)
        _cast_inputs(root, plan)
        mover = plan.make_offloader(device, fake=True)
        apply_policies(root, resolved.policies, mover, compiles=plan.compiles_blocks)
        batches = [replace(batch.fake(device), count=max(1, batch.count)) for batch in real]
        assembly = Assembly(
            context=RunContext.alone(device),
            plan=plan,
            loss=workload.loss,
            meter=FakeMeter(tracker, device),
            model=fake,
            make_optimizer=fake_safe_optimizer(workload.make_optimizer, plan.device_type),
            module=root,
            materialize=lambda _names: None,
            slices=slices,
        )
        runner = unit.runner(assembly, tracker)
        early_state = state_bytes(fake, runner.optimizer).optimizer
        cut_through = getattr(root, "cut_through", ())
        choices = {n: choice for n, choice in resolved.policies.items() if n not in cut_through}
        with ExitStack() as noting:
            replaced = root if plan.replicate.replaces_products else None
            products = ReplacedProducts(replaced, lambda: tracker.clock)
            noting.enter_context(products.noted(plan.techniques["replicate"].replaced_functions()))
            for hook in hooks:  # before the recorder of ticks: these hooks may replace gradients
                noting.enter_context(hook(fake, tracker))
            ticks = _recorder_of_ticks(plan, root, tracker, choices)
            births: list[GradientTicks] = []
            marks = unit.steps(runner, batches, partial(_step, tracker, births, products))
        timeline = tracker.timeline()
        sizes = [storage_bytes(batch.tensors()) for batch in batches]
    first = FakeRun(
        model=fake,
        runner=runner,
        choices=choices,
        timeline=timeline,
        marks=marks[0],
        ticks=ticks,
        batch_bytes=sizes[-1],
        widths=widths,
        gradients=births[0],
        exchange_log=exchanges.all,
        step_memory=_step_memory(workload, device, plan, runner.optimizer),
        early_share=early_state / max(1, state_bytes(fake, runner.optimizer).optimizer),
        late=late_names(resolved),
    )
    return _with_all_steps(first, marks, births, sizes)


def _recorder_of_ticks(
    plan: Plan, root: nn.Module, tracker: StorageTracker, choices: Mapping[str, BlockPolicy]
) -> BlockTickRecorder:
    """Return the recorder of the units of a plan, and of the modules that have a policy."""
    return BlockTickRecorder(root, tracker, choices, outside=plan.replicate.gathers_outside)


def _with_all_steps(
    first: FakeRun,
    marks: Sequence[tuple[int, ...]],
    births: Sequence[GradientTicks],
    sizes: Sequence[int],
) -> FakeRun:
    """Return the record of the second step, with those of the first and the third step.

    If there is only one step, its record is returned.

    Args:
        first: the record of the first step.
        marks: the ticks of each step; see `FakeRun.marks`.
        births: the gradient ticks of each step.
        sizes: the bytes of a micro-batch, of one or two sizes.
    """
    others = [
        replace(first, marks=step_marks, gradients=gradients)
        for step_marks, gradients in zip(marks[1:], births[1:], strict=True)
    ]
    if not others:
        return first
    earlier = replace(first, batch_bytes=sizes[0]) if len(sizes) > 1 else None
    return replace(others[0], first_step=earlier, later=others[1] if others[1:] else None)


def _step(
    tracker: StorageTracker,
    births: list[GradientTicks],
    products: ReplacedProducts,
    runner: LoopRunner,
    batches: Sequence[MicroBatch],
) -> tuple[int, ...]:
    """Take one step and return its `FakeRun.marks`.

    The gradient ticks of the first micro-batch are appended to `births`.
    """
    ticks = [tracker.clock]
    runner.take_exchanges()
    for batch in batches:
        runner.begin_step()  # each micro-batch is a step if gradients are released
        runner.run_micro_batch(batch, 1.0)
        if len(ticks) == 1:
            births.append(_gradient_ticks(tracker, products, runner, begin=ticks[0]))
        ticks.append(tracker.clock)
    runner.meter.phase("step")
    runner.clip()
    runner.apply_step()
    return (*ticks, tracker.clock)


def _gradient_ticks(
    tracker: StorageTracker, products: ReplacedProducts, runner: LoopRunner, begin: int
) -> GradientTicks:
    """Return the gradient ticks of the last micro-batch; `begin` is the first tick of the step."""
    trained = [p for p in runner.module.parameters() if p.requires_grad]
    known = {p: tracker.birth_of(p.grad) for p in trained if p.grad is not None}
    births, passes, begins = [], [], list[int | None]()
    for parameters, pass_ticks, backward_ticks in products.gathered_together():
        pairs = zip(pass_ticks[::2], pass_ticks[1::2], strict=False)
        passes.append(tuple(pair for pair in pairs if begin <= pair[0]))
        births.append(tuple(known[p] for p in parameters if p in known))
        first_birth = min(births[-1], default=0)
        before = (tick for tick in backward_ticks if begin < tick < first_birth)
        begins.append(max(before, default=None))
    viewed = (
        (birth, max((end for end in ends if begin < end), default=birth))
        for p, birth in known.items()
        if (ends := products.viewed.get(p)) is not None
    )
    return GradientTicks(
        # Known only if every trained parameter has a gradient after this micro-batch.
        gradient_births=tuple(known.values()) if len(known) == len(trained) else (),
        viewed_births=tuple(viewed),
        module_births=tuple(births),
        module_begins=tuple(begins),
        module_passes=tuple(passes),
        gathered_uses=tuple(_gathered_uses(products, known, begin)),
        exchanges=runner.take_exchanges(),
    )


def _gathered_uses(
    products: ReplacedProducts, known: Mapping[nn.Parameter, int], begin: int
) -> Iterator[GatheredUse]:
    """Yield `Profile.gathered_uses` of one micro-batch.

    Args:
        products: the recorder of the modules' passes.
        known: for each parameter with a gradient, the tick at which the gradient was made.
        begin: the first tick of the step.
    """
    for parameters, pass_ticks, begins, ends in products.gathered_uses():
        pairs = zip(pass_ticks[::2], pass_ticks[1::2], strict=False)
        yield GatheredUse(
            tuple(parameter.nbytes for parameter in parameters),
            tuple(
                max((end for end in products.viewed.get(parameter, ()) if begin < end), default=0)
                for parameter in parameters
            ),
            tuple(pair for pair in pairs if begin <= pair[0]),
            (
                min((tick for tick in begins if begin < tick), default=None),
                max((tick for tick in ends if begin < tick), default=None),
            ),
            tuple(known[parameter] for parameter in parameters if parameter in known),
        )


def profile_from_run(run: FakeRun, plan: Plan) -> Profile:
    """Return the profile of a model, or of a part of it, from its run on fake tensors."""
    states = state_bytes(run.model, run.runner.optimizer, run.late)
    first, later = tuple(pairwise(run.marks[:3]))
    blocks, followed = (
        [run.ticks.visits(*window, names) for window in (first, later)]
        for names in (None, run.choices)
    )
    return Profile(
        parameter_bytes=states.parameters + states.frozen,
        frozen_bytes=states.frozen,
        gradient_bytes=0 if plan.release_gradients else states.gradients,
        buffer_bytes=states.buffers,
        optimizer_bytes=states.optimizer,
        batch_bytes=run.batch_bytes,
        **optimizer_state_figures(run.model, run.runner.optimizer, run.widths),
        passes={"first": run.window(0), "later": run.window(1)},
        step=run.window(2),
        updated=updated_shapes(run.model, run.runner.optimizer),
        step_memory=run.step_memory,
        early_share=run.early_share,
        blocks=tuple(zip(*(blocks_of_pass.values() for blocks_of_pass in blocks), strict=True)),
        outside_blocks=run.ticks.outside_blocks(*first),
        uncalled=tuple(name for name in run.ticks.outside if name not in blocks[0]),
        windows=tuple(
            (name, visit, followed[1][name])
            for name, visit in followed[0].items()
            if name in followed[1]
        ),
        recomputed=recomputed_names(run.choices),
        gradient_births=run.gradients.gradient_births,
        viewed_births=run.gradients.viewed_births,
        module_births=run.gradients.module_births,
        module_begins=run.gradients.module_begins,
        module_passes=run.gradients.module_passes,
        gathered_uses=run.gradients.gathered_uses,
        exchanges=run.gradients.exchanges,
        not_compiled=run.not_compiled,
    )


def timeline_window(timeline: Timeline, start: int, stop: int) -> Timeline:
    """Return the timeline of the storages that are made in an interval, except buffers.

    A storage that lives beyond the interval is cut off at `stop + 1`.

    Args:
        timeline: the timeline of the whole run.
        start: the tick before the interval.
        stop: the last tick of the interval.
    """
    spans = tuple(
        Span(s.nbytes, s.kind, s.birth, min(s.death, stop + 1))
        for s in timeline.spans
        if start < s.birth <= stop and s.kind != "buffers"
    )
    before: Phase = timeline.phase_at(start + 1)
    inside = tuple(p for p in timeline.phases if start < p[0] <= stop)
    return Timeline(spans, ((start, before), *inside))
