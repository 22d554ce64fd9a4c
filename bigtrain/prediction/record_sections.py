"""Split one run of a model on fake tensors into sections, from which other models are composed.

A section is a block, or the part of the model before or after all blocks. The caller may pass a
shortened model, in which few of several equal blocks remain. A model whose blocks do not run one
after another is a single section.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from bigtrain.core.loop import LoopRunner
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import Plan
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Profile
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.memory.timeline import BlockTicks, Timeline
from bigtrain.models.parameters import left_out_names
from bigtrain.optim.step_memory import StepMemory
from bigtrain.prediction.block_ticks import SectionHooks
from bigtrain.prediction.loops import InputThenWeightBackward
from bigtrain.prediction.record import (
    FakeRun,
    profile_from_run,
    record_steps,
)
from bigtrain.prediction.sections import (
    OpLog,
    PassPair,
    Section,
    SectionPass,
    SectionTensor,
    SectionWindow,
    Windows,
    mark_gradients,
    section_spans,
)
from bigtrain.prediction.state_figures import optimizer_state_figures
from bigtrain.prediction.whole_model import WHOLE_MODEL, TakeStep, WholeModel
from bigtrain.slicing.exchange import TensorExchange
from bigtrain.slicing.state import ModelSlices
from bigtrain.tracing.watch import untraceable_reason


@dataclass(frozen=True, eq=False)
class RecordedSections:
    """A model as sections in the order of its forward pass, and its optimizer's step."""

    sections: tuple[Section, ...]
    """The sections; the first and the last are the parts before and after all blocks."""
    step: Timeline
    """The memory of gradient clipping and of the optimizer's step."""
    step_work: OpLog
    """The operations of gradient clipping and of the optimizer's step."""
    batch_bytes: int
    """Bytes of one micro-batch with its targets."""
    rows: int
    """The number of rows of a micro-batch."""
    state_slots: float
    """See `Profile.state_slots`."""
    profile: Profile | None = None
    """The profile of the whole model if its blocks do not run one after another, so that the model
    is a single section; otherwise None."""
    copies_gradient: bool = False
    """Whether the strides of a block's output differ from those of its gradient. Between ranks a
    gradient is sent with the strides of the output, and so has to be copied."""
    step_memory: StepMemory | None = field(default=None, compare=False, repr=False)
    """See `Profile.step_memory`."""
    early_share: float = 0.0
    """See `Profile.early_share`."""


class UntraceableError(Exception):
    """The model does not run on fake tensors."""


class _OneStep(WholeModel):
    """Runs a model for one step only, so that no step with existing optimizer state is recorded."""

    def steps(
        self, runner: LoopRunner, batches: Sequence[MicroBatch], step: TakeStep
    ) -> list[tuple[int, ...]]:
        """Take one step of two micro-batches; see `WholeModel.steps`."""
        return [step(runner, [batches[-1], batches[-1]])]


ONE_STEP = _OneStep()


def record_sections(
    workload: Workload,
    names: Sequence[str],
    micro_batches: Sequence[MicroBatch],
    plan: Plan,
    device: torch.device,
    slices: ModelSlices | None = None,
    *,
    contiguous_gradients: bool = False,
    unit: WholeModel = WHOLE_MODEL,
) -> tuple[RecordedSections, ...]:
    """Run a model on fake tensors and split the run into sections.

    Args:
        workload: a workload whose model is on the meta device; its example is not used.
        names: the names of the blocks of the model.
        micro_batches: one micro-batch, or two of different sizes, which share one run.
        plan: the plan of the run.
        device: the device whose kernels are assumed.
        slices: the model's slices over tp; the first rank's slices are run. None if the model is
            not sliced.
        contiguous_gradients: see `SectionHooks`.
        unit: runs the steps.

    Returns:
        The sections for each of `micro_batches`.

    Raises:
        UntraceableError: the model's code raises an exception on fake tensors. That exception is
            the cause of this error.
        ConfigError: a technique refuses the model.
    """
    notes = SectionHooks(names, contiguous_gradients=contiguous_gradients)
    try:
        run = _recorded(workload, micro_batches, plan, device, slices, notes, unit)
    except ConfigError:
        raise
    except Exception as error:  # user code of any kind runs here
        raise UntraceableError(untraceable_reason(error)) from error
    recorded = SectionSplitter(run, notes, plan).split(micro_batches[-1].rows)
    if run.first_step is None:
        return (recorded,)
    small = SectionSplitter(run.first_step, notes, plan).split(micro_batches[0].rows)
    # In the first step the optimizer makes its state; the second step is like all later ones.
    profile = small.profile and replace(small.profile, step=recorded.step)
    return replace(
        small, step=recorded.step, step_work=recorded.step_work, profile=profile
    ), recorded


