"""How long a schedule takes and how much of that is idle: played, and in closed form."""

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
    """One micro-batch on one stage; a whole backward takes `inputs + weights`.

    torch's stage 0 has no inputs to send gradients of: its I does nothing and its W everything.
    """

    forward: float
    inputs: float
    weights: float


class Bubble(NamedTuple):
    """One step of the pipeline, with nothing but the computation."""

    seconds: float
    """From the first action to the end of the last."""
    busy: tuple[float, ...]
    """Seconds of each rank's actions."""

    @property
    def share(self) -> float:
        """Idle time over all time, all ranks together."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.seconds)


def simulate_step(orders: Orders, seconds: Sequence[StageSeconds]) -> Bubble:
    """Play a step through: each action as early as its rank and what it needs allow.

    F needs the F of the stage before; B and I need the F of their own stage and the B or I of the
    stage behind; W needs its I. Sending takes no time.

    Args:
        orders: of all ranks.
        seconds: of each stage.

    Raises:
        ValueError: the ranks wait for each other for ever.
    """
    program = _in_order(orders)
    durations = [[cost.forward, cost.inputs + cost.weights, *cost[1:]] for cost in seconds]
    ends = [0.0] * (len(program) + 1)  # the last one is of what is not waited for
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
    """The actions of all ranks, each after what it needs.

    Returns:
        Of each the rank, the stage, the number of its kind, and the places of two others that it
        needs, -1 for none.

    Raises:
        ValueError: the ranks wait for each other for ever.
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
        actions[place]
        for actions, place in zip(orders, next_action, strict=True)
        if actions[place:]
    ]
    if stuck:
        raise ValueError(f"the schedule never comes to {stuck[0]}")
    return program


def _needed(action: Action, places: dict[Action, int], last: int) -> tuple[int, int] | None:
    """Where the two actions are that one needs, -1 for none; None for not yet."""
    stage, kind, number = action
    needed: list[int | None] = []
    if kind == "F" and stage > 0:
        needed.append(places.get(Action(stage - 1, "F", number)))
    if kind in ("B", "I"):
        needed.append(places.get(Action(stage, "F", number)))
        if stage < last:
            whole = places.get(Action(stage + 1, "B", number))
            needed.append(places.get(Action(stage + 1, "I", number)) if whole is None else whole)
    if kind == "W":
        needed.append(places.get(Action(stage, "I", number)))
    found = [place for place in needed if place is not None]
    if len(found) < len(needed):
        return None
    first, second = (*found, -1, -1)[:2]
    return first, second


def bubble_share(
    schedule: str,
    pp: int,
    micro_batches: int,
    stages_per_rank: int = 1,
    forward: float = 1.0,
    inputs: float = 1.0,
    weights: float = 1.0,
) -> float:
    """Idle time over all time of a step, `Bubble.share`, where all stages are alike.

    Idle time of each rank, F, I and W being one stage's seconds: GPipe, 1F1B, interleaved and
    LoopedBFS (p-1)(F+I+W); interleaved zero bubble (p-1)(F+I - min(F, I, W)), which is ZB-H1's
    (p-1)(F+I-W) where W is the least; ZBV and DualPipeV (p-1)F for F = I = W. Where I is a whole
    backward pass, no shorter than F, and W nothing: ZBV 2(p-1)I, and DualPipeV min(F, (p-1)(I-F))
    less, as torch's tables are played. With fewer micro-batches than ranks, interleaved and
    LoopedBFS wait (v-1)(p-m) times longer.

    Args:
        schedule: one of `orders.SCHEDULES`.
        pp: number of ranks.
        micro_batches: of one step.
        stages_per_rank: as in `orders.schedule_orders`.
        forward: seconds of one micro-batch on one stage.
        inputs: of its backward pass to the stage's inputs.
        weights: of its backward pass to the weights.

    Raises:
        ConfigError: see `orders.check_schedule`.
        ValueError: a split schedule with so few micro-batches, or a V with so unequal seconds, that
            only playing it through (`simulate_step`) tells.
    """
    p, m, v = pp, micro_batches, stages_per_rank
    check_schedule(schedule, p, v, m)
    whole = forward + inputs + weights
    least = {"interleaved_zero_bubble": p, "zbv_zero_bubble": 2 * p - 1, "dualpipev": 2 * p}
    if p == 1:
        return 0.0
    split = forward == inputs == weights
    is_whole = weights == 0 and inputs >= forward
    uneven = schedule in V_SHAPED_SCHEDULES and not (split or is_whole)
    if uneven or m < least.get(schedule, 1):
        raise ValueError(
            f"{schedule} with {p} ranks and {m} micro-batches of {forward}, {inputs} and {weights} "
            "seconds has no closed form; play it through with schedules.bubble"
        )
    if schedule == "naive":
        idle = m * (p - 1) * whole
    elif schedule in V_SHAPED_SCHEDULES and is_whole:
        idle = 2 * (p - 1) * inputs
        if schedule == "dualpipev":
            idle -= min(forward, (p - 1) * (inputs - forward))
    elif schedule in least:
        idle = (p - 1) * (forward + inputs - min(forward, inputs, weights))
    else:
        idle = (p - 1 + (v - 1) * max(0, p - m)) * whole
    return idle / (idle + m * v * whole)
