"""Runs that are stopped by signals or lose a rank lose no step, and their curve is continuous."""

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
from support.survival import LIMIT_S, Curve, RunFolder, uninterrupted_curve
from support.zygote import interpreter, surroundings


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return uninterrupted_curve(tmp_path_factory.mktemp("expected"))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_saves_and_stops(run_folder: RunFolder, expected: Any, name: str) -> None:
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *run_folder.words()]
    with run_folder.start(command, FAULT_SLEEP="0.1") as process:
        run_folder.wait_for_step(3)
        process.send_signal(getattr(signal, name))
        process.send_signal(getattr(signal, name))  # the same signal again, as `timeout` does
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, output
    step = run_folder.curve()[-1][0]
    saved = run_folder.run / "checkpoints" / f"step-{step}"
    assert f"stopped by {name} after step {step}, saved as {saved}" in output
    assert (
        f"Go on with the same command and: --resume auto log.dir={run_folder.run.parent}" in output
    )
    assert step in (3, 4, 5)
    assert (run_folder.run / "checkpoints" / "latest").read_text().strip() == f"step-{step}"
    status, output = run_folder.bigtrain(["-n", "2", "--resume", "auto"])
    assert status == 0, output
    assert f"continues after step {step}" in output
    assert run_folder.curve() == expected


def test_a_signal_to_every_process_spares_those_that_read_ahead(run_folder: RunFolder) -> None:
    words = run_folder.words(data__workers=1, train__steps=400)
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *words]
    with run_folder.start(command, FAULT_SLEEP="0.1") as process:
        run_folder.wait_for_step(2)
        ranks = {int((run_folder.folder / f"pid-{rank}-0").read_text()) for rank in (0, 1)}
        stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat")]
        fields = [(stat.partition(" ")[0], stat.rpartition(")")[2].split()[1]) for stat in stats]
        workers = [int(pid) for pid, parent in fields if int(parent) in ranks]
        assert len(workers) == 2
        for pid in (*workers, *ranks):  # to every process, as a scheduler does
            os.kill(pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, output


def test_a_signal_to_one_rank_stops_all(run_folder: RunFolder) -> None:
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *run_folder.words()]
    with run_folder.start(command, FAULT_SLEEP="0.1") as process:
        run_folder.wait_for_step(2)
        os.kill(int((run_folder.folder / "pid-1-0").read_text()), signal.SIGUSR1)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, output
    assert "stopped by SIGUSR1 after step" in output


def test_a_signal_without_room_to_save_says_what_is_lost(run_folder: RunFolder) -> None:
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *run_folder.words()]
    with run_folder.start(command, FAULT_SLEEP="0.3") as process:
        run_folder.wait_for_step(2)
        while not (run_folder.run / "checkpoints" / "latest").exists():
            time.sleep(0.01)
        (run_folder.run / "checkpoints").rename(run_folder.folder / "aside")
        (run_folder.run / "checkpoints").write_text("")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, output
    words = r"bigtrain: SIGTERM stopped the run after step \d, and its state is lost: no checkpoint"
    assert re.search(words, output), output
    assert "there is none yet. Make room, and run again with --resume auto." in output


def test_a_second_signal_ends_at_once(run_folder: RunFolder) -> None:
    words = run_folder.words(mesh__timeout=60)
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *words]
    with run_folder.start(command, FAULT_SLEEP="0.02") as process:
        run_folder.wait_for_step(1)
        for rank in (0, 1):  # so that the step never ends
            os.kill(int((run_folder.folder / f"pid-{rank}-0").read_text()), signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        time.sleep(2.2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
    assert process.returncode == 143, output


def test_ranks_whose_launcher_is_killed_save_and_stop(run_folder: RunFolder) -> None:
    words = run_folder.words(train__steps=400)
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *words]
    with run_folder.start(command, FAULT_SLEEP="0.1") as process:
        run_folder.wait_for_step(3)
        process.kill()
        output, _ = process.communicate(timeout=LIMIT_S)  # the ranks also hold the pipe
        step = run_folder.curve()[-1][0]
        assert f"stopped by SIGTERM after step {step}, saved as" in output


def test_one_process_saves_and_stops(run_folder: RunFolder) -> None:
    command = [interpreter(), "-m", "bigtrain", "train", *run_folder.words()]
    with run_folder.start(command, FAULT_SLEEP="0.1") as process:
        run_folder.wait_for_step(2)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, output
    assert "stopped by SIGTERM after step" in output


def test_a_signal_before_the_first_step_ends_as_usual(run_folder: RunFolder) -> None:
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *run_folder.words()]
    with run_folder.start(command, FAULT_SLEEP="0.1") as process:
        end = time.monotonic() + LIMIT_S
        while not (run_folder.folder / "pid-1-0").exists():
            assert time.monotonic() < end
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode in (143, 75), output
    if process.returncode == 143:
        assert "stopped by" not in output


