"""Compute the seconds and the idle share of a schedule, by simulation and in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from bigtrain.schedules.orders import (
    V_SHAPED_SCHEDULES,
    Action,
    ActionKind,
    Orders,
    check_schedule,
)


class StageSeconds(NamedTuple):
    """Seconds of the passes of one micro-batch on one stage.

    A whole backward pass takes the sum of its two parts. No input of the first stage requires a
    gradient, so its I takes no time, and its W takes the time of the whole backward pass.
    """

    forward: float
    input_backward: float
    """Seconds of the backward pass for the stage's inputs (I)."""
    weight_backward: float
    """Seconds of the backward pass for the stage's weights (W)."""


class Bubble(NamedTuple):
    """The times of one step of a pipeline, without messages."""

    seconds: float
    """Seconds from the begin of the first action to the end of the last action."""
    busy: tuple[float, ...]
    """Seconds of the actions of each rank."""

    @property
    def share(self) -> float:
        """The idle time of all ranks, divided by the time of all ranks."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.seconds)


def simulate_step(orders: Orders, seconds: Sequence[StageSeconds]) -> Bubble:
    """Simulate a step: each action begins as soon as its rank is free and its inputs exist.

    F needs the F of the previous stage. B and I need the F of their stage, and the B or I of the
    next stage. W needs the I of its stage. Messages take no time.

    Args:
        orders: the actions of each rank, in order.
        seconds: the seconds of each stage.

    Raises:
        ValueError: the order of actions is a deadlock.
    """
    program = _in_order(orders)
    durations = [
        [
            cost.forward,
            cost.input_backward + cost.weight_backward,
            cost.input_backward,
            cost.weight_backward,
        ]
        for cost in seconds
    ]
    ends = [0.0] * (len(program) + 1)  # the last entry, index -1, is for no dependency
    clocks, busy = [0.0] * len(orders), [0.0] * len(orders)
    for number, (rank, stage, kind, first, second) in enumerate(program):
        duration = durations[stage][kind]
        ends[number] = max(clocks[rank], ends[first], ends[second]) + duration
        clocks[rank] = ends[number]
        busy[rank] += duration
    return Bubble(max(clocks), tuple(busy))


_KINDS: tuple[ActionKind, ...] = ("F", "B", "I", "W")


@lru_cache(maxsize=64)
def _in_order(orders: Orders) -> list[tuple[int, int, int, int, int]]:
    """Return the actions of all ranks in an order in which each follows the actions that it needs.

    Returns:
        For each action: the rank, the stage, the index of its kind, and the positions of the at
        most two actions that it needs, or -1.

    Raises:
        ValueError: the order of actions is a deadlock.
    """
    last = max((action.stage for actions in orders for action in actions), default=0)
    places: dict[Action, int] = {}
    program: list[tuple[int, int, int, int, int]] = []
    next_action = [0] * len(orders)
    progressed = True
    while progressed:
        progressed = False
        for rank, actions in enumerate(orders):
            while next_action[rank] < len(actions):
                action = actions[next_action[rank]]
                needed = _needed(action, places, last)
                if needed is None:
                    break
                places[action] = len(program)
                program.append((rank, action.stage, _KINDS.index(action.kind), *needed))
                next_action[rank] += 1
                progressed = True
    stuck = [
        actions[position]
        for actions, position in zip(orders, next_action, strict=True)
        if actions[position:]
    ]
    if stuck:
        raise ValueError(f"the schedule never reaches {stuck[0]}")
    return program


def _needed(action: Action, places: dict[Action, int], last: int) -> tuple[int, int] | None:
    """Return the positions of the at most two actions that an action needs, filled up with -1.

    None if one of these actions has no position yet.
    """
    stage, kind, number = action
    needed: list[int | None] = []
    if kind == "F" and stage > 0:
        needed.append(places.get(Action(stage - 1, "F", number)))
    if kind in ("B", "I"):
        needed.append(places.get(Action(stage, "F", number)))
        if stage < last:
            backward = places.get(Action(stage + 1, "B", number))
            needed.append(
                places.get(Action(stage + 1, "I", number)) if backward is None else backward
            )
    if kind == "W":
        needed.append(places.get(Action(stage, "I", number)))
    known = [position for position in needed if position is not None]
    if len(known) < len(needed):
        return None
    first, second = (*known, -1, -1)[:2]
    return first, second


def bubble_share(
    schedule: str,
    pp: int,
    micro_batches: int,
    stages_per_rank: int = 1,
    forward: float = 1.0,
    input_backward: float = 1.0,
    weight_backward: float = 1.0,
) -> float:
    """Return the idle share of a step (see `Bubble.share`) if all stages take the same seconds.

    With p ranks, m micro-batches and v stages on each rank, and F, I and W the seconds of the
    passes of one stage, the idle time of each rank is:

    * naive: m(p-1)(F+I+W).
    * GPipe, 1F1B, interleaved 1F1B and LoopedBFS: (p-1)(F+I+W). With fewer micro-batches than
      ranks, the idle time is (v-1)(p-m)(F+I+W) longer.
    * Interleaved zero bubble: (p-1)(F+I - min(F, I, W)). If W is the least of the three, that is
      (p-1)(F+I-W), as for ZB-H1.
    * ZBV and DualPipeV: (p-1)F for F = I = W. If I is a whole backward pass that is not shorter
      than F, and W is zero, the idle time is 2(p-1)I for ZBV. For DualPipeV the idle time is
      min(F, (p-1)(I-F)) shorter, as a simulation of torch's tables shows.

    Args:
        schedule: one of `orders.SCHEDULES`.
        pp: the number of ranks.
        micro_batches: the number of micro-batches of one step.
        stages_per_rank: see `orders.schedule_orders`.
        forward: seconds of the forward pass of one micro-batch on one stage.
        input_backward: seconds of the backward pass for the stage's inputs.
        weight_backward: seconds of the backward pass for the stage's weights.

    Raises:
        ConfigError: see `orders.check_schedule`.
        ValueError: there is no closed form, because a schedule with split backward passes has too
            few micro-batches, or a V-shaped schedule has other seconds than above. `simulate_step`
            computes the share.
    """
    p, m, v = pp, micro_batches, stages_per_rank
    check_schedule(schedule, p, v, m)
    micro_batch_seconds = forward + input_backward + weight_backward
    least = {"interleaved_zero_bubble": p, "zbv_zero_bubble": 2 * p - 1, "dualpipev": 2 * p}
    if p == 1:
        return 0.0
    is_equal = forward == input_backward == weight_backward
    is_whole = weight_backward == 0 and input_backward >= forward
    uneven = schedule in V_SHAPED_SCHEDULES and not (is_equal or is_whole)
    if uneven or m < least.get(schedule, 1):
        raise ValueError(
            f"{schedule} with {p} ranks and {m} micro-batches of {forward}, {input_backward} and "
            f"{weight_backward} seconds has no closed form; use schedules.bubble.simulate_step"
        )
    if schedule == "naive":
        idle = m * (p - 1) * micro_batch_seconds
    elif schedule in V_SHAPED_SCHEDULES and is_whole:
        idle = 2 * (p - 1) * input_backward
        if schedule == "dualpipev":
            idle -= min(forward, (p - 1) * (input_backward - forward))
    elif schedule in least:
        idle = (p - 1) * (forward + input_backward - min(forward, input_backward, weight_backward))
    else:
        idle = (p - 1 + (v - 1) * max(0, p - m)) * micro_batch_seconds
    return idle / (idle + m * v * micro_batch_seconds)
