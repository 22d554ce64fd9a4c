"""Replay one rank's step of a pipeline from one recorded micro-batch of each of its stages.

The recording of a stage has one forward pass, directly followed by its backward pass. In a schedule
other actions come between the two. Meanwhile the storages that are alive at the end of the forward
pass wait for the backward pass. The memory of an action is that of its own ticks, plus all storages
that wait.

An action is a forward pass (F), a backward pass (B), or the backward pass for the inputs (I) and
for the weights (W).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from bigtrain.memory.timeline import MEMORY_KINDS, MemoryKind, Phase, Span, Timeline
from bigtrain.schedules.orders import Action


@dataclass(frozen=True)
class RecordedPass:
    """The forward and the backward pass of one micro-batch through a stage.

    Raises:
        ValueError: the ticks are not in order.
    """

    timeline: Timeline
    starts: tuple[int, ...]
    """The tick at which the backward pass begins. If the backward pass is split, the tick at which
    I begins and the tick at which W begins."""
    end: int
    """The last tick of the backward pass. Gradients that are freed later stay until the optimizer
    has used them."""

    def __post_init__(self) -> None:
        ticks = (self.begin, *self.starts, self.end + 1)
        if len(self.starts) not in (1, 2) or any(a > b for a, b in pairwise(ticks)):
            raise ValueError(f"the ticks of a micro-batch's passes are not in order: {ticks}")

    @classmethod
    def of(cls, timeline: Timeline) -> RecordedPass:
        """Make a pass from a timeline with one phase "backward" per part of the backward pass."""
        weights_begin = timeline.phases[0][0]
        end = max((span.death for span in timeline.spans), default=weights_begin + 1) - 1
        starts = tuple(tick for tick, phase in timeline.phases if phase == "backward") or (end,)
        return cls(timeline, starts, max(*starts, end))

    @property
    def begin(self) -> int:
        """The first tick at which a storage is alive or the backward pass begins."""
        return min((*self.starts[:1], *(span.birth for span in self.timeline.spans)))


StageRecord = Mapping[str, RecordedPass]
"""The recordings of a stage, by the kinds of `forecast.Passes`.

Without the variant `split`, I and W are derived from the whole backward pass, and take no less
memory than the real ones. For stage 0 they are exact: torch leaves I out there, and W is the whole
backward pass. For other stages, I and W each have the ticks of the whole backward pass. Parameter
gradients are made in W. All other storages that are alive in I stay until the end of W, because
torch keeps the autograd graph, which may refer to any of them. A pass of the variant `last` counts
as whole even if the schedule splits the backward pass.
"""


class _PassCase(NamedTuple):
    """The kind of a micro-batch's passes through a stage; equal kinds share a recording."""

    stage: int
    order: Literal["first", "later"]
    split: bool
    last: bool = False


@dataclass(frozen=True)
class _Recording:
    """A `RecordedPass` divided into its actions."""

    ticks: tuple[int, ...]
    """The first tick of each action, and the tick after the last action."""
    actions: tuple[tuple[Span, ...], ...]
    """For each action, the storages alive in it, clipped to its ticks."""
    waiting: tuple[tuple[tuple[MemoryKind, int], ...], ...]
    """For each action, the (kind, bytes) of storages that wait from its end for the next action, or
    for the optimizer's step."""
    gathered: int
    """Bytes of kind `parameters` that are alive after the forward pass. All micro-batches of the
    stage share them."""


_Course = Literal["usual", "resumed", "strayed"]
"""The variant of the recording: see `forecast.Passes`."""


_BEFORE_ACTION = -1
"""The index of an action for the moment before an action, in which nothing is computed."""


class _Act(NamedTuple):
    """An action of a kind of pass; equal ones share a recording.

    The field `point` is the index of the action among those of its `_Recording`.
    """

    case: _PassCase
    point: int
    course: _Course


_Slot = tuple[_PassCase, int] | int
"""The key of storages that wait. The pair is a kind of pass and the index of an action: storages
that wait between this action and the next. A number is a stage whose parameters are gathered."""


