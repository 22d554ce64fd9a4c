"""Join the forecasts of a rank's stages into the forecast of the rank.

The actions of a rank's schedule have the kinds of torch's schedules: F is a forward pass, B a whole
backward pass, I the backward pass for the inputs, and W the backward pass for the weights.
"""

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
    """The actions of one rank in a step, in order."""

    actions: Sequence[Action]
    in_transit: Sequence[InTransit] = ()
    """For each action, the boundary tensors in transit; see `transfers.transfers`."""
    before_backward: Sequence[InTransit] = ()
    """For each action, the tensors in transit just before it; see `transfers.backward_starts`."""


def join_stages(
    rank_actions: RankActions,
    forecasts: Mapping[int, Forecast],
    *,
    tied: int = 0,
    bucket: int | None = None,
) -> Forecast:
    """Join the forecasts of a rank's stages, in the order of the rank's schedule.

    Args:
        rank_actions: the actions of this rank.
        forecasts: by stage, the forecast of one micro-batch.
        tied: the most bytes that the rank receives to sum the gradients of one tied parameter.
        bucket: see `Traits.averaging_bucket`; None if no gradients are averaged in buckets.

    Returns:
        The forecast of one whole step, with one kind of pass: `first` is the action with the
        highest peak.
    """
    actions, in_transit = rank_actions.actions, rank_actions.in_transit
    before_backward = rank_actions.before_backward
    if any("first_resumed" in stage_forecast.passes for stage_forecast in forecasts.values()):
        # A stage that gathers its parameters does so for whole backward passes only.
        pairs = zip(actions, in_transit, strict=bool(in_transit))
        in_transit = [transit for action, transit in pairs if action.kind != "W"]
        actions = merge_split_backward(actions)
    records = {
        stage: {kind: RecordedPass.of(timeline) for kind, timeline in forecast.passes.items()}
        for stage, forecast in forecasts.items()
    }
    states, own_records, gradients = _merge_states(forecasts, records)
    stage_forecasts = list(forecasts.values())
    phases = stage_forecasts[0].step.phases
    step_spans = tuple(
        span for stage_forecast in stage_forecasts for span in stage_forecast.step.spans
    )
    # Before the step, while all gradients exist, tied ones are summed or a bucket is copied.
    copied = 0 if bucket is None else _fullest(stage_forecasts, bucket)
    if tied or bucket is not None:
        tick = phases[0][0] - 1
        temporary = Span(max(tied, copied), "temporary", tick, tick + 1)
        step_spans, phases = (temporary, *step_spans), ((tick, "backward"), *phases)
    extra_bytes = _extra_bytes(actions, forecasts, in_transit)
    sizes = _boundary_bytes(forecasts)
    before_bytes = [_sent(transit, forecasts, sizes, {}) for transit in before_backward]
    return Forecast(
        states=states,
        passes={"first": replay_actions(actions, own_records, extra_bytes, before_bytes)},
        step=Timeline(step_spans, phases),
        gradients=gradients,
    )


def _fullest(stage_forecasts: Sequence[Forecast], bucket: int) -> int:
    """Return the most bytes of copies that `replicas.GradientAverager` has at one moment.

    The averager copies consecutive gradients of one dtype into one tensor of at most a bucket's
    size. A gradient that is alone in its bucket is not copied. A copy is freed after the next copy
    has been made.
    """
    named = {
        name: (size, kind) for forecast in stage_forecasts for name, size, kind in forecast.tensors
    }
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
    """Return the states of a rank, the records of its stages, and its bytes of gradients.

    A trained or frozen parameter that several stages share is counted once, with the last of these
    stages, because the last stage makes the gradient first. The batch is in the states of every
    stage, and is counted once as well.
    """
    states, gradients = Breakdown(), 0
    records: dict[int, StageRecord] = {}
    counted: set[str] = set()
    counted_frozen: set[str] = set()
    for stage in sorted(forecasts, reverse=True):
        stage_forecast = forecasts[stage]
        sizes = {name: size for name, size, _ in stage_forecast.tensors}
        tied_bytes = {name: size for name, size in sizes.items() if name in counted}
        shared, total = sum(tied_bytes.values()), sum(sizes.values())
        own_states = replace(
            stage_forecast.states,
            parameters=stage_forecast.states.parameters - shared,
            optimizer=stage_forecast.states.optimizer
            - stage_forecast.states.optimizer * shared // max(1, total),
            activations=0 if records else stage_forecast.states.activations,
            frozen=stage_forecast.states.frozen - _frozen_again(stage_forecast, counted_frozen),
        )
        states = states.plus(own_states)
        gradients += stage_forecast.gradients - shared
        records[stage] = _adding(pieces[stage], list(tied_bytes.values()))
        counted |= sizes.keys()
        counted_frozen |= dict(stage_forecast.frozen_tensors).keys()
    return states, records, gradients


def _frozen_again(forecast: Forecast, counted: Collection[str]) -> int:
    """Return the bytes of a stage's frozen parameters that another stage has counted."""
    sizes = dict(forecast.frozen_tensors)
    tied_bytes = sum(size for name, size in sizes.items() if name in counted)
    return forecast.states.frozen * tied_bytes // max(1, sum(sizes.values()))