def _recorded(
    workload: Workload,
    micro_batches: Sequence[MicroBatch],
    plan: Plan,
    device: torch.device,
    slices: ModelSlices | None,
    notes: SectionHooks,
    unit: WholeModel = WHOLE_MODEL,
) -> FakeRun:
    *before, last = micro_batches
    resolved = ResolvedPlan.of(plan, workload.model, slices=slices)
    return record_steps(
        replace(workload, example=last),
        resolved,
        device,
        unit,
        hooks=[notes.install],
        earlier_batch=before[0] if before else None,
    )


@dataclass(frozen=True)
class _Moments:
    """The ticks (begin, end) of the forward and of the backward pass of a block."""

    forward: tuple[int, int]
    backward: tuple[int, int]


class SectionSplitter:
    """Splits a recorded run into sections.

    Args:
        run: the run.
        notes: the hooks that recorded its operations and the inputs of its blocks.
        plan: the plan of the run.
    """

    def __init__(self, run: FakeRun, notes: SectionHooks, plan: Plan) -> None:
        self._run, self._notes, self._plan = run, notes, plan
        self.order = self._in_order()
        """The names of the blocks in the order of the forward pass; empty if the blocks do not run
        one after another."""

    def split(self, rows: int) -> RecordedSections:
        """Return the sections of the run.

        Args:
            rows: the number of rows of a micro-batch in the run.
        """
        run = self._run
        windows = [self.windows(number) for number in (0, 1)]
        tensors = self._tensors(windows[0])
        names = ["", *self.order, ""]
        sections = []
        for index, name in enumerate(names):
            first_pass, later_pass = (self._pass(n, index, windows[n], tensors) for n in (0, 1))
            passes = mark_gradients(first_pass, later_pass)
            forward, backward = (self._work(*window) for window in windows[1][index])
            incoming, incoming_gradients, sequence_shards = 0, 0, 0
            if 0 < index < len(names) - 1:
                before = self.order[index - 1]
                incoming, incoming_gradients, sequence_shards = self._incoming(before)
            in_forward, in_backward = (self._exchanges(*window) for window in windows[1][index])
            sections.append(
                Section(
                    name,
                    passes,
                    forward,
                    backward,
                    tensors[index],
                    incoming=incoming,
                    incoming_gradients=incoming_gradients,
                    sequence_shards=sequence_shards,
                    exchanges=(in_forward, in_backward),
                )
            )
        begin, stop = run.marks[2], run.marks[3]
        slots = optimizer_state_figures(run.model, run.runner.optimizer, run.widths)["state_slots"]
        return RecordedSections(
            tuple(sections),
            run.window(2),
            self._work(begin, stop),
            run.batch_bytes,
            rows,
            slots,
            None if self.order else profile_from_run(run, self._plan),
            self._notes.copies_gradient,
            step_memory=run.step_memory,
            early_share=run.early_share,
        )

    def _incoming(self, name: str) -> tuple[int, int, int]:
        start, stop = self._run.marks[:2]
        incoming_notes = self._notes.incoming
        return next(
            sizes for tick, n, sizes in incoming_notes if n == name and start <= tick <= stop
        )

    def _in_order(self) -> list[str]:
        """Return `order`."""
        begins: dict[str, int] = {}
        for name in self._notes.names:
            ticks, later = (
                self._run.ticks.ticks(name, *self._run.marks[n : n + 2]).get("forward begins", [])
                for n in (0, 1)
            )
            if len(ticks) > 1 or len(later) != len(ticks):  # called twice, or not in every pass
                return []
            begins.update((name, tick) for tick in ticks)
        order = sorted(begins, key=lambda name: begins[name])
        for pass_number in (0, 1):
            moments = [self._moments(name, pass_number) for name in order]
            forward_ticks = [t for m in moments for t in m.forward]
            backward_ticks = [t for m in reversed(moments) for t in m.backward]
            if forward_ticks != sorted(forward_ticks) or backward_ticks != sorted(backward_ticks):
                return []
        return order

    def _moments(self, name: str, pass_number: int) -> _Moments:
        start, stop = self._run.marks[pass_number], self._run.marks[pass_number + 1]
        ticks = self._run.ticks.ticks(name, start, stop)
        forward = min(ticks["forward begins"]), max(ticks.get("forward ends", [stop]))
        begins = min(ticks.get("backward begins", [stop]))
        return _Moments(forward, (begins, max(ticks.get("backward ends", [stop]))))

    def _backward_start(self, which: int) -> int:
        start, stop = self._run.marks[which], self._run.marks[which + 1]
        phases = self._run.timeline.phases
        return next((t for t, p in phases if p == "backward" and start < t <= stop), stop)

    def _returned(self, which: int) -> int:
        """Return the tick at which the model's forward pass ends and that of the loss begins."""
        backward_start = self._backward_start(which)
        return backward_start - self._run.ticks.loss_ticks(self._run.marks[which], backward_start)

    def windows(self, pass_number: int) -> list[Windows]:
        """Return the windows of the part before the blocks, of each block, and of the part after.

        Args:
            pass_number: 0 for the first micro-batch of the step, 1 for the second.
        """
        start, stop = self._run.marks[pass_number], self._run.marks[pass_number + 1]
        backward_start = self._backward_start(pass_number)
        moments = [self._moments(name, pass_number) for name in self.order]
        forward_edges = [start, *(m.forward[0] for m in moments)]
        backward_edges = [stop, *(m.backward[1] for m in moments)]
        if moments:
            forward_edges.append(moments[-1].forward[1])
            last_start = max(backward_start, moments[-1].backward[0])
            backward_edges.append(min(last_start, backward_edges[-1]))
        else:  # the first section has the whole pass, and the last one is empty
            forward_edges.append(backward_start)
            backward_edges.append(backward_start)
        forward_edges.append(backward_start)
        backward_edges.append(backward_start)
        pairs = zip(pairwise(forward_edges), pairwise(backward_edges), strict=True)
        return [
            (SectionWindow(*forward), SectionWindow(*reversed(backward)))
            for forward, backward in pairs
        ]

    def _pass(
        self,
        pass_number: int,
        position: int,
        windows: list[Windows],
        tensors: list[tuple[SectionTensor, ...]],
    ) -> SectionPass:
        (forward_window, backward_window), stop = (
            windows[position],
            self._run.marks[pass_number + 1],
        )
        returned = self._returned(pass_number) if self.order else None
        spans = self._run.window(pass_number).spans
        section_pass = section_spans(spans, windows, position, stop, returned)
        visit = None
        if self.order and 0 < position <= len(self.order):
            moments = self._moments(self.order[position - 1], pass_number)
            of_block = [t for t in tensors[position] if not t.is_between]
            parameters = [t for t in of_block if not t.is_buffer]
            forward, backward = moments.forward, moments.backward
            offset = forward_window.length - backward_window.begin
            visit = BlockTicks(
                tuple(t.shape for t in parameters),
                tuple(t.trained for t in parameters),
                (forward[0] - forward_window.begin, forward[1] - forward_window.begin),
                (max(backward[0], backward_window.begin) + offset, backward[1] + offset),
                packed=tuple(t.is_packed for t in parameters),
                left_out=tuple(t.is_left_out for t in parameters),
            )
        return replace(section_pass, ticks=visit)

    def _work(self, after: int, until: int) -> OpLog:
        rows = np.array([r[1:] for r in self._notes.work if after < r[0] <= until]).reshape(-1, 8)
        flops, low_flops, nbytes, times = rows.T[:4]
        return OpLog(flops, low_flops, nbytes, times, rows[:, 4:])

    def _exchanges(self, after: int, until: int) -> tuple[TensorExchange, ...]:
        return tuple(exchange for tick, exchange in self._run.exchange_log if after < tick <= until)

    def _tensors(self, windows: list[Windows]) -> list[tuple[SectionTensor, ...]]:
        """Return the parameters and buffers of each section."""
        blocks = {name: index for index, name in enumerate(self.order, start=1)}
        tensors_of_section: list[list[SectionTensor]] = [[] for _ in windows]
        model, state = self._run.model, self._run.runner.optimizer.state
        left_out = left_out_names(model)
        for name, parameter in model.named_parameters():
            slots = [v for v in state.get(parameter, {}).values() if isinstance(v, torch.Tensor)]
            sizes = [v.numel() * v.element_size() for v in slots]
            counts = sum(s for s, v in zip(sizes, slots, strict=True) if v.numel() == 1)
            size = parameter.numel() * parameter.element_size()
            description = (
                name,
                tuple(parameter.shape),
                size,
                parameter.requires_grad,
                str(parameter.dtype),
            )
            tensor = SectionTensor(*description, False, sum(sizes), counts, name in left_out)
            for index, is_between in self._places(name, blocks, len(windows)):
                tensors_of_section[index].append(replace(tensor, is_between=is_between))
        for name, buffer in model.named_buffers():
            size = buffer.numel() * buffer.element_size()
            tensor = SectionTensor(name, tuple(buffer.shape), size, is_buffer=True)
            for index, is_between in self._places(name, blocks, len(windows)):
                tensors_of_section[index].append(replace(tensor, is_between=is_between))
        return [tuple(names) for names in tensors_of_section]

    def _places(self, name: str, blocks: dict[str, int], sections: int) -> list[tuple[int, bool]]:
        """Return the sections to which a tensor belongs, each as (index, whether `is_between`).

        A tensor outside of all blocks belongs to each section in which the first forward pass uses
        it: the part before the blocks, the part after them, or a block and what follows it.
        """
        for block, index in blocks.items():
            if name.startswith(f"{block}."):
                return [(index, False)]
        if not self.order:
            return [(0, False)]
        begins, ends, backward_start = self._first_forward
        ticks = [tick for tick in self._notes.used.get(name, ()) if tick <= backward_start]
        places = {sections - 1 if tick > ends else bisect_left(begins, tick) for tick in ticks}
        if len(begins) < len(self.order):  # that pass left blocks out, so sections do not match
            places &= {0, sections - 1}
        return [(index, 0 < index < sections - 1) for index in sorted(places)] or [(0, False)]

    @cached_property
    def _first_forward(self) -> tuple[list[int], int, int]:
        """Ticks of the first forward pass.

        Those at which the blocks of `order` begin, if the pass calls them; at which the last block
        ends; and at which the pass ends.
        """
        backward_start = next(t for t, phase in self._run.timeline.phases if phase == "backward")
        called = {n: self._run.ticks.ticks(n, 0, backward_start) for n in self._notes.names}
        begins = [ticks[0] for n in self.order if (ticks := called[n].get("forward begins"))]
        ends = max(tick for ticks in called.values() for tick in ticks.get("forward ends", ()))
        return begins, ends, backward_start


