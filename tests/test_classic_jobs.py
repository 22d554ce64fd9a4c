"""The classic jobs run from small data sets in the real formats, as a user starts them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.zygote import forked_cli

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import classic_jobs  # noqa: E402
from small_datasets import write_small  # noqa: E402

JOBS = {
    "mnist": ({"loss", "top1", "top5"}, []),
    "cifar10": (
        {"loss", "top1", "top5"},
        ["train.precision=fp32", "model.args.small_images=false"],
    ),
    "imagenet": (
        {"loss", "top1", "top5"},
        [
            *("model.name=resnet18", "data.args.size=32", "data.workers=0"),
            *("train.epochs=null", "train.precision=fp32", "train.eval_every=0"),
        ],
    ),
    "voc": ({"loss", "pixel_accuracy", "mean_iou"}, ["data.args.size=33"]),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    root = tmp_path_factory.mktemp("small")
    for name in JOBS:
        write_small(name, root / name, share=0.03)
    return root


def start_job(job, folder, cwd, *words):
    """Run a job for two steps from the small data sets."""
    lengths = ["train.steps=2", "train.epochs=null", "train.global_batch_size=4"]
    quick = ["memory.predict=false", "memory.track_steps=0", "checkpoint.at_end=false"]
    words = [*lengths, *quick, *JOBS[job][1], *words]
    return forked_cli(["train", "--config", job, f"data.path={folder}", *words], cwd=cwd)


@pytest.mark.parametrize("job", JOBS)
def test_each_runs_from_its_files(job, small, tmp_path):
    done = start_job(job, small / job, tmp_path, "log.name=run")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "run"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    (measured,) = (run / "validation.jsonl").read_text().splitlines()
    assert set(json.loads(measured)) - {"step"} == JOBS[job][0]


DAMAGES = {
    "mnist": "MNIST/raw/train-labels-idx1-ubyte.gz",
    "cifar10": "cifar-10-batches-bin/test_batch.bin",
    "imagenet": "train/nine/nine_1.JPEG",
    "voc": "VOCdevkit/VOC2012/SegmentationClass/2012_val_000000.png",
}
"""One file of each data set, which is cut in half."""


@pytest.mark.parametrize("job", DAMAGES)
def test_a_damaged_file_ends_in_one_line_before_ranks_connect(job, small, tmp_path):
    file = small / job / DAMAGES[job]
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    try:
        done = start_job(job, small / job, tmp_path)
    finally:
        file.write_bytes(content)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"bigtrain: data.path: {file} cannot be read: ")
    assert "Get this file again" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("job", JOBS)
def test_a_missing_split_is_named(job, small, tmp_path):
    done = start_job(job, small, tmp_path)
    assert done.returncode == 2
    assert f"{small}" in done.stderr
    assert "does not exist" in done.stderr


def test_the_page_and_the_benchmark_run_the_same_words():
    page = (Path(__file__).parents[1] / "docs" / "jobs.md").read_text(encoding="utf-8")
    commands = page.replace("\\\n", "").splitlines()
    for name, job in classic_jobs.JOBS.items():
        (line,) = [line for line in commands if f"data.path=small/{name}" in line]
        words = line.split(f"data.path=small/{name}")[1].split()
        assert set(words) == set(job.words) - {"train.eval_every=23"}, name


def test_curves_that_were_kept_are_drawn_and_judged(tmp_path, monkeypatch):
    rows = {
        strategy: {
            "reached": strategy != "1f1b",
            "losses": [3.0, 2.0, 1.0],
            "validation": [{"step": 1, "top1": 0.5}, {"step": 3, "top1": 0.97}],
        }
        for strategy in classic_jobs.STRATEGIES
    }
    curves_file, picture = tmp_path / "kept.json", tmp_path / "curves.svg"
    for chosen, status in ((list(rows), 1), (["ddp", "zero2"], 0)):
        runs = {"mnist": {strategy: rows[strategy] for strategy in chosen}}
        curves_file.write_text(json.dumps({"runs": runs}))
        words = ["classic_jobs.py", "--from", str(curves_file), "--picture", str(picture)]
        monkeypatch.setattr(sys, "argv", words)
        assert classic_jobs.main() == status
        assert all(strategy in picture.read_text() for strategy in chosen)
