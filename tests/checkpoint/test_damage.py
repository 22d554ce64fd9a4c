"""A checkpoint whose bytes have changed is never loaded."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter

import pytest
import torch
from torch import nn

from bigtrain.checkpoint.read import Checkpoint
from bigtrain.engine.engine import Engine
from bigtrain.errors import CheckpointError, DamagedCheckpointError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.ranks.context import RunContext


def net():
    return nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 5))


def engine():
    job = job_from_keys("single", {"train.global_batch_size": 4})
    make = torch.optim.AdamW
    return Engine(net, CrossEntropy(), make, job, RunContext.alone())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of a run of one step."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(4, 24, generator=generator), torch.tensor([0, 1, 2, 3])
    with engine() as running:
        running.step(batch)
        return running.save(tmp_path_factory.mktemp("run"))


def damage(draw, path):
    """Damage a copy of a checkpoint at a random place; return the kind of damage and the
    files hit.
    """
    files = sorted(one for one in path.iterdir() if one.stat().st_size)
    file = draw.choice(files)
    data = file.read_bytes()
    kind = draw.choice(("bit", "bit", "bit", "cut", "gone", "swap", "longer", "zeros"))
    if kind == "bit":
        bit = draw.randrange(8 * len(data))
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
    elif kind == "cut":
        file.write_bytes(data[: draw.randrange(len(data))])
    elif kind == "gone":
        file.unlink()
    elif kind == "swap":
        second_file = draw.choice([one for one in files if one != file])
        swapped_content = second_file.read_bytes()
        second_file.write_bytes(data)
        file.write_bytes(swapped_content)
    elif kind == "longer":
        file.write_bytes(data + draw.randbytes(draw.randint(1, 64)))
    else:  # a page that the disk has lost reads as zeros
        begin = draw.randrange(len(data))
        lost = bytes(min(512, len(data) - begin))
        if data[begin : begin + len(lost)] == lost:
            lost = b"\xff" * len(lost)
        file.write_bytes(data[:begin] + lost + data[begin + len(lost) :])
    return kind, file.name


def count_refused_damages(written, tmp_path, number, seed):
    """Draw `number` damages of a checkpoint; count those of each kind that opening or loading
    refuses.
    """
    draw, counts = random.Random(seed), Counter()
    copy = tmp_path / "step-1"
    with engine() as running:
        before = {name: value.clone() for name, value in running.runner.module.state_dict().items()}
        for _ in range(number):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(written, copy)
            kind, name = damage(draw, copy)
            with pytest.raises(CheckpointError) as opened:
                Checkpoint(copy)
            with pytest.raises(CheckpointError):
                running.load(copy)
            # The message names the file, or says that the list of files itself is damaged.
            assert name in str(opened.value) or "manifest" in str(opened.value) or kind == "swap"
            counts[kind] += 1
        after = running.runner.module.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert running.steps_done == 0
    return counts


def test_forty_random_damages_are_refused_and_nothing_of_them_is_loaded(written, tmp_path):
    assert sum(count_refused_damages(written, tmp_path, 40, 5).values()) == 40


def test_a_thousand_random_damages_are_refused(written, tmp_path, capsys):
    counts = count_refused_damages(written, tmp_path, 1000, 6)
    with capsys.disabled():
        print(f"\n{counts.total()} damages of a checkpoint, all refused: {dict(counts)}")
    assert counts.total() == 1000
    assert len(counts) == 6


def test_the_checkpoint_that_was_damaged_is_otherwise_read(written, tmp_path):
    shutil.copytree(written, tmp_path / "step-1")
    with engine() as running:
        running.load(tmp_path / "step-1")
        assert running.steps_done == 1


def test_a_manifest_of_another_checkpoint_is_noticed(written, tmp_path):
    """The manifest's hash is right, but it belongs to a different checkpoint."""
    shutil.copytree(written, tmp_path / "step-1")
    with engine() as running:
        second_checkpoint = running.save(tmp_path / "other")
    shutil.copy(second_checkpoint / "manifest.json", tmp_path / "step-1")
    with pytest.raises(DamagedCheckpointError):
        Checkpoint(tmp_path / "step-1")
    assert json.loads((second_checkpoint / "manifest.json").read_text())["format"] == 2