def record_split_backward(
    workload: Workload,
    names: Sequence[str],
    micro_batches: Sequence[MicroBatch],
    plan: Plan,
    device: torch.device,
    slices: ModelSlices | None = None,
    *,
    contiguous_gradients: bool = False,
) -> tuple[dict[str, PassPair], ...] | None:
    """Run a model whose backward pass is split into the inputs' and the weights' gradients.

    Both parts stop at the inputs of the first block. The part before the first block is left out,
    because the stage that contains it does not split its backward pass.

    Args:
        workload: see `record_sections`.
        names: see `record_sections`.
        micro_batches: see `record_sections`.
        plan: see `record_sections`.
        device: see `record_sections`.
        slices: see `record_sections`.
        contiguous_gradients: see `record_sections`.

    Returns:
        For each of `micro_batches` the passes of the blocks by name, and under "" those of the part
        after them. None if the model cannot run with a split backward pass.
    """
    notes = SectionHooks(names, contiguous_gradients=contiguous_gradients)
    unit = InputThenWeightBackward(notes.names)
    try:
        run = _recorded(workload, micro_batches, plan, device, slices, notes, unit)
    except Exception:  # noqa: BLE001 - user code may raise anything; then the pass is not split
        return None
    runs = [run] if run.first_step is None else [run.first_step, run]
    passes = [
        _split_sections(SectionSplitter(fake_run, notes, plan), fake_run, unit) for fake_run in runs
    ]
    return tuple(passes) if all(passes) else None


