"""Runs that are told to stop, and runs that lose a rank: nothing is lost, and the curve is one."""

from __future__ import annotations

import getpass
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import find, slurm
from support.programs import ROOT
from support.survival import LIMIT_S, Curve, Place, uninterrupted
from support.zygote import interpreter, surroundings


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return uninterrupted(tmp_path_factory.mktemp("expected"))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_saves_and_stops(place: Place, expected: Any, name: str) -> None:
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *place.words()]
    with place.start(command, FAULT_SLEEP="0.1") as process:
        place.wait_for_step(3)
        process.send_signal(getattr(signal, name))
        process.send_signal(getattr(signal, name))  # as `timeout` does: the same one
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, said
    step = place.curve()[-1][0]
    saved = place.run / "checkpoints" / f"step-{step}"
    assert f"stopped by {name} after step {step}, saved as {saved}" in said
    assert f"Go on with the same command and: --resume auto log.dir={place.run.parent}" in said
    assert step in (3, 4, 5)
    assert (place.run / "checkpoints" / "latest").read_text().strip() == f"step-{step}"
    status, said = place.bigtrain(["-n", "2", "--resume", "auto"])
    assert status == 0, said
    assert f"continues after step {step}" in said
    assert place.curve() == expected


def test_a_signal_to_every_process_spares_those_that_read_ahead(place: Place) -> None:
    words = place.words(data__workers=1, train__steps=400)
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *words]
    with place.start(command, FAULT_SLEEP="0.1") as process:
        place.wait_for_step(2)
        ranks = {int((place.folder / f"pid-{rank}-0").read_text()) for rank in (0, 1)}
        stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat")]
        fields = [(stat.partition(" ")[0], stat.rpartition(")")[2].split()[1]) for stat in stats]
        workers = [int(pid) for pid, parent in fields if int(parent) in ranks]
        assert len(workers) == 2
        for pid in (*workers, *ranks):  # as a scheduler does
            os.kill(pid, signal.SIGTERM)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, said


def test_a_signal_to_one_rank_stops_all(place: Place) -> None:
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *place.words()]
    with place.start(command, FAULT_SLEEP="0.1") as process:
        place.wait_for_step(2)
        os.kill(int((place.folder / "pid-1-0").read_text()), signal.SIGUSR1)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, said
    assert "stopped by SIGUSR1 after step" in said


def test_a_signal_without_room_to_save_says_what_is_lost(place: Place) -> None:
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *place.words()]
    with place.start(command, FAULT_SLEEP="0.3") as process:
        place.wait_for_step(2)
        while not (place.run / "checkpoints" / "latest").exists():
            time.sleep(0.01)
        (place.run / "checkpoints").rename(place.folder / "aside")
        (place.run / "checkpoints").write_text("")
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, said
    words = r"bigtrain: SIGTERM stopped the run after step \d, and its state is lost: no checkpoint"
    assert re.search(words, said), said
    assert "there is none yet. Make room, and run again with --resume auto." in said


def test_a_second_signal_ends_at_once(place: Place) -> None:
    words = place.words(mesh__timeout=60)
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *words]
    with place.start(command, FAULT_SLEEP="0.02") as process:
        place.wait_for_step(1)
        for rank in (0, 1):  # the step never ends
            os.kill(int((place.folder / f"pid-{rank}-0").read_text()), signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        time.sleep(2.2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=10)
    assert process.returncode == 143, said


def test_ranks_whose_launcher_is_killed_save_and_stop(place: Place) -> None:
    words = place.words(train__steps=400)
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *words]
    with place.start(command, FAULT_SLEEP="0.1") as process:
        place.wait_for_step(3)
        process.kill()
        said, _ = process.communicate(timeout=LIMIT_S)  # the ranks have the other end, too
        step = place.curve()[-1][0]
        assert f"stopped by SIGTERM after step {step}, saved as" in said


def test_one_process_saves_and_stops(place: Place) -> None:
    command = [interpreter(), "-m", "bigtrain", "train", *place.words()]
    with place.start(command, FAULT_SLEEP="0.1") as process:
        place.wait_for_step(2)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, said
    assert "stopped by SIGTERM after step" in said


