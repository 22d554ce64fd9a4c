"""Log lines are written exactly once, whatever happens to the disk or the run."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import StepResult
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.ranks.context import RunContext
from bigtrain.report import run_log
from bigtrain.report.run_log import RunLog


def result(step: int) -> StepResult:
    return StepResult(step, 1.0, 1.0, 0.1, 8, 100.0, None, 0.08, None)


class Log:
    """A log of one process in a folder, and its printed output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed = io.StringIO()
        folder.mkdir(exist_ok=True)

    def open(self, first_step: int = 0) -> RunLog:
        job = job_from_keys("single", {"device": "cpu", "log.every": 100})
        plan = make_plan(job, 1, "cpu")
        context = RunContext.alone()
        console = Console(file=self.printed, width=300)
        return RunLog(
            self.folder, job, plan, context, console, total_steps=9, first_step=first_step
        )

    def steps(self) -> list[int]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "run")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt", "gpt"),
        ("hf:/tmp/models/small", "small"),
        ("hf:models/small/", "small"),
        ("hf:OWNER/small-1.5B", "small-1.5B"),
        ("hf:odd [*]", "odd [*]"),
        ("timm:resnet18.a1_in1k", "resnet18.a1_in1k"),
        ("package.module:Net", "Net"),
    ],
)
def test_a_folder_has_the_last_part_of_the_models_name(
    model: str, expected: str, tmp_path: Path
) -> None:
    job = job_from_keys("ddp", {"model.name": model, "log.dir": str(tmp_path / "runs")})
    folders = [run_log.run_folder(job, RunContext.alone()) for _ in range(2)]
    assert [folder.name for folder in folders] == [f"{expected}-ddp-1", f"{expected}-ddp-2"]
    assert all(folder.parent == tmp_path / "runs" for folder in folders)
    resumed = job_from_keys(
        "ddp",
        {
            "model.name": model,
            "log.dir": str(tmp_path / "runs"),
            "checkpoint.resume": "auto",
        },
    )
    assert run_log.run_folder(resumed, RunContext.alone()) == folders[1]


