"""Blocks whose backward pass is in two parts: gradients of inputs first, those of weights later.

torch keeps a stage's whole graph between the two, with all that was saved, and at each layer with
weights the gradient that came there. So the parts are recorded as they are, in one run on fake
tensors that goes back to the first block: a stage that begins before it goes back in one part.
Sections have three windows of ticks here: forward, for the inputs, for the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from bigtrain.core.loop import LoopRunner
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Profile
from bigtrain.data.loader import MicroBatch
from bigtrain.memory.timeline import MemoryKind, Span, Timeline
from bigtrain.memory.tracker import StorageTracker
from bigtrain.models.blocks import independent_blocks
from bigtrain.prediction.record import FakeRun, record_steps
from bigtrain.prediction.record_sections import SectionHooks, SectionSplitter
from bigtrain.prediction.sections import UNTIL_OPTIMIZER
from bigtrain.prediction.sections import SectionWindow as Whole

UNTIL_TURN, UNTIL_END = -2, -3
"""The deaths of what stays until all forward passes are done, or the micro-batch."""
SPLIT_DETAILED_ENDS = 2
"""As in `sections`."""


@dataclass(frozen=True)
class SplitPass:
    """One micro-batch through a section, there and back in two parts."""

    forward: int
    inputs: int
    weights: int
    """Ticks of the windows."""
    spans: tuple[Span, ...]
    wires: tuple[int, ...] = ()
    """Which of them come from the section before, or go back to it: a stage that begins here has
    what it was sent, and the gradient of that, until the end."""
    arriving: tuple[int, ...] = ()
    """Which of them are gradients of what goes out: a stage that ends here has them until the end,
    too."""

    def at_edges(self, *, begins: bool, ends: bool) -> tuple[Span, ...]:
        """As a section has it with which a stage begins, or ends."""
        found = list(self.spans)
        for place in (*(self.wires if begins else ()), *(self.arriving if ends else ())):
            found[place] = found[place]._replace(death=UNTIL_END)
        return tuple(found)

    @cached_property
    def flat(self) -> tuple[Span, ...]:
        """What others see of it: what waits between its windows, and its gradients."""
        there, back = self.forward, self.forward + self.inputs
        sums: dict[tuple[MemoryKind, int, int], int] = {}
        kept = []
        for nbytes, kind, birth, death in self.spans:
            ends = death if death < 0 else back + self.weights if death > back + 1 else there + 2
            if death == UNTIL_OPTIMIZER:
                kept.append(Span(nbytes, kind, birth, death))
            elif birth <= there and (death == UNTIL_END or death > there + 1):
                sums[kind, there, ends] = sums.get((kind, there, ends), 0) + nbytes
            elif there < birth <= back and (death == UNTIL_END or death > back + 1):
                sums[kind, back, ends] = sums.get((kind, back, ends), 0) + nbytes
        return (*(Span(n, kind, a, b) for (kind, a, b), n in sums.items()), *kept)


SplitPasses = tuple[SplitPass, SplitPass]
"""The first micro-batch of a step, and every other one."""


class SplitWindow(NamedTuple):
    """Ticks a < t <= b forward, c < t <= d for the inputs, e < t <= f for the weights."""

    a: int
    b: int
    c: int
    d: int
    e: int
    f: int


def record_split_backward(
    workload: Workload,
    micro_batches: Sequence[MicroBatch],
    plan: Plan,
    device: torch.device,
    *,
    as_sent: bool = False,
) -> tuple[dict[str, SplitPasses], ...] | None:
    """Run a model with its backward pass in two parts; see `record_sections.record_sections`.

    Returns:
        For each micro-batch the blocks by their names, and under "" what is after them; None where
        the model does not run so.
    """
    notes = SectionHooks([name for name, _ in independent_blocks(workload.model)], as_sent=as_sent)
    parts = _SplitBackwardRecorder(notes)
    *before, last = micro_batches
    noting = (parts.install, before[0] if before else None, parts.runner)
    try:
        resolved = ResolvedPlan.of(plan, workload.model)
        run = record_steps(replace(workload, example=last), resolved, device, *noting)
    except Exception:  # noqa: BLE001 - user code of any kind runs here; the whole pass stands in
        return None
    runs = [run] if run.first_step is None else [run.first_step, run]
    found = [_split_passes(one, notes, parts, plan) for one in runs]
    return tuple(found) if all(found) else None


class _SplitBackwardRecorder:
    """Takes the backward pass apart, and notes when the parts of each block are done."""

    def __init__(self, notes: SectionHooks) -> None:
        self._notes = notes
        self.wires: list[Tensor] = []
        """What the first block is called with in this micro-batch."""
        self.starts: list[int] = []
        """When the parts for the weights begin, one for each micro-batch."""
        self.done: list[tuple[int, str]] = []
        """(clock, block) when the weights of a block are done; "" for what is in none."""

    def runner(self, assembly: Assembly) -> LoopRunner:
        """The plain loop, but for its backward pass."""
        return _SplitLoopRunner(assembly, self)

    def install(self, fake: nn.Module, tracker: StorageTracker) -> AbstractContextManager[object]:
        """See `record.InstallHooks`. The first block's inputs are cut off before."""
        for name in self._notes.names:
            block = fake.get_submodule(name)
            block.register_forward_pre_hook(self._detach_inputs, with_kwargs=True)
        return self._notes.install(fake, tracker)

    def _detach_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.wires:
            return None
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        wanted = [t for t in leaves if t.requires_grad]
        wanted = wanted or [t for t in leaves if t.is_floating_point()]
        ids = {id(t) for t in wanted}

        def cut(leaf: Any) -> Any:
            if id(leaf) not in ids:
                return leaf
            wire = leaf.detach().requires_grad_()
            self.wires.append(wire)
            return wire

        return tree_map(cut, (args, kwargs))

    def backward(self, loss: Tensor, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Both parts; what is in no block comes last, and so keeps what it has longest."""
        from torch.distributed.pipelining import _backward

        for_inputs: Callable[..., Any] = _backward.stage_backward_input
        for_weights: Callable[..., Any] = _backward.stage_backward_weight
        parameters = [parameter for _, parameter in named]
        wires, self.wires = self.wires, []
        _, groups = for_inputs([loss], None, wires, iter(parameters))
        owners = {get_gradient_edge(p).node: self._block(name) for name, p in named}
        places = {name: place for place, name in enumerate(self._notes.names)}

        def place(group: Any) -> tuple[int, str]:
            return min(
                (places.get(o, len(places)), o) for o in (owners[n] for n in group["params"])
            )

        self.starts.append(self._notes.clock())
        for group in sorted(groups, key=place):
            name = place(group)[1]
            for_weights(iter(parameters), [group])
            self.done.append((self._notes.clock(), name))

    def _block(self, parameter: str) -> str:
        return next((n for n in self._notes.names if parameter.startswith(f"{n}.")), "")


class _SplitLoopRunner(LoopRunner):
    def __init__(self, assembly: Assembly, parts: _SplitBackwardRecorder) -> None:
        super().__init__(assembly)
        self._parts = parts

    def backward(self, loss: Tensor) -> None:
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        self._parts.backward(loss, named)


def _split_passes(
    run: FakeRun, notes: SectionHooks, parts: _SplitBackwardRecorder, plan: Plan
) -> dict[str, SplitPasses]:
    """The blocks of a run and what is after them; nothing where they do not follow one another."""
    apart = SectionSplitter(run, notes, plan)
    if not apart.order:
        return {}
    names = [*(notes.names[number] for number in apart.order), ""]
    both = [_passes(run, which, apart.windows(which)[1:], names, parts) for which in (0, 1)]
    return {name: (both[0][n], both[1][n]) for n, name in enumerate(names)}


def _passes(
    run: FakeRun,
    which: int,
    found: Sequence[Whole],
    names: Sequence[str],
    parts: _SplitBackwardRecorder,
) -> list[SplitPass]:
    start, stop = run.marks[which], run.marks[which + 1]
    begin = next((tick for tick in parts.starts if start < tick <= stop), stop)
    ends = {name: tick for tick, name in parts.done if start < tick <= stop}
    windows: list[SplitWindow] = []
    done = begin
    for w, name in zip(found, names, strict=True):
        until = max(done, ends.get(name, done))
        windows.append(SplitWindow(w.a, w.b, min(w.c, begin), min(w.d, begin), done, until))
        done = until
    windows[-1] = windows[-1]._replace(f=stop)
    spans = run.window(which).spans
    return [_section(spans, windows, place, stop) for place in range(len(windows))]


def _section(
    spans: Sequence[Span], windows: Sequence[SplitWindow], place: int, stop: int
) -> SplitPass:
    w = windows[place]
    owner = _Owner(windows, place, stop)
    pairs = [(span, owner.owned(span)) for span in spans]
    kept = [(span, own) for span, own in pairs if own is not None]
    wires = tuple(n for n, (span, _) in enumerate(kept) if owner.is_wire(span))
    arriving = tuple(n for n, (span, _) in enumerate(kept) if owner.is_arriving(span))
    sizes = (w.b - w.a, w.d - w.c, w.f - w.e)
    return SplitPass(*sizes, tuple(own for _, own in kept), wires, arriving)


class _Owner:
    """A section that takes of a timeline what belongs to it, as `sections.section_spans` does."""

    def __init__(self, windows: Sequence[SplitWindow], place: int, stop: int) -> None:
        self._w = windows[place]
        self._before = windows[place - 1] if place else None
        self._after = windows[place + 1] if place + 1 < len(windows) else None
        self._turn, self._stop = windows[-1].b, stop
        self._there = self._w.b - self._w.a
        self._back = self._there + self._w.d - self._w.c

    def owned(self, span: Span) -> Span | None:
        """In the section's own ticks; None of what is another's."""
        w, after = self._w, self._after
        if w.a < span.birth <= w.b:
            return self._made_there(span)
        if w.c < span.birth <= w.d:
            return self._made_back(span)
        if w.e < span.birth <= w.f:
            born = self._back + span.birth - w.e
            is_kept = span.death > self._stop and span.kind == "gradients"
            died = UNTIL_OPTIMIZER if is_kept else self._back + min(span.death, w.f + 1) - w.e
            return span._replace(birth=born, death=died)
        if span.birth <= w.a and (self._before is None or span.birth > self._before.a):
            return self._come_in(span)
        if after is not None and after.c < span.birth <= after.d and _goes(span, w):
            return self._until(span, self._there + 1)  # the gradient of what goes out
        return None

    def is_wire(self, span: Span) -> bool:
        """Whether it comes from the section before and is kept for the way back, or goes to it."""
        w, before = self._w, self._before
        if before is None:
            return False
        if w.c < span.birth <= w.d:
            return _goes(span, before)
        return before.a < span.birth <= w.a and _goes(span, w)

    def is_arriving(self, span: Span) -> bool:
        """Whether it is a gradient of what goes out."""
        after = self._after
        return after is not None and after.c < span.birth <= after.d

    def _made_there(self, span: Span) -> Span:
        w, after, death = self._w, self._after, span.death
        born = span.birth - w.a
        if death <= w.b + 1:
            return span._replace(birth=born, death=death - w.a)
        if after is not None and (death <= after.b + 1 or _goes(span, after)):
            # The section after has it from then on.
            return span._replace(birth=born, death=self._there + 1)
        if death <= self._turn + 1:
            return span._replace(birth=born, death=UNTIL_TURN)
        return self._until(span, born)

    def _made_back(self, span: Span) -> Span:
        before, born = self._before, self._there + span.birth - self._w.c
        if before is not None and _goes(span, before):
            return span._replace(birth=born, death=self._back + 1)
        return self._until(span, born)

    def _come_in(self, span: Span) -> Span | None:
        """What the section before has made, or for the first one what comes from another rank."""
        w, death = self._w, span.death
        if death <= self._turn + 1:
            return span._replace(birth=1, death=death - w.a) if _in(death, w.a, w.b) else None
        is_own = _goes(span, w) or (self._before is None and death > self._stop)
        return self._until(span, 1) if is_own else None

    def _until(self, span: Span, born: int) -> Span:
        w, death = self._w, span.death
        if death > self._stop and span.kind == "gradients":
            death = UNTIL_OPTIMIZER
        elif w.c + 1 <= death <= w.d + 1:
            death = self._there + death - w.c
        elif _in(death, w.e, w.f):
            death = self._back + death - w.e
        else:
            death = UNTIL_END
        return span._replace(birth=born, death=death)


def _goes(span: Span, w: SplitWindow) -> bool:
    """Whether it is let go of on the way back through a section, in either part."""
    return _in(span.death, w.c, w.d) or _in(span.death, w.e, w.f)


def _in(death: int, begin: int, end: int) -> bool:
    return begin + 1 < death <= end + 1


def split_profile(whole: Profile, sections: Sequence[SplitPasses]) -> Profile:
    """The profile of a stage with its backward pass in two parts.

    Args:
        whole: of the same stage, in one part.
        sections: of the stage.
    """
    first, later = (_placed([section[number] for section in sections]) for number in (0, 1))
    nothing: dict[str, Any] = {"blocks": (), "windows": (), "recomputed": frozenset()}
    return replace(whole, first=first, next=later, **nothing)


def _placed(passes: Sequence[SplitPass]) -> Timeline:
    """Sections one after another: there, back for the inputs, there again for the weights."""
    turn = sum(one.forward for one in passes)
    begin = turn + sum(one.inputs for one in passes)
    stop = begin + sum(one.weights for one in passes)
    spans: list[Span] = []
    there, back, again = 0, begin, begin
    for place, one in enumerate(passes):
        back -= one.inputs
        around = passes[max(0, place - SPLIT_DETAILED_ENDS) : place + SPLIT_DETAILED_ENDS + 1]
        is_inside = len(around) > 2 * SPLIT_DETAILED_ENDS and all(other is one for other in around)
        moves = _Moves(one, there, back, again, {UNTIL_OPTIMIZER: stop + 1, UNTIL_END: stop + 1})
        ends = place == len(passes) - 1
        seen = one.flat if is_inside else one.at_edges(begins=place == 0, ends=ends)
        for nbytes, kind, birth, death in seen:
            born = moves.at(birth)
            died = turn + 1 if death == UNTIL_TURN else moves.until(death)
            if died > born:
                spans.append(Span(nbytes, kind, born, died))
        there += one.forward
        again += one.weights
    phases: Any = ((0, "forward"), (turn + 1, "backward"), (begin + 1, "backward"))
    return Timeline(tuple(spans), phases)


class _Moves(NamedTuple):
    """From a section's own ticks to those of the stage."""

    one: SplitPass
    there: int
    back: int
    again: int
    marked: dict[int, int]

    def at(self, tick: int) -> int:
        """When something is born."""
        if tick <= self.one.forward:
            return self.there + tick
        tick -= self.one.forward
        return self.back + tick if tick <= self.one.inputs else self.again + tick - self.one.inputs

    def until(self, tick: int) -> int:
        """When something dies: a tick after the last one at which it is there."""
        return self.marked[tick] if tick < 0 else self.at(tick - 1) + 1


def interpolate_split(
    small: dict[str, SplitPasses], large: dict[str, SplitPasses], join: Callable[..., Any]
) -> dict[str, SplitPasses] | None:
    """Those of another micro-batch size, read off two.

    Args:
        small: of fewer rows.
        large: of more.
        join: of two tuples of spans the one between them, or None.
    """
    found: dict[str, SplitPasses] = {}
    for name, pair in small.items():
        joined = list(_joined(pair, large[name], join))
        if len(joined) != len(pair):
            return None
        found[name] = (joined[0], joined[1])
    return found


def _joined(
    small: SplitPasses, large: SplitPasses, join: Callable[..., Any]
) -> Iterator[SplitPass]:
    for a, b in zip(small, large, strict=True):
        spans = join(a.spans, b.spans)
        if spans is not None and replace(a, spans=()) == replace(b, spans=()):
            yield replace(a, spans=spans)
