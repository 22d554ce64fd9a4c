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
from support.survival import LIMIT_S, Curve, Place, uninterrupted
from support.zygote import interpreter


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return uninterrupted(tmp_path_factory.mktemp("expected"))


class Disk:
    """A folder for a run on a small separate file system, which can be filled and emptied.

    If no file system can be mounted, the size of the ranks' files is limited instead
    (RLIMIT_FSIZE).
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
        output = ""
        while "warning: no checkpoint was written to" not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
        left = [path.name for path in (place.run / "checkpoints").iterdir()]
        assert sorted(left) == [".lock", "latest", "step-2"]
        disk.free()
        rest, _ = process.communicate(timeout=LIMIT_S)
    output += rest
    assert process.returncode == 0, output
    assert re.search(r"(No space left on device|File too large)", output)
    assert "The run goes on; the newest is still step-2." in output
    if not disk.mounted:  # on a full file system a short line may fit into the last page
        assert "metrics.jsonl cannot be written" in output
    assert place.curve() == expected
    assert (place.run / "checkpoints" / "latest").read_text().strip() == "step-6"


@pytest.mark.parametrize("fault", ["a file", "nothing"])
def test_a_folder_that_is_gone_between_two_saves(place: Place, expected: Any, fault: str) -> None:
    checkpoints = place.run / "checkpoints"
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", *place.words()]
    with place.start(command, FAULT_SLEEP="0.3") as process:
        place.wait_for_step(3)  # the save after step 2 has finished
        assert (checkpoints / "latest").exists()
        aside = place.folder / "aside"
        checkpoints.rename(aside)
        if fault == "a file":
            checkpoints.write_text("")
            place.wait_for_step(5)
            checkpoints.unlink()
            aside.rename(checkpoints)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert ("warning: no checkpoint was written" in output) is (fault == "a file")
    assert place.curve() == expected
    steps = {"a file": {"step-2", "step-6"}, "nothing": {"step-4", "step-6"}}
    assert {path.name for path in checkpoints.glob("step-*")} == steps[fault]
    assert (checkpoints / "latest").read_text().strip() == "step-6"


def test_a_last_save_that_fails_is_a_failure_and_goes_on_later(place: Place, expected: Any) -> None:
    place.run.mkdir(parents=True)
    # A file, because root may write into a read-only folder
    (place.run / "checkpoints").write_text("")
    status, output = place.bigtrain(["-n", "2", "--restarts", "0"])
    assert status == 1, output
    words = "The run went to its end, but its last state is lost; there is none yet. Make room"
    assert words in output
    assert place.curve() == expected
