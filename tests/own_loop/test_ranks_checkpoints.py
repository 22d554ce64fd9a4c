"""Checkpoints in a custom loop: paths as text, the newest one, and equal errors on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import UNSEEN, sgd
from support.ranks import run_ranks
from torch import nn

import bigtrain
from bigtrain.checkpoint.command import describe_checkpoint
from bigtrain.engine.engine import Engine
from bigtrain.errors import CheckpointError, ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.ranks.context import RunContext

BATCH = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), torch.arange(4) % 3


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)


def save_and_load_by_text(context: RunContext, folder: str) -> list[Any]:
    """Text instead of paths; wrong arguments come first, and the loop continues after
    their errors.
    """
    job = job_from_keys("ddp", {"train.global_batch_size": 8, **UNSEEN})
    results: list[Any] = []
    with Engine(Net, F.cross_entropy, sgd, job, context) as engine:
        results.append(engine.newest(folder))
        for call in (engine.save, engine.load, engine.newest):
            for wrong in (None, 3, "", "a\0b"):
                with pytest.raises(ConfigError) as refused:
                    call(wrong)  # type: ignore[operator]
                results.append(str(refused.value))
        with pytest.raises(CheckpointError) as none:
            engine.load(folder)
        results.append(str(none.value))
        engine.step(BATCH)
        path = engine.save(folder, extra={"epoch": 1})
        second = engine.step(BATCH).loss
        engine.load(folder)
        results += [path, engine.newest(folder), engine.newest(Path(folder)), engine.steps_done]
        assert engine.step(BATCH).loss == second
        assert engine.load(str(path)) == {"epoch": 1}
    return results


def test_paths_may_be_text_and_errors_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(save_and_load_by_text, 2, str(tmp_path / "ck"))
    assert first == second
    assert first[0] is None
    assert "save: got a NoneType, and the path of a folder is needed" in first[1]
    assert "load: got a int" in first[6]
    assert "newest: got an empty name" in first[11]
    assert "there is no checkpoint" in first[13] or "ck" in first[13]
    assert first[14:] == [tmp_path / "ck" / "step-1"] * 3 + [1]


def test_the_newest_is_found_below_text_too(tmp_path: Path) -> None:
    assert bigtrain.newest_checkpoint(str(tmp_path)) is None
    with pytest.raises(ConfigError, match="newest_checkpoint: got a NoneType"):
        bigtrain.newest_checkpoint(None)  # type: ignore[arg-type]


def test_a_removed_checkpoint_is_told_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more: dict[str, Any] = {"memory__predict": False, "checkpoint__keep": 2}
    with bigtrain.prepare(Net, F.cross_entropy, sgd, **more) as engine:
        for _ in range(5):
            engine.step(BATCH)
            engine.save(tmp_path)
    errors = capsys.readouterr().err
    assert errors.count("was removed") == 1
    assert f"{tmp_path / 'step-1'} was removed: only the newest 2 checkpoints stay" in errors
    assert "checkpoint__keep=20" in errors


def test_a_checkpoint_of_a_loop_says_the_classes_it_is_of(tmp_path: Path) -> None:
    with bigtrain.prepare(Net, F.cross_entropy, sgd, memory__predict=False) as engine:
        description = describe_checkpoint(bigtrain.Checkpoint(engine.save(tmp_path)))
    assert description["model"] == {"name": "Net"}
    assert description["optimizer"] == "SGD"


def test_memory_is_printed_as_a_table() -> None:
    with bigtrain.prepare(Net, F.cross_entropy, sgd, example=BATCH) as engine:
        engine.step(BATCH)
        report = engine.memory()
    assert report is not None
    lines = str(report).splitlines()
    assert lines[0] == "Peak memory, ddp on cpu, rank 0"
    assert lines[1].split() == ["measured", "predicted"]
    assert [line.split()[0] for line in lines[2:]][-2:] == ["peak", "reached"]
    assert "parameters" in str(report)
