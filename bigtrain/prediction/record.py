"""A model's memory before anything runs: the plain loop, once over on fake tensors.

The same loop, loss and optimizer as in the run, under the same tracker; only the numbers in
the tensors are missing. So the timelines are those of the run, storage by storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from bigtrain.costs.forecast import Profile
from bigtrain.data.loader import MicroBatch
from bigtrain.devices import tracing_device
from bigtrain.memory.meter import MemoryMeter
from bigtrain.memory.timeline import Breakdown, Phase, Span, Timeline
from bigtrain.memory.tracker import StorageTracker
from bigtrain.models.bf16_parameters import bf16_parameter_names
from bigtrain.models.blocks import independent_blocks
from bigtrain.models.compiled import programs_for_every_size
from bigtrain.optim.step_memory import StepMemory, fake_safe_optimizer, group_options
from bigtrain.optim.update import state_bytes_by_slot
from bigtrain.prediction.block_ticks import BlockTickRecorder
from bigtrain.prediction.fullest_way import WAYS, OneWay
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


class FakeMeter(MemoryMeter):
    """A meter that does nothing but track."""

    def __init__(self, tracker: StorageTracker, device: torch.device) -> None:  # no super: no reset
        self.device = device
        self._tracker = tracker
        self.recorder = FlightRecorder()


def make_profile(workload: Workload, resolved: ResolvedPlan) -> Profile:
    """Run two optimizer steps on fake tensors, the second one of two micro-batches.

    Of a model that may go several ways the fullest one is run, in every micro-batch.

    Args:
        workload: with an example.
        resolved: for the precision, the clipping, the device and what blocks keep.

    Returns:
        The profile; with only the states in it, and the reason, where the model cannot run so.
    """
    device = tracing_device(resolved.plan.device_type)
    error: Exception | None = None
    if not resolved.routes.vary:
        try:
            return profile_from_run(record_steps(workload, resolved, device), resolved.plan)
        except Exception as raised:  # noqa: BLE001 - user code of any kind runs here
            error = raised
    try:
        return _fullest_profile(workload, resolved, device)
    except Exception as raised:  # noqa: BLE001 - the same, with answers that are made up
        reason = untraceable_reason(error or raised)
        return profile_states_only(workload.model, workload.micro_batch, reason)


def _fullest_profile(workload: Workload, resolved: ResolvedPlan, device: torch.device) -> Profile:
    """Of the way through a model that comes by most of it, and of these the one that takes most.

    Raises:
        Exception: no way is known; of any kind that the model's own code raises.
    """
    found: list[tuple[tuple[int, int], Profile]] = []
    error: Exception | None = None
    for answer, passes in WAYS:
        way = OneWay(answer, passes)
        try:
            run = record_steps(workload, resolved, device, way, [way.install])
            profile = profile_from_run(run, resolved.plan)
        except Exception as raised:  # noqa: BLE001 - user code of any kind runs here
            error = error or raised
            continue
        profile = replace(profile, branch_condition=_way_taken(way, resolved))
        peak = max(one.peak().bytes for one in profile.passes.values())
        found.append(((-way.left_out, peak), profile))
        if not way.left_out:
            break
    if not found:
        raise error or RuntimeError("no way through the model is known")
    return max(found, key=lambda one: one[0])[1]


def _way_taken(way: OneWay, resolved: ResolvedPlan) -> str:
    """What makes a model's way."""
    if resolved.routes.vary:
        return f"not every pass uses {resolved.routes.names}"
    asked = "the model changes its way" if way.question is None else f"{way.question} decides"
    return f"{asked} what a pass does"


