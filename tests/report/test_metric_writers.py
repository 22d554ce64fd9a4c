"""Figures of a run in TensorBoard files and at Weights & Biases (offline, without an account)."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.zygote import forked_cli

from bigtrain import cli
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.report import metric_writers
from bigtrain.report.metric_writers import check_writers, figures_of, open_writers

SMALL = [
    "model.args={num_layers: 1, width: 16, num_heads: 2}",
    "data.name=synthetic",
    "data.args={kind: language, length: 16, validation_samples: 16}",
    "train.global_batch_size=8",
    "train.eval_every=2",
    "log.name=tracked",
    "log.wandb=proofs",
]


BLOCK, HEADER = 32768, 7
"""wandb's files are LevelDB logs: blocks of parts, each with a checksum, a length and a kind."""


def logged_records(data: bytes) -> Iterator[bytes]:
    """Return the records of one of wandb's files, put together from their parts."""
    record, at = b"", HEADER  # the file begins with a header as long as that of a part
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def offline_figures(folder: Path) -> list[dict[str, float]]:
    """Return the figures that wandb has kept in the files of its offline runs, in their order."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in logged_records(path.read_bytes()):
            record: Any = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append(
                    {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
                )
    return rows


def test_wandb_gets_what_the_json_lines_have_and_a_resume_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "runs" / "tracked"
    done = forked_cli(["train", "-n", "2", *SMALL, "train.steps=2"], cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    begun = json.loads((run / "wandb.json").read_text())
    assert begun["project"] == "proofs"
    more = ["train", "-n", "2", *SMALL, "train.steps=4", "--resume", "auto"]
    again = forked_cli(more, cwd=tmp_path, timeout=120)
    assert again.returncode == 0, again.stderr
    assert json.loads((run / "wandb.json").read_text()) == begun  # the same run there
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = offline_figures(run)
    trained = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert trained == {line["step"]: line["loss"] for line in lines}
    validated = (run / "validation.jsonl").read_text().splitlines()
    assert [row["step"] for row in rows if "validation/loss" in row] == [2, 4]
    assert len(validated) == 2


def test_a_package_that_is_missing_is_named_before_ranks_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metric_writers, "find_spec", lambda _: None)
    for key, value, package in (("wandb", "p", "wandb"), ("tensorboard", True, "tensorboard")):
        job = job_from_keys("single", {f"log.{key}": value})
        with pytest.raises(ConfigError, match=rf"log.{key}=\w+ needs .*bigtrain\[{package}\]"):
            check_writers(job.log)
    check_writers(job_from_keys("single", {}).log)


@pytest.mark.parametrize("name", ["a/b", "", "x" * 129, "100%"])
def test_a_name_that_wandb_would_refuse_is_refused_first(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", f"log.wandb='{name}'", "--dry-run"]) == 2
    assert "is not a project's name: 1 to 128 characters" in capsys.readouterr().err


def test_an_account_that_is_refused_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def refused(**_: Any) -> None:
        raise wandb.errors.CommError("permission denied\nsecond line")

    monkeypatch.setattr(wandb, "init", refused)
    job = job_from_keys("single", {"log.wandb": "theirs"})
    with pytest.raises(ConfigError, match=r"begin a run: permission denied. Run `wandb login`"):
        open_writers(job.log, tmp_path, 0, dict)


def test_only_numbers_are_figures() -> None:
    values = {"step": 3, "loss": 1.5, "phase": "forward", "is_last": True, "norm": math.inf}
    assert figures_of(values) == {"loss": 1.5, "norm": math.inf}
