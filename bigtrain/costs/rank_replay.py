"""One rank's forecast from those of its stages: a schedule's step laid out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bigtrain.costs.forecast import Forecast
from bigtrain.costs.replay import RecordedPass, StageRecord, replay_actions
from bigtrain.memory.timeline import Breakdown, Span, Timeline
from bigtrain.schedules.orders import Action, merge_split_backward
from bigtrain.schedules.transfers import InTransit


@dataclass(frozen=True)
class RankActions:
    """What one rank does in a step, in order."""

    actions: Sequence[Action]
    in_transit: Sequence[InTransit] = ()
    """For each action what is on its way to other ranks; see `transfers.transfers`."""
    turns: Sequence[InTransit] = ()
    """For each action what is so just before it; see `transfers.turns`."""


def join_stages(
    rank_actions: RankActions, forecasts: Mapping[int, Forecast], bucket: int | None = None
) -> Forecast:
    """Put the stages of a rank together in the order of its schedule.

    Args:
        rank_actions: of this rank.
        forecasts: of its stages, each of one micro-batch.
        bucket: see `Traits.averaging_bucket`.
    """
    actions, in_transit = rank_actions.actions, rank_actions.in_transit
    turns = rank_actions.turns
    if any("first_resumed" in stage_forecast.passes for stage_forecast in forecasts.values()):
        # What frees and fills parameters does so around whole backward passes only.
        pairs = zip(actions, in_transit, strict=bool(in_transit))
        in_transit = [ways for action, ways in pairs if action.kind != "W"]
        actions = merge_split_backward(actions)
    records = {
        stage: {way: RecordedPass.of(timeline) for way, timeline in found.passes.items()}
        for stage, found in forecasts.items()
    }
    states, own_records, gradients = _merge_states(forecasts, records)
    stage_forecasts = list(forecasts.values())
    phases = stage_forecasts[0].step.phases
    step_spans = tuple(
        span for stage_forecast in stage_forecasts for span in stage_forecast.step.spans
    )
    if bucket is not None:
        # One tick before the step: all gradients are there, and a bucket of them once more.
        tick = phases[0][0] - 1
        copied = Span(_fullest(stage_forecasts, bucket), "temporary", tick, tick + 1)
        step_spans, phases = (copied, *step_spans), ((tick, "backward"), *phases)
    extra_bytes = _extra_bytes(actions, forecasts, in_transit)
    turn_bytes = [_sent(ways, forecasts, {}) for ways in turns]
    return Forecast(
        states=states,
        passes={"first": replay_actions(actions, own_records, extra_bytes, turn_bytes)},
        step=Timeline(step_spans, phases),
        gradients=gradients,
    )


def _fullest(stage_forecasts: Sequence[Forecast], bucket: int) -> int:
    """The most that `replicas.GradientAverager` has in copies at one moment.

    Neighbours of one type that fit in together are copied into one tensor, what is alone is not;
    and a copy is let go when the next one is there.
    """
    named = {name: (size, kind) for found in stage_forecasts for name, size, kind in found.tensors}
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
    records: dict[int, StageRecord] = {}
    counted: set[str] = set()
    for stage in sorted(forecasts, reverse=True):
        stage_forecast = forecasts[stage]
        sizes = {name: size for name, size, _ in stage_forecast.tensors}
        tied_bytes = {name: size for name, size in sizes.items() if name in counted}
        shared, whole = sum(tied_bytes.values()), sum(sizes.values())
        own_states = replace(
            stage_forecast.states,
            parameters=stage_forecast.states.parameters - shared,
            optimizer=stage_forecast.states.optimizer
            - stage_forecast.states.optimizer * shared // max(1, whole),
            activations=stage_forecast.states.activations if not counted else 0,
        )
        states = states.plus(own_states)
        gradients += stage_forecast.gradients - shared
        records[stage] = _adding(pieces[stage], list(tied_bytes.values()))
        counted |= sizes.keys() or {""}
    return states, records, gradients


def _adding(piece: StageRecord, sizes: Sequence[int]) -> StageRecord:
    """A stage of which some gradients are added to those that another stage has made."""

    def without_gradients(passes: RecordedPass) -> RecordedPass:
        spans = list(passes.timeline.spans)
        for size in sizes:
            matching = [n for n, s in enumerate(spans) if (s.kind, s.nbytes) == ("gradients", size)]
            if matching:
                # Of several the last one made: a lower stage begins with what it shares.
                number = max(matching, key=lambda n: spans[n].birth)
                span = spans[number]
                spans[number] = span._replace(kind="temporary", death=span.birth + 1)
        return replace(passes, timeline=replace(passes.timeline, spans=tuple(spans)))

    if not sizes:
        return piece
    firsts = piece.keys() & {"first", "first_split"}
    return {**piece, **{way: without_gradients(piece[way]) for way in firsts}}


_Doing = dict[tuple[int, int], int]
"""By stage and micro-batch how far it is: 1 from its forward pass on, 2 from the beginning of its
backward pass on, 3 when the inputs' gradients are there and the weights' are not."""


def _extra_bytes(
    actions: Sequence[Action], forecasts: Mapping[int, Forecast], underway: Sequence[InTransit]
) -> list[int]:
    """Bytes beside each action that no stage's own recording has, less what two of them have."""
    progress: _Doing = {}
    finished: set[tuple[int, int]] = set()
    awaiting_weights = dict.fromkeys(forecasts, 0)
    extra_bytes = []
    for moment, (stage, kind, number) in enumerate(actions):
        progress_before = progress.get((stage, number), 0)
        progress[stage, number] = 1 if kind == "F" else max(progress_before, 2)
        transit_bytes = _sent(underway[moment], forecasts, awaiting_weights) if underway else 0
        extra_bytes.append(transit_bytes + _shared_boundary_bytes(forecasts, progress, finished))
        if kind == "I":
            progress[stage, number] = 3
            awaiting_weights[stage] += 1
        elif kind in ("B", "W"):
            awaiting_weights[stage] -= progress[stage, number] == 3
            del progress[stage, number]
            finished.add((stage, number))
    return extra_bytes


