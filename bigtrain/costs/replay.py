"""One rank's step through a pipeline, from one micro-batch of each of its stages.

A stage's micro-batch is recorded once, forward and backward one after the other. In the
schedule's order other work comes between the two: what is alive where the forward pass ends waits.
The memory of an action is then what its own ticks hold, on top of what all others have waiting.
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


class _PassCase(NamedTuple):
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


_Course = Literal["usual", "resumed", "strayed"]
"""Whether it is the case's recording, or another way: see `forecast.Passes`."""


_TURN = -1
"""In place of an action: a moment between two, in which nothing is computed."""


class _Act(NamedTuple):
    """An action of a way; all that have the same recording are one."""

    way: _PassCase
    point: int
    course: _Course


_Slot = tuple[_PassCase, int] | int
"""What waits: a micro-batch that goes so and has done this action and not the next; or, by its
number, a stage that has its parameters gathered."""


class _Held:
    """What waits beside the actions: how often each of its parts is there, and bytes of all."""

    def __init__(self, sizes: Mapping[_Slot, Sequence[tuple[MemoryKind, int]]]) -> None:
        self._sizes = sizes
        self._sums = {slot: sum(size for _, size in parts) for slot, parts in sizes.items()}
        self.counts = dict.fromkeys(sizes, 0)
        self.nbytes = 0

    def change(self, slot: _Slot, by: int) -> None:
        """One more or one less, of what holds anything."""
        if slot in self.counts:
            self.counts[slot] += by
            self.nbytes += by * self._sums[slot]

    def spans(self, counts: Mapping[_Slot, int], end: int) -> list[Span]:
        """What was counted so, as long as one action lasts."""
        return [
            Span(size * count, kind, 0, end)
            for slot, count in counts.items()
            if count
            for kind, size in self._sizes[slot]
        ]


class _Highest(NamedTuple):
    """The highest moment so far."""

    nbytes: int = -1
    act: _Act | None = None
    extra: int = 0
    counts: Mapping[_Slot, int] = {}


def replay_actions(
    actions: Sequence[Action],
    pieces: Mapping[int, StageRecord],
    beside: Sequence[int] = (),
    before: Sequence[int] = (),
) -> Timeline:
    """The action of a rank's step in which most is alive: its peak is that of the whole step.

    What an action of a stage holds itself is the same each time; what waits beside it is one span
    for each kind, stage and point. Spans of kind `parameters` that outlive a forward pass are what
    a sharded stage has gathered: they are there once, from a forward pass to the next backward
    pass of the stage, which frees them.

    Args:
        actions: what the rank does, as `orders.schedule_orders` has it.
        pieces: the rank's stages.
        beside: for each action the bytes of what is on its way meanwhile.
        before: for each action those of what is on its way just before it, where that is more.

    Returns:
        The timeline, from tick 0.
    """
    case_of = _ways(actions, pieces)
    recordings = _Recordings(pieces, set(case_of.values()))
    held = _Held(recordings.waiting())
    forwards: dict[int, int] = {}  # of each stage since its last backward pass
    highest = _Highest()
    for moment, (stage, kind, micro_batch) in enumerate(actions):
        case = case_of[stage, micro_batch]
        action_index = {"F": 0, "I": 1, "B": 1, "W": 2}[kind]
        if before and before[moment]:
            act = _Act(case, _TURN, "usual")
            highest = recordings.higher(highest, act, held, before[moment])
        held.change((case, action_index - 1), -1)
        if kind != "F" and held.counts.get(stage):  # what it frees is in its own ticks
            held.change(stage, -1)
        act = _Act(case, action_index, _course(kind, forwards.get(stage, 0)))
        highest = recordings.higher(highest, act, held, beside[moment] if beside else 0)
        forwards[stage] = forwards.get(stage, 0) + 1 if kind == "F" else 0
        if kind == "F" and held.counts.get(stage) == 0:
            held.change(stage, 1)
        held.change((case, action_index), 1)
    return recordings.laid_out(highest, held)


class _Recordings:
    """What the micro-batches of a rank's stages hold while they go through."""

    def __init__(self, pieces: Mapping[int, StageRecord], cases: Collection[_PassCase]) -> None:
        self._pieces = pieces
        self._usual = {case: _recording(case, pieces[case.stage]) for case in cases}
        self._found: dict[_Act, tuple[tuple[Span, ...], int, int]] = {}

    def waiting(self) -> dict[_Slot, Sequence[tuple[MemoryKind, int]]]:
        """What is alive between actions, but for what holds nothing."""
        found: dict[_Slot, Sequence[tuple[MemoryKind, int]]] = {}
        for case in sorted(self._usual):
            for action_index, parts in enumerate(self._usual[case].waiting):
                if parts:
                    found[case, action_index] = parts
            if self._usual[case].gathered:
                found[case.stage] = (("parameters", self._usual[case].gathered),)
        return found

    def higher(self, known: _Highest, act: _Act, held: _Held, extra: int) -> _Highest:
        """An action, where more is alive than at the highest moment before it."""
        _, length, own = self._of(act)
        nbytes = held.nbytes + extra + own
        if not length or nbytes <= known.nbytes:
            return known
        return _Highest(nbytes, act, extra, dict(held.counts))

    def laid_out(self, highest: _Highest, held: _Held) -> Timeline:
        """One action, and what waits beside it."""
        if highest.act is None:
            return Timeline((), ((0, "forward"),))
        own, end, _ = self._of(highest.act)
        spans = [*held.spans(highest.counts, end), *own]
        if highest.extra:
            spans.append(Span(highest.extra, "temporary", 0, end))
        phase: Phase = "backward" if highest.act.point > 0 else "forward"
        return Timeline(tuple(spans), ((0, phase),))

    def _of(self, act: _Act) -> tuple[tuple[Span, ...], int, int]:
        """What is alive during an action, from tick 0 on; how many ticks it has; most bytes."""
        if act.point == _TURN:
            return (), 1, 0
        if act not in self._found:
            recording = self._usual[act.way]
            way = f"{act.way.order}_{act.course}"
            if act.course != "usual" and not act.way.split and way in self._pieces[act.way.stage]:
                recording = _cut_by_action(self._pieces[act.way.stage][way])
            start, stop = recording.ticks[act.point : act.point + 2]
            spans = recording.actions[act.point]
            own = tuple(Span(n, kind, a - start, z - start) for n, kind, a, z in spans)
            most = max(Timeline(own, ((0, "forward"),)).steps()[1], default=0)
            self._found[act] = own, stop - start, most
        return self._found[act]


def _course(kind: str, forwards: int) -> _Course:
    if kind == "F":
        return "resumed" if forwards else "usual"
    return "usual" if forwards == 1 else "strayed" if forwards else "resumed"


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