@dataclass(frozen=True)
class FakeRun:
    """Two steps on fake tensors, the second of two micro-batches, and what was noted meanwhile."""

    model: nn.Module
    """The fake twin."""
    runner: LoopRunner
    choices: Mapping[str, BlockPolicy]
    timeline: Timeline
    marks: tuple[int, ...]
    """The ticks of the second step: its begin, the ends of its micro-batches, its end."""
    ticks: BlockTickRecorder
    batch_bytes: int
    widths: Mapping[str, float]
    """See `state_bytes_by_slot`."""
    gradient_births: tuple[int, ...] = ()
    """See `Profile.gradient_births`."""
    viewed_births: tuple[tuple[int, int], ...] = ()
    """See `Profile.viewed_births`."""
    module_births: tuple[tuple[int, ...], ...] = ()
    """See `Profile.module_births`."""
    module_begins: tuple[int | None, ...] = ()
    """See `Profile.module_begins`."""
    module_passes: tuple[tuple[tuple[int, int], ...], ...] = ()
    """See `Profile.module_passes`."""
    exchanges: tuple[TensorExchange, ...] = ()
    """See `Profile.exchanges`."""
    exchange_log: Sequence[tuple[int, TensorExchange]] = ()
    """Those of all steps, each with its tick."""
    first_step: FakeRun | None = None
    """The first step, where it was taken with two micro-batches of another size."""
    later: FakeRun | None = None
    """The third step, where there is one."""
    not_compiled: str | None = None
    """See `Profile.not_compiled`."""
    step_memory: StepMemory | None = None
    """See `Profile.step_memory`."""
    early_share: float = 0.0
    """See `Profile.early_share`."""

    def window(self, number: int) -> Timeline:
        """The first micro-batch, the next, or the step: 0, 1, 2."""
        return timeline_window(self.timeline, *self.marks[number : number + 2])


InstallHooks = Callable[[nn.Module, StorageTracker], AbstractContextManager[object]]
"""Given the fake twin and the clock; entered around all passes."""


def record_steps(
    workload: Workload,
    resolved: ResolvedPlan,
    device: torch.device,
    unit: WholeModel = WHOLE_MODEL,
    hooks: Sequence[InstallHooks] = (),
    earlier_batch: MicroBatch | None = None,
) -> FakeRun:
    """Take a fake twin of a model, or of a part of it, through the plain loop.

    Where blocks are compiled their programs are run, or, if torch makes none without numbers, the
    blocks as they are written.

    Args:
        workload: with an example.
        resolved: as in the run; its layout is not looked at.
        device: whose kernels decide what is saved.
        unit: what of the model.
        hooks: what else is noted.
        earlier_batch: a micro-batch of another size, for the first step.

    Raises:
        Exception: of any kind that the model's own code raises where it sees no numbers.
    """
    given = (device, unit, hooks, earlier_batch)
    if not resolved.plan.compiles_blocks:
        return _record(workload, resolved, *given)
    try:
        with programs_for_every_size():
            return _record(workload, resolved, *given)
    except Exception as error:  # noqa: BLE001 - of the compiler, or of the user's code
        as_written = replace(resolved, plan=replace(resolved.plan, compiles_blocks=False))
        run = _record(workload, as_written, *given)
        return replace(run, not_compiled=untraceable_reason(error))


def _step_memory(
    workload: Workload, device: torch.device, plan: Plan, optimizer: torch.optim.Optimizer
) -> StepMemory:
    options, kind = group_options(optimizer), type(optimizer).__name__
    return StepMemory(workload.make_optimizer, device, plan.device_type, options, kind)


