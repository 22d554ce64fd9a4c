"""Failures of ranks: exit statuses, the first report, lost and silent ranks, and strangers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigtrain.errors import ConfigError, LaunchError
from bigtrain.ranks import failure_guard
from bigtrain.ranks.exit_status import (
    error_summary,
    exit_status_of,
    is_clean_exit,
    is_first_to_report,
    is_interrupt,
    is_peer_failure,
    mark_reporting_rank,
    run_guarded,
    write_error_file,
)
from bigtrain.ranks.failure_hub import FailureHub, FailureListener, RunEnd, lost_rank_message
from bigtrain.ranks.launcher_env import process_start_time
from bigtrain.recorder.ring import FlightRecorder


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("x"), 2),
        (LaunchError("x"), 1),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (SystemExit(None), 0),
        (SystemExit("no"), 1),
    ],
)
def test_exit_status(error: BaseException, status: int) -> None:
    assert exit_status_of(error) == status


def test_kinds_of_endings() -> None:
    assert is_clean_exit(SystemExit(0))
    assert is_clean_exit(SystemExit(75))
    assert not is_clean_exit(SystemExit(7))
    assert is_interrupt(KeyboardInterrupt())
    assert is_interrupt(SystemExit(143))
    assert not is_interrupt(ConfigError("x"))
    assert is_peer_failure(
        RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer")
    )
    assert not is_peer_failure(RuntimeError("shapes do not match"))
    assert not is_peer_failure(ValueError("timed out"))
    assert error_summary(ValueError("a\nb")) == "ValueError: a"
    assert error_summary(ValueError()) == "ValueError: "


def raising(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (ConfigError("pp=3. Use pp=2"), 2, "bigtrain: pp=3. Use pp=2\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(75), 75, ""),
        (SystemExit("words"), 1, "words\n"),
    ],
)
def test_run_guarded(
    error: BaseException, status: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_guarded(raising(error)) == status
    assert capsys.readouterr().err == shown


def test_run_guarded_keeps_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(raising(ValueError("odd"))) == 1
    shown = capsys.readouterr().err
    assert shown.endswith("ValueError: odd\n")
    assert "in main" in shown
    assert "run_guarded" not in shown
    assert run_guarded(lambda: None) == 0
    assert run_guarded(lambda: 75) == 75


def test_one_rank_says_what_all_have_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environ = {"RANK": "0", "WORLD_SIZE": "2"}
    assert is_first_to_report({})
    assert is_first_to_report({"RANK": "0", "WORLD_SIZE": "1"})
    assert list(tmp_path.iterdir()) == []
    assert is_first_to_report(environ)
    assert not is_first_to_report({**environ, "RANK": "1"})
    assert is_first_to_report({**environ, "MASTER_PORT": "2"})
    # The same command again from the same shell: an earlier launch must not silence this one.
    for file in tmp_path.iterdir():
        os.utime(file, (time.time(), process_start_time() - 60))
    assert is_first_to_report(environ)
    assert not is_first_to_report({**environ, "RANK": "1"})
    # A message that all ranks have agreed on is printed whatever the file contains.
    error = ConfigError("agreed")
    mark_reporting_rank(error)
    monkeypatch.setenv("RANK", "1")
    ended: list[int] = []
    monkeypatch.setattr("bigtrain.ranks.exit_status.exit_process", ended.append)
    assert run_guarded(raising(error)) == 2
    assert ended == [2]
    assert capsys.readouterr().err == "bigtrain: agreed\n"


def test_the_traceback_is_left_for_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    try:
        raise ValueError("odd")
    except ValueError as error:
        write_error_file(error)
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: odd"
    assert "test_the_traceback_is_left" in message["extraInfo"]["py_callstack"]


class Ranks:
    """Watches of several ranks in one process, which record their end instead of exiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.ended: list[int] = []
        monkeypatch.setattr("bigtrain.ranks.failure_hub.PRINT_GRACE_S", 0.05)
        monkeypatch.setattr("bigtrain.ranks.failure_hub.exit_process", self.ended.append)
        hub = FailureHub(one_node=True)
        self.hub = hub
        self.watches = [FailureListener("127.0.0.1", hub.port, hub.token, n) for n in range(count)]

    def wait_for_ends(self, count: int) -> list[int]:
        end = time.monotonic() + 5
        while len(self.ended) < count and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        return self.ended

    def close(self) -> None:
        for watch in reversed(self.watches):
            watch.close()


class Ended:
    """A listener whose run has ended already, by another rank."""

    records: dict[int, object] = {}
    rank = 0

    def __init__(self, status: int) -> None:
        self.status, self.recorder = status, FlightRecorder(0)

    def report(self, *_: object, **__: object) -> RunEnd:
        return RunEnd(1, "", self.status)

    def grace(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "status", "caught"),
    [
        (ConfigError("all ranks find it"), 2, "all ranks find it"),
        (ConfigError("after a crash"), 1, None),
        (RuntimeError("a crash"), 1, None),
        (RuntimeError("after a wrong input"), 2, None),
    ],
)
def test_a_script_can_catch_what_all_ranks_have_found(
    error: Exception, status: int, caught: str | None
) -> None:
    """Only the first rank's error would be caught otherwise, and no rank would print anything."""
    watch: Any = Ended(status)
    with pytest.raises(SystemExit) as ended, failure_guard._reported(watch):
        raise error
    assert ended.value.code == status
    assert isinstance(ended.value, ConfigError) == (caught is not None)
    if caught is not None:
        assert str(ended.value) == caught
    assert run_guarded(raising(ended.value)) == status  # and prints nothing