def test_a_signal_before_the_first_step_ends_as_usual(place: Place) -> None:
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *place.words()]
    with place.start(command, FAULT_SLEEP="0.1") as process:
        end = time.monotonic() + LIMIT_S
        while not (place.folder / "pid-1-0").exists():
            assert time.monotonic() < end
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode in (143, 75), said
    if process.returncode == 143:
        assert "stopped by" not in said


def test_no_restart_is_made_for_the_users_fault(place: Place) -> None:
    status, said = place.bigtrain(["-n", "2", "--restarts", "3"], {"train.global_batch_size": 7})
    assert status == 2
    assert "restart" not in said
    status, said = place.bigtrain(["-n", "2", "--restarts", "3"], FAULT_RAISE="1:0:3,1:1:1")
    assert status == 1
    assert said.count("ValueError: odd") == 2
    assert said.count("bigtrain: restart 1 of 3 on 2 ranks, from step-2 (step 2 was the last") == 1
    assert "bigtrain: it failed twice after step 2 and is not started again" in said


def test_an_exception_that_does_not_come_again_is_survived(place: Place, expected: Any) -> None:
    status, said = place.bigtrain(["-n", "2", "--restarts", "1"], FAULT_RAISE="0:0:4")
    assert status == 0, said
    assert place.curve() == expected
    assert "continues after step 2" in said


def test_a_rank_that_is_gone_is_done_without(place: Place, expected: Any) -> None:
    options = ["-n", "2", "--restarts", "3", "--min-ranks", "1"]
    status, said = place.bigtrain(options, {"mesh.dp": 2}, FAULT_KILL="1:0:4,1:1:1")
    assert status == 0, said
    line = r"rank 1 was lost twice in a row and is left out: restart 2 of 3 on 1 rank, from "
    line += r"step-2 \(step 2 was the last one done\), global batch 8"
    assert re.search(line, said), said
    assert "strategy ddp: 1 rank on cpu" in said
    found = place.curve()
    assert [row[0] for row in found] == [row[0] for row in expected]
    assert found[:2] == expected[:2]
    # Other random streams (dropout) from there on, the same samples.
    assert [row[1] for row in found] == pytest.approx([row[1] for row in expected], rel=0.02)


@pytest.mark.full
def test_a_rank_that_stands_still_is_ended(place: Place, expected: Any) -> None:
    words = place.words(mesh__timeout=2)
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", "--restarts", "1", *words]
    with place.start(command, FAULT_SLEEP="0.05") as process:
        place.wait_for_step(3)
        os.kill(int((place.folder / "pid-1-0").read_text()), signal.SIGSTOP)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert place.curve() == expected


def torchrun(place: Place, *options: str, **keys: Any) -> list[str]:
    agent = [interpreter(), "-m", "torch.distributed.run", "--nproc-per-node=2", *options]
    agent += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    return [*agent, str(ROOT / "bigtrain" / "train.py"), *place.words(**keys)]


def test_ranks_that_torchrun_starts_again_go_on(place: Place, expected: Any) -> None:
    command = torchrun(place, "--max-restarts=1")
    with place.start(command, FAULT_KILL="1:0:4") as process:
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert "continues after step 2" in said
    assert place.curve() == expected


