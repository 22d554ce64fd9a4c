"""Runs that are told to stop, and runs that lose a rank: nothing is lost, and the curve is one."""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cluster import find, slurm
from support.programs import ROOT
from support.zygote import interpreter, surroundings

LIMIT_S = 60.0


def _faults() -> Any:
    """benchmarks/faults.py, as a module."""
    spec = importlib.util.spec_from_file_location("faults", ROOT / "benchmarks" / "faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = module
    spec.loader.exec_module(module)
    return module


faults = _faults()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks; what a run without a fault computes is known."""
    made = faults.FaultRuns(tmp_path_factory.mktemp("faults"), interpreter(), surroundings())
    made.reference()
    assert len(made.expected) == faults.STEPS
    return made


NET = """
import os, signal, sys, time
from pathlib import Path
from torch import nn
FOLDER, RANK = Path(os.environ["FAULT_FOLDER"]), os.environ.get("RANK", "0")
LIFE = os.environ.get("BIGTRAIN_LAUNCH", "/0").rpartition("/")[2]
LIFE = os.environ.get("TORCHELASTIC_RESTART_COUNT", LIFE)
(FOLDER / f"pid-{RANK}-{LIFE}").write_text(str(os.getpid()))

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(256, 24), nn.Dropout(0.1), nn.Linear(24, 256))
        self.calls = 0

    def forward(self, tokens):
        if tokens.device.type == "cpu" and self.training and not tokens.is_meta:
            self.calls += 1
            time.sleep(float(os.environ.get("FAULT_SLEEP", "0")))
            if f"{RANK}:{LIFE}:{self.calls}" in os.environ.get("FAULT_RAISE", "").split(","):
                raise ValueError("odd")
            if f"{RANK}:{LIFE}:{self.calls}" in os.environ.get("FAULT_KILL", "").split(","):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(tokens)
