"""Finding the checkpoints of a folder among other files, and deleting old ones."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.damages import damages

from bigtrain.checkpoint.folders import (
    best_checkpoint,
    checkpoints_of,
    find_checkpoint,
    has_own_lock,
    is_complete,
    replacing,
    sole_writer,
)
from bigtrain.checkpoint.manifest import Manifest
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.engine.engine import Engine
from bigtrain.engine.resume import resume
from bigtrain.errors import CheckpointError, ConfigError, DamagedCheckpointError

BATCH = torch.randn(4, 24, generator=torch.Generator().manual_seed(2)), torch.arange(4)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with the checkpoints step-1 and step-2."""
    written: Path = damages.written_run(tmp_path / "run")
    return written


def junk(checkpoints: Path, steps: range, text: str = "{}") -> None:
    for step in steps:
        (checkpoints / f"step-{step}").mkdir()
        (checkpoints / f"step-{step}" / "manifest.json").write_text(text)


def steps_in(checkpoints: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in checkpoints.glob("step-*"))


def test_many_that_are_none_are_said_in_a_few_lines(run: Path) -> None:
    """Many damaged checkpoints are reported in a few lines."""
    checkpoints = run / "checkpoints"
    (checkpoints / "latest").unlink()
    junk(checkpoints, range(100, 600))
    with damages.small_engine() as engine:
        lines = resume(engine.job, engine, run)
    assert engine.steps_done == 2
    assert len(lines) == 5
    assert [line for line in lines if "step-599" in line]
    assert lines[3] == "warning: 497 older checkpoints are damaged, too. Goes back to step-2."
    for step in (1, 2):
        (checkpoints / f"step-{step}" / "state.json").write_text("")
    with damages.small_engine() as engine, pytest.raises(CheckpointError) as caught:
        resume(engine.job, engine, run)
    assert "499 older checkpoints are damaged, too. Leave --resume out" in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_what_is_not_whole_does_not_count_among_those_that_are_kept(run: Path) -> None:
    """A damaged checkpoint does not count towards the number of checkpoints to keep."""
    checkpoints = run / "checkpoints"
    engine: Engine
    with damages.small_engine() as engine:  # keeps three checkpoints
        engine.load(checkpoints / "step-2")
        junk(checkpoints, range(50, 60))
        for expected in ([1, 2, 3], [2, 3, 4]):
            engine.step(BATCH)
            engine.save(checkpoints)
            assert steps_in(checkpoints) == [*expected, *range(50, 60)]
        # As soon as three whole checkpoints are newer, the damaged ones are deleted.
        engine.step(BATCH)
        engine.save(checkpoints)
        assert steps_in(checkpoints) == [3, 4, 5]
        # A checkpoint that has lost a file does not count either.
        next((checkpoints / "step-4").glob("model-*")).unlink()
        engine.step(BATCH)
        engine.save(checkpoints)
        assert steps_in(checkpoints) == [3, 4, 5, 6]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_folder_that_may_not_be_looked_into_is_no_empty_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """To start from the beginning would discard the run's progress."""
    checkpoints, real = run / "checkpoints", os.listdir

    def refuse(path: Any = ".") -> Any:
        if os.fspath(path) == str(checkpoints):
            raise OSError(code, os.strerror(code))
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    words = rf"checkpoints cannot be searched for checkpoints: {os.strerror(code)}\. Make it"
    with pytest.raises(CheckpointError, match=words):
        checkpoints_of(checkpoints)
    with pytest.raises(CheckpointError, match=words):
        find_checkpoint(str(run))
    assert checkpoints_of(run / "nothing") == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_one_that_may_not_be_looked_into_counts_as_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    new, real = run / "checkpoints" / "step-2", os.stat

    def refuse(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).startswith(f"{new}/"):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **options)

    with damages.small_engine() as engine, monkeypatch.context() as patched:
        patched.setattr(os, "stat", refuse)
        assert is_complete(new)
        for path in new.iterdir():
            # So that its other files cannot be opened either
            path.rename(path.with_suffix(".away"))
        lines = resume(engine.job, engine, run)
        assert engine.steps_done == 1
    assert lines[0].startswith(f"warning: {new}/manifest.json is not readable: ")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a" * 300, "it has a name of 300 bytes, and at most 255 are allowed"),
        ("a" * 5000, "it has a name of 5000 bytes"),
        ("a/" * 3000, "it has 6000 bytes, and at most 4095 are allowed"),
        ("a\0b", "it has a NUL character"),
        ("a\ud800", "half of a character"),
        ("/proc/self/mem", "there is no checkpoint at"),
        ("/dev/zero", "there is no checkpoint at"),
        ("", "there is no checkpoint at ''"),
    ],
)
def test_what_is_no_path_of_a_checkpoint(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match="checkpoint.resume") as caught:
        find_checkpoint(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_lock_is_known_as_ones_own(tmp_path: Path) -> None:
    assert not has_own_lock(tmp_path)
    with sole_writer(tmp_path):
        assert has_own_lock(tmp_path)
        (tmp_path / ".lock").unlink()
        assert not has_own_lock(tmp_path)
    (tmp_path / ".lock").write_text("process 1 on elsewhere")
    assert not has_own_lock(tmp_path)


def test_best_names_a_checkpoint_of_its_own_folder(run: Path) -> None:
    checkpoints = run / "checkpoints"
    for text, expected in (("step-1", "step-1"), ("../x", None), ("step-9", None), ("", None)):
        (checkpoints / "best").write_text(text)
        best = best_checkpoint(checkpoints)
        assert (best and best.name) == expected


def test_a_checkpoint_says_what_it_needs(run: Path) -> None:
    path = run / "checkpoints" / "step-2"
    assert Manifest.open(path).looks_whole
    os.truncate(path / "state.json", 3)
    assert not Manifest.open(path).looks_whole
    with pytest.raises(DamagedCheckpointError, match=r"state\.json is damaged: it has 3 bytes"):
        Checkpoint(path)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_draft_is_renamed_or_removed(is_folder: bool, tmp_path: Path) -> None:
    def fill(draft: Path) -> None:
        if is_folder:
            draft.mkdir()
        draft.joinpath("x" if is_folder else "").write_text("whole")

    target = tmp_path / "target"
    fill(target.with_name(f".target.{os.getpid()}"))  # of a killed process with this number
    with replacing(target) as draft:
        fill(draft)
        assert not target.exists()
    assert target.joinpath("x" if is_folder else "").read_text() == "whole"

    def fail() -> None:
        with replacing(tmp_path / "other") as draft:
            fill(draft)
            raise OSError("disk")

    with pytest.raises(CheckpointError, match="other could not be written: disk"):
        fail()
    assert list(tmp_path.iterdir()) == [target]


def test_processes_that_write_the_same_target_have_drafts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    with replacing(target) as first:
        first.write_text("first")
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with replacing(target) as second:
            second.write_text("second")
        assert first.read_text() == "first"
    assert target.read_text() == "first"
