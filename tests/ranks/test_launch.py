"""Ranks that `bigtrain train -n` starts: refusals before a start, exit statuses, and restarts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bigtrain.cli import main
from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.memory.host_memory import oom_kill_count
from bigtrain.ranks import launch
from bigtrain.ranks.launch import (
    _status,
    check_resources,
    check_shares,
    devices_without,
    start_ranks,
)
from bigtrain.ranks.launcher_env import SINGLE_RANK, Launcher, RankInfo, launcher_hint
from bigtrain.units import MIB


def single_rank(launcher: Launcher) -> RankInfo:
    """The placement of a single rank under a launcher."""
    return RankInfo(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher=launcher)


def test_hint() -> None:
    hint = launcher_hint(single_rank("deepspeed"), 8)
    assert hint is not None
    assert hint.endswith("deepspeed --num_accelerators 2 bigtrain/train.py ...")
    hint = launcher_hint(SINGLE_RANK, 8)
    assert hint == "one rank on 8 cores. For two: bigtrain train -n 2 ..."


@pytest.mark.parametrize(
    ("placement", "cores", "has_gpu"),
    [
        (SINGLE_RANK, 1, False),
        (SINGLE_RANK, 8, True),
        (single_rank("torchrun"), 8, False),
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
    with pytest.raises(ConfigError, match=r"--restarts -1: at least 0 is needed. Use --restarts 3"):
        start_ranks(2, [], tmp_path, restarts=-1)
    words = r"--min-ranks 3: with 2 ranks it can be 1 to 2. Use --min-ranks 1"
    with pytest.raises(ConfigError, match=words):
        start_ranks(2, [], tmp_path, restarts=1, min_ranks=3)
    words = r"--min-ranks 1 has an effect only after a restart. Add --restarts 3"
    with pytest.raises(ConfigError, match=words):
        start_ranks(2, [], tmp_path, min_ranks=1)
    with pytest.raises(ConfigError, match="is not a file: 2 ranks cannot run it"):
        start_ranks(2, [], tmp_path / "no.py")


def test_more_ranks_than_the_machine_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "free_host_bytes", lambda: 20 * 1024 * MIB)
    monkeypatch.setattr(launch, "_usable_cores", lambda: 2)
    words = "-n 64: a rank takes about 350.0 MiB .* all ranks 21.88 GiB, and 20.00 GiB are free"
    with pytest.raises(ConfigError, match=f"{words}. Use -n 29 or fewer"):
        check_resources(64)
    with pytest.raises(ConfigError, match="-n 33: .* 2 cores .*, and at most 16 .* Use -n 32 or"):
        check_resources(33)
    check_resources(32)
    monkeypatch.setattr(launch, "free_host_bytes", lambda: 100 * MIB)
    check_resources(1)  # a single rank finds out its memory itself


def test_more_ranks_than_samples_are_refused_before_any_starts(capfd) -> None:
    words = ["train", "-n", "9", "data.name=digits", "train.global_batch_size=8"]
    assert main(words) == 2
    errors = capfd.readouterr().err
    assert errors == (
        "bigtrain: -n 9: each rank needs at least one sample of every step, and "
        "train.global_batch_size is 8. Use -n 8 or fewer, or train.global_batch_size=9\n"
    )
    for strategy in ("gpipe", "tensor", "parameter_server"):
        check_shares(load_job(None, strategy, words[3:]), 9)


def test_a_wrong_key_is_said_once_before_any_rank_starts(capfd) -> None:
    for ranks in ([], ["-n", "2"], ["-n", "2", "--dry-run"]):
        assert main(["train", *ranks, "optim.lrr=1"]) == 2
        message = "bigtrain: unknown key optim.lrr, did you mean optim.lr?\n"
        assert capfd.readouterr().err == message


def test_a_dry_run_of_many_ranks_is_one_process(monkeypatch, capfd) -> None:
    monkeypatch.setattr(launch, "start_ranks", None)
    words = ["data.name=digits", "model.name=lenet", "train.global_batch_size=32", "--dry-run"]
    monkeypatch.setenv("RANK", "3")
    assert main(["train", "-n", "16", *words]) == 0
    assert "micro-batch 2 x accumulation 1 x dp 16" in capfd.readouterr().out
    assert os.environ["RANK"] == "3"
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize(
    ("exitcode", "status", "words"),
    [
        (1, 1, ""),
        (2, 2, ""),
        (75, 75, ""),
        (143, 143, ""),
        (7, 1, ""),
        (-signal.SIGKILL, 1, "rank 3 was killed (signal 9): host memory ran out? (host"),
        (-signal.SIGSEGV, 1, "rank 3 was killed (signal 11): a crash in native code? See"),
    ],
)
def test_status(exitcode: int, status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status((3, exitcode), oom_kill_count()) == status
    assert words in capsys.readouterr().err


def test_kernel_that_ended_a_rank_for_its_memory_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _status((3, -signal.SIGKILL), oom_kill_count() - 1) == 1
    errors = capsys.readouterr().err
    assert "the kernel killed it because host memory ran out (host memory " in errors
    assert "GiB free now" in errors
    assert "--cap SIZE, which explains" in errors


@pytest.mark.parametrize(
    "words", [["-n", "2"], ["-n2"], ["-n=2"], ["--num-ranks", "2"], ["--num-ranks=2"]]
)
@pytest.mark.parametrize(
    ("more", "options"),
    [
        ([], {"restarts": 0, "min_ranks": None}),
        (["--restarts", "3", "--min-ranks=1"], {"restarts": 3, "min_ranks": 1}),
    ],
)
def test_the_ranks_do_not_get_how_they_are_started(
    words: list[str], more: list[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[int, list[str], dict[str, Any]]] = []

    def start(number: int, arguments: list[str], _script: Path, **options: Any) -> int:
        started.append((number, arguments, options))
        return 0

    monkeypatch.setattr("bigtrain.ranks.launch.start_ranks", start)
    assert main(["train", "--config", "digits", *words, *more, "MESH.DP", "-1"]) == 0
    assert started == [(2, ["--config", "digits", "MESH.DP", "-1"], options)]


@pytest.mark.parametrize(
    ("words", "option"), [(["--restarts", "1"], "--restarts"), (["--min-ranks=1"], "--min-ranks")]
)
def test_who_starts_no_ranks_starts_none_again(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", *words])
    assert f"{option} needs ranks that bigtrain starts itself. Add -n N" in capsys.readouterr().err


RANK = r"""
import json, os, pathlib, signal, sys, time
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
launch = pathlib.Path(os.environ["BIGTRAIN_LAUNCH"])
life = int(launch.name)
words = json.loads(os.environ.get("BIGTRAIN_RESTART", '{"words": []}'))["words"]
here = pathlib.Path(__file__).parent
with (here / "said").open("a") as file:
    file.write(json.dumps([life, rank, ranks, words]) + "\n")