"""


class Place:
    """A folder with a net, a text and a run, `r`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "runs" / "r"
        (folder / "net.py").write_text(NET)
        (folder / "corpus.txt").write_text("pack my box with five dozen liquor jugs. " * 200)

    def words(self, **keys: Any) -> list[str]:
        values = {
            "data.path": self.folder / "corpus.txt",
            "data.args.validation_samples": 8,
            "data.args.sequence_length": 16,
            "train.global_batch_size": 8,
            "train.steps": 6,
            "train.eval_every": 0,
            "checkpoint.every": 2,
            "mesh.timeout": 5,
            "memory.predict": "false",
            "memory.track_steps": 0,
            "log.dir": self.folder / "runs",
            "log.name": "r",
            **{key.replace("__", "."): value for key, value in keys.items()},
        }
        fixed = ["--strategy", "ddp", "device=cpu", "model.name=net:Net", "data.name=text"]
        return [*fixed, *(f"{key}={value}" for key, value in values.items())]

    @contextlib.contextmanager
    def start(self, command: Sequence[str], **environ: str) -> Iterator[subprocess.Popen[str]]:
        path = f"{self.folder}{os.pathsep}{surroundings()['PYTHONPATH']}"
        process = subprocess.Popen(
            command,
            env={**surroundings(), "PYTHONPATH": path, "FAULT_FOLDER": str(self.folder), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                for file in self.folder.glob("pid-*"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(file.read_text()), signal.SIGKILL)
                process.communicate()

    def bigtrain(
        self, options: Sequence[str], keys: dict[str, Any] | None = None, **environ: str
    ) -> tuple[int, str]:
        """Run `bigtrain train OPTIONS` to its end: status and output."""
        command = [interpreter(), "-m", "bigtrain", "train", *options, *self.words(**(keys or {}))]
        with self.start(command, **environ) as process:
            said, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, said

    def curve(self) -> list[tuple[int, float, float]]:
        rows = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]

    def wait_for_step(self, step: int) -> None:
        metrics = self.run / "metrics.jsonl"
        end = time.monotonic() + LIMIT_S
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    place = Place(tmp_path_factory.mktemp("expected"))
    status, said = place.bigtrain(["-n", "2"])
    assert status == 0, said
    return place.curve()


@pytest.mark.parametrize("number", range(4))
def test_a_fault_of_each_kind_changes_no_number(runs: Any, number: int) -> None:
    faulty = {
        0: faults.Fault("SIGKILL", 1, step=5),
        1: faults.Fault("SIGTERM", 0, step=3, delay_s=0.02),
        2: faults.Fault("write", 0, call=runs.calls[0] // 2),
        3: faults.Fault("write", 1, call=runs.calls[1] - 1),
    }[number]
    outcome = runs.one(number, faulty)
    assert outcome.problem is None
    assert outcome.came
    assert outcome.continued_from is not None


@pytest.mark.full
@pytest.mark.parametrize("kind", faults.KINDS)
def test_ten_faults_at_random_change_no_number(runs: Any, kind: str) -> None:
    import random

    draws = random.Random(kind)
    for number in range(3 if kind == "write" else 2):
        outcome = runs.drawn(100 + 10 * faults.KINDS.index(kind) + number, kind, draws)
        assert outcome.problem is None, outcome


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
    assert "there is none. Make room, and run again with --resume auto." in said


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
    assert "bigtrain: it failed twice after step 2, and is not started again" in said


def test_an_exception_that_does_not_come_again_is_survived(place: Place, expected: Any) -> None:
    status, said = place.bigtrain(["-n", "2", "--restarts", "1"], FAULT_RAISE="0:0:4")
    assert status == 0, said
    assert place.curve() == expected
    assert "continues after step 2" in said


def test_a_rank_that_is_gone_is_done_without(place: Place, expected: Any) -> None:
    options = ["-n", "2", "--restarts", "3", "--min-ranks", "1"]
    status, said = place.bigtrain(options, {"mesh.dp": 2}, FAULT_KILL="1:0:4,1:1:1")
    assert status == 0, said
    line = r"rank 1 was lost twice in a row and is taken as gone: restart 2 of 3 on 1 rank, from "
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
    command = [sys.executable, "-m", "bigtrain", "train", "-n", "2", "--restarts", "1", *words]
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


def test_under_torchrun_a_signal_saves_before_the_end(place: Place, expected: Any) -> None:
    with place.start(torchrun(place), FAULT_SLEEP="0.1") as process:
        place.wait_for_step(3)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, said  # torchrun has no other
    step = place.curve()[-1][0]
    assert f"stopped by SIGTERM after step {step}" in said
    with place.start(torchrun(place, checkpoint__resume="auto")) as process:
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert place.curve() == expected


class Disk:
    """A folder for a run that can be full and have room again: a small file system of its own.

    Where none can be mounted, the ranks' files may not grow (RLIMIT_FSIZE) instead.
    """

    def __init__(self, folder: Path, place: Place, *, mounts: bool) -> None:
        self.folder, self._place = folder, place
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
        self.mounted = mounts and subprocess.run(command, capture_output=True).returncode == 0

    def fill(self) -> None:
        if not self.mounted:
            self._limit(1)
            return
        with (self.folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(512))

    def free(self) -> None:
        if self.mounted:
            (self.folder / "filler").unlink()
        else:
            self._limit(resource.RLIM_INFINITY)

    def _limit(self, size: int) -> None:
        for rank in (0, 1):
            pid = int((self._place.folder / f"pid-{rank}-0").read_text())
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request: pytest.FixtureRequest, place: Place) -> Iterator[Disk]:
    made = Disk(place.folder / "disk", place, mounts=request.param == "tmpfs")
    yield made
    made.close()


def test_a_disk_that_fills_up_loses_nothing(place: Place, disk: Disk, expected: Any) -> None:
    place.run = disk.folder / "r"
    words = place.words(log__dir=disk.folder)
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *words]
    with place.start(command, FAULT_SLEEP="0.2") as process:
        assert process.stdout is not None
        place.wait_for_step(2)
        while not (place.run / "checkpoints" / "latest").exists():
            time.sleep(0.01)
        disk.fill()
        said = ""
        while "warning: no checkpoint was written to" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        left = [path.name for path in (place.run / "checkpoints").iterdir()]
        assert sorted(left) == [".lock", "latest", "step-2"]
        disk.free()
        rest, _ = process.communicate(timeout=LIMIT_S)
    said += rest
    assert process.returncode == 0, said
    assert re.search(r"(No space left on device|File too large)", said)
    assert "The run goes on; the newest is still step-2." in said
    if not disk.mounted:  # in a file system a short line may find room in the file's last page
        assert "metrics.jsonl cannot be written" in said
    assert place.curve() == expected
    assert (place.run / "checkpoints" / "latest").read_text().strip() == "step-6"


@pytest.mark.parametrize("fault", ["a file", "nothing"])
def test_a_folder_that_is_gone_between_two_saves(place: Place, expected: Any, fault: str) -> None:
    checkpoints = place.run / "checkpoints"
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *place.words()]
    with place.start(command, FAULT_SLEEP="0.3") as process:
        place.wait_for_step(2)
        while not (checkpoints / "latest").exists():
            time.sleep(0.01)
        aside = place.folder / "aside"
        checkpoints.rename(aside)
        if fault == "a file":
            checkpoints.write_text("")
            place.wait_for_step(5)
            checkpoints.unlink()
            aside.rename(checkpoints)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert ("warning: no checkpoint was written" in said) is (fault == "a file")
    assert place.curve() == expected
    steps = {"a file": {"step-2", "step-6"}, "nothing": {"step-4", "step-6"}}
    assert {path.name for path in checkpoints.glob("step-*")} == steps[fault]
    assert (checkpoints / "latest").read_text().strip() == "step-6"


def test_a_last_save_that_fails_is_a_failure_and_goes_on_later(place: Place, expected: Any) -> None:
    place.run.mkdir(parents=True)
    (place.run / "checkpoints").write_text("")  # root may write into a folder that is read-only
    status, said = place.bigtrain(["-n", "2", "--restarts", "0"])
    assert status == 1, said
    words = "The run went to its end, but its last state is lost; there is none yet. Make room"
    assert words in said
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