def _fake_model(
    workload: Workload, resolved: ResolvedPlan, device: torch.device, exchanges: ExchangeLog
) -> tuple[nn.Module, SlicedState | None]:
    """The model without numbers as the run has it: its types, its memory format, its slices."""
    plan = resolved.plan
    fake = fake_model(workload.model, device, double=plan.precision == "fp64")
    for name in bf16_parameter_names(fake) if plan.bf16_parameters else ():
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
    """Have the model and its blocks called with numbers in bf16, where a technique does it."""
    if not (plan.bf16_parameters and plan.replicate.casts_inputs):
        return

    def low(leaf: object) -> object:
        is_wide = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(torch.bfloat16) if is_wide and isinstance(leaf, Tensor) else leaf

    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        del module
        return tree_map(low, args), tree_map(low, kwargs)

    for module in (root, *(block for _, block in independent_blocks(root))):
        if not isinstance(module, _NormBase):  # these stay in fp32
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
        unit.placed(one, plan)
        for one in ([last] if earlier_batch is None else [earlier_batch, last])
    ]
    widths = state_bytes_by_slot(workload.make_optimizer)
    tracker = StorageTracker(fake=True, inside=workspaces_of(plan.device_type))
    exchanges = ExchangeLog(lambda: tracker.clock)
    of_cuda = stands_for_cuda(plan.device_type, device)
    program = cuda_program() if of_cuda else nullcontext()
    mode = FakeMode(of_cuda=of_cuda)
    watching = tracker if plan.compiles_blocks else tracker.behind(mode)  # programs see modes alone
    with program, mode, watching:
        fake, slices = _fake_model(workload, resolved, device, exchanges)
        root = unit.root(fake, workload.loss, plan, device)
        _cast_inputs(root, plan)
        mover = plan.make_offloader(device, fake=True)
        apply_policies(root, resolved.policies, mover, compiles=plan.compiles_blocks)
        batches = [replace(one.fake(device), count=max(1, one.count)) for one in real]
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
            for hook in hooks:  # before the ticks: what they do to a gradient comes before it
                noting.enter_context(hook(fake, tracker))
            ticks = BlockTickRecorder(root, tracker, choices)
            births: list[_Births] = []
            marks = unit.steps(runner, batches, partial(_step, tracker, births, products))
        timeline = tracker.timeline()
        sizes = [storage_bytes(batch.tensors()) for batch in batches]
    given = (fake, runner, choices, timeline)
    early_share = early_state / max(1, state_bytes(fake, runner.optimizer).optimizer)
    step_memory = _step_memory(workload, device, plan, runner.optimizer)
    first, *others = (
        FakeRun(
            *(*given, one, ticks, sizes[-1], widths),
            **vars(born),
            exchange_log=exchanges.all,
            step_memory=step_memory,
            early_share=early_share,
        )
        for one, born in zip(marks, births, strict=True)
    )
    if not others:  # a single step
        return first
    earlier = replace(first, batch_bytes=sizes[0]) if len(batches) > 1 else None
    return replace(others[0], first_step=earlier, later=others[1] if others[1:] else None)


@dataclass(frozen=True)
class _Births:
    """The ticks at which gradients are made; see `Profile`."""

    gradient_births: tuple[int, ...]
    viewed_births: tuple[tuple[int, int], ...]
    module_births: tuple[tuple[int, ...], ...]
    module_begins: tuple[int | None, ...]
    module_passes: tuple[tuple[tuple[int, int], ...], ...]
    exchanges: tuple[TensorExchange, ...]


def _step(
    tracker: StorageTracker,
    births: list[_Births],
    products: ReplacedProducts,
    runner: LoopRunner,
    batches: Sequence[MicroBatch],
) -> tuple[int, ...]:
    """One step; the ticks of its begin, the ends of its micro-batches, its end.

    `births` gets those of the gradients that the first micro-batch makes, where it makes all.
    """
    ticks = [tracker.clock]
    runner.take_exchanges()
    for batch in batches:
        runner.begin_step()  # where gradients are released there is no second one
        runner.run_micro_batch(batch, 1.0)
        if len(ticks) == 1:
            trained = [p for p in runner.module.parameters() if p.requires_grad]
            known = {p: tracker.birth_of(p.grad) for p in trained if p.grad is not None}
            is_all = len(known) == len(trained)
            groups, passes, begins = [], [], list[int | None]()
            for own, there, times in products.together():
                pairs = zip(there[::2], there[1::2], strict=False)
                passes.append(tuple(pair for pair in pairs if ticks[0] <= pair[0]))
                groups.append(tuple(known[p] for p in own if p in known))
                before = (t for t in times if ticks[0] < t < min(groups[-1], default=0))
                begins.append(max(before, default=None))
            births.append(
                _Births(
                    tuple(known.values()) if is_all else (),
                    tuple(
                        (birth, max((end for end in ends if ticks[0] < end), default=birth))
                        for p, birth in known.items()
                        if (ends := products.viewed.get(p)) is not None
                    ),
                    tuple(groups),
                    tuple(begins),
                    tuple(passes),
                    runner.take_exchanges(),
                )
            )
        ticks.append(tracker.clock)
    runner.meter.phase("step")
    runner.clip()
    runner.apply_step()
    return (*ticks, tracker.clock)


