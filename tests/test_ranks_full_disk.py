"""Disks that fill up and folders that are removed during a run: it continues and loses nothing."""

from __future__ import annotations

import contextlib
import re
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.survival import LIMIT_S, Curve, RunFolder, uninterrupted_curve
from support.zygote import interpreter


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return uninterrupted_curve(tmp_path_factory.mktemp("expected"))


class Disk:
    """A folder for a run on a small separate file system, which can be filled and emptied.

    If no file system can be mounted, the size of the ranks' files is limited instead
    (RLIMIT_FSIZE).
    """

    def __init__(self, folder: Path, run_folder: RunFolder, *, mounts: bool) -> None:
        self.folder, self._run_folder = folder, run_folder
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
            pid = int((self._run_folder.folder / f"pid-{rank}-0").read_text())
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request: pytest.FixtureRequest, run_folder: RunFolder) -> Iterator[Disk]:
    made = Disk(run_folder.folder / "disk", run_folder, mounts=request.param == "tmpfs")
    yield made
    made.close()


def test_a_disk_that_fills_up_loses_nothing(
    run_folder: RunFolder, disk: Disk, expected: Any
) -> None:
    run_folder.run = disk.folder / "r"
    words = run_folder.words(log__dir=disk.folder)
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *words]
    with run_folder.start(command, FAULT_SLEEP="0.2") as process:
        assert process.stdout is not None
        run_folder.wait_for_step(2)
        while not (run_folder.run / "checkpoints" / "latest").exists():
            time.sleep(0.01)
        disk.fill()
        output = ""
        while "warning: no checkpoint was written to" not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
        left = [path.name for path in (run_folder.run / "checkpoints").iterdir()]
        assert sorted(left) == [".lock", "latest", "step-2"]
        disk.free()
        last_output, _ = process.communicate(timeout=LIMIT_S)
    output += last_output
    assert process.returncode == 0, output
    assert re.search(r"(No space left on device|File too large)", output)
    assert "The run goes on; the newest is still step-2." in output
    if not disk.mounted:  # on a full file system a short line may fit into the last page
        assert "metrics.jsonl cannot be written" in output
    assert run_folder.curve() == expected
    assert (run_folder.run / "checkpoints" / "latest").read_text().strip() == "step-6"


@pytest.mark.parametrize("fault", ["a file", "nothing"])
def test_a_folder_that_is_gone_between_two_saves(
    run_folder: RunFolder, expected: Any, fault: str
) -> None:
    checkpoints = run_folder.run / "checkpoints"
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *run_folder.words()]
    with run_folder.start(command, FAULT_SLEEP="0.3") as process:
        run_folder.wait_for_step(3)  # the save after step 2 has finished
        assert (checkpoints / "latest").exists()
        aside = run_folder.folder / "aside"
        checkpoints.rename(aside)
        if fault == "a file":
            checkpoints.write_text("")
            run_folder.wait_for_step(5)
            checkpoints.unlink()
            aside.rename(checkpoints)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert ("warning: no checkpoint was written" in output) is (fault == "a file")
    assert run_folder.curve() == expected
    steps = {"a file": {"step-2", "step-6"}, "nothing": {"step-4", "step-6"}}
    assert {path.name for path in checkpoints.glob("step-*")} == steps[fault]
    assert (checkpoints / "latest").read_text().strip() == "step-6"


def test_a_last_save_that_fails_is_a_failure_and_goes_on_later(
    run_folder: RunFolder, expected: Any
) -> None:
    run_folder.run.mkdir(parents=True)
    # A file, because root may write into a read-only folder
    (run_folder.run / "checkpoints").write_text("")
    status, output = run_folder.bigtrain(["-n", "2", "--restarts", "0"])
    assert status == 1, output
    words = "The run went to its end, but its last state is lost; there is none yet. Make room"
    assert words in output
    assert run_folder.curve() == expected
