"""A model taken apart on fake tensors: one run, from whose parts others are put together.

Blocks that are alike and follow one another are run three times at most: the first, one for all
between, and the last. A model that cannot be shortened so is run whole; one whose blocks do not
follow one another is a single section.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import Plan
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Profile
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.memory.timeline import BlockTicks, Timeline
from bigtrain.memory.tracker import StorageTracker
from bigtrain.models.blocks import independent_blocks
from bigtrain.prediction.record import (
    FakeRun,
    optimizer_state_figures,
    profile_from_run,
    record_steps,
    untraceable_reason,
)
from bigtrain.prediction.sections import (
    OpLog,
    Section,
    SectionPass,
    SectionTensor,
    SectionWindow,
    mark_gradients,
    section_spans,
)
from bigtrain.tensors.op_cost import REPEAT_COUNT, bytes_touched, flops_of


@dataclass(frozen=True)
class RecordedSections:
    """A model as sections in the order of its forward pass, and its optimizer's step."""

    sections: tuple[Section, ...]
    """The first and the last are what is before and after all blocks."""
    step: Timeline
    step_work: OpLog
    """Of the optimizer and the clipping."""
    batch_bytes: int
    rows: int
    state_slots: float
    """See `Profile.state_slots`."""
    profile: Profile | None = None
    """Of the whole model, where it is one section: its blocks do not follow one another."""
    copies_gradient: bool = False
    """Whether a block's output lies otherwise in memory than the gradient that came back for it:
    between ranks that gradient is sent as the output lies, and may have to be copied."""


class UntraceableError(Exception):
    """A model that does not run on fake tensors."""