def profile_from_run(run: FakeRun, plan: Plan) -> Profile:
    """What a run on fake tensors says of a model, or of what was run of it."""
    states = state_bytes(run.model, run.runner.optimizer)
    first, later = tuple(pairwise(run.marks[:3]))
    blocks, followed = (
        [run.ticks.visits(*window, names) for window in (first, later)]
        for names in (None, run.choices)
    )
    return Profile(
        parameter_bytes=states.parameters,
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
        blocks=tuple(zip(*(one.values() for one in blocks), strict=True)),
        outside_blocks=run.ticks.outside_blocks(*first),
        windows=tuple(
            (name, visit, followed[1][name])
            for name, visit in followed[0].items()
            if name in followed[1]
        ),
        recomputed=recomputed_names(run.choices),
        gradient_births=run.gradient_births,
        viewed_births=run.viewed_births,
        module_births=run.module_births,
        module_begins=run.module_begins,
        module_passes=run.module_passes,
        exchanges=run.exchanges,
        not_compiled=run.not_compiled,
    )


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


def optimizer_state_figures(
    model: nn.Module, optimizer: torch.optim.Optimizer, widths: Mapping[str, float]
) -> dict[str, Any]:
    """How the optimizer's state goes with the number of trained elements.

    Args:
        model: profiled.
        optimizer: after a step on it.
        widths: of `state_bytes_by_slot`: bf16 ones are updated in fp32 by those who shard state.
    """
    elements, state_numbers, scalars = 0, 0.0, 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        elements += parameter.numel()
        is_bf16 = parameter.dtype == torch.bfloat16
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                width = value.element_size() / parameter.element_size()
                state_numbers += value.numel() * (widths.get(key, 4.0) / 4 if is_bf16 else width)
            elif isinstance(value, Tensor):
                scalars += value.numel() * value.element_size()
    slots = state_numbers / elements if elements else 0.0
    return {"trained_elements": elements, "state_slots": slots, "state_scalars": scalars}


def updated_shapes(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """See `Profile.updated`; empty where the optimizer is not put to the parameters themselves."""
    groups = {id(p): n for n, g in enumerate(optimizer.param_groups) for p in g["params"]}
    trained = [p for p in model.parameters() if p.requires_grad]
    if not all(id(p) in groups for p in trained):
        return ()
    return tuple((tuple(p.shape), groups[id(p)]) for p in trained)


def storage_bytes(leaves: Iterable[object]) -> int:
    """Bytes of the distinct storages below some tensors; a meta tensor counts as if real."""
    storages: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            storage = leaf.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def profile_states_only(model: nn.Module, micro_batch: MicroBatch, reason: str) -> Profile:
    """The profile of a model that cannot run on fake tensors."""
    states = state_bytes(model, None)
    return Profile(
        parameter_bytes=states.parameters,
        gradient_bytes=states.gradients,
        buffer_bytes=states.buffers,
        optimizer_bytes=0,
        batch_bytes=storage_bytes(micro_batch.tensors()),
        untraceable=reason,
    )


def untraceable_reason(error: Exception) -> str:
    """One line on why a model cannot run without its numbers."""
    name = type(error).__name__
    if name in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return f"the value of a tensor decides what it does: {error}"
    lines = str(error).strip().splitlines()
    return f"{name}: {lines[0]}" if lines else name
