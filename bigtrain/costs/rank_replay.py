"""One rank's forecast from those of its stages: a schedule's step laid out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from bigtrain.costs.forecast import Forecast
from bigtrain.costs.replay import RecordedPass, StageRecord, replay_actions
from bigtrain.memory.timeline import Breakdown, Span, Timeline
from bigtrain.schedules.orders import Action, merge_split_backward
from bigtrain.schedules.transfers import InTransit


def join_stages(
    actions: Sequence[Action],
    forecasts: Mapping[int, Forecast],
    halves: Mapping[int, Forecast],
    underway: Sequence[InTransit] = (),
    bucket: int | None = None,
) -> Forecast:
    """Put the stages of a rank together in the order of its schedule.

    Args:
        actions: of this rank, one step.
        forecasts: of its stages, each of one micro-batch.
        halves: the same with the backward pass in two parts.
        underway: for each action what is on its way; see `transfers.transfers`.
        bucket: see `Traits.averaging_bucket`.
    """
    if any(found.resumed is not None for found in forecasts.values()):
        # What frees and fills parameters does so around whole backward passes only.
        pairs = zip(actions, underway, strict=bool(underway))
        underway = [ways for action, ways in pairs if action.kind != "W"]
        actions = merge_split_backward(actions)
    pieces = {
        stage: StageRecord(
            *_both(found),
            _both(halves[stage]) if stage in halves else None,
            *(pair and (_passes(pair[0]), _passes(pair[1])) for pair in _others(found)),
        )
        for stage, found in forecasts.items()
    }
    states, first, gradients = _merge_states(forecasts, pieces)
    every = list(forecasts.values())
    phases = every[0].step.phases
    steps = tuple(span for found in every for span in found.step.spans)
    if bucket is not None:
        # One tick before the step: all gradients are there, and a bucket of them once more.
        tick = phases[0][0] - 1
        copied = Span(_fullest(every, bucket), "temporary", tick, tick + 1)
        steps, phases = (copied, *steps), ((tick, "backward"), *phases)
    return Forecast(
        states=states,
        first=replay_actions(actions, first, _extra_bytes(actions, forecasts, underway)),
        step=Timeline(steps, phases),
        gradients=gradients,
    )


def _others(found: Forecast) -> tuple[tuple[Timeline, Timeline] | None, ...]:
    """The courses of a stage besides the usual one, as `StageRecord` has them."""
    return found.resumed, found.strayed, found.last


def _fullest(every: Sequence[Forecast], bucket: int) -> int:
    """The most that `replicas.GradientAverager` has in copies at one moment.

    Neighbours of one type that fit in together are copied into one tensor, what is alone is not;
    and a copy is let go when the next one is there.
    """
    named = {name: (size, kind) for found in every for name, size, kind in found.tensors}
    copies, number, filled, before = [0], 0, 0, ""
    for size, kind in [*named.values(), (0, "none")]:
        if number and (kind != before or filled + size > bucket):
            if number > 1:
                copies.append(filled)
            number, filled = 0, 0
        number, filled, before = number + 1, filled + size, kind
    return max(sum(pair) for pair in pairwise([*copies, 0]))


def _merge_states(
    forecasts: Mapping[int, Forecast], pieces: Mapping[int, StageRecord]
) -> tuple[Breakdown, dict[int, StageRecord], int]:
    """The states of a rank's stages, their pieces, and bytes of gradients.

    What several of them use is there once: with the last of them, whose gradient comes first. All
    have been told of the same batch.
    """
    states, gradients = Breakdown(), 0
    found: dict[int, StageRecord] = {}
    seen: set[str] = set()
    for stage in sorted(forecasts, reverse=True):
        one = forecasts[stage]
        sizes = {name: size for name, size, _ in one.tensors}
        again = {name: size for name, size in sizes.items() if name in seen}
        shared, whole = sum(again.values()), sum(sizes.values())
        own = replace(
            one.states,
            parameters=one.states.parameters - shared,
            optimizer=one.states.optimizer - one.states.optimizer * shared // max(1, whole),
            activations=one.states.activations if not seen else 0,
        )
        states = states.plus(own)
        gradients += one.gradients - shared
        found[stage] = _adding(pieces[stage], list(again.values()))
        seen |= sizes.keys() or {""}
    return states, found, gradients


def _adding(piece: StageRecord, sizes: Sequence[int]) -> StageRecord:
    """A stage of which some gradients are added to those that another stage has made."""

    def change(passes: RecordedPass) -> RecordedPass:
        spans = list(passes.timeline.spans)
        for size in sizes:
            kept = [n for n, s in enumerate(spans) if (s.kind, s.nbytes) == ("gradients", size)]
            if kept:
                span = spans[kept[0]]
                spans[kept[0]] = span._replace(kind="temporary", death=span.birth + 1)
        return replace(passes, timeline=replace(passes.timeline, spans=tuple(spans)))

    if not sizes:
        return piece
    split = piece.split and (change(piece.split[0]), piece.split[1])
    return replace(piece, first=change(piece.first), split=split)


_Doing = dict[tuple[int, int], int]
"""By stage and micro-batch how far it is: 1 from its forward pass on, 2 from the beginning of its
backward pass on, 3 when the inputs' gradients are there and the weights' are not."""


def _extra_bytes(
    actions: Sequence[Action], forecasts: Mapping[int, Forecast], underway: Sequence[InTransit]
) -> list[int]:
    """Bytes beside each action that no stage's own recording has, less what two of them have."""
    doing: _Doing = {}
    over: set[tuple[int, int]] = set()
    found = []
    for moment, (stage, kind, number) in enumerate(actions):
        done = doing.get((stage, number), 0)
        doing[stage, number] = 1 if kind == "F" else max(done, 2)
        way = _sent(underway[moment], forecasts, doing) if underway else 0
        found.append(way + _shared_boundary_bytes(forecasts, doing, over))
        if kind == "I":
            doing[stage, number] = 3
        elif kind in ("B", "W"):
            del doing[stage, number]
            over.add((stage, number))
    return found


