"""The files that `bigtrain init` writes run unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.zygote import forked_cli, interpreter, surroundings

from bigtrain.cli import main
from bigtrain.job.starter import FILES


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A new folder inside another new one, and the output of the command."""
    parent = tmp_path_factory.mktemp("starter")
    done = forked_cli(("init", "new/first one"), cwd=parent, timeout=60)
    assert done.returncode == 0, done.stderr
    return parent / "new" / "first one", done.stdout


def test_it_says_what_it_made_and_what_comes_next(made: tuple[Path, str]) -> None:
    folder, output = made
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    lines = output.splitlines()
    assert lines[0].startswith("made new/first one/mylib.py, ")
    assert lines[1:] == ["cd 'new/first one'", "bigtrain train job.yaml -n 2", "pytest"]


@pytest.mark.parametrize(
    ("strategy", "steps", "least"), [("ddp", 300, 0.9), ("fsdp+full", 30, 0.4), ("1f1b", 30, 0.4)]
)
def test_the_job_trains_and_learns(
    made: tuple[Path, str], strategy: str, steps: int, least: float
) -> None:
    folder, _ = made
    words = ["train", "job.yaml", "-n", "2", "--strategy", strategy, f"log.name={strategy}"]
    words += [] if steps == 300 else [f"train.steps={steps}"]
    done = forked_cli(words, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "model: mylib:Net, 17.0k parameters (all trained), fp32" in done.stdout
    assert "points: 5000 to train on, 1000 held out" in done.stdout
    lines = (folder / "runs" / strategy / "validation.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["top1"] > least, lines
    assert f"step {steps}/{steps}  loss" in done.stdout


def test_its_own_tests_pass(made: tuple[Path, str]) -> None:
    folder, _ = made
    command = [interpreter(), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=folder, env=surroundings(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_the_readme_has_a_command_for_what_it_writes(made: tuple[Path, str]) -> None:
    folder, _ = made
    words = ["--strategy", "fsdp", "model.name=mylib:Net", "data.name=mylib:points"]
    done = forked_cli(["train", "-n", "2", *words, "train.steps=2"], cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("existing", ["a file in it", "many files in it", "a file", "no name"])
def test_nothing_is_written_over(
    existing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "there"
    if existing == "a file":
        folder.write_text("mine")
    elif existing != "no name":
        folder.mkdir()
        for number in range(1 if existing == "a file in it" else 5):
            (folder / f"mine-{number}").write_text("mine")
    assert main(["init", "a\0b" if existing == "no name" else "there"]) == 2
    errors = capsys.readouterr().err
    needed = {
        "a file in it": "init: there is not empty (mine-0), and init overwrites nothing. Name a",
        "many files in it": "is not empty (mine-0, mine-1, mine-2 and 2 more)",
        "a file": "init: there cannot be made: File exists. Name a new folder: bigtrain init first",
        "no name": "cannot be made: embedded null byte",
    }[existing]
    assert needed in errors
    assert "Traceback" not in errors
    assert not (folder / "mylib.py").exists()


def test_in_an_empty_folder_it_needs_no_cd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "."]) == 0
    assert "cd " not in capsys.readouterr().out
    assert (tmp_path / "job.yaml").exists()


def test_what_it_writes_is_in_our_style(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    ruff = [sys.executable, "-m", "ruff"]
    for check in (["format", "--check"], ["check"]):
        command = [*ruff, *check, "--isolated", "--line-length=100", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