def _adding(piece: StageRecord, sizes: Sequence[int]) -> StageRecord:
    """Return the records of a stage that adds gradients to those of another stage.

    These gradients are freed once they are added.

    Args:
        piece: the records of the stage.
        sizes: the bytes of each of these gradients.
    """

    def without_gradients(passes: RecordedPass) -> RecordedPass:
        spans = list(passes.timeline.spans)
        for size in sizes:
            matching = [n for n, s in enumerate(spans) if (s.kind, s.nbytes) == ("gradients", size)]
            if matching:
                # Of several, take the gradient that is made last: the stage begins with the shared
                # parameter.
                number = max(matching, key=lambda n: spans[n].birth)
                span = spans[number]
                spans[number] = span._replace(kind="temporary", death=span.birth + 1)
        return replace(passes, timeline=replace(passes.timeline, spans=tuple(spans)))

    if not sizes:
        return piece
    firsts = piece.keys() & {"first", "first_split"}
    return {**piece, **{kind: without_gradients(piece[kind]) for kind in firsts}}


class _SharedBoundaries:
    """The boundary tensors between two stages of one rank, which both recordings may contain.

    A recording contains the stage's inputs from the forward pass to the last action, the gradients
    of its outputs from the beginning of the backward pass to the last action, and the gradients of
    its inputs until W.
    """

    def __init__(self, forecasts: Mapping[int, Forecast]) -> None:
        self._forecasts = forecasts
        self.progress: dict[tuple[int, int], int] = {}
        """By (stage, micro-batch): 1 once the forward pass has begun, 2 once the backward pass has
        begun, 3 between I and W. A finished micro-batch has no entry."""
        self._finished: set[tuple[int, int]] = set()
        self._parts: dict[tuple[int, int], int] = {}
        self.nbytes = 0
        """Bytes to add to the recordings: tensors in no recording, less tensors in two of them."""

    def go_on(self, stage: int, number: int, progress: int) -> None:
        """Set the progress of a micro-batch in a stage."""
        self.progress[stage, number] = progress
        self._count(stage, number)

    def finish(self, stage: int, number: int) -> None:
        """End a micro-batch in a stage: its backward pass is complete."""
        del self.progress[stage, number]
        self._finished.add((stage, number))
        self._count(stage, number)

    def _count(self, stage: int, number: int) -> None:
        for first in (stage - 1, stage):
            if first in self._forecasts and first + 1 in self._forecasts:
                nbytes = self._between(first, number)
                self.nbytes += nbytes - self._parts.get((first, number), 0)
                self._parts[first, number] = nbytes

    def _between(self, stage: int, number: int) -> int:
        """Return the bytes to add for one micro-batch between a stage and the next stage."""
        stage_progress = self.progress.get((stage, number), 0)
        if not stage_progress:
            return 0
        next_progress = self.progress.get((stage + 1, number), 0)
        begun, ended = next_progress > 0, (stage + 1, number) in self._finished
        boundary, theirs = (self._forecasts[n].boundary for n in (stage, stage + 1))
        total = 0
        if not begun and not ended:
            total += boundary.outgoing  # the next stage has not received the outputs yet
        elif begun:
            total -= theirs.incoming - boundary.outgoing
        if stage_progress == 1:
            total += theirs.incoming_gradients * ended
            total += theirs.incoming_copied * (next_progress == 3)
        elif ended:
            total -= boundary.outgoing_gradients - theirs.incoming_gradients
        elif begun:
            total -= boundary.outgoing_gradients - theirs.incoming_copied
        return total


def _extra_bytes(
    actions: Sequence[Action], forecasts: Mapping[int, Forecast], in_transit: Sequence[InTransit]
) -> list[int]:
    """Return for each action the bytes to add to the recordings; they may be negative.

    These are the bytes of tensors in no recording, less the bytes of tensors in two recordings.
    """
    shared, sizes = _SharedBoundaries(forecasts), _boundary_bytes(forecasts)
    awaiting_weights = dict.fromkeys(forecasts, 0)
    extra_bytes = []
    for moment, (stage, kind, number) in enumerate(actions):
        progress = shared.progress.get((stage, number), 0)
        shared.go_on(stage, number, 1 if kind == "F" else max(progress, 2))
        transit_bytes = 0
        if in_transit and in_transit[moment]:
            transit_bytes = _sent(in_transit[moment], forecasts, sizes, awaiting_weights)
        extra_bytes.append(transit_bytes + shared.nbytes)
        if kind == "I":
            shared.go_on(stage, number, 3)
            awaiting_weights[stage] += 1
        elif kind in ("B", "W"):
            awaiting_weights[stage] -= progress == 3
            shared.finish(stage, number)
    return extra_bytes


def _boundary_bytes(forecasts: Mapping[int, Forecast]) -> dict[tuple[int, str], int]:
    """Return the bytes of each message of one micro-batch, by (stage, kind of message)."""
    return {
        (stage, message): nbytes
        for stage, forecast in forecasts.items()
        for message, nbytes in (
            ("RECV_F", forecast.boundary.incoming),
            ("SEND_F", forecast.boundary.outgoing),
            ("RECV_B", forecast.boundary.outgoing_gradients),
            ("SEND_B", forecast.boundary.incoming_gradients),
        )
    }


def _sent(
    in_transit: InTransit,
    forecasts: Mapping[int, Forecast],
    sizes: Mapping[tuple[int, str], int],
    awaiting_weights: Mapping[int, int],
) -> int:
    """Return the bytes that are being sent or received, without those in a recording.

    Args:
        in_transit: the number of messages, by (stage, kind of message).
        forecasts: by stage, its forecast.
        sizes: the result of `_boundary_bytes`.
        awaiting_weights: by stage, the number of micro-batches between I and W.
    """
    total = 0
    for message, count in in_transit.items():
        total += count * sizes[message]
        stage, kind = message
        if kind == "SEND_B" and awaiting_weights.get(stage):
            # The recording contains an input gradient until W, whether or not it is being sent.
            boundary = forecasts[stage].boundary
            recorded = min(count, awaiting_weights[stage])
            total -= recorded * (boundary.incoming_gradients - boundary.incoming_copied)
    return total