def _sent(underway: InTransit, forecasts: Mapping[int, Forecast], doing: _Doing) -> int:
    """What goes to other ranks or comes from them."""
    total = 0
    for (stage, kind), count in underway.items():
        wires = forecasts[stage].boundary
        each = {
            "RECV_F": wires.incoming,
            "SEND_F": wires.outgoing,
            "RECV_B": wires.outgoing_gradients,
            "SEND_B": wires.incoming_gradients,
        }
        if kind == "SEND_B":  # a gradient is kept with its input until W, sent or not
            count -= min(count, sum(s == stage and at == 3 for (s, _), at in doing.items()))
        total += count * each[kind]
    return total


def _shared_boundary_bytes(
    forecasts: Mapping[int, Forecast], doing: _Doing, over: Collection[tuple[int, int]]
) -> int:
    """What one stage of the rank hands to the next one, and is given back: the same storages.

    A recording has a stage's inputs from its forward pass to its last action, the gradients of its
    outputs from the beginning of its backward pass to its last action, and those of its inputs
    until W.
    """
    total = 0
    for (stage, number), at in doing.items():
        high = stage + 1
        if high not in forecasts:
            continue
        above = doing.get((high, number), 0)
        begun, ended = above > 0, (high, number) in over
        wires = forecasts[stage].boundary
        if not begun and not ended:
            total += wires.outgoing  # nobody has it yet
        elif begun:
            total -= forecasts[high].boundary.incoming - wires.outgoing
        if at == 1 and ended:
            total += wires.outgoing_gradients
        elif at >= 2 and begun:
            total -= wires.outgoing_gradients
    return total


def _both(found: Forecast) -> tuple[RecordedPass, RecordedPass]:
    return _passes(found.first), _passes(found.next or found.first)


def _passes(timeline: Timeline) -> RecordedPass:
    begin = timeline.phases[0][0]
    end = max((span.death for span in timeline.spans), default=begin + 1) - 1
    starts = tuple(tick for tick, phase in timeline.phases if phase == "backward") or (end,)
    return RecordedPass(timeline, starts, max(*starts, end))