def _split_sections(
    splitter: SectionSplitter, run: FakeRun, unit: InputThenWeightBackward
) -> dict[str, PassPair]:
    """Return the passes of the blocks of a run, by name, and of the part after them, under "".

    The result is empty if the blocks do not run one after another.
    """
    if not splitter.order:
        return {}
    names = [*splitter.order, ""]
    first, later = (_split_passes(splitter, run, unit, which) for which in (0, 1))
    return dict(zip(names, zip(first, later, strict=True), strict=True))


def _split_passes(
    splitter: SectionSplitter, run: FakeRun, unit: InputThenWeightBackward, which: int
) -> list[SectionPass]:
    start, stop = run.marks[which], run.marks[which + 1]
    begin = next((tick for tick in unit.starts if start < tick <= stop), stop)
    ends = {name: tick for tick, name in unit.done if start < tick <= stop}
    windows: list[Windows] = []
    done = begin
    for name, (forward_window, backward_window) in zip(
        [*splitter.order, ""], splitter.windows(which)[1:], strict=True
    ):
        until = max(done, ends.get(name, done)) if name else stop
        inputs = SectionWindow(min(backward_window.begin, begin), min(backward_window.end, begin))
        windows.append((forward_window, inputs, SectionWindow(done, until)))
        done = until
    spans = run.window(which).spans
    return [section_spans(spans, windows, index, stop) for index in range(len(windows))]
