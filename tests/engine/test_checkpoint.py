"""Files that are whole or not there, and damage that is noticed."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bigtrain.engine.checkpoint import (
    Checkpoint,
    find_checkpoint,
    newest_checkpoint,
    random_state,
    set_random_state,
    write_checkpoint,
)
from bigtrain.errors import CheckpointError, ConfigError
from bigtrain.tensors.source import TensorSource


def tensors():
    return {
        "model.a.weight": torch.randn(3, 4),
        "model.half": torch.randn(5).bfloat16(),
        "model.count": torch.tensor(7),
        "model.flags": torch.tensor([True, False]),
        "model.strided": torch.arange(12.0).view(3, 4).t(),
        "model.empty": torch.empty(0, 3),
        "optimizer.a.weight.exp_avg": torch.randn(3, 4, dtype=torch.float64),
        "optimizer.a.weight.step": torch.tensor(3.0),
    }


def write(folder, step=1, keep=9, values=None):
    sources = {name: TensorSource.of(value) for name, value in (values or tensors()).items()}
    return write_checkpoint(folder, step, sources, {"samples_seen": 4}, keep)


def test_what_is_written_is_read_back_bit_for_bit(tmp_path):
    values = tensors()
    opened = Checkpoint(write(tmp_path, values=values))
    assert set(opened.names) == set(values)
    for name, value in values.items():
        assert torch.equal(opened.read(name), value)
        assert opened.read(name).dtype == value.dtype
    assert opened.meta["step"] == 1
    assert opened.meta["samples_seen"] == 4


def test_the_files_are_what_the_safetensors_library_reads_and_writes(tmp_path):
    from safetensors.torch import load_file, save_file

    path = write(tmp_path)
    values = {k.removeprefix("model."): v for k, v in tensors().items() if k.startswith("model.")}
    found = load_file(path / "model.safetensors")
    assert found.keys() == values.keys()
    save_file({k: v.contiguous() for k, v in found.items()}, path / "again.safetensors")
    assert load_file(path / "again.safetensors").keys() == values.keys()


def test_only_the_newest_are_kept_and_latest_points_at_the_last(tmp_path):
    for step in (2, 4, 10, 12):
        write(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-10", "step-12"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-12"
    (tmp_path / "latest").unlink()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-12"


def test_after_a_resume_from_an_older_step_what_is_written_stays(tmp_path):
    for step in (100, 200, 150, 175):  # at 200 the run was resumed from 100
        path = write(tmp_path, step, keep=2)
        assert newest_checkpoint(tmp_path) == path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-150", "step-175"]


def test_what_a_killed_process_left_half_written_goes(tmp_path):
    (tmp_path / ".step-2.77").mkdir()
    (tmp_path / ".replaced-1.77").mkdir()
    write(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-3"]


def test_writing_the_same_step_again_replaces_it(tmp_path):
    write(tmp_path, 5)
    values = {"model.a": torch.ones(2)}
    assert Checkpoint(write(tmp_path, 5, values=values)).names == ["model.a"]


def test_an_unfinished_checkpoint_is_not_found(tmp_path):
    write(tmp_path, 1)
    (tmp_path / ".step-2.77").mkdir()
    (tmp_path / "step-3").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-1"


def test_a_checkpoint_is_found_from_its_folder_its_run_and_its_parent(tmp_path):
    path = write(tmp_path / "run" / "checkpoints", 7)
    for place in (path, path.parent, path.parent.parent):
        assert find_checkpoint(str(place)) == path
    with pytest.raises(
        ConfigError, match=r"checkpoint\.resume: there is no checkpoint at '.*nope'"
    ):
        find_checkpoint(str(tmp_path / "nope"))


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("offset", [20, -1, -9])
def test_one_flipped_bit_is_noticed(tmp_path, offset):
    path = write(tmp_path)
    flip(path / "model.safetensors", offset)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is damaged: its contents changed"
    ):
        Checkpoint(path)


def test_a_short_missing_or_newer_file_is_noticed(tmp_path):
    path = write(tmp_path)
    file = path / "optimizer.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    with pytest.raises(CheckpointError, match=rf"it has {len(data) - 4} bytes, {len(data)} were"):
        Checkpoint(path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
        Checkpoint(path)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(CheckpointError, match=r"has format 99, this bigtrain reads up to 1"):
        Checkpoint(path)
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json is not readable"):
        Checkpoint(path)


def test_a_type_that_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"c: tensors of type torch\.complex64"):
        write(tmp_path, values={"model.c": torch.zeros(1, dtype=torch.complex64)})
    assert newest_checkpoint(tmp_path) is None


def test_random_states_of_all_gpus_are_kept_and_put_back(monkeypatch):
    kept = {0: 10, 1: 11}

    def put(state, device):
        kept[device.index] = int(state[0])

    gpus = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(kept),
        get_rng_state=lambda device: torch.tensor([kept[device.index]], dtype=torch.uint8),
        set_rng_state=put,
    )
    real = torch.get_device_module
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: gpus if kind == "cuda" else real(kind)
    )
    state = json.loads(json.dumps(random_state()))
    kept[0] = kept[1] = 0
    set_random_state(state)
    assert kept == {0: 10, 1: 11}
    kept = {0: 7}  # one GPU less than then
    set_random_state(state)
    assert kept == {0: 10}
    kept = {0: 7, 1: 8}
    set_random_state({**state, "cuda": state["cuda"][1]})  # as older checkpoints have it
    assert kept == {0: 11, 1: 8}


def test_random_states_go_through_json_and_back():
    state = json.loads(json.dumps(random_state()))
    first = (random.random(), np.random.rand(), torch.rand(1).item())
    set_random_state(state)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == first
