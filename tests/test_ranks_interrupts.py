"""Ctrl-C ends the step, saves, prints how to continue, and leaves no process and no traceback."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.programs import ROOT
from support.survival import LIMIT_S, Curve, RunFolder, uninterrupted_curve
from support.zygote import interpreter, surroundings

BIGTRAIN = [interpreter(), "-m", "bigtrain", "train"]
TORCHRUN = [
    *(interpreter(), "-m", "torch.distributed.run", "--nproc-per-node=2"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"),
    str(ROOT / "bigtrain" / "train.py"),
]
LAUNCHES = {"ranks": [*BIGTRAIN, "-n", "2"], "alone": BIGTRAIN, "torchrun": TORCHRUN}


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return uninterrupted_curve(tmp_path_factory.mktemp("expected"))


class Terminal:
    """A command as the foreground job of a terminal, whose Ctrl-C reaches all its processes."""

    def __init__(self, run_folder: RunFolder, command: Sequence[str], **environ: str) -> None:
        path = f"{run_folder.folder}{os.pathsep}{surroundings()['PYTHONPATH']}"
        self.process = subprocess.Popen(
            command,
            env={
                **surroundings(),
                "PYTHONPATH": path,
                "FAULT_FOLDER": str(run_folder.folder),
                **environ,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        try:
            output, _ = self.process.communicate(timeout=LIMIT_S)
        finally:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
                left = True
            except ProcessLookupError:
                left = False
        assert not left or self.process.returncode is None, "a process outlived the command"
        return self.process.returncode, output


@pytest.mark.parametrize("launch", LAUNCHES)
def test_ctrl_c_saves_and_says_how_to_go_on(
    run_folder: RunFolder, expected: Curve, launch: str
) -> None:
    command = [*LAUNCHES[launch], *run_folder.words()]
    terminal = Terminal(run_folder, command, FAULT_SLEEP="0.2")
    run_folder.wait_for_step(3)
    terminal.press_ctrl_c()
    status, output = terminal.end()
    assert status == (1 if launch == "torchrun" else 130), (
        output
    )  # torchrun has no other exit status
    step = run_folder.curve()[-1][0]
    assert output.count("Ctrl-C: the run ends after this step and saves its state.") == 1
    saved = run_folder.run / "checkpoints" / f"step-{step}"
    assert f"stopped by SIGINT after step {step}, saved as {saved}." in output
    if launch != "torchrun":  # torchrun's agent prints a traceback
        assert "Traceback" not in output, output
    match = re.search(r"(?:Go on|Continue) with the same command and: (.*)", output)
    assert match is not None
    done = subprocess.run(
        [*command, *shlex.split(match[1])],
        env={**surroundings(), "PYTHONPATH": f"{run_folder.folder}{os.pathsep}{ROOT}"}
        | {"FAULT_FOLDER": str(run_folder.folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert f"continues after step {step}" in done.stdout
    if launch != "alone":
        assert run_folder.curve() == expected
    assert [row[0] for row in run_folder.curve()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("saved", [True, False])
def test_ctrl_c_again_ends_at_once_and_says_what_is_left(
    run_folder: RunFolder, saved: bool
) -> None:
    words = run_folder.words(mesh__timeout=60, checkpoint__every=2 if saved else 0)
    terminal = Terminal(run_folder, [*LAUNCHES["ranks"], *words], FAULT_SLEEP="0.05")
    run_folder.wait_for_step(3)
    for rank in (0, 1):  # so that the step never ends
        os.kill(int((run_folder.folder / f"pid-{rank}-0").read_text()), signal.SIGSTOP)
    terminal.press_ctrl_c()
    time.sleep(2.2)
    assert terminal.process.poll() is None
    terminal.press_ctrl_c()
    status, output = terminal.end()
    assert status == 130, output
    done = run_folder.curve()[-1][0]
    assert "Traceback" not in output, output
    if not saved:
        assert f"bigtrain: nothing was saved: the {done} steps that were done are lost" in output
        return
    newest = int((run_folder.run / "checkpoints" / "latest").read_text().strip()[5:])
    lost = f"; steps {newest + 1} to {done} are lost" if done > newest else ""
    assert (
        f"the newest checkpoint is of step {newest}{lost}. Continue with the same command" in output
    )
    assert f"--resume auto log.dir={run_folder.run.parent} log.name=r" in output


def test_ctrl_c_before_the_first_step_is_said_in_one_line(run_folder: RunFolder) -> None:
    terminal = Terminal(run_folder, [*LAUNCHES["ranks"], *run_folder.words()], FAULT_SLEEP="30")
    while len(list(run_folder.folder.glob("pid-*"))) < 2:
        time.sleep(0.02)
    time.sleep(4.0)  # during the first forward pass or before it
    terminal.press_ctrl_c()
    time.sleep(2.2)
    terminal.press_ctrl_c()
    status, output = terminal.end()
    assert status == 130, output
    assert output.count("nothing was saved, and nothing is lost") == 1, output
    assert "Traceback" not in output, output


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_ctrl_c_while_torch_is_loaded_is_quiet(run_folder: RunFolder, seconds: float) -> None:
    command = [sys.executable, "-m", "bigtrain", "train", "-n", "2", *run_folder.words()]
    terminal = Terminal(run_folder, command, FAULT_SLEEP="5")
    end = time.monotonic() + LIMIT_S
    while len(loading(terminal.process.pid)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(seconds)
    terminal.press_ctrl_c()
    status, output = terminal.end()
    assert "Traceback" not in output, output
    assert status == 130, output


def loading(parent: int) -> list[str]:
    """The children of a process in which torch is being imported."""
    children = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and "torch" in (path / "maps").read_text():
                children.append(path.name)
        except OSError:
            continue
    return children