@pytest.mark.parametrize(
    ("rank", "asynchronous"), [(1, "true"), pytest.param(0, "false", marks=pytest.mark.full)]
)
def test_under_torchrun_a_rank_that_is_stopped_in_a_save_is_named(
    place: Place, rank: int, asynchronous: str
) -> None:
    words = {"mesh__timeout": 1, "checkpoint__asynchronous": asynchronous, "train__steps": 2}
    with place.start(torchrun(place, **words), FAULT_STOP_IN_SAVE=f"{rank}:0") as process:
        assert process.stdout is not None
        said = ""
        while line := process.stdout.readline():  # torchrun itself waits 30 s for the one
            said += line
            if "flight_recorder.json" in line:
                break
    assert "step 2/2" in said
    assert f"bigtrain: rank {1 - rank} waits for a checkpoint (" in said, said
    assert f"rank {rank} has not answered: it is stopped, or stuck in native code" in said


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_under_torchrun_a_signal_saves_before_the_end(
    place: Place, expected: Curve, name: str
) -> None:
    agent = torchrun(place, "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1")
    with place.start(agent, FAULT_SLEEP="0.1") as process:
        place.wait_for_step(3)
        process.send_signal(getattr(signal, name))
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, said  # torchrun has no other
    step = place.curve()[-1][0]
    assert f"stopped by {name} after step {step}" in said
    with place.start(torchrun(place, checkpoint__resume="auto")) as process:
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert place.curve() == expected


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    with slurm(tmp_path / "slurm") as variables:
        yield variables


@pytest.mark.launcher
def test_slurm_announces_an_end(place: Place, cluster: dict[str, str]) -> None:
    words = [str(ROOT / "bigtrain" / "train.py"), *place.words(train__steps=500)]
    command = [find("srun"), "-n2", "--overcommit", interpreter(), *words]
    with place.start(command, **cluster, FAULT_SLEEP="0.05") as process:
        place.wait_for_step(2)
        cancel = [find("scancel"), "--signal=USR1", "--user", getpass.getuser()]
        subprocess.run(cancel, env={**surroundings(), **cluster}, check=True)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, said
    assert said.count("stopped by SIGUSR1 after step") == 1


SERVERS = {
    "strategy": "parameter_server_async",
    "strategy__replicate__servers": 2,
    "data__args__validation_samples": 12,
    "train__global_batch_size": 6,
    "train__eval_every": 4,
    "train__steps": 12,
    "checkpoint__every": 4,
}


def test_a_run_goes_on_without_a_worker_that_is_killed(place: Place) -> None:
    """And is continued on all ranks from what it saved."""
    status, said = place.bigtrain(["-n", "5"], SERVERS, FAULT_KILL="3:0:5")
    assert status == 0, said
    lost = re.findall(r"bigtrain: worker 1 \(rank 3\) was lost in step (\d+): it ended", said)
    assert len(lost) == said.count(" lost ") == 1
    assert 3 <= int(lost[0]) <= 8  # as the server counts: the others may be ahead, or behind
    assert "2 of 3 workers continue without its samples" in said
    assert [step for step, _, _ in place.curve()] == list(range(1, 13))
    losses = [loss for _, loss, _ in place.curve()]
    assert losses[-1] < losses[0]
    checked = place.run / "checkpoints" / "step-12"
    command = [interpreter(), "-m", "bigtrain", "checkpoint", "verify", str(checked)]
    with place.start(command) as process:
        found, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, found
    more = {**SERVERS, "train__steps": 14}
    status, said = place.bigtrain(["-n", "5", "--resume", "auto"], more)
    assert status == 0, said
    assert "continues after step 12" in said
    assert "was lost" not in said


def test_the_end_of_a_server_is_the_end_of_the_run(place: Place) -> None:
    words = place.words(**{**SERVERS, "train__steps": 4000})
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "4", *words]
    with place.start(command, FAULT_SLEEP="0.02") as process:
        place.wait_for_step(3)
        os.kill(int((place.folder / "pid-1-0").read_text()), signal.SIGKILL)
        began = time.monotonic()
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, said
    assert time.monotonic() - began < 15
    assert re.search(
        r"bigtrain: rank \d lost server 1 \(rank 1\): it ended without a message", said
    )


def test_a_signal_after_a_loss_saves_and_stops(place: Place) -> None:
    words = place.words(**{**SERVERS, "train__steps": 4000})
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "4", "--restarts", "1", *words]
    with place.start(command, FAULT_SLEEP="0.02") as process:
        place.wait_for_step(3)
        os.kill(int((place.folder / "pid-2-0").read_text()), signal.SIGKILL)
        place.wait_for_step(30)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, said
    assert "worker 0 (rank 2) was lost in step" in said
    assert "stopped by SIGTERM after step" in said
    assert "restart 1" not in said
