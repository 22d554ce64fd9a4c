"""One rank's step through a pipeline, from one micro-batch of each of its stages.

A stage's micro-batch is recorded once, forward and backward one after the other. In the
schedule's order other work comes between the two: what is alive where the forward pass ends waits.
The memory of an action is then what its own ticks hold, on top of what all others have waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from bigtrain.memory.timeline import MEMORY_KINDS, MemoryKind, Phase, Span, Timeline
from bigtrain.schedules.orders import Action


@dataclass(frozen=True)
class RecordedPass:
    """One micro-batch through a stage and back, recorded in one go.

    Raises:
        ValueError: the ticks are not in order.
    """

    timeline: Timeline
    starts: tuple[int, ...]
    """The tick at which the backward pass begins: what is born before it and dies after it is in
    flight. Two ticks where the backward pass is split: of its inputs' part, and its weights'."""
    end: int
    """The last tick; gradients that die later stay until the optimizer has used them."""

    def __post_init__(self) -> None:
        ticks = (self.begin, *self.starts, self.end + 1)
        if len(self.starts) not in (1, 2) or any(a > b for a, b in pairwise(ticks)):
            raise ValueError(f"the passes of a micro-batch lie between the ticks {ticks}")

    @classmethod
    def of(cls, timeline: Timeline) -> RecordedPass:
        """One whose backward phases are its parts, up to where the last storage goes."""
        weights_begin = timeline.phases[0][0]
        end = max((span.death for span in timeline.spans), default=weights_begin + 1) - 1
        starts = tuple(tick for tick, phase in timeline.phases if phase == "backward") or (end,)
        return cls(timeline, starts, max(*starts, end))

    @property
    def begin(self) -> int:
        """The first tick at which anything is alive, or the backward pass begins."""
        return min((*self.starts[:1], *(span.birth for span in self.timeline.spans)))


StageRecord = Mapping[str, RecordedPass]
"""A stage as the replay needs it, by the ways of `forecast.Passes`.

Without `split` its parts are made up, and hold no less than the real ones. For stage 0 that is
exact: torch leaves its I out, and its W is the whole backward pass. Elsewhere I and W have the
ticks of the whole backward pass each; parameters' gradients come in W; all else that is alive
or made in I stays until the end of W, as torch keeps the graph and may keep any gradient in it.
`last` is whole, also in a schedule that splits the backward pass.
"""


@dataclass(frozen=True, order=True)
class _PassCase:
    """How one micro-batch goes through a stage: all that go alike are one."""

    stage: int
    order: Literal["first", "later"]
    split: bool
    last: bool = False


@dataclass(frozen=True)
class _Recording:
    """A `RecordedPass` cut where its actions end."""

    ticks: tuple[int, ...]
    """The first tick of each action, and the one after the last."""
    actions: tuple[tuple[Span, ...], ...]
    """What is alive during each action, within its ticks."""
    waiting: tuple[tuple[tuple[MemoryKind, int], ...], ...]
    """Bytes by kind from the end of each action to the next, or to the end of the step."""
    gathered: int
    """Bytes of kind `parameters` from the end of the forward pass on: once for the stage."""


_Held = tuple[int, ...]
"""For each way and each action of it, how many micro-batches have done that and not the next; for
each stage whether it has its parameters gathered; and the bytes of what is on its way."""


_Course = Literal["usual", "resumed", "strayed"]
"""Whether it is the case's recording, or another way: see `forecast.Passes`."""


_OTHER_COURSES: tuple[_Course, ...] = ("resumed", "strayed")


_TURN = -1
"""In place of an action: a moment between two, in which nothing is computed."""


class _Act(NamedTuple):
    """An action of a way; all that have the same recording are one."""

    way: _PassCase
    point: int
    course: _Course


