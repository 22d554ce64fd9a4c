"""Pipeline schedules: the order in which each rank works, what is in flight, who stands idle.

With several stages on a rank the order is torch's own table (torch 2.15,
`torch.distributed.pipelining.schedules`); with one it is the textbook's, which is torch's, too:
GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

from bigtrain.errors import ConfigError, nearest

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; its part for the stage's inputs; its part for the weights."""

ONE_STAGE = ("naive", "gpipe", "1f1b")
"""With one stage on each rank."""
TORCH = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv_zero_bubble": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""With several, and torch's class."""
_PLACED = 512
"""Actions of a kind up to which torch's placing of sends and receives is asked for."""
V_SHAPED = ("zbv_zero_bubble", "dualpipev")
"""Rank r has the stages r and 2 pp - 1 - r; elsewhere it has r, r + pp, r + 2 pp, ..."""
SPLIT = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
"""Those that compute the gradients of inputs and of weights apart."""
SCHEDULES = (*ONE_STAGE, *TORCH)


class Action(NamedTuple):
    """What a rank does next."""

    stage: int
    kind: Kind
    micro_batch: int


_HELD: dict[Kind, int] = {"F": 1, "I": 0, "B": -1, "W": -1}

Orders = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in order."""


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


def stage_ranks(schedule: str, pp: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage."""
    if schedule in V_SHAPED:
        return (*range(pp), *reversed(range(pp)))
    return tuple(stage % pp for stage in range(pp * stages_per_rank))


