"""Sends, receives and waits of a rank in the order of its step."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import pytest

from bigtrain.schedules.events import (
    StepEvent,
    forward_events,
    one_at_a_time_events,
    schedule_events,
)
from bigtrain.schedules.orders import (
    SCHEDULES,
    SINGLE_STAGE_SCHEDULES,
    schedule_orders,
    stage_ranks,
)
from bigtrain.schedules.transfers import _in_transit, transfers

PEERS = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}


def per_rank(schedule):
    return 1 if schedule in SINGLE_STAGE_SCHEDULES else 2


def words(row):
    return " ".join(
        "+".join(f"{event.stage}{event.kind}{event.micro_batch}" for event in group)
        for group in row
    )


def test_a_rank_in_the_middle_of_one_forward_one_backward():
    """As in the loop of torch's class, a send and a receive with the same rank begin together."""
    rows = schedule_events("1f1b", 3, 1, 4)
    assert words(rows[1]) == (
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1WAIT_SEND_F0 "
        "1SEND_F1+1RECV_B0 1WAIT_SEND_F1 1B0 1SEND_B0+1RECV_F2 1F2 "
        "1SEND_F2+1RECV_B1 1WAIT_SEND_F2 1B1 1WAIT_SEND_B0 1SEND_B1+1RECV_F3 1F3 "
        "1SEND_F3+1RECV_B2 1WAIT_SEND_F3 1B2 1WAIT_SEND_B1 "
        "1SEND_B2 1RECV_B3 1B3 1WAIT_SEND_B2 1SEND_B3 1WAIT_SEND_B3"
    )
    assert words(rows[0][:6]) == "0F0 0SEND_F0 0F1 0WAIT_SEND_F0 0SEND_F1 0F2"
    assert words(rows[2][:5]) == "2RECV_F0 2F0 2B0 2SEND_B0+2RECV_F1 2F1"
    assert words(schedule_events("gpipe", 2, 1, 2)[1]) == (
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1WAIT_SEND_B0 1WAIT_SEND_B1"
    )


def test_messages_are_placed_as_by_torch_2_15():
    """Earlier versions request the last gradient after the action before it."""
    row = words(schedule_events("zbv_zero_bubble", 3, 2, 8)[0])
    assert row.startswith(
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 5RECV_F0 0F4 0SEND_F4 5F0 5RECV_F1 "
        "5I0 5SEND_B0 5W0 5F1 5RECV_F2 5I1 5SEND_B1 5W1 5F2 5I2 5SEND_B2 0RECV_B0 5W2 0F5 0SEND_F5 "
        "5RECV_F3 0I0 0WAIT_SEND_F0 0W0 "
    )
    waits = " ".join(f"5WAIT_SEND_B{number}" for number in range(8))
    assert row.endswith(
        "0RECV_B6 0RECV_B7 0I5 0WAIT_SEND_F5 0W5 0I6 0WAIT_SEND_F6 0W6 0I7 0WAIT_SEND_F7 0W7 "
        + waits
    )


def test_one_micro_batch_at_a_time_leaves_one_send_open():
    """A gradient arrives while the next micro-batch is computed, and is then waited for."""
    rows = schedule_events("naive", 3, 1, 2)
    assert words(rows[1]) == (
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1WAIT_SEND_F0 1B0 1SEND_B0 "
        "1RECV_F1 1F1 1WAIT_SEND_B0 1SEND_F1 1RECV_B1 1WAIT_SEND_F1 1B1 1SEND_B1 1WAIT_SEND_B1"
    )
    assert words(rows[2]) == (
        "2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2WAIT_SEND_B0 2SEND_B1 2WAIT_SEND_B1"
    )
    # In a V schedule the last rank passes its first output to itself.
    assert words(one_at_a_time_events((0, 1, 1, 0), 1)[1]) == (
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2WAIT_SEND_F0 2B0 1B0 1SEND_B0 1WAIT_SEND_B0"
    )
    assert words(forward_events((0, 1, 1, 0))[0]) == "0F0 0SEND_F0 3RECV_F0 3F0"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 2), (2, 4), (3, 12), (4, 8)])