def _sent(
    underway: InTransit, forecasts: Mapping[int, Forecast], awaiting_weights: Mapping[int, int]
) -> int:
    """What goes to other ranks or comes from them; of each stage how many wait for their W."""
    total = 0
    for (stage, kind), count in underway.items():
        wires = forecasts[stage].boundary
        bytes_by_kind = {
            "RECV_F": wires.incoming,
            "SEND_F": wires.outgoing,
            "RECV_B": wires.outgoing_gradients,
            "SEND_B": wires.incoming_gradients,
        }
        total += count * bytes_by_kind[kind]
        if kind == "SEND_B":  # a gradient is kept with its input until W, sent or not
            kept = min(count, awaiting_weights.get(stage, 0))
            total -= kept * (wires.incoming_gradients - wires.incoming_copied)
    return total


def _shared_boundary_bytes(
    forecasts: Mapping[int, Forecast], progress: _Doing, finished: Collection[tuple[int, int]]
) -> int:
    """What one stage of the rank hands to the next one, and is given back: the same storages.

    A recording has a stage's inputs from its forward pass to its last action, the gradients of its
    outputs from the beginning of its backward pass to its last action, and those of its inputs
    until W.
    """
    total = 0
    for (stage, number), stage_progress in progress.items():
        next_stage = stage + 1
        if next_stage not in forecasts:
            continue
        next_progress = progress.get((next_stage, number), 0)
        begun, ended = next_progress > 0, (next_stage, number) in finished
        wires = forecasts[stage].boundary
        if not begun and not ended:
            total += wires.outgoing  # nobody has it yet
        elif begun:
            total -= forecasts[next_stage].boundary.incoming - wires.outgoing
        theirs = forecasts[next_stage].boundary
        if stage_progress == 1:
            total += theirs.incoming_gradients * ended
            total += theirs.incoming_copied * (next_progress == 3)
        elif ended:
            total -= wires.outgoing_gradients - theirs.incoming_gradients
        elif begun:
            total -= wires.outgoing_gradients - theirs.incoming_copied
    return total