def check_schedule(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> None:
    """Refuse what a schedule cannot do: torch's own conditions, before torch is loaded.

    Raises:
        ConfigError: with the numbers, and those that would do.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"strategy.cut: schedule={schedule!r} is none of {', '.join(SCHEDULES)}"
            f"{nearest(schedule, SCHEDULES)}"
        )
    wanted = 1 if schedule in ONE_STAGE else 2 if schedule in V_SHAPED else None
    if wanted is not None and stages_per_rank != wanted:
        raise ConfigError(
            f"strategy.cut: schedule={schedule} has {wanted} stage{'s' * (wanted > 1)} on each "
            f"rank, not {stages_per_rank}. Use stages_per_rank={wanted}, or another schedule: "
            "interleaved_1f1b takes any number."
        )
    least = {"1f1b": pp, "dualpipev": 2 * pp}.get(schedule, 1)
    if micro_batches < least:
        raise ConfigError(
            f"strategy.cut: schedule={schedule} with mesh.pp={pp} needs at least {least} "
            f"micro-batches in a step, and there are {micro_batches}. Use a smaller "
            "train.micro_batch_size, or schedule=gpipe."
        )
    rounds = max(1, micro_batches // pp)
    if schedule.startswith("interleaved") and micro_batches % rounds:
        raise ConfigError(
            f"strategy.cut: schedule={schedule} with mesh.pp={pp} deals {micro_batches} "
            f"micro-batches to {rounds} rounds, and that leaves a remainder. Use "
            f"{micro_batches // rounds * rounds} micro-batches: change train.micro_batch_size or "
            "train.global_batch_size."
        )


@lru_cache(maxsize=256)
def order(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> Orders:
    """What each rank does in a step.

    `naive` lets a micro-batch through all stages and back before the next one begins.

    Args:
        schedule: one of `SCHEDULES`.
        pp: number of ranks.
        stages_per_rank: 1 for `naive`, `gpipe` and `1f1b`; 2 for those shaped like a V.
        micro_batches: of one step.

    Raises:
        ConfigError: see `check_schedule`.
    """
    check_schedule(schedule, pp, stages_per_rank, micro_batches)
    if schedule in TORCH:
        return _from_torch(TORCH[schedule], pp, stages_per_rank, micro_batches)
    ahead = {
        "naive": [1] * pp,
        "gpipe": [micro_batches] * pp,
        "1f1b": [min(micro_batches, pp - rank) for rank in range(pp)],
    }[schedule]
    return tuple(tuple(_one_stage(rank, ahead[rank], micro_batches)) for rank in range(pp))


def _one_stage(stage: int, ahead: int, micro_batches: int) -> Iterator[Action]:
    """First `ahead` forwards, then backward and forward in turns, then what is left."""
    for number in range(ahead):
        yield Action(stage, "F", number)
    for number in range(micro_batches):
        yield Action(stage, "B", number)
        if ahead + number < micro_batches:
            yield Action(stage, "F", ahead + number)


def _from_torch(name: str, pp: int, stages_per_rank: int, micro_batches: int) -> Orders:
    """The table that torch's class makes, which is the order in which its runtime computes.

    Its constructor wants stages only for how many there are. What it does next, placing every
    send and receive, takes seconds for 512 micro-batches and changes no order: it is left out.
    (Were the method that does it renamed, this would be slower, and as right.)
    """
    rows = _table(name, pp, stages_per_rank, micro_batches, sending=False).pipeline_order
    return tuple(tuple(_actions(rows[rank])) for rank in range(pp))


def _table(name: str, pp: int, stages_per_rank: int, micro_batches: int, *, sending: bool) -> Any:
    from torch.distributed.pipelining import schedules

    parent: Any = getattr(schedules, name)
    skip = {"_prepare_schedule_with_comms": lambda self, *args, **kwargs: None}  # noqa: ARG005
    table: Any = type(name, (parent,), {} if sending else skip)
    stages = [
        SimpleNamespace(
            group_size=pp,
            group_rank=0,
            num_stages=pp * stages_per_rank,
            stage_index=number * pp,
            submod=None,
        )
        for number in range(stages_per_rank)
    ]
    try:
        return table(stages, micro_batches)
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"strategy.cut: torch's {name} refuses mesh.pp={pp} with {stages_per_rank} stages on "
            f"each rank and {micro_batches} micro-batches: {error}. Use schedule=gpipe."
        ) from error


Underway = Mapping[tuple[int, str], int]
"""Micro-batches whose wires are on their way: (stage, RECV_F | SEND_F | RECV_B | SEND_B)."""


@lru_cache(maxsize=256)
def transfers(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int
) -> tuple[tuple[Underway, ...], ...]:
    """For each rank and each of its actions what is on its way beside it, as torch places it.

    What is received lies in a buffer from when it is asked for; what is sent is kept until it is
    known to have arrived. Where torch's placing would take long it is foretold, and what is
    received is taken to come in time.
    """
    orders = order(schedule, pp, stages_per_rank, micro_batches)
    if schedule == "1f1b":
        return tuple(tuple(_one_ahead(actions)) for actions in orders)
    if schedule == "naive":  # the last stage hears of its gradient's arrival with the next output
        return tuple(tuple(_one_behind(actions, pp)) for actions in orders)
    if schedule == "gpipe":  # torch waits for what is sent at the end of each half
        kept = {"F": "SEND_F", "B": "SEND_B"}
        return tuple(tuple({(s, kept[k]): n} for s, k, n in actions) for actions in orders)
    if schedule not in TORCH:
        return tuple(tuple({} for _ in actions) for actions in orders)
    if pp * stages_per_rank * micro_batches > _PLACED:
        ranks = stage_ranks(schedule, pp, stages_per_rank)
        return tuple(tuple(_waited_late(actions, ranks)) for actions in orders)
    table = _table(TORCH[schedule], pp, stages_per_rank, micro_batches, sending=True)
    rows = table.pipeline_order_with_comms
    return tuple(tuple(_underway(rows[rank])) for rank in range(pp))


def _one_ahead(actions: Sequence[Action]) -> Iterator[Underway]:
    """In torch's 1F1B a gradient is let go when the next one is there, also while F comes first.

    An output is let go when the next one is there as long as nothing goes back, then at once.
    """
    before: str | None = None
    back = False
    for stage, kind, _ in actions:
        if back:
            yield {(stage, "SEND_B"): 1}
        else:
            yield {(stage, "SEND_F"): 1} if kind == before == "F" else {}
        before, back = kind, back or kind == "B"


def _waited_late(actions: Sequence[Action], ranks: Sequence[int]) -> Iterator[Underway]:
    """Outputs are waited for at their micro-batch's backward pass, gradients never, as torch does.

    They keep them until the step is over.
    """
    open_: Counter[tuple[int, str]] = Counter()
    for stage, kind, _ in actions:
        yield {way: count for way, count in open_.items() if count}
        back = kind in ("B", "I")
        if back and open_[stage, "SEND_F"]:
            open_[stage, "SEND_F"] -= 1
        to = stage + 1 if kind == "F" else stage - 1 if back else -1
        if 0 <= to < len(ranks) and ranks[to] != ranks[stage]:
            open_[stage, "SEND_F" if kind == "F" else "SEND_B"] += 1


def _one_behind(actions: Sequence[Action], pp: int) -> Iterator[Underway]:
    done: set[int] = set()
    for stage, kind, _ in actions:
        counts = kind == "F" or stage == pp - 1
        yield {(stage, "SEND_B"): 1} if counts and stage in done else {}
        if kind == "B":
            done.add(stage)


def _underway(row: Sequence[Any]) -> Iterator[Underway]:
    """What is to be sent is there from when it is made: of a pair of actions, beside the second."""
    parts = [part for action in row for part in action.sub_actions or (action,)]
    named = [(p.stage_index, p.computation_type.value, p.microbatch_index) for p in parts]
    sent = {name for name in named if name[1] in ("SEND_F", "SEND_B")}
    open_: Counter[tuple[int, str]] = Counter()
    for stage, kind, number in named:
        if kind in ("RECV_F", "RECV_B"):
            open_[stage, kind] += 1
        elif kind in ("WAIT_SEND_F", "WAIT_SEND_B"):
            open_[stage, kind.removeprefix("WAIT_")] -= 1
        elif kind in get_args(Kind):
            # Its own wires are the action's from now on.
            arrived = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}.get(kind)
            if arrived is not None and open_[stage, arrived]:
                open_[stage, arrived] -= 1
            yield {way: count for way, count in open_.items() if count}
            sends = {"F": "SEND_F", "B": "SEND_B", "I": "SEND_B"}.get(kind, "")
            if (stage, sends, number) in sent:
                open_[stage, sends] += 1


def _actions(row: Sequence[Any]) -> Iterator[Action]:
    """Ours for torch's: without the idle places, and pairs that may overlap one after another."""
    for action in row:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _actions(action.sub_actions)
            continue
        kind = action.computation_type.value
        if kind not in get_args(Kind):
            raise ValueError(f"torch's schedule has an action {action!r}, which is not known here")
        yield Action(action.stage_index, kind, action.microbatch_index)


def in_flight(actions: Sequence[Action]) -> dict[int, int]:
    """The most micro-batches that each stage of a rank holds saved tensors of at one moment.

    One is held from its F to its B, or to its W: torch's I keeps the graph (`retain_graph=True` in
    `stage_backward_input`) with all that it has saved.
    """
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    for stage, kind, _ in actions:
        held[stage] = held.get(stage, 0) + _HELD[kind]
        most[stage] = max(most.get(stage, 0), held[stage])
    return most


def unsplit(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The same where backward passes stay whole: I is all of one, and W is nothing."""
    return tuple(a._replace(kind="B") if a.kind == "I" else a for a in actions if a.kind != "W")


@lru_cache(maxsize=1024)
def held_by_stage(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, *, splits: bool
) -> tuple[int, ...]:
    """For each stage the most micro-batches that it has in flight in a step.

    Args:
        schedule: see `order`.
        pp: see `order`.
        stages_per_rank: see `order`.
        micro_batches: see `order`.
        splits: see `Plan.splits_backward`.
    """
    held: dict[int, int] = {}
    for actions in order(schedule, pp, stages_per_rank, micro_batches):
        held |= in_flight(actions if splits else unsplit(actions))
    return tuple(held[stage] for stage in range(pp * stages_per_rank))


@lru_cache(maxsize=1024)
def held_at_fullest(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int, *, splits: bool, later: bool
) -> tuple[int, ...]:
    """For each stage those that it has in flight when the stages of its rank have most together.

    Args:
        schedule: see `order`.
        pp: see `order`.
        stages_per_rank: see `order`.
        micro_batches: see `order`.
        splits: see `Plan.splits_backward`.
        later: only moments at which every stage of the rank has made its gradients.
    """
    found: dict[int, int] = {}
    for actions in order(schedule, pp, stages_per_rank, micro_batches):
        held = dict.fromkeys((stage for stage, _, _ in actions), 0)
        waiting = set(held) if later else set()
        most, then = -1, dict(held)
        for stage, kind, _ in actions if splits else unsplit(actions):
            held[stage] += _HELD[kind]
            if _HELD[kind] < 0:
                waiting.discard(stage)
            if not waiting and sum(held.values()) > most:
                most, then = sum(held.values()), dict(held)
        found |= then
    return tuple(found[stage] for stage in range(pp * stages_per_rank))


def in_flight_together(actions: Sequence[Action]) -> int:
    """The same over all stages of a rank: pairs of a stage and a micro-batch, at one moment."""
    return max(accumulate(_HELD[action.kind] for action in actions), default=0)


def bubble(orders: Orders, seconds: Sequence[StageSeconds]) -> Bubble:
    """Play a step through: each action as early as its rank and what it needs allow.

    F needs the F of the stage before; B and I need the F of their own stage and the B or I of the
    stage behind; W needs its I. Sending takes no time.

    Args:
        orders: of all ranks.
        seconds: of each stage.

    Raises:
        ValueError: the ranks wait for each other for ever.
    """
    done: dict[Action, float] = {}
    clocks = [0.0] * len(orders)
    places = [0] * len(orders)
    last = len(seconds) - 1
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(orders):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                ready = _ready(action, done, last)
                if ready is None:
                    break
                clocks[rank] = max(clocks[rank], ready) + _duration(action, seconds)
                done[action] = clocks[rank]
                places[rank] += 1
                moved = True
    stuck = [
        actions[place] for actions, place in zip(orders, places, strict=True) if actions[place:]
    ]
    if stuck:
        raise ValueError(f"the schedule never comes to {stuck[0]}")
    busy = tuple(sum(_duration(action, seconds) for action in actions) for actions in orders)
    return Bubble(max(clocks), busy)


def _ready(action: Action, done: dict[Action, float], last: int) -> float | None:
    """When all that an action needs is there; None for not yet."""
    stage, kind, number = action
    needed: list[float | None] = []
    if kind == "F" and stage > 0:
        needed.append(done.get(Action(stage - 1, "F", number)))
    if kind in ("B", "I"):
        needed.append(done.get(Action(stage, "F", number)))
        if stage < last:
            whole = done.get(Action(stage + 1, "B", number))
            needed.append(done.get(Action(stage + 1, "I", number)) if whole is None else whole)
    if kind == "W":
        needed.append(done.get(Action(stage, "I", number)))
    times = [time for time in needed if time is not None]
    return max(times, default=0.0) if len(times) == len(needed) else None


def _duration(action: Action, seconds: Sequence[StageSeconds]) -> float:
    cost = seconds[action.stage]
    return {
        "F": cost.forward,
        "B": cost.inputs + cost.weights,
        "I": cost.inputs,
        "W": cost.weights,
    }[action.kind]
