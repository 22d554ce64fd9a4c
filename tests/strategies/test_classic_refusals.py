"""Impossible settings of the classic systems are refused in one line with the fix, before
connecting.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from bigtrain.ranks.exit_status import run_guarded
from bigtrain.train import main

OPTION = "strategy.replicate."
SERVERS, ASYNC = ["--strategy", "parameter_server"], ["--strategy", "parameter_server_async"]
REFUSED = {
    "as many servers as ranks": (
        4,
        [*SERVERS, OPTION + "servers=4"],
        "strategy.replicate.servers=4 of 4 ranks leaves no worker. "
        "Set strategy.replicate.servers=3, or start 5 ranks.",
    ),
    "more servers than ranks": (
        2,
        [*ASYNC, OPTION + "servers=3"],
        "Set strategy.replicate.servers=1, or start 4 ranks.",
    ),
    "no server": (3, [*SERVERS, OPTION + "servers=0"], "Use strategy.replicate.servers=1."),
    "a server alone": (1, SERVERS, "Start 2 with `bigtrain train -n 2`, or use --strategy single."),
    "a ring of one rank": (
        1,
        ["--strategy", "ring"],
        "strategy ring sends gradients around 2 replicas or more, and mesh.dp=1. "
        "Use --strategy single, or start more ranks.",
    ),
    "staleness below zero": (
        3,
        [*ASYNC, OPTION + "staleness=-1"],
        "strategy.replicate.staleness: needs 0 or more (got -1). "
        "Use strategy.replicate.staleness=0.",
    ),
    "half a step of staleness": (
        3,
        [*ASYNC, OPTION + "staleness=0.5"],
        "strategy.replicate.staleness: needs a whole number (got 0.5).",
    ),
    "no held-out classes": (
        2,
        ["--config", "imagenet", "data.path=images"],
        "images/val does not exist, and imagenet needs train/CLASS and val/CLASS. "
        "Give the folder that has both, or use data.name=image_folder.",
    ),
    "no list of held-out masks": (
        2,
        ["--config", "voc", "data.path=voc"],
        "voc holds no voc 2012, voc/VOCdevkit/VOC2012/ImageSets/Segmentation/val.txt does not "
        "exist. Give the folder that has VOCdevkit, or set data.args.download=true.",
    ),
    "no held-out digits": (
        2,
        ["--config", "mnist", "data.path=mnist"],
        "mnist holds no mnist, mnist/t10k-images-idx3-ubyte does not exist. "
        "Give the folder that has it, or set data.args.download=true.",
    ),
    "no test batch": (
        2,
        ["--config", "cifar10", "data.path=cifar10"],
        "cifar10 holds no cifar10, cifar10/cifar-10-batches-bin/test_batch.bin does not exist. "
        "Give the folder that has it, or set data.args.download=true.",
    ),
}


def without_held_out(folder: Path) -> None:
    """Data sets that have only their training part."""
    for name in (
        "images/train/a/1.png",
        "voc/VOCdevkit/VOC2012/ImageSets/Segmentation/train.txt",
        "mnist/train-images-idx3-ubyte",
        "mnist/train-labels-idx1-ubyte",
        *(f"cifar10/cifar-10-batches-bin/data_batch_{n}.bin" for n in range(1, 6)),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_a_line_and_status_2(tmp_path, monkeypatch, capsys, case):
    ranks, words, message = REFUSED[case]
    without_held_out(tmp_path)
    (tmp_path / "said").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "said"))
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.distributed, "init_process_group", None)  # must not be reached
    assert run_guarded(lambda: main(words)) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("bigtrain: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "runs").exists()