def test_no_restart_is_made_for_the_users_fault(run_folder: RunFolder) -> None:
    status, output = run_folder.bigtrain(
        ["-n", "2", "--restarts", "3"], {"train.global_batch_size": 7}
    )
    assert status == 2
    assert "restart" not in output
    status, output = run_folder.bigtrain(["-n", "2", "--restarts", "3"], FAULT_RAISE="1:0:3,1:1:1")
    assert status == 1
    assert output.count("ValueError: odd") == 2
    assert (
        output.count("bigtrain: restart 1 of 3 on 2 ranks, from step-2 (step 2 was the last") == 1
    )
    assert "bigtrain: it failed twice after step 2 and is not started again" in output


def test_an_exception_that_does_not_come_again_is_survived(
    run_folder: RunFolder, expected: Any
) -> None:
    status, output = run_folder.bigtrain(["-n", "2", "--restarts", "1"], FAULT_RAISE="0:0:4")
    assert status == 0, output
    assert run_folder.curve() == expected
    assert "continues after step 2" in output


def test_a_rank_that_is_gone_is_done_without(run_folder: RunFolder, expected: Any) -> None:
    options = ["-n", "2", "--restarts", "3", "--min-ranks", "1"]
    status, output = run_folder.bigtrain(options, {"mesh.dp": 2}, FAULT_KILL="1:0:4,1:1:1")
    assert status == 0, output
    line = r"rank 1 was lost twice in a row and is left out: restart 2 of 3 on 1 rank, from "
    line += r"step-2 \(step 2 was the last one done\), global batch 8"
    assert re.search(line, output), output
    assert "strategy ddp: 1 rank on cpu" in output
    curve = run_folder.curve()
    assert [row[0] for row in curve] == [row[0] for row in expected]
    assert curve[:2] == expected[:2]
    # From here the random streams (dropout) differ; the samples are the same.
    assert [row[1] for row in curve] == pytest.approx([row[1] for row in expected], rel=0.02)


def test_a_rank_that_stands_still_is_ended(run_folder: RunFolder, expected: Any) -> None:
    words = run_folder.words(mesh__timeout=2)
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", "--restarts", "1", *words]
    with run_folder.start(command, FAULT_SLEEP="0.05") as process:
        run_folder.wait_for_step(3)
        os.kill(int((run_folder.folder / "pid-1-0").read_text()), signal.SIGSTOP)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert run_folder.curve() == expected


def torchrun(run_folder: RunFolder, *options: str, **keys: Any) -> list[str]:
    agent = [interpreter(), "-m", "torch.distributed.run", "--nproc-per-node=2", *options]
    agent += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    return [*agent, str(ROOT / "bigtrain" / "train.py"), *run_folder.words(**keys)]


def test_ranks_that_torchrun_starts_again_go_on(run_folder: RunFolder, expected: Any) -> None:
    command = torchrun(run_folder, "--max-restarts=1")
    with run_folder.start(command, FAULT_KILL="1:0:4") as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "continues after step 2" in output
    assert run_folder.curve() == expected


