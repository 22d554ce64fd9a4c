"""Lines that are written once, whatever happens to the disk or to the run."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import StepResult
from bigtrain.job.load import job_from_keys
from bigtrain.ranks.context import RunContext
from bigtrain.report.run_log import RunLog


def result(step: int) -> StepResult:
    return StepResult(step, 1.0, 1.0, 0.1, 8, 100.0, None, 0.08, None)


class Log:
    """A log of one process in a folder, and what it prints."""

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


@pytest.mark.parametrize("first", [0, 2, 4])
def test_steps_that_are_done_again_stand_there_once(log: Log, first: int) -> None:
    with log.open() as writer:
        for step in (1, 2, 3):
            writer.step(result(step))
            writer.validation(step, {"loss": 1.0})
    with (log.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the process died
    with log.open(first) as writer:
        for step in range(first + 1, 6):
            writer.step(result(step))
    # What was not written before a checkpoint cannot be had back.
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
        writer.step(result(1))
        writer.step(result(2))
        log.folder.mkdir()
        writer.step(result(3))
        assert log.steps() == [1, 2, 3]
    said = log.printed.getvalue()
    words = f"warning: {log.folder / 'metrics.jsonl'} cannot be written: [Errno 2] No such file"
    assert said.count(words) == 1
    assert "The run goes on; its lines are kept until there is room." in said


def test_what_is_lost_at_the_end_is_said(log: Log) -> None:
    with log.open() as writer:
        shutil.rmtree(log.folder)
        writer.step(result(1))
        writer.step(result(2))
        writer._leave("memory.json", "{}\n")
    said = log.printed.getvalue()
    assert f"warning: {log.folder / 'metrics.jsonl'} lacks its last lines: 2" in said
    assert f"warning: {log.folder / 'memory.json'} was not written: [Errno 2] No such" in said


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