def test_the_first_report_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 3)
    assert ranks.watches[1].report("ValueError: odd", 2) is None
    later = ranks.watches[2].report("ValueError: even", 1)
    assert later == RunEnd(1, "ValueError: odd", 2)
    assert ranks.wait_for_ends(2) == [2, 2]
    assert ranks.watches[1].report("again", 1) is None
    ranks.close()


def test_an_echo_waits_for_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2)
    threading.Timer(0.2, ranks.watches[0].report, ("ValueError: odd", 1)).start()
    ending = ranks.watches[1].report("Connection closed by peer", 1, patience_s=5)
    assert ending == RunEnd(0, "ValueError: odd", 1)
    ranks.wait_for_ends(1)
    ranks.close()


def test_a_lost_rank_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(monkeypatch, 4)
    ranks.watches[2]._closing.set()
    ranks.watches[2]._socket.shutdown(2)
    assert ranks.wait_for_ends(3) == [1, 1, 1]
    # The free memory changes from one moment to the next.
    output, expected = capsys.readouterr().err, lost_rank_message(0, 2) + "\n"
    output, expected = (re.sub(r"[\d.]+ \w+ free", "free", text) for text in (output, expected))
    assert output.startswith(expected)
    assert output.count("lost rank 2") == 1
    assert "rank 2 ended without a message; no rank waited for it\n" in output
    assert "stack of rank" in output
    ranks.close()


def test_a_spare_rank_is_missed_and_ends_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(monkeypatch, 4)
    names = ["server 0", "server 1", "worker 0", "worker 1"]
    for watch in ranks.watches:
        watch.recorder.lost_ranks.allow([2, 3], names, tells=watch.rank == 0)
    ranks.watches[0].recorder.step = 7
    assert not ranks.watches[0].recorder.lost_ranks.confirm(1)
    ranks.watches[3]._closing.set()
    ranks.watches[3]._socket.shutdown(2)
    assert all(watch.recorder.lost_ranks.confirm(3) for watch in ranks.watches[:3])
    assert [watch.recorder.lost_ranks.lost for watch in ranks.watches[:3]] == [(3,)] * 3
    errors = capsys.readouterr().err
    assert errors.startswith("bigtrain: worker 1 (rank 3) was lost in step 7: it ended without a ")
    assert errors.endswith("1 of 2 workers continue without its samples\n")
    silent = ranks.watches[0].silent_rank(0.02)
    assert silent is None or silent[0] != 3
    assert ranks.ended == []
    # Every other rank is needed.
    ranks.watches[1]._closing.set()
    ranks.watches[1]._socket.shutdown(2)
    assert ranks.wait_for_ends(2) == [1, 1]
    assert "bigtrain: rank 0 lost server 1 (rank 1): it ended" in capsys.readouterr().err
    ranks.close()


def test_who_leaves_in_good_order_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 3)
    ranks.watches[1].close()
    ranks.watches[0].close()
    time.sleep(0.2)
    assert ranks.ended == []
    assert ranks.watches[2].ending is None
    ranks.watches[2].close()


def silent_for(watch: FailureListener, seconds: float) -> int:
    """The rank that has been silent for so long, asked in as many calls as that takes."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        rank = watch.silent_rank(0.02)
        if rank is not None and rank[1] >= seconds:
            return rank[0]
        time.sleep(0.03)
    raise TimeoutError


def test_a_rank_that_answers_to_no_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 3)
    for _ in range(5):
        silent = ranks.watches[0].silent_rank(0.02)
        assert silent is None or silent[1] < 0.3
        time.sleep(0.03)
    say = ranks.watches[1]._say
    ranks.watches[1]._say = lambda **_: None  # type: ignore[method-assign]
    assert silent_for(ranks.watches[2], 0.3) == 1
    ranks.watches[1]._say = say  # type: ignore[method-assign]
    ranks.hub._answer = lambda *_: None  # type: ignore[method-assign]
    assert silent_for(ranks.watches[2], 0.6) == 0
    monkeypatch.setattr("bigtrain.ranks.failure_hub._REPLY_S", 0.1)
    ranks.close()


def test_a_stranger_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2)
    monkeypatch.setattr("bigtrain.ranks.failure_hub._REPLY_S", 1.0)
    stranger = FailureListener("127.0.0.1", ranks.hub.port, "wrong", 1)
    time.sleep(0.2)
    assert [watch.ending for watch in ranks.watches] == [None, None]
    stranger.close()
    ranks.close()


@pytest.mark.parametrize("noise", [b"1\n", b"[]\n", b"\xff\n", b'{"kind": "hello"}\n', b"x" * 9999])
def test_noise_from_a_stranger_does_not_end_the_watching(
    monkeypatch: pytest.MonkeyPatch, noise: bytes
) -> None:
    ranks = Ranks(monkeypatch, 2)
    with socket.create_connection(("127.0.0.1", ranks.hub.port)) as stranger:
        stranger.settimeout(2.0)
        stranger.sendall(noise)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""  # the hub has closed the connection
    assert ranks.watches[1].report("ValueError: odd", 2) is None
    assert ranks.wait_for_ends(1) == [2]
    ranks.close()