@pytest.mark.parametrize("first", [0, 2, 4])
def test_steps_that_are_done_again_stand_there_once(log: Log, first: int) -> None:
    with log.open() as writer:
        for step in (1, 2, 3):
            writer.step(result(step))
            writer.validation(step, {"loss": 1.0})
    with (log.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the process died while writing
    with log.open(first) as writer:
        for step in range(first + 1, 6):
            writer.step(result(step))
    # Lines that were not written before a checkpoint are lost.
    assert log.steps() == [n for n in (1, 2, 3, 4, 5) if n <= min(first, 3) or n > first]
    validation = (log.folder / "validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in validation] == [1, 2, 3][:first]


def test_figures_of_a_strategy_stand_among_the_others(log: Log) -> None:
    with log.open() as writer:
        writer.step(result(1), {"staleness": 2.0})
    line = json.loads((log.folder / "metrics.jsonl").read_text())
    assert (line["loss"], line["staleness"]) == (1.0, 2.0)


def test_lines_that_cannot_be_written_are_written_later(log: Log) -> None:
    with log.open() as writer:
        shutil.rmtree(log.folder)
        log.folder.write_text("in the way")
        writer.step(result(1))
        writer.step(result(2))
        log.folder.unlink()
        writer.step(result(3))
        assert log.steps() == [1, 2, 3]
    output = log.printed.getvalue()
    words = f"warning: {log.folder / 'metrics.jsonl'} cannot be written: [Errno 17] File exists"
    assert output.count(words) == 1
    assert "The run continues and keeps its lines in memory until there is room." in output


def test_what_is_lost_at_the_end_is_said(log: Log) -> None:
    with log.open() as writer:
        shutil.rmtree(log.folder)
        log.folder.write_text("in the way")
        writer.step(result(1))
        writer.step(result(2))
        writer._leave("memory.json", "{}\n")
    output = log.printed.getvalue()
    assert f"warning: {log.folder / 'metrics.jsonl'} lacks its last 2 lines" in output
    assert (
        f"warning: {log.folder / 'memory.json'} was not written: [Errno 17] File exists" in output
    )


@pytest.mark.parametrize("when", ["between", "at the end", "before the first"])
def test_a_folder_that_is_removed_is_made_again_with_all_lines(log: Log, when: str) -> None:
    with log.open() as writer:
        if when == "before the first":
            shutil.rmtree(log.folder)
        writer.step(result(1))
        writer.validation(1, {"loss": 1.0})
        writer.step(result(2))
        if when == "between":
            shutil.rmtree(log.folder)
        writer.step(result(3))
        if when == "at the end":
            shutil.rmtree(log.folder)
    assert log.steps() == [1, 2, 3]
    assert len((log.folder / "validation.jsonl").read_text().splitlines()) == 1
    assert (log.folder / "plan.yaml").exists()
    output = log.printed.getvalue()
    assert output.count(f"warning: {log.folder} was removed during the run.") == 1


def test_a_folder_that_another_run_has_taken_ends_this_one(log: Log) -> None:
    hold = (
        "import fcntl, os, sys\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "file.write(f'process {os.getpid()} on elsewhere')\n"
        "file.flush()\n"
        "print('held', flush=True)\ninput()\n"
    )
    with log.open() as writer:
        writer.step(result(1))
        shutil.rmtree(log.folder)
        (log.folder / "checkpoints").mkdir(parents=True)
        holder = subprocess.Popen(
            [sys.executable, "-c", hold, str(log.folder / "checkpoints" / ".lock")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdout.readline() == b"held\n"
        (log.folder / "metrics.jsonl").write_text("another's\n")
        with pytest.raises(ConfigError, match=rf"process {holder.pid} on .* saves its checkpoints"):
            writer.step(result(2))
        holder.communicate(b"\n")
    assert "metrics.jsonl was replaced" in log.printed.getvalue()


@pytest.mark.parametrize("how", ["removed", "truncated to 0 bytes", "replaced"])
def test_a_file_that_others_change_is_reported_and_continued(log: Log, how: str) -> None:
    path = log.folder / "metrics.jsonl"
    with log.open() as writer:
        writer.step(result(1))
        if how == "removed":
            path.unlink()
        elif how == "replaced":
            path.with_suffix(".new").write_text("")
            path.with_suffix(".new").replace(path)
        else:
            os.truncate(path, 0)
        writer.step(result(2))
        writer.step(result(3))
    assert log.steps() == ([1, 2, 3] if how == "removed" else [2, 3])
    assert log.printed.getvalue().count(f"metrics.jsonl was {how}") == 1


def test_lines_are_on_the_disk_before_a_checkpoint(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        "os.fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    with log.open() as writer:
        writer.step(result(1))
        writer.validation(1, {"loss": 1.0})
        writer.sync()
    assert synced == [str(log.folder / name) for name in ("metrics.jsonl", "validation.jsonl")]


class FailingWriter:
    """A tracker that fails at its second step, and when it is closed."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, _group: str, _figures: object, step: int) -> None:
        if step == 2:
            raise ConnectionError("the service is gone\nand more")
        self.steps.append(step)

    def close(self) -> None:
        raise OSError("no room")


def test_a_tracker_that_fails_does_not_end_the_run(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, at_its_end = FailingWriter(), FailingWriter()
    monkeypatch.setattr(at_its_end, "write", lambda *_: None)
    monkeypatch.setattr(run_log, "open_writers", lambda *_: [failing, at_its_end])
    with log.open() as writer:
        for step in (1, 2, 3):
            writer.step(result(step))
    assert log.steps() == [1, 2, 3]
    assert failing.steps == [1]
    said = log.printed.getvalue()
    assert said.count("FailingWriter failed and gets no more figures") == 2
    assert "ConnectionError: the service is gone. The run continues; metrics.jsonl" in said
    assert "OSError: no room. The run continues" in said
