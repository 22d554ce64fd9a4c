"""torch's records of messages that began together, and the waits that the recorder derives
from them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bigtrain.ranks import hang_watch
from bigtrain.recorder.exchanges import _described, _grouped_messages
from bigtrain.recorder.waiting import wait_of

GROUPS = {"3": ("mesh_pp", [0, 1, 2])}
NOW_S = 1_000.0


def entry(kind: str, number: int, state: str, *, age_s: float = 150.0) -> dict[str, Any]:
    """A record of NCCL's recorder; for one of several grouped messages the state is never
    updated.
    """
    return {
        "process_group": ("3", "mesh_pp"),
        "profiling_name": f"nccl:{kind}",
        "is_p2p": True,
        "p2p_seq_id": number,
        "collective_seq_id": 0,
        "time_created_ns": int((NOW_S - age_s) * 1e9),
        "timeout_ms": 110_000,
        "retired": False,
        "state": state,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
    }


def waits(monkeypatch: pytest.MonkeyPatch, *entries: dict[str, Any]) -> Any:
    monkeypatch.setattr("time.time", lambda: NOW_S)
    over = _grouped_messages(entries)
    record = {
        "rank": 1,
        "idle_s": 150.0,
        "error": None,
        "events": [],
        "stack": [],
        "exchanges": [_described(each, GROUPS, over) for each in entries],
    }
    recorder: Any = SimpleNamespace(idle_s=150.0, record=lambda: record)
    return wait_of(record), hang_watch.overdue(recorder, 100.0)


def test_messages_that_began_together_and_are_over_are_not_waited_for(monkeypatch) -> None:
    together = (
        entry("send 1->2", 7, "scheduled"),
        entry("recv 1<-0", 7, "scheduled"),
        entry("coalesced", 7, "completed"),
    )
    assert waits(monkeypatch, *together) == (None, None)


def test_messages_that_began_together_and_are_open_are_waited_for(monkeypatch) -> None:
    wait, overdue = waits(
        monkeypatch,
        entry("recv 1<-0", 6, "scheduled"),
        entry("coalesced", 6, "completed"),
        entry("recv 1<-0", 7, "scheduled"),
        entry("coalesced", 7, "started"),
    )
    assert wait is not None
    assert wait.kind == "recv"
    assert overdue == wait


def test_a_message_by_itself_is_told_by_its_own_state(monkeypatch) -> None:
    assert waits(monkeypatch, entry("recv 1<-0", 7, "completed")) == (None, None)
    wait, overdue = waits(monkeypatch, entry("recv 1<-0", 8, "started"))
    assert wait is not None
    assert overdue == wait


def test_a_message_has_as_long_as_its_group(monkeypatch) -> None:
    """As while a checkpoint is written, which has a longer timeout."""
    patient = {**entry("recv 1<-0", 8, "started"), "timeout_ms": 600_000}
    wait, overdue = waits(monkeypatch, patient)
    assert wait is not None
    assert overdue is None
