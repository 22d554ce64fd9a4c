"""The events of a rank's step in order: passes, sends, receives and waits.

Messages and waits are placed by the rules of torch 2.15. Earlier versions of torch place a few
receives at other positions, and wait for all sends at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from bigtrain.schedules.orders import (
    TORCH_SCHEDULES,
    Action,
    check_schedule,
    pipeline_table,
    schedule_orders,
    stage_ranks,
)
from bigtrain.versions.torch_versions import SCHEDULES_LET_GO

EventKind = Literal[
    "F", "B", "I", "W", "RECV_F", "SEND_F", "RECV_B", "SEND_B", "WAIT_SEND_F", "WAIT_SEND_B"
]
"""An action, the begin of a message (F for outputs, B for gradients), or the wait for a send."""


class StepEvent(NamedTuple):
    """An action, a message or a wait of a rank."""

    stage: int
    kind: EventKind
    micro_batch: int


EventRow = tuple[tuple[StepEvent, ...], ...]
"""The step of a rank in groups. The messages of a group begin together; other events are alone in
their group."""
_SENDS: dict[str, EventKind] = {"F": "SEND_F", "B": "SEND_B"}
_RECEIVES: dict[str, EventKind] = {"F": "RECV_F", "B": "RECV_B"}
_WAITS: dict[str, EventKind] = {"SEND_F": "WAIT_SEND_F", "SEND_B": "WAIT_SEND_B"}
_WITH_NEXT = ("SEND_F", "WAIT_SEND_F", "RECV_B")
_WITH_PREVIOUS = ("RECV_F", "SEND_B", "WAIT_SEND_B")


@lru_cache(maxsize=64)
def schedule_events(
    schedule: str, pp: int, stages_per_rank: int, micro_batches: int
) -> tuple[EventRow, ...]:
    """Return the events of each rank in a step.

    There are no events for the waits for receives: an action waits for the tensors that it needs.

    Args:
        schedule: one of `orders.SCHEDULES`.
        pp: the number of ranks.
        stages_per_rank: see `orders.schedule_orders`.
        micro_batches: the number of micro-batches of one step.

    Raises:
        ConfigError: see `orders.check_schedule`.
    """
    if schedule == "naive":
        check_schedule(schedule, pp, stages_per_rank, micro_batches)
        return one_at_a_time_events(tuple(range(pp)), micro_batches)
    if schedule in TORCH_SCHEDULES:
        placed = _torch_rows if SCHEDULES_LET_GO else _placed_as_torch_2_15
        rows = placed(schedule, pp, stages_per_rank, micro_batches)
        return tuple(_torch_row(rows[rank]) for rank in range(pp))
    row = {"gpipe": _gpipe_row, "1f1b": _1f1b_row}[schedule]
    orders = schedule_orders(schedule, pp, stages_per_rank, micro_batches)
    return tuple(_without_ends(row(actions), rank, pp) for rank, actions in enumerate(orders))


@lru_cache(maxsize=64)
def one_at_a_time_events(ranks: Sequence[int], micro_batches: int) -> tuple[EventRow, ...]:
    """Return the events of each rank if micro-batches run forward and backward one after the other.

    The messages have one order, which all ranks share, so there is no deadlock. Before a send
    begins, the rank waits for its previous send. Before a backward pass, it waits for the send of
    the output. So ranks overlap as far as the order allows, and each rank has at most one open
    send.

    Args:
        ranks: the rank of each stage.
        micro_batches: the number of micro-batches of one step.
    """
    rows: list[list[StepEvent]] = [[] for _ in range(max(ranks) + 1)]
    is_open: dict[int, StepEvent] = {}

    def wait(rank: int) -> None:
        if rank in is_open:
            rows[rank].append(_wait(is_open.pop(rank)))

    def send(rank: int, event: StepEvent) -> None:
        wait(rank)
        rows[rank].append(event)
        is_open[rank] = event

    for number in range(micro_batches):
        for stage, rank in enumerate(ranks):
            if stage and ranks[stage - 1] != rank:
                rows[rank].append(StepEvent(stage, "RECV_F", number))
            rows[rank].append(StepEvent(stage, "F", number))
            if stage < len(ranks) - 1 and ranks[stage + 1] != rank:
                send(rank, StepEvent(stage, "SEND_F", number))
        for stage, rank in reversed(list(enumerate(ranks))):
            if stage < len(ranks) - 1 and ranks[stage + 1] != rank:
                rows[rank].append(StepEvent(stage, "RECV_B", number))
                wait(rank)
            rows[rank].append(StepEvent(stage, "B", number))
            if stage and ranks[stage - 1] != rank:
                send(rank, StepEvent(stage, "SEND_B", number))
    for rank in range(len(rows)):
        wait(rank)
    return tuple(tuple((event,) for event in row) for row in rows)


def forward_events(ranks: Sequence[int]) -> tuple[EventRow, ...]:
    """Return the events of each rank for one forward pass, without waits for sends.

    Args:
        ranks: the rank of each stage.
    """
    kinds = ("RECV_F", "F", "SEND_F")
    return tuple(
        tuple(group for group in row if group[0].kind in kinds)
        for row in one_at_a_time_events(tuple(ranks), 1)
    )


def _torch_rows(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> Any:
    name = TORCH_SCHEDULES[schedule]
    table = pipeline_table(name, pp, stages_per_rank, micro_batches, sending=True)
    return table.pipeline_order_with_comms


def _placed_as_torch_2_15(schedule: str, pp: int, stages_per_rank: int, micro_batches: int) -> Any:
    """Return the table of an earlier torch with the messages in the positions of torch 2.15.

    torch places the actions of all ranks round-robin. From 2.15 on, a rank has one more action
    after each reduction of gradients, to wait for the reduction. This action decides whether a
    receive is placed before or after another action.
    """
    from torch.distributed.pipelining import schedules

    torch: Any = schedules
    name = TORCH_SCHEDULES[schedule]
    table = pipeline_table(name, pp, stages_per_rank, micro_batches, sending=False)
    rows = {}
    for rank, row in table.pipeline_order.items():
        reduced = torch._add_reduce_grad(torch._add_unshard_reshard(row), micro_batches)
        rows[rank] = [
            placed
            for action in reduced
            for placed in [action] * (1 + (action.computation_type == torch.REDUCE_GRAD))
        ]
    ranks = stage_ranks(schedule, pp, stages_per_rank)
    return torch._add_send_recv(rows, stage_to_rank=ranks.__getitem__, num_stages=len(ranks))


def _torch_row(row: Sequence[Any]) -> EventRow:
    """Return the events of a row of torch's table, overlapping pairs of actions in sequence."""
    groups = [
        [
            StepEvent(part.stage_index, part.computation_type.value, part.microbatch_index)
            for part in action.sub_actions or (action,)
            if part.computation_type.value in get_args(EventKind)
        ]
        for action in row
    ]
    if not any(event.kind in _WAITS.values() for group in groups for event in group):
        groups = list(_with_waits(groups))
    return tuple((event,) for group in groups for event in group)


