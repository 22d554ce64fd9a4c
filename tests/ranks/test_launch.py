from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bigtrain.cli import main
from bigtrain.errors import ConfigError
from bigtrain.memory.host_memory import oom_kill_count
from bigtrain.ranks.launch import _status, launcher_hint, start_ranks
from bigtrain.ranks.launcher_env import SINGLE_RANK, Launcher, RankInfo


def alone(launcher: Launcher) -> RankInfo:
    return RankInfo(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher=launcher)


def test_hint() -> None:
    hint = launcher_hint(alone("deepspeed"), 8)
    assert hint is not None
    assert hint.endswith("deepspeed --num_accelerators 2 bigtrain/train.py ...")
    hint = launcher_hint(SINGLE_RANK, 8)
    assert hint == "one rank on 8 cores. For two: bigtrain train -n 2 ..."


@pytest.mark.parametrize(
    ("placement", "cores", "has_gpu"),
    [
        (SINGLE_RANK, 1, False),
        (SINGLE_RANK, 8, True),
        (alone("torchrun"), 8, False),
        (
            RankInfo(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="deepspeed"),
            8,
            False,
        ),
    ],
)
def test_no_hint(placement: RankInfo, cores: int, has_gpu: bool) -> None:
    assert launcher_hint(placement, cores, has_gpu=has_gpu) is None


def test_what_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="-n 0: at least 1 rank is needed. Use -n 1"):
        start_ranks(0, [], tmp_path)
    with pytest.raises(ConfigError, match="is not a file, and 2 ranks were to run it"):
        start_ranks(2, [], tmp_path / "no.py")


@pytest.mark.parametrize(
    ("exitcode", "status", "words"),
    [
        (1, 1, ""),
        (2, 2, ""),
        (75, 75, ""),
        (7, 1, ""),
        (-signal.SIGKILL, 1, "rank 3 was killed (signal 9): host memory ran out? (host"),
        (-signal.SIGSEGV, 1, "rank 3 was killed (signal 11): a crash in native code? See"),
    ],
)
def test_status(exitcode: int, status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    failure: Any = SimpleNamespace(exitcode=exitcode)
    assert _status((3, failure), oom_kill_count()) == status
    assert words in capsys.readouterr().err


def test_kernel_that_ended_a_rank_for_its_memory_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failure: Any = SimpleNamespace(exitcode=-signal.SIGKILL)
    assert _status((3, failure), oom_kill_count() - 1) == 1
    said = capsys.readouterr().err
    assert "the kernel ended it, because host memory ran out (host memory " in said
    assert "GiB free now" in said
    assert "--cap SIZE for an explanation" in said


@pytest.mark.parametrize(
    "words", [["-n", "2"], ["-n2"], ["-n=2"], ["--num-ranks", "2"], ["--num-ranks=2"]]
)
def test_the_ranks_do_not_get_the_number_of_ranks(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[int, list[str]]] = []

    def start(number: int, arguments: list[str], _script: Path) -> int:
        started.append((number, arguments))
        return 0

    monkeypatch.setattr("bigtrain.ranks.launch.start_ranks", start)
    assert main(["train", "--config", "digits", *words, "OPTIM.LR", "-1"]) == 0
    assert started == [(2, ["--config", "digits", "OPTIM.LR", "-1"])]