class SectionHooks:
    """Notes when blocks begin and end, and what every operation does.

    Args:
        names: of the blocks.
        as_sent: gradients that come back to a block lie as its output does.
    """

    def __init__(self, names: Sequence[str], *, as_sent: bool = False) -> None:
        self.names = tuple(names)
        self.relaid = False
        """See `RecordedSections.copies_gradient`."""
        self._as_sent = as_sent
        self.ticks: list[tuple[int, int, str]] = []
        """(clock, block, what)"""
        self.work: list[tuple[int, float, float, float, int]] = []
        """(clock, flops, flops in bf16, bytes, how often it is done) of each operation."""
        self.incoming: list[tuple[int, int, tuple[int, int]]] = []
        """(clock, block, bytes that it is called with, those that a gradient goes back to)"""
        self.used: dict[str, set[int]] = {}
        """When each tensor of the model was used in the first micro-batch of all."""
        self._owners: dict[int, str] = {}
        self.clock: Callable[[], int] = lambda: 0

    def install(self, fake: nn.Module, tracker: StorageTracker) -> AbstractContextManager[object]:
        """Put hooks on the blocks, for good; see `record.InstallHooks`."""
        self.clock = lambda: tracker.clock
        for number, name in enumerate(self.names):
            block = fake.get_submodule(name)
            block.register_forward_pre_hook(self._before(number), with_kwargs=True)
            block.register_forward_hook(self._after(number))
        for tensors in (fake.named_parameters(), fake.named_buffers()):
            for name, tensor in tensors:
                self._owners[tensor.untyped_storage()._cdata] = name
        return _OpLogMode(self)

    def note(self, number: int, what: str) -> None:
        """Note a moment of a block."""
        self.ticks.append((self.clock(), number, what))

    def _before(self, number: int) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self.note(number, "forward begins")
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            sizes = [leaf.numel() * leaf.element_size() for leaf in given]
            wanted = [s for s, leaf in zip(sizes, given, strict=True) if leaf.requires_grad]
            self.incoming.append((self.clock(), number, (sum(sizes), sum(wanted))))
            for tensor in given:
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.note(number, "backward ends"))  # type: ignore[no-untyped-call]

        return hook

    def _after(self, number: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self.note(number, "forward ends")
            given = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            for tensor in given:
                if tensor.requires_grad:
                    tensor.register_hook(self._arrived(number, tensor.stride()))  # type: ignore[no-untyped-call]

        return hook

    def _arrived(self, number: int, strides: tuple[int, ...]) -> Any:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            pairs = zip(gradient.shape, gradient.stride(), strides, strict=True)
            if any(own != sent for size, own, sent in pairs if size > 1):
                self.relaid = True
                if self._as_sent and number < len(self.names) - 1:  # the last one's is not sent
                    gradient = gradient.new_empty_strided(gradient.shape, strides)
            self.note(number, "backward begins")
            return gradient

        return hook

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operation that was done."""
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if not made:  # a question about a tensor
            return
        clock = self.clock()
        for tensor in given:
            owner = self._owners.get(tensor.untyped_storage()._cdata)
            if owner is not None:
                self.used.setdefault(owner, set()).add(clock)
        flops = float(flops_of(func, args, kwargs, result))
        low = any(t.dtype in (torch.bfloat16, torch.float16) for t in given)
        nbytes = float(bytes_touched(given, made))
        sizes = (0.0 if low else flops, flops if low else 0.0, nbytes)
        self.work.append((clock, *sizes, REPEAT_COUNT.get()))


class _OpLogMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, notes: SectionHooks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        self._notes.operation(func, args, kwargs or {}, result)
        return result


def record_sections(
    workload: Workload,
    micro_batches: Sequence[MicroBatch],
    plan: Plan,
    device: torch.device,
    *,
    as_sent: bool = False,
) -> tuple[RecordedSections, ...]:
    """Run a model on fake tensors and take the run apart; see `record.make_profile`.

    Args:
        workload: the model on the meta device; its example is not looked at.
        micro_batches: one, or two of different sizes: both are taken in one run.
        plan: as in the run.
        device: whose kernels decide what is saved.
        as_sent: see `SectionHooks`.

    Returns:
        One for each micro-batch.

    Raises:
        CannotRunError: the model's own code raises where it sees no numbers; the cause says what.
        ConfigError: a technique refuses the model.
    """
    notes = SectionHooks([name for name, _ in independent_blocks(workload.model)], as_sent=as_sent)
    try:
        *before, last = micro_batches
        given = (replace(workload, example=last), ResolvedPlan.of(plan, workload.model), device)
        run = record_steps(*given, notes.install, before[0] if before else None)
    except ConfigError:
        raise
    except Exception as error:  # user code of any kind runs here
        raise UntraceableError(untraceable_reason(error)) from error
    found = SectionSplitter(run, notes, plan).dissected(last.rows)
    if run.first_step is None:
        return (found,)
    small = SectionSplitter(run.first_step, notes, plan).dissected(before[0].rows)
    # In the first step the optimizer has made its state; the second is like all others.
    profile = small.profile and replace(small.profile, step=found.step)
    return replace(small, step=found.step, step_work=found.step_work, profile=profile), found


@dataclass(frozen=True)
class _Moments:
    """When blocks began and ended in one micro-batch: forward, and backward."""

    forward: tuple[int, int]
    backward: tuple[int, int]


class SectionSplitter:
    """A run and its notes, to be cut into sections."""

    def __init__(self, run: FakeRun, notes: SectionHooks, plan: Plan) -> None:
        self._run, self._notes, self._plan = run, notes, plan
        self.order = self._in_order()
        """The blocks in the order of the pass; none where they do not follow one another."""

    def dissected(self, rows: int) -> RecordedSections:
        """The sections of the run."""
        run = self._run
        windows = [self.windows(number) for number in (0, 1)]
        tensors = self._tensors(windows[0])
        names = ["", *(self._notes.names[n] for n in self.order), ""]
        if not self.order:
            names = ["", ""]
        sections = []
        for place, name in enumerate(names):
            first, later = (self._pass(n, place, windows[n], tensors) for n in (0, 1))
            passes = mark_gradients(first, later)
            forward, backward = self._works(windows[1][place])
            incoming = (0, 0)
            if 0 < place < len(names) - 1:
                incoming = self._incoming(self.order[place - 1])
            sections.append(Section(name, passes, forward, backward, tensors[place], *incoming))
        begin, stop = run.marks[2], run.marks[3]
        slots = optimizer_state_figures(run.model, run.optimizer, run.widths)["state_slots"]
        return RecordedSections(
            tuple(sections),
            run.window(2),
            self._work(begin, stop),
            run.batch_bytes,
            rows,
            slots,
            None if self.order else profile_from_run(run, self._plan),
            self._notes.relaid,
        )

    def _incoming(self, number: int) -> tuple[int, int]:
        start, stop = self._run.marks[:2]
        seen = self._notes.incoming
        return next(sizes for tick, n, sizes in seen if n == number and start <= tick <= stop)

    def _in_order(self) -> list[int]:
        """The blocks in the order of the pass; none where they do not follow one another."""
        start, stop = self._run.marks[0], self._run.marks[1]
        begins = {}
        for tick, number, what in self._notes.ticks:
            if what == "forward begins" and start <= tick <= stop:
                if number in begins:  # called twice
                    return []
                begins[number] = tick
        order = sorted(begins, key=lambda number: begins[number])
        for which in (0, 1):
            moments = [self._moments(number, which) for number in order]
            there = [t for m in moments for t in m.forward]
            back = [t for m in reversed(moments) for t in m.backward]
            if there != sorted(there) or back != sorted(back):
                return []
        return order

    def _moments(self, number: int, which: int) -> _Moments:
        start, stop = self._run.marks[which], self._run.marks[which + 1]
        ticks: dict[str, list[int]] = {}
        for tick, whose, what in self._notes.ticks:
            if whose == number and start <= tick <= stop:
                ticks.setdefault(what, []).append(tick)
        forward = min(ticks["forward begins"]), max(ticks.get("forward ends", [stop]))
        begins = min(ticks.get("backward begins", [stop]))
        return _Moments(forward, (begins, max(ticks.get("backward ends", [stop]))))

    def _turn(self, which: int) -> int:
        start, stop = self._run.marks[which], self._run.marks[which + 1]
        phases = self._run.timeline.phases
        return next((t for t, p in phases if p == "backward" and start < t <= stop), stop)

    def windows(self, which: int) -> list[SectionWindow]:
        """Of what is before the blocks, of each block, of what is after them."""
        start, stop = self._run.marks[which], self._run.marks[which + 1]
        turn = self._turn(which)
        moments = [self._moments(number, which) for number in self.order]
        there = [start, *(m.forward[0] for m in moments)]
        back = [stop, *(m.backward[1] for m in moments)]
        if moments:
            there.append(moments[-1].forward[1])
            back.append(min(max(turn, moments[-1].backward[0]), back[-1]))
        else:  # one section before the turn, none after it
            there.append(turn)
            back.append(turn)
        there.append(turn)
        back.append(turn)
        return [
            SectionWindow(there[n], there[n + 1], back[n + 1], back[n])
            for n in range(len(there) - 1)
        ]

    def _pass(
        self,
        which: int,
        place: int,
        windows: list[SectionWindow],
        tensors: list[tuple[SectionTensor, ...]],
    ) -> SectionPass:
        window, stop = windows[place], self._run.marks[which + 1]
        found = section_spans(self._run.window(which).spans, windows, place, stop)
        visit = None
        if self.order and 0 < place <= len(self.order):
            moments = self._moments(self.order[place - 1], which)
            parameters = [t for t in tensors[place] if not t.is_buffer]
            forward, backward = moments.forward, moments.backward
            behind = window.forward - window.c
            visit = BlockTicks(
                tuple(t.shape for t in parameters),
                tuple(t.trained for t in parameters),
                (forward[0] - window.a, forward[1] - window.a),
                (max(backward[0], window.c) + behind, backward[1] + behind),
            )
        return replace(found, ticks=visit)

    def _works(self, window: SectionWindow) -> tuple[OpLog, OpLog]:
        return self._work(window.a, window.b), self._work(window.c, window.d)

    def _work(self, after: int, until: int) -> OpLog:
        rows = np.array([r[1:] for r in self._notes.work if after < r[0] <= until]).reshape(-1, 4)
        return OpLog(*rows.T)

    def _tensors(self, windows: list[SectionWindow]) -> list[tuple[SectionTensor, ...]]:
        """Each section's parameters and buffers; outside of blocks by their first use."""
        blocks = {self._notes.names[n]: place + 1 for place, n in enumerate(self.order)}
        found: list[list[SectionTensor]] = [[] for _ in windows]
        model, state = self._run.model, self._run.optimizer.state
        for name, parameter in model.named_parameters():
            slots = [v for v in state.get(parameter, {}).values() if isinstance(v, torch.Tensor)]
            sizes = [v.numel() * v.element_size() for v in slots]
            counts = sum(s for s, v in zip(sizes, slots, strict=True) if v.numel() == 1)
            size = parameter.numel() * parameter.element_size()
            given = (
                name,
                tuple(parameter.shape),
                size,
                parameter.requires_grad,
                str(parameter.dtype),
            )
            for place in self._places(name, blocks, len(windows)):
                found[place].append(SectionTensor(*given, False, sum(sizes), counts))
        for name, buffer in model.named_buffers():
            size = buffer.numel() * buffer.element_size()
            for place in self._places(name, blocks, len(windows)):
                found[place].append(SectionTensor(name, tuple(buffer.shape), size, is_buffer=True))
        return [tuple(own) for own in found]

    def _places(self, name: str, blocks: dict[str, int], sections: int) -> list[int]:
        """The sections that a tensor belongs to: what is tied may be used before and after."""
        for block, place in blocks.items():
            if name.startswith(f"{block}."):
                return [place]
        if not self.order:
            return [0]
        begins, ends, turn = self._first_forward
        ticks = [tick for tick in self._notes.used.get(name, ()) if tick <= turn]
        places = {
            0 if tick <= begins else sections - 1 for tick in ticks if not begins < tick < ends
        }
        return sorted(places) or [0]

    @cached_property
    def _first_forward(self) -> tuple[int, int, int]:
        """Of the very first forward pass: when the blocks begin, when they end, when it ends."""
        turn = next(t for t, phase in self._run.timeline.phases if phase == "backward")
        noted = [n for n in self._notes.ticks if n[0] <= turn]
        begins = min(t for t, _, what in noted if what == "forward begins")
        return begins, max(t for t, _, what in noted if what == "forward ends"), turn