def replay_actions(
    actions: Sequence[Action],
    pieces: Mapping[int, StageRecord],
    beside: Sequence[int] = (),
    before: Sequence[int] = (),
) -> Timeline:
    """The moments of a rank's step among which the highest is, whatever is alive beside them.

    An action of a stage is the same each time but for what waits beside it, so it is laid out
    only where no less waits (of any stage, at any point) than at another time. Such moments follow
    each other on one clock, in the order of the step, each complete; what waits beside an action
    is one span for each kind, stage and point. So `peak()` is exactly that of the whole step laid
    out, also after kinds have been dropped; a sum over time it is not. Spans of kind `parameters`
    that outlive a forward pass are what a sharded stage has gathered: they are there once, from a
    forward pass to the next backward pass of the stage, which frees them.

    Args:
        actions: what the rank does, as `orders.schedule_orders` has it.
        pieces: the rank's stages.
        beside: for each action the bytes of what is on its way meanwhile.
        before: for each action those of what is on its way just before it, where that is more.

    Returns:
        The timeline, from tick 0; empty phases are left out.
    """
    case_of = _ways(actions, pieces)
    recordings = {case: _recording(case, pieces[case.stage]) for case in set(case_of.values())}
    slots: dict[tuple[_PassCase, int] | int, int] = {}
    for case in sorted(recordings):
        for action_index, waiting in enumerate(recordings[case].waiting):
            if waiting:  # what holds nothing need not be told apart
                slots[case, action_index] = len(slots)
    gathered = {case.stage: found.gathered for case, found in recordings.items() if found.gathered}
    for stage in sorted(gathered):
        slots[stage] = len(slots)
    held_counts = [0] * len(slots)
    forwards: dict[int, int] = {}  # of each stage since its last backward pass
    seen: dict[_Act, dict[_Held, tuple[int, int]]] = {}
    for moment, (stage, kind, micro_batch) in enumerate(actions):
        case = case_of[stage, micro_batch]
        action_index = {"F": 0, "I": 1, "B": 1, "W": 2}[kind]
        if before and before[moment]:
            _see(seen, _Act(case, _TURN, "usual"), held_counts, before[moment], moment)
        if (case, action_index - 1) in slots:
            held_counts[slots[case, action_index - 1]] -= 1
        course = _course(kind, forwards.get(stage, 0))
        if stage in slots and kind != "F":  # what it frees is in its own ticks
            held_counts[slots[stage]] = 0
        extra = beside[moment] if beside else 0
        _see(seen, _Act(case, action_index, course), held_counts, extra, moment)
        forwards[stage] = forwards.get(stage, 0) + 1 if kind == "F" else 0
        if stage in slots and kind == "F":
            held_counts[slots[stage]] = 1
        if (case, action_index) in slots:
            held_counts[slots[case, action_index]] += 1
    chosen = sorted(
        (moment, act, counts) for act, known in seen.items() for counts, moment in _front(known)
    )
    waits = {slot: _waiting(recordings, gathered, key) for key, slot in slots.items()}
    others = {
        (case, course): _cut_by_action(pieces[case.stage][f"{case.order}_{course}"])
        for case in recordings
        for course in _OTHER_COURSES
        if not case.split and f"{case.order}_{course}" in pieces[case.stage]
    }
    return _laid_out(chosen, recordings, others, waits)


def _course(kind: str, forwards: int) -> _Course:
    if kind == "F":
        return "resumed" if forwards else "usual"
    return "usual" if forwards == 1 else "strayed" if forwards else "resumed"


def _waiting(
    recordings: Mapping[_PassCase, _Recording],
    gathered: Mapping[int, int],
    key: tuple[_PassCase, int] | int,
) -> Sequence[tuple[MemoryKind, int]]:
    if isinstance(key, int):
        return (("parameters", gathered[key]),)
    return recordings[key[0]].waiting[key[1]]


def _ways(
    actions: Sequence[Action], pieces: Mapping[int, StageRecord]
) -> dict[tuple[int, int], _PassCase]:
    """How each (stage, micro-batch) goes; the first whose B or W comes makes the gradients."""
    split = {(stage, number) for stage, kind, number in actions if kind in ("I", "W")}
    firsts: dict[int, int] = {}
    for stage, kind, number in actions:
        if kind in ("B", "W"):
            firsts.setdefault(stage, number)
    last_micro_batch = max((number for _, _, number in actions), default=0)
    return {
        (stage, number): _PassCase(
            stage,
            "first" if firsts.get(stage) == number else "later",
            (stage, number) in split,
            number == last_micro_batch and "first_last" in pieces[stage],
        )
        for stage, _, number in actions
    }


def _see(
    seen: dict[_Act, dict[_Held, tuple[int, int]]],
    act: _Act,
    counts: Sequence[int],
    extra: int,
    moment: int,
) -> None:
    """Of moments at which as much waits keep that with most on its way, of equal ones the first."""
    known = seen.setdefault(act, {})
    key = tuple(counts)
    if key not in known or extra > known[key][0]:
        known[key] = extra, moment