def _with_waits(groups: Sequence[Sequence[StepEvent]]) -> Iterator[list[StepEvent]]:
    """Add the waits: for outputs after the micro-batch's backward pass, for the rest at the end."""
    is_open: dict[StepEvent, None] = {}
    for group in groups:
        waits = []
        for event in group:
            output = event._replace(kind="SEND_F")
            if event.kind in _WAITS:
                is_open[event] = None
            elif event.kind in ("B", "I") and output in is_open:
                del is_open[output]
                waits.append(_wait(output))
        yield [*group, *waits]
    yield [_wait(event) for event in is_open]


def _wait(sent: StepEvent) -> StepEvent:
    return sent._replace(kind=_WAITS[sent.kind])


def _gpipe_row(actions: Sequence[Action]) -> Iterator[list[StepEvent]]:
    """Yield the groups of a rank's events in GPipe.

    The waits for all outputs are after the last forward pass, and the waits for all gradients are
    after the last backward pass.
    """
    for kind in ("F", "B"):
        sent = []
        for action in actions:
            if action.kind == kind:
                yield [_event(action, _RECEIVES)]
                yield [_event(action)]
                yield [_event(action, _SENDS)]
                sent.append(_event(action, _SENDS))
        yield from ([_wait(event)] for event in sent)


def _1f1b_row(actions: Sequence[Action]) -> Iterator[list[StepEvent]]:
    """Yield the groups of a rank's events in 1F1B.

    A send and the receive from the same neighbour begin together. During warm-up, the wait for an
    output is after the next output is computed; later, it is before the next action. The wait for a
    gradient is after the next gradient is computed.
    """
    for number, action in enumerate(actions):
        previous = actions[number - 1] if number else None
        messages = [_event(action, _RECEIVES)]
        if previous is not None:
            messages.insert(0, _event(previous, _SENDS))
        changes = previous is not None and previous.kind != action.kind
        yield from [messages] if changes else ([event] for event in messages)
        output = messages[:-1] if previous is not None and previous.kind == "F" else []
        gradient = [a for a in actions[:number] if a.kind == action.kind == "B"][-1:]
        if changes:
            yield from ([_wait(event)] for event in output)
        yield [_event(action)]
        if not changes:
            yield from ([_wait(event)] for event in output)
        yield from ([_wait(_event(sent, _SENDS))] for sent in gradient)
    last = _event(actions[-1], _SENDS)
    yield [last]
    yield [_wait(last)]


def _event(action: Action, kinds: dict[str, EventKind] | None = None) -> StepEvent:
    return StepEvent(action.stage, kinds[action.kind] if kinds else action.kind, action.micro_batch)


def _without_ends(groups: Iterable[Sequence[StepEvent]], rank: int, pp: int) -> EventRow:
    """Drop messages with a rank before the first rank or after the last rank, and their waits."""
    left_out = (*_WITH_PREVIOUS * (rank == 0), *_WITH_NEXT * (rank == pp - 1))
    remaining = (tuple(event for event in group if event.kind not in left_out) for group in groups)
    return tuple(group for group in remaining if group)