class _Held:
    """The storages that wait: a count for each slot, and the bytes of all."""

    def __init__(self, sizes: Mapping[_Slot, Sequence[tuple[MemoryKind, int]]]) -> None:
        self._sizes = sizes
        self._sums = {slot: sum(size for _, size in parts) for slot, parts in sizes.items()}
        self.counts = dict.fromkeys(sizes, 0)
        self.nbytes = 0

    def change(self, slot: _Slot, by: int) -> None:
        """Change the count of a slot; slots without storages are ignored."""
        if slot in self.counts:
            self.counts[slot] += by
            self.nbytes += by * self._sums[slot]

    def spans(self, counts: Mapping[_Slot, int], end: int) -> list[Span]:
        """Return storages that wait as spans from tick 0 to `end`, one for each slot and kind.

        Args:
            counts: for each slot, how many times its storages wait.
            end: the tick at which the spans end.
        """
        return [
            Span(size * count, kind, 0, end)
            for slot, count in counts.items()
            if count
            for kind, size in self._sizes[slot]
        ]


class _Highest(NamedTuple):
    """The peak of the actions examined so far."""

    nbytes: int = -1
    act: _Act | None = None
    extra: int = 0
    counts: Mapping[_Slot, int] = {}


def replay_actions(
    actions: Sequence[Action],
    pieces: Mapping[int, StageRecord],
    in_transit: Sequence[int] = (),
    before: Sequence[int] = (),
) -> Timeline:
    """Return the timeline of the action with the highest peak, which is that of the whole step.

    The timeline contains the storages that the action itself makes or uses, tick by tick. It also
    contains the storages that wait meanwhile, as one span for each kind of memory, kind of pass and
    action. Spans of kind `parameters` that outlive a forward pass are gathered parameters of a
    sharded stage. They exist once, from a forward pass to the next backward pass of the stage,
    which frees them.

    Args:
        actions: the actions of the rank, as in `orders.schedule_orders`.
        pieces: by stage, its recordings.
        in_transit: by action, the bytes in transit during it; empty if nothing is in transit.
        before: by action, the bytes in transit just before it; 0 where that moment does not
            matter. Empty if no such moment matters.

    Returns:
        The timeline, from tick 0.
    """
    case_of = _pass_cases(actions, pieces)
    recordings = _Recordings(pieces, set(case_of.values()))
    waiting = _Held(recordings.waiting())
    forwards: dict[int, int] = {}  # by stage, the forward passes after its last backward pass
    highest = _Highest()
    for moment, (stage, kind, micro_batch) in enumerate(actions):
        case = case_of[stage, micro_batch]
        action_index = {"F": 0, "I": 1, "B": 1, "W": 2}[kind]
        if before and before[moment]:
            act = _Act(case, _BEFORE_ACTION, "usual")
            highest = recordings.higher(highest, act, waiting, before[moment])
        waiting.change((case, action_index - 1), -1)
        if kind != "F" and waiting.counts.get(stage):  # the action's recording contains these
            waiting.change(stage, -1)
        act = _Act(case, action_index, _course(kind, forwards.get(stage, 0)))
        highest = recordings.higher(highest, act, waiting, in_transit[moment] if in_transit else 0)
        forwards[stage] = forwards.get(stage, 0) + 1 if kind == "F" else 0
        if kind == "F" and waiting.counts.get(stage) == 0:
            waiting.change(stage, 1)
        waiting.change((case, action_index), 1)
    return recordings.timeline(highest, waiting)


