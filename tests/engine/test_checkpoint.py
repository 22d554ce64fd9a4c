"""Checkpoint files are complete or absent, and damage is noticed."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bigtrain.checkpoint.folders import checkpoints_of, find_checkpoint, newest_checkpoint
from bigtrain.checkpoint.random_state import random_state, set_random_state
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.checkpoint.save import CheckpointWriting
from bigtrain.errors import CheckpointError, ConfigError
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import StateTensor

MODEL, OPTIMIZER = (f"{part}-00001-of-00001.safetensors" for part in ("model", "optimizer"))


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
    state = {name: StateTensor.of(value) for name, value in (values or tensors()).items()}
    alone, meta = RunContext.alone(), {"samples_seen": 4}
    return CheckpointWriting(folder, step, state, meta, alone, keep=keep).finish(alone)


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
    tensors_read = load_file(path / MODEL)
    assert tensors_read.keys() == values.keys()
    save_file({k: v.contiguous() for k, v in tensors_read.items()}, path / "again.safetensors")
    assert load_file(path / "again.safetensors").keys() == values.keys()


def test_only_the_newest_are_kept_and_latest_points_at_the_last(tmp_path):
    for step in (2, 4, 10, 12):
        write(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-10", "step-12"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-12"
    (tmp_path / "latest").unlink()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-12"


def test_after_a_resume_from_an_older_step_what_is_written_stays(tmp_path):
    for step in (100, 200, 150, 175):  # after step 200 the run was resumed from step 100
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
    for folder in (path, path.parent, path.parent.parent):
        assert find_checkpoint(str(folder)) == path
    with pytest.raises(
        ConfigError, match=r"checkpoint\.resume: there is no checkpoint at '.*nope'"
    ):
        find_checkpoint(str(tmp_path / "nope"))


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_what_another_library_wrote_is_named_with_the_way_to_use_it(tmp_path):
    (tmp_path / "weights.pt").write_bytes(b"PK")
    for path in (tmp_path, tmp_path / "weights.pt"):
        with pytest.raises(ConfigError, match=rf"bigtrain checkpoint convert {path} TARGET"):
            find_checkpoint(str(path))
    with pytest.raises(ConfigError, match="Give a folder that holds") as refusal:
        find_checkpoint(str(tmp_path / "nowhere"))
    assert "convert" not in str(refusal.value)


@pytest.mark.parametrize("offset", [20, -1, -9])
def test_one_flipped_bit_is_noticed(tmp_path, offset):
    path = write(tmp_path)
    flip(path / MODEL, offset)
    with pytest.raises(CheckpointError, match=rf"{MODEL} is damaged: its contents changed"):
        Checkpoint(path)


def test_a_short_missing_or_newer_file_is_noticed(tmp_path):
    path = write(tmp_path)
    file = path / OPTIMIZER
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    with pytest.raises(CheckpointError, match=rf"it has {len(data) - 4} bytes, {len(data)} were"):
        Checkpoint(path)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{OPTIMIZER} is missing"):
        Checkpoint(path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match=r"has format 99, this bigtrain reads up to 2"):
        Checkpoint(path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json is not readable"):
        Checkpoint(path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        Checkpoint(path)


def test_a_bit_flipped_anywhere_and_files_that_are_swapped_are_noticed(tmp_path):
    path = write(tmp_path)
    files = sorted(p for p in path.iterdir())
    assert len(files) == 6
    for file in files:
        content = file.read_bytes()
        for position in random.Random(file.name).sample(range(len(content)), 20):
            flip(file, position)
            with pytest.raises(CheckpointError):
                Checkpoint(path)
            file.write_bytes(content)
        file.write_bytes(b"")
        with pytest.raises(CheckpointError):
            Checkpoint(path)
        file.write_bytes(content)
    assert Checkpoint(path).meta["step"] == 1
    model_file, optimizer_file = (path / name for name in (MODEL, OPTIMIZER))
    contents = model_file.read_bytes(), optimizer_file.read_bytes()
    model_file.write_bytes(contents[1])
    optimizer_file.write_bytes(contents[0])
    with pytest.raises(CheckpointError):
        Checkpoint(path)


def test_a_pickle_in_the_folder_is_never_opened(tmp_path):
    path = write(tmp_path)
    marker = tmp_path / "ran"
    (path / "model.bin").write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % str(marker).encode())
    assert Checkpoint(path).read("model.count") == 7
    assert not marker.exists()


def test_a_folder_that_cannot_be_written_fails_the_save_and_nothing_else(tmp_path, monkeypatch):
    from bigtrain.checkpoint import write as module

    first = write(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"no checkpoint was written to .*rank 0: .*No space"):
        write(tmp_path, 2)
    assert checkpoints_of(tmp_path) == [first]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1"]


def test_a_type_that_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"c: tensors of type torch\.complex128"):
        write(tmp_path, values={"model.c": torch.zeros(1, dtype=torch.complex128)})
    assert newest_checkpoint(tmp_path) is None


def test_random_states_of_all_gpus_are_kept_and_put_back(monkeypatch):
    device_states = {0: 10, 1: 11}
    own = [0]

    def put(state, device):
        device_states[device.index] = int(state[0])

    gpus = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(device_states),
        current_device=lambda: own[0],
        get_rng_state=lambda device: torch.tensor([device_states[device.index]], dtype=torch.uint8),
        set_rng_state=put,
    )
    real = torch.get_device_module
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: gpus if kind == "cuda" else real(kind)
    )
    state = json.loads(json.dumps(random_state()))
    device_states[0] = device_states[1] = 0
    set_random_state(state)
    assert device_states == {0: 10, 1: 11}
    device_states = {0: 7}  # one GPU fewer than at the save
    set_random_state(state)
    assert device_states == {0: 10}
    own, device_states = [1], {0: 10, 1: 11}
    state = json.loads(json.dumps(random_state()))
    own, device_states = [0], {0: 7}  # one visible GPU for each rank: the device of rank 1 is 0 now
    set_random_state(state)
    assert device_states == {0: 11}
    del state["own"]
    device_states = {0: 7, 1: 8}
    set_random_state(state)  # the format of older checkpoints
    assert device_states == {0: 10, 1: 11}
    device_states = {0: 7, 1: 8}
    set_random_state({**state, "cuda": state["cuda"][1]})  # and of still older ones
    assert device_states == {0: 11, 1: 8}


def test_random_states_go_through_json_and_back():
    state = json.loads(json.dumps(random_state()))
    first = (random.random(), np.random.rand(), torch.rand(1).item())
    set_random_state(state)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == first