def step(number):
    with (here / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": number}) + "\n")

def save(number):
    (here / "checkpoints").mkdir(exist_ok=True)
    (here / "checkpoints" / "latest").write_text(f"step-{number}\n")

def note(**changes):
    values = dict(folder=str(here), begun_at=None, words=words, global_size=12, micro_size=4)
    values |= dict(model_ranks=1, timeout=0.3) | changes
    (launch.parent / "note.json").write_text(json.dumps(values))

def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)

"""


class Launched:
    """A launch whose ranks are short programs without torch."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        monkeypatch.setattr("bigtrain.ranks.launch._REMINDER_S", 0.2)

    def __call__(self, program: str, num_ranks: int = 2, **options: Any) -> int:
        script = self._folder / "rank.py"
        script.write_text(RANK + program)
        return start_ranks(num_ranks, [], script, **options)

    def lives(self) -> list[tuple[int, int, list[str]]]:
        """For each life: its number, its ranks and its words."""
        rows = [json.loads(line) for line in (self._folder / "said").read_text().splitlines()]
        return [(life, ranks, words) for life, rank, ranks, words in sorted(rows) if rank == 0]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    return Launched(tmp_path, monkeypatch)


def test_a_lost_rank_is_started_again_with_all_others(
    launched: Launched, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "note(); step(1); step(2); save(1)\nif rank == 1 and life == 0: die()\n"
    program += "if life == 0: time.sleep(60)"
    assert launched(program, restarts=2) == 0
    folder = [f'log.dir="{tmp_path.parent}"', f'log.name="{tmp_path.name}"']
    assert launched.lives() == [(0, 2, []), (1, 2, [*folder, "checkpoint.resume=auto"])]
    errors = capfd.readouterr().err
    assert "bigtrain: rank 1 was killed (signal 9)" in errors
    line = "bigtrain: restart 1 of 2 on 2 ranks, from step-1 (step 2 was the last one done), "
    assert line + "global batch 12\n" in errors


def test_restarts_come_to_an_end(launched: Launched, capfd: pytest.CaptureFixture[str]) -> None:
    assert launched("die()", restarts=2) == 1
    assert [life for life, _, _ in launched.lives()] == [0, 1, 2]
    assert "bigtrain: restart 2 of 2 on 2 ranks, from the beginning\n" in capfd.readouterr().err


def test_what_began_elsewhere_begins_there_again(launched: Launched, tmp_path: Path) -> None:
    program = "note(begun_at='else')\nif life == 0: step(1); die()\n"
    program += "if life == 1: step(2); save(2); die()\n"
    assert launched(program, num_ranks=1, restarts=2) == 0
    first, second, third = (words for _, _, words in launched.lives())
    assert (first, second[-1]) == ([], f'log.name="{tmp_path.name}"')
    assert third[-1] == "checkpoint.resume=auto"
    # The step before the checkpoint was done again.
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 2}