def _front(known: Mapping[_Held, tuple[int, int]]) -> Iterable[tuple[_Held, int]]:
    """What is nowhere less than another."""
    front: dict[_Held, int] = {}
    for counts, (extra, moment) in known.items():
        beside = (*counts, extra)
        if any(all(a >= b for a, b in zip(other, beside, strict=True)) for other in front):
            continue
        for other in list(front):
            if all(a <= b for a, b in zip(other, beside, strict=True)):
                del front[other]
        front[beside] = moment
    return front.items()


def _recording(case: _PassCase, piece: StageRecord) -> _Recording:
    whole_pass = piece[f"{case.order}_last" if case.last else case.order]
    if not case.split:
        return _cut_by_action(whole_pass)
    split_pass = None if case.last else piece.get(f"{case.order}_split")
    if split_pass is None:
        is_whole = case.last or case.stage == 0
        split_pass = (_torch_first_stage if is_whole else _split_conservatively)(whole_pass)
    return _cut_by_action(split_pass)


def _torch_first_stage(whole: RecordedPass) -> RecordedPass:
    return replace(whole, starts=(whole.starts[0], whole.starts[0]))


def _split_conservatively(whole: RecordedPass) -> RecordedPass:
    """The backward pass twice: see `StageRecord`."""
    boundary, again = whole.starts[0], whole.end + 1 - whole.starts[0]
    end = whole.end + again + 1  # a tick more, at which all but the gradients is gone
    spans = []
    for span in whole.timeline.spans:
        stays = span.kind == "gradients" and span.death > whole.end
        if stays:
            birth = span.birth + again if span.birth >= boundary else span.birth
            spans.append(span._replace(birth=birth, death=end + 1))
        elif span.death > boundary:
            spans.append(span._replace(death=end))
        else:
            spans.append(span)
    timeline = Timeline(tuple(spans), whole.timeline.phases)
    return RecordedPass(timeline, (boundary, boundary + again), end)


def _cut_by_action(passes: RecordedPass) -> _Recording:
    """Sort the spans by the actions that they are alive in."""
    ticks = (passes.begin, *passes.starts, passes.end + 1)
    spans_by_action, waiting = [], []
    gathered = 0
    for start, stop in pairwise(ticks):
        is_last = stop == ticks[-1]
        alive: list[Span] = []
        sums = dict.fromkeys(MEMORY_KINDS, 0)
        for span in passes.timeline.spans:
            nbytes, kind, birth, death = span
            if birth >= stop or death <= start:
                continue
            if birth >= start and death <= stop:
                if birth < death:
                    alive.append(span)
            else:
                alive.append(Span(nbytes, kind, max(birth, start), min(death, stop)))
            if (death >= stop and kind == "gradients") if is_last else death > stop:
                sums[kind] += nbytes
        spans_by_action.append(tuple(alive))
        gathered_now = sums.pop("parameters")
        gathered = gathered_now if start == ticks[0] else gathered
        waiting.append(tuple((kind, nbytes) for kind, nbytes in sums.items() if nbytes))
    return _Recording(ticks, tuple(spans_by_action), tuple(waiting), gathered)


def _laid_out(
    chosen: Sequence[tuple[int, _Act, _Held]],
    recordings: Mapping[_PassCase, _Recording],
    others: Mapping[tuple[_PassCase, _Course], _Recording],
    waits: Mapping[int, Sequence[tuple[MemoryKind, int]]],
) -> Timeline:
    spans: list[Span] = []
    phases: list[tuple[int, Phase]] = []
    clock = 0
    for _, (case, action_index, course), counts in chosen:
        recording = others.get((case, course), recordings[case])
        start, stop = 0, 1
        if action_index != _TURN:
            start, stop = recording.ticks[action_index], recording.ticks[action_index + 1]
        if start == stop:
            continue
        end = clock + stop - start
        phase: Phase = "backward" if action_index > 0 else "forward"
        if not phases or phases[-1][1] != phase:
            phases.append((clock, phase))
        for slot, waiting in waits.items():
            if counts[slot]:
                spans += (Span(n * counts[slot], kind, clock, end) for kind, n in waiting)
        if counts[-1]:
            spans.append(Span(counts[-1], "temporary", clock, end))
        moved = clock - start
        own = recording.actions[action_index] if action_index != _TURN else ()
        spans += [Span(n, k, a + moved, z + moved) for n, k, a, z in own]
        clock = end
    return Timeline(tuple(spans), tuple(phases) or ((0, "forward"),))