@pytest.mark.parametrize(("rank", "asynchronous"), [(1, "true"), (0, "false")])
def test_under_torchrun_a_rank_that_is_stopped_in_a_save_is_named(
    run_folder: RunFolder, rank: int, asynchronous: str
) -> None:
    words = {"mesh__timeout": 1, "checkpoint__asynchronous": asynchronous, "train__steps": 2}
    with run_folder.start(torchrun(run_folder, **words), FAULT_STOP_IN_SAVE=f"{rank}:0") as process:
        assert process.stdout is not None
        output = ""
        while line := process.stdout.readline():  # torchrun itself waits 30 s for the stopped rank
            output += line
            if "flight_recorder.json" in line:
                break
    assert "step 2/2" in output
    assert f"bigtrain: rank {1 - rank} waits for a checkpoint (" in output, output
    assert f"rank {rank} has not answered: it is stopped, or stuck in native code" in output


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_under_torchrun_a_signal_saves_before_the_end(
    run_folder: RunFolder, expected: Curve, name: str
) -> None:
    agent = torchrun(run_folder, "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1")
    with run_folder.start(agent, FAULT_SLEEP="0.1") as process:
        run_folder.wait_for_step(3)
        process.send_signal(getattr(signal, name))
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, output  # torchrun has no other exit status
    step = run_folder.curve()[-1][0]
    assert f"stopped by {name} after step {step}" in output
    with run_folder.start(torchrun(run_folder, checkpoint__resume="auto")) as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert run_folder.curve() == expected


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    with slurm(tmp_path / "slurm") as variables:
        yield variables


@pytest.mark.launcher
def test_slurm_announces_an_end(run_folder: RunFolder, cluster: dict[str, str]) -> None:
    words = [str(ROOT / "bigtrain" / "train.py"), *run_folder.words(train__steps=500)]
    command = [find("srun"), "-n2", "--overcommit", interpreter(), *words]
    with run_folder.start(command, **cluster, FAULT_SLEEP="0.05") as process:
        run_folder.wait_for_step(2)
        cancel = [find("scancel"), "--signal=USR1", "--user", getpass.getuser()]
        subprocess.run(cancel, env={**surroundings(), **cluster}, check=True)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, output
    assert output.count("stopped by SIGUSR1 after step") == 1


SERVERS = {
    "strategy": "parameter_server_async",
    "strategy__replicate__servers": 2,
    "data__args__validation_samples": 12,
    "train__global_batch_size": 6,
    "train__eval_every": 4,
    "train__steps": 12,
    "checkpoint__every": 4,
}


def test_a_run_goes_on_without_a_worker_that_is_killed(run_folder: RunFolder) -> None:
    """The run is then continued on all ranks from its checkpoint."""
    status, output = run_folder.bigtrain(["-n", "5"], SERVERS, FAULT_KILL="3:0:5")
    assert status == 0, output
    lost = re.findall(r"bigtrain: worker 1 \(rank 3\) was lost in step (\d+): it ended", output)
    assert len(lost) == output.count(" lost ") == 1
    assert 3 <= int(lost[0]) <= 8  # by the server's count: the workers may be ahead or behind
    assert "2 of 3 workers continue without its samples" in output
    assert [step for step, _, _ in run_folder.curve()] == list(range(1, 13))
    losses = [loss for _, loss, _ in run_folder.curve()]
    assert losses[-1] < losses[0]
    checked = run_folder.run / "checkpoints" / "step-12"
    command = [interpreter(), "-m", "bigtrain", "checkpoint", "verify", str(checked)]
    with run_folder.start(command) as process:
        queue_output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, queue_output
    more = {**SERVERS, "train__steps": 14}
    status, output = run_folder.bigtrain(["-n", "5", "--resume", "auto"], more)
    assert status == 0, output
    assert "continues after step 12" in output
    assert "was lost" not in output


def test_the_end_of_a_server_is_the_end_of_the_run(run_folder: RunFolder) -> None:
    words = run_folder.words(**{**SERVERS, "train__steps": 4000})
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "4", *words]
    with run_folder.start(command, FAULT_SLEEP="0.02") as process:
        run_folder.wait_for_step(3)
        os.kill(int((run_folder.folder / "pid-1-0").read_text()), signal.SIGKILL)
        began = time.monotonic()
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, output
    assert time.monotonic() - began < 15
    assert re.search(
        r"bigtrain: rank \d lost server 1 \(rank 1\): it ended without a message", output
    )


def test_a_signal_after_a_loss_saves_and_stops(run_folder: RunFolder) -> None:
    words = run_folder.words(**{**SERVERS, "train__steps": 4000})
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "4", "--restarts", "1", *words]
    with run_folder.start(command, FAULT_SLEEP="0.02") as process:
        run_folder.wait_for_step(3)
        os.kill(int((run_folder.folder / "pid-2-0").read_text()), signal.SIGKILL)
        run_folder.wait_for_step(30)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, output
    assert "worker 0 (rank 2) was lost in step" in output
    assert "stopped by SIGTERM after step" in output
    assert "restart 1" not in output