@pytest.mark.parametrize(
    ("ranks", "changes", "fewer", "rows"),
    [
        (4, {}, 3, 4),
        (4, {"model_ranks": 2}, 2, 4),
        (4, {"global_size": 8}, 2, 4),
        (3, {"micro_size": 5}, 2, 3),
        (3, {"model_ranks": 0}, 2, 0),
    ],
)
def test_a_place_that_is_lost_twice_is_done_without(
    launched: Launched,
    ranks: int,
    changes: dict[str, int],
    fewer: int,
    rows: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = f"note(**{changes}); time.sleep(0.2)\nif life < 2 and rank == 1: die()"
    assert launched(program, num_ranks=ranks, restarts=2, min_ranks=2) == 0
    assert [number for _, number, _ in launched.lives()] == [ranks, ranks, fewer]
    total = changes.get("global_size", 12)
    batch = ["mesh.dp=-1", f"train.global_batch_size={total}", f"train.micro_batch_size={rows}"]
    batch += ["train.accumulation_steps=null"]
    _, _, words = launched.lives()[-1]
    assert words[3:] == (batch if rows else [])
    line = f"rank 1 was lost twice in a row and is left out: restart 2 of 2 on {fewer} ranks"
    assert line in capfd.readouterr().err


@pytest.mark.parametrize(
    ("environ", "rank", "hidden"),
    [
        ({}, 1, {"CUDA_VISIBLE_DEVICES": "0,2,3"}),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 1, {"CUDA_VISIBLE_DEVICES": "4,6,7"}),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}, 3, {"CUDA_VISIBLE_DEVICES": "0,1,2,4"}),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1, {}),  # the ranks share a GPU
        ({"ZE_AFFINITY_MASK": "0,1,2,3"}, 0, {"ZE_AFFINITY_MASK": "1,2,3"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, 3, {"CUDA_VISIBLE_DEVICES": "0,1,2"}),
    ],
)
def test_the_device_of_a_lost_rank_is_hidden(
    environ: dict[str, str], rank: int, hidden: dict[str, str]
) -> None:
    assert devices_without(rank, 4, environ) == hidden


def test_the_ranks_that_are_left_do_not_see_the_device_of_the_lost_one(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that answers and fails would be given to another rank."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    seen = tmp_path / "seen"
    program = "note(); time.sleep(0.2)\n"
    variable = "os.environ['CUDA_VISIBLE_DEVICES']"
    program += f"if rank == 0: print({variable}, file=open({str(seen)!r}, 'a'))\n"
    program += "if life < 2 and rank == 1: die()\nif life in (2, 3) and rank == 0: die()"
    assert launched(program, num_ranks=3, restarts=4, min_ranks=1) == 0
    assert seen.read_text().split() == ["4,5,6", "4,5,6", "4,6", "4,6", "6"]


def test_a_place_that_fails_twice_is_done_without_and_a_program_is_not_saved_so(
    launched: Launched, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "note(); time.sleep(0.2)\nif ranks == 2 and rank == 1: sys.exit(1)"
    assert launched(program, restarts=5, min_ranks=1) == 0
    assert [number for _, number, _ in launched.lives()] == [2, 2, 1]
    assert "rank 1 was lost twice in a row and is left out: " in capfd.readouterr().err
    program = "note(); time.sleep(0.2)\nif rank == 0: sys.exit(1)"
    assert launched(program, restarts=5, min_ranks=1) == 1
    assert sorted(number for _, number, _ in launched.lives()) == [1, 1, 2, 2, 2, 2]
    assert "it failed twice after step 0 and is not started again" in capfd.readouterr().err


def test_ranks_that_are_refused_after_a_restart_are_too_many(
    launched: Launched, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "note()\nif life == 0: die()\nif ranks == 3: sys.exit(2)"
    assert launched(program, num_ranks=3, restarts=2, min_ranks=2) == 0
    assert [number for _, number, _ in launched.lives()] == [3, 3, 2]
    assert "bigtrain: 3 ranks were refused: restart 2 of 2 on 2 ranks" in capfd.readouterr().err
    assert launched("if life == 0: die()\nsys.exit(2)", restarts=2) == 2


def test_a_rank_that_stands_still_is_ended_and_started_again(
    launched: Launched, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "note()\nif rank == 1 and life == 0: die(signal.SIGSTOP)\n"
    program += "if life == 0: time.sleep(60)"
    assert launched(program, restarts=1) == 0
    errors = capfd.readouterr().err
    assert "bigtrain: rank 1 has been stopped (SIGSTOP) for 0 s and is killed" in errors
    assert "restart 1 of 1" in errors
