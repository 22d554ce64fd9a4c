"""One rank's forecast from those of its stages: a schedule's step laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bigtrain.forecast import Forecast
from bigtrain.replay import Passes, StagePiece, replay
from bigtrain.schedules import Action, Underway
from bigtrain.timeline import Timeline


def joined(
    actions: Sequence[Action],
    forecasts: Mapping[int, Forecast],
    halves: Mapping[int, Forecast],
    underway: Sequence[Underway] = (),
) -> Forecast:
    """Put the stages of a rank together in the order of its schedule.

    Args:
        actions: of this rank, one step.
        forecasts: of its stages, each of one micro-batch.
        halves: the same with the backward pass in two parts.
        underway: for each action what is on its way; see `schedules.transfers`.
    """
    pieces = {
        stage: StagePiece(*_both(found), _both(halves[stage]) if stage in halves else None)
        for stage, found in forecasts.items()
    }
    every = list(forecasts.values())
    # Every stage has been told of the same batch.
    states = every[0].states
    for other in every[1:]:
        states = states.plus(replace(other.states, activations=0))
    phases = every[0].step.phases
    steps = tuple(span for found in every for span in found.step.spans)
    return Forecast(
        states=states,
        first=replay(actions, pieces, [_bytes(some, forecasts) for some in underway]),
        step=Timeline(steps, phases),
        gradients=sum(found.gradients for found in every),
    )


def _bytes(underway: Underway, forecasts: Mapping[int, Forecast]) -> int:
    total = 0
    for (stage, kind), count in underway.items():
        wires = forecasts[stage].wires
        each = {
            "RECV_F": wires.incoming,
            "SEND_F": wires.outgoing,
            "RECV_B": wires.outgoing_gradients,
            "SEND_B": wires.incoming_gradients,
        }
        total += count * each[kind]
    return total


def _both(found: Forecast) -> tuple[Passes, Passes]:
    return _passes(found.first), _passes(found.next or found.first)


def _passes(timeline: Timeline) -> Passes:
    begin = timeline.phases[0][0]
    end = max((span.death for span in timeline.spans), default=begin + 1) - 1
    starts = tuple(tick for tick, phase in timeline.phases if phase == "backward") or (end,)
    return Passes(timeline, starts, max(*starts, end))
