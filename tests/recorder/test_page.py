"""Which rank waits for which, derived from records that are made by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bigtrain.recorder.page import Cause, doing, make_page, records_by_files, show_page
from bigtrain.recorder.ring import EVENTS, FlightRecorder


def record(rank: int, **changes: Any) -> dict[str, Any]:
    position = {"phase": "forward", "block": "blocks.2", "step": 3, "micro_batch": 1}
    figures = {"idle_s": 30.0, "peak_bytes": None, "error": None, "unit": "micro-batch"}
    stack = ["/v/lib/python3/site-packages/torch/autograd/graph.py:9 _engine_run_backward"]
    return {
        "rank": rank,
        **position,
        **figures,
        "stack": stack,
        "exchanges": [],
        "events": [],
        **changes,
    }


def exchange(number: int, *, done: bool = False, kind: str = "all_reduce", size: int = 2**20):
    return {
        **{"kind": kind, "bytes": size, "group": "0", "ranks": [0, 1, 2], "number": number},
        **{"message": False, "begun": 100.0, "age_s": 30.0, "timeout_s": 40.0, "done": done},
    }


def headline(cause: Cause, *records: dict[str, Any] | None) -> str:
    return make_page(dict(enumerate(records)), cause).headline


WAITED = Cause("waited", 0, "rank 0 waited")
EVENTS_OF_BLOCK = [(99.0, "backward", "blocks.7", 1, 3), (101.0, "step", "", 1, 3)]


def test_the_rank_that_never_came_is_named_with_what_it_does():
    waits = record(0, phase="backward", exchanges=[exchange(5)], events=EVENTS_OF_BLOCK)
    also = record(1, phase="backward", exchanges=[exchange(4, done=True), exchange(5)])
    reads = record(2, phase="data", micro_batch=2, exchanges=[exchange(4, done=True)])
    assert headline(WAITED, waits, also, reads) == (
        "rank 0 waits for the gradients at blocks.7 (all_reduce, 1.0 MiB) for 30 s; "
        "rank 2 never came: it reads data (micro-batch 2 of step 4)"
    )


def test_a_rank_without_a_record_has_not_answered():
    page = make_page({0: record(0, exchanges=[exchange(5)]), 1: None, 2: None}, WAITED)
    assert page.headline.endswith("rank 1 has not answered: it is stopped, or stuck in native code")
    assert page.lines[1] == "rank 1: no answer"


def test_a_chain_is_followed_to_its_end():
    first = record(0, exchanges=[exchange(5)])
    own_group = {**exchange(1), "group": "7", "ranks": [1, 2]}
    middle = record(1, exchanges=[exchange(4, done=True), own_group])
    last = record(2, exchanges=[exchange(5)], phase="step")
    absent = record(2, exchanges=[exchange(4, done=True)], phase="step")
    assert "rank 2 never came: it is in the optimizer's step (step 3)" in headline(
        WAITED, first, middle, absent
    )
    # A circle: each waits for the other, in different groups.
    assert headline(WAITED, first, middle, last).endswith("; the ranks wait for each other")


@pytest.mark.parametrize("word", ["send to", "receive from"])
def test_a_message_that_is_waited_for_is_described_by_its_direction(word):
    """gloo's messages are in the recorder's own events only."""
    stack = ["/bigtrain/pipeline/transport.py:110 wait_sends"]
    waits = record(0, stack=stack, events=[(99.0, "forward", f"{word} rank 1, 64 bytes", 1, 3)])
    kind, preposition = ("send", "to") if word == "send to" else ("recv", "from")
    assert headline(WAITED, waits, record(1, phase="step")).startswith(
        f"rank 0 waits for a message {preposition} rank 1 ({kind}, 64 B) for 30 s; "
    )


def test_a_broken_exchange_is_still_waited_for_until_its_error_has_come():
    stack = ["/v/lib/python3/site-packages/torch/distributed/distributed_c10d.py:9 all_reduce"]
    broken = record(1, stack=stack, exchanges=[exchange(5, done=True)])
    assert headline(Cause("lost", 0), None, broken).startswith("rank 1 waits for ")
    elsewhere = record(1, exchanges=[exchange(5, done=True)])
    assert "no rank waited for it" in headline(Cause("lost", 0), None, elsewhere)


def test_ranks_in_other_exchanges_are_told_apart_from_a_dead_network():
    same = [record(rank, exchanges=[exchange(5)]) for rank in range(3)]
    assert headline(WAITED, *same).endswith(
        "all its ranks came and it does not end: check the network between them"
    )
    same[1]["exchanges"] = [exchange(5, kind="all_gather", size=8)]
    assert "the ranks are not in the same exchange (all_gather of 8 B and" in headline(
        WAITED, *same
    )


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (Cause("failed", 0, "ValueError: odd"), "rank 0 failed: ValueError: odd. It is in the"),
        (Cause("lost", 1), "rank 1 ended without a message; no rank waited for it"),
        (Cause("asked", 0), "no rank waits for another"),
    ],
)
def test_other_causes(cause: Cause, words: str):
    assert headline(cause, record(0), record(1)).startswith(words)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, "is in the forward pass of blocks.2 (micro-batch 1 of step 3)"),
        ({"phase": "step"}, "is in the optimizer's step (step 3)"),
        ({"phase": "begin"}, "begins step 3"),
        ({"phase": "build", "step": 0}, "builds the model"),
        ({"phase": "evaluate"}, "validates (after step 3)"),
        ({"phase": "between"}, "is between two steps (after step 3)"),
        (
            {"phase": "between", "stack": ["/x/bigtrain/checkpoint/save.py:3 f", "/y/lib.py:1 g"]},
            "writes a checkpoint (after step 3)",
        ),
        (
            {"phase": "data", "stack": ["/my/set.py:3 read"]},
            "reads data (micro-batch 1 of step 4),",
        ),
    ],
)
def test_what_a_rank_does(said: dict[str, Any], words: str):
    assert doing(record(0, **said)).startswith(words)


def test_stacks_that_are_alike_are_shown_once_and_torch_is_left_out():
    torch_frame = "/v/lib/python3/site-packages/torch/nn/module.py:1 _call_impl"
    stack = ["/my/train.py:1 main", torch_frame, "/my/net.py:2 forward", torch_frame]
    records = {rank: record(rank, stack=stack) for rank in range(3)}
    page = make_page(records, WAITED)
    assert page.stacks == (
        "stack of ranks 0, 1, 2:\n    /my/train.py:1 main\n    /my/net.py:2 forward\n"
        f"    {torch_frame}",
    )
    assert page.document["ranks"][2]["stack"] == stack


def test_the_page_is_printed_and_left_in_the_folder(tmp_path, capsys):
    recorder = FlightRecorder(1, 3)
    recorder.folder = tmp_path
    recorder.begin_step(2)
    recorder.enter("forward")
    show_page(recorder, {1: recorder.record()}, Cause("failed", 1, "ValueError: odd"))
    path = tmp_path / "flight_recorder.json"
    errors = capsys.readouterr().err
    assert errors == (
        "bigtrain: rank 1 failed in the forward pass (step 2, micro-batch 1)\n"
        f"bigtrain: the last events of each rank: {path}\n"
    )
    written = json.loads(path.read_text())
    assert written["headline"].startswith("rank 1 failed: ValueError: odd. It is in")
    assert [rank.get("answered", True) for rank in written["ranks"]] == [False, True, False]
    # Without a folder there is no file, but the page is printed
    recorder.folder = tmp_path / "gone"
    assert show_page(recorder, {1: recorder.record()}, WAITED).write(recorder.folder) is None


def test_without_rank_0_the_ranks_leave_their_records_for_each_other(tmp_path):
    recorders = [FlightRecorder(rank, 3) for rank in (1, 2)]
    for recorder in recorders:
        recorder.folder = tmp_path
    assert sorted(records_by_files(recorders[0], 0.01)) == [1]
    assert sorted(records_by_files(recorders[1], 0.01)) == [1, 2]
    assert list(records_by_files(FlightRecorder(5, 8), 0.01)) == [5]


def test_the_ring_keeps_the_last_events_and_counts_passes():
    recorder = FlightRecorder()
    for step in range(1, EVENTS):
        recorder.begin_step(step)
        recorder.enter("forward")
        recorder.enter_block("a")
        recorder.enter("forward")
    events = recorder.events()
    assert len(events) == EVENTS
    assert [event[0] for event in events] == sorted(event[0] for event in events)
    assert [event[1:] for event in events[-4:]] == [
        ("begin", "", 0, EVENTS - 1),
        ("forward", "", 1, EVENTS - 1),
        ("forward", "a", 1, EVENTS - 1),
        ("forward", "", 2, EVENTS - 1),
    ]
    assert recorder.idle_s < 5


def test_what_broke_the_main_thread_stands_in_its_record():
    recorder = FlightRecorder()
    try:
        raise ValueError("odd")
    except ValueError as error:
        recorder.fail(error)
    rank_record = recorder.record()
    assert rank_record["error"] == "ValueError"
    assert [line.rpartition(" ")[2] for line in rank_record["stack"]] == [
        "test_what_broke_the_main_thread_stands_in_its_record"
    ]

    def broken() -> list[dict[str, Any]]:
        raise KeyError("entries")

    recorder.exchanges = broken  # as in a different version of torch
    assert recorder.record()["exchanges"] == [{"unreadable": "KeyError: 'entries'"}]
    assert make_page({0: recorder.record()}, WAITED).headline == "rank 0 waited"