def test_every_message_is_received_and_waited_for_without_a_deadlock(schedule, pp, micro_batches):
    """Ranks that run as far as they can, with messages between two of them in order."""
    arguments = (schedule, pp, per_rank(schedule), micro_batches)
    done = play_events(schedule_events(*arguments), stage_ranks(*arguments[:3]))
    for rank, actions in enumerate(schedule_orders(*arguments)):
        assert [e for e in done[rank] if len(e.kind) == 1] == list(actions)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 1), (2, 1), (3, 2), (4, 5)])
def test_remaining_micro_batches_pass_all_stages_of_any_layout(schedule, pp, micro_batches):
    ranks = stage_ranks(schedule, pp, per_rank(schedule))
    for rank, events in enumerate(play_events(one_at_a_time_events(ranks, micro_batches), ranks)):
        mine = [stage for stage, owner in enumerate(ranks) if owner == rank]
        assert [e for e in events if len(e.kind) == 1] == [
            StepEvent(stage, kind, number)
            for number in range(micro_batches)
            for kind, stages in (("F", mine), ("B", mine[::-1]))
            for stage in stages
        ]


def play_events(rows, ranks):
    """Run the rows of all ranks; assert that every message is complete; return each
    rank's events.
    """
    underway, asked = defaultdict(deque), defaultdict(deque)
    places, done, arrived = [0] * len(rows), [[] for _ in rows], set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while places[rank] < len(row):
                if not all(may_begin(event, ranks, arrived) for event in row[places[rank]]):
                    break
                for event in row[places[rank]]:
                    done[rank].append(event)
                    pass_on(event, ranks, underway, asked, arrived)
                places[rank] += 1
                moved = True
    assert places == [len(row) for row in rows]
    for events in done:
        assert set(Counter(events).values()) == {1}
        sent = {e for e in events if e.kind in PEERS}
        assert {
            e._replace(kind=e.kind.removeprefix("WAIT_")) for e in events if "WAIT" in e.kind
        } == sent
    assert not any(underway.values())
    assert not any(asked.values())
    return done


def may_begin(event, ranks, arrived):
    """Whether the inputs of an action exist, or the message of a wait has arrived."""
    stage, kind, number = event
    if kind == "F" and stage and ranks[stage - 1] != ranks[stage]:
        return StepEvent(stage, "RECV_F", number) in arrived
    if kind in ("B", "I") and stage + 1 < len(ranks) and ranks[stage + 1] != ranks[stage]:
        return StepEvent(stage, "RECV_B", number) in arrived
    if kind.startswith("WAIT"):
        receive, step = PEERS[kind.removeprefix("WAIT_")]
        return StepEvent(stage + step, receive, number) in arrived
    return True


def pass_on(event, ranks, underway, asked, arrived):
    """Deliver messages between two ranks in the order in which they are sent."""
    stage, kind, number = event
    if kind in PEERS:
        receive, step = PEERS[kind]
        link = ranks[stage], ranks[stage + step]
        underway[link].append(StepEvent(stage + step, receive, number))
    elif kind.startswith("RECV"):
        link = ranks[stage + (-1 if kind == "RECV_F" else 1)], ranks[stage]
        asked[link].append(event)
    else:
        return
    while underway[link] and asked[link]:
        sent, wanted = underway[link].popleft(), asked[link].popleft()
        assert sent == wanted
        arrived.add(sent)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (3, 12)])
def test_messages_in_transit_follow_from_the_events(schedule, pp, micro_batches):
    for rank, row in enumerate(schedule_events(schedule, pp, 1, micro_batches)):
        # The first rank sends no gradients, and the last one no outputs.
        never = [kind for kind, end in (("SEND_B", 0), ("SEND_F", pp - 1)) if rank == end]
        expected = [
            {message: n for message, n in in_transit.items() if n and message[1] not in never}
            for in_transit in transfers(schedule, pp, 1, micro_batches, rank)
        ]
        assert expected == list(_in_transit(row))