class _Recordings:
    """The storages of each action of a rank's stages."""

    def __init__(self, pieces: Mapping[int, StageRecord], cases: Collection[_PassCase]) -> None:
        self._pieces = pieces
        self._usual = {case: _recording(case, pieces[case.stage]) for case in cases}
        self._replayed: dict[_Act, tuple[tuple[Span, ...], int, int]] = {}

    def waiting(self) -> dict[_Slot, Sequence[tuple[MemoryKind, int]]]:
        """Return by slot the (kind, bytes) of the storages that wait; without empty slots."""
        waiting_parts: dict[_Slot, Sequence[tuple[MemoryKind, int]]] = {}
        for case in sorted(self._usual):
            for action_index, parts in enumerate(self._usual[case].waiting):
                if parts:
                    waiting_parts[case, action_index] = parts
            if self._usual[case].gathered:
                waiting_parts[case.stage] = (("parameters", self._usual[case].gathered),)
        return waiting_parts

    def higher(self, known: _Highest, act: _Act, waiting: _Held, extra: int) -> _Highest:
        """Return the higher of the peak so far and the peak of an action."""
        _, length, own_bytes = self._of(act)
        nbytes = waiting.nbytes + extra + own_bytes
        if not length or nbytes <= known.nbytes:
            return known
        return _Highest(nbytes, act, extra, dict(waiting.counts))

    def timeline(self, highest: _Highest, waiting: _Held) -> Timeline:
        """Return the timeline of the action with the highest peak, with the storages that wait."""
        if highest.act is None:
            return Timeline((), ((0, "forward"),))
        action_spans, end, _ = self._of(highest.act)
        spans = [*waiting.spans(highest.counts, end), *action_spans]
        if highest.extra:
            # Negative bytes are those of boundary tensors that two recordings have.
            extra_kind: MemoryKind = "temporary" if highest.extra > 0 else "activations"
            spans.append(Span(highest.extra, extra_kind, 0, end))
        phase: Phase = "backward" if highest.act.point > 0 else "forward"
        return Timeline(tuple(spans), ((0, phase),))

    def _of(self, act: _Act) -> tuple[tuple[Span, ...], int, int]:
        """Return the storages of an action from tick 0 on, its number of ticks, and its peak."""
        if act.point == _BEFORE_ACTION:
            return (), 1, 0
        if act not in self._replayed:
            recording = self._usual[act.case]
            pieces = self._pieces[act.case.stage]
            kind = f"{act.case.order}_{act.course}"
            if act.case.last and f"{act.case.order}_last_{act.course}" in pieces:
                kind = f"{act.case.order}_last_{act.course}"
            if act.course != "usual" and not act.case.split and kind in pieces:
                recording = _cut_by_action(pieces[kind])
            start, stop = recording.ticks[act.point : act.point + 2]
            spans = recording.actions[act.point]
            shifted = tuple(Span(n, kind, a - start, z - start) for n, kind, a, z in spans)
            most = max(Timeline(shifted, ((0, "forward"),)).steps()[1], default=0)
            self._replayed[act] = shifted, stop - start, most
        return self._replayed[act]


def _course(kind: str, forwards: int) -> _Course:
    if kind == "F":
        return "resumed" if forwards else "usual"
    return "usual" if forwards == 1 else "strayed" if forwards else "resumed"


def _pass_cases(
    actions: Sequence[Action], pieces: Mapping[int, StageRecord]
) -> dict[tuple[int, int], _PassCase]:
    """Return the kind of passes of each (stage, micro-batch).

    The micro-batch that is the first to reach B or W on a stage allocates the gradients.
    """
    split = {(stage, number) for stage, kind, number in actions if kind in ("I", "W")}
    firsts: dict[int, int] = {}
    for stage, kind, number in actions:
        if kind in ("B", "W"):
            firsts.setdefault(stage, number)
    lasts = {stage: number for stage, kind, number in actions if kind != "F"}
    last_micro_batch = max((number for _, _, number in actions), default=0)
    return {
        (stage, number): _PassCase(
            stage,
            "first" if firsts.get(stage) == number else "later",
            (stage, number) in split,
            number == (last_micro_batch if "first_last" in pieces[stage] else lasts.get(stage))
            and "later_last" in pieces[stage],
        )
        for stage, _, number in actions
    }


def _recording(case: _PassCase, piece: StageRecord) -> _Recording:
    whole_pass = piece[f"{case.order}_last" if case.last else case.order]
    if not case.split:
        return _cut_by_action(whole_pass)
    split_pass = None if case.last else piece.get(f"{case.order}_split")
    if split_pass is None:
        is_whole = case.last or case.stage == 0
        split_pass = (_torch_first_stage if is_whole else _split_conservatively)(whole_pass)
    return _cut_by_action(split_pass)


def _torch_first_stage(backward: RecordedPass) -> RecordedPass:
    return replace(backward, starts=(backward.starts[0], backward.starts[0]))


def _split_conservatively(backward: RecordedPass) -> RecordedPass:
    """Derive I and W, each with the ticks of the whole backward pass; see `StageRecord`."""
    boundary, again = backward.starts[0], backward.end + 1 - backward.starts[0]
    end = backward.end + again + 1  # one more tick, at which only the gradients are alive
    spans = []
    for span in backward.timeline.spans:
        stays = span.kind == "gradients" and span.death > backward.end
        if stays:
            birth = span.birth + again if span.birth >= boundary else span.birth
            spans.append(span._replace(birth=birth, death=end + 1))
        elif span.death > boundary:
            spans.append(span._replace(death=end))
        else:
            spans.append(span)
    timeline = Timeline(tuple(spans), backward.timeline.phases)
    return RecordedPass(timeline, (boundary, boundary + again), end)


def _cut_by_action(passes: RecordedPass) -> _Recording:
    """Assign each span to the actions in which it is alive."""
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
