"""One rank's forecast from those of its stages: a schedule's step laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bigtrain.forecast import Forecast
from bigtrain.replay import Passes, StagePiece, replay
from bigtrain.schedules import Action
from bigtrain.timeline import Timeline


def joined(
    actions: Sequence[Action],
    forecasts: Mapping[int, Forecast],
    halves: Mapping[int, Forecast],
) -> Forecast:
    """Put the stages of a rank together in the order of its schedule.

    Args:
        actions: of this rank, one step.
        forecasts: of its stages, each of one micro-batch.
        halves: the same with the backward pass in two parts.
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
        first=replay(actions, pieces),
        step=Timeline(steps, phases),
        gradients=sum(found.gradients for found in every),
    )


def _both(found: Forecast) -> tuple[Passes, Passes]:
    return _passes(found.first), _passes(found.next or found.first)


def _passes(timeline: Timeline) -> Passes:
    begin = timeline.phases[0][0]
    end = max((span.death for span in timeline.spans), default=begin + 1) - 1
    starts = tuple(tick for tick, phase in timeline.phases if phase == "backward") or (end,)
    return Passes(timeline, starts, max(*starts, end))
