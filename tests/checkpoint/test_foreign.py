"""Conversion of other libraries' checkpoints: what is converted, what is refused, no
code is run.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from bigtrain.checkpoint.foreign.convert import convert, open_source
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.checkpoint.write import write_tensors
from bigtrain.errors import CheckpointError, ConfigError
from bigtrain.memory.tracker import StorageTracker
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import StateTensor

pytestmark = [
    # dcp.save warns that it runs in one process, and torch that it validates sparse tensors.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Validating sparse tensor"),
]


class Evil:
    """An object that runs a command when an unrestricted unpickler loads it."""

    def __init__(self, proof):
        self.proof = str(proof)

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


def net():
    torch.manual_seed(2)
    return nn.Sequential(OrderedDict(up=nn.Linear(3, 4), norm=nn.BatchNorm1d(4)))


def convert_source(source, folder, **options):
    """Convert a checkpoint into `folder / "made"` and open the result."""
    return Checkpoint(convert(open_source(source), folder / "made", **options).path)


def assert_holds(checkpoint, wanted):
    model = {n.removeprefix("model."): n for n in checkpoint.names if n.startswith("model.")}
    assert model.keys() == wanted.keys()
    for name, value in wanted.items():
        tensor = checkpoint.read(model[name])
        assert tensor.dtype == value.dtype
        assert torch.equal(tensor, value), name


WRAPPED = {
    "plain": lambda state: state,
    "of DDP": lambda state: {f"module.{name}": value for name, value in state.items()},
    "compiled, of DDP": lambda state: {f"module._orig_mod.{n}": v for n, v in state.items()},
    "of a trainer": lambda state: {"epoch": 3, "state_dict": state, "optimizer": {"state": {}}},
    "twice nested": lambda state: {"model": {"module": state, "args": None}},
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_weights_are_found_in_what_torch_save_wrote(wrap, tmp_path):
    torch.save(wrap(net().state_dict()), tmp_path / "w.pt")
    checkpoint = convert_source(tmp_path / "w.pt", tmp_path)
    assert_holds(checkpoint, net().state_dict())
    assert checkpoint.meta["step"] == 0
    assert checkpoint.meta["converted_from"] == "state dict in w.pt"


def test_tensors_of_any_layout_in_memory_are_read_in_order(tmp_path):
    base = torch.arange(24.0)
    values = {
        "transposed": base.view(4, 6).t(),
        "every second": base[1::2],
        "expanded": base[:3].expand(5, 3),
        "of a part": base.view(2, 12)[1],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "number": torch.tensor(7),
        "none": torch.empty(0, 3),
        "half": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True, False]),
    }
    torch.save(values, tmp_path / "w.pth")
    assert_holds(convert_source(tmp_path / "w.pth", tmp_path), values)


def test_a_folder_as_the_hub_has_it(tmp_path):
    state = net().state_dict()
    names = list(state)
    places = {n: f"model-0000{1 + (n in names[3:])}-of-00002.safetensors" for n in names}
    for file in set(places.values()):
        save_file({n: state[n] for n in names if places[n] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_text('{"architectures": ["Net"]}')
    checkpoint = convert_source(tmp_path, tmp_path / "new", step=7, samples_seen=56)
    assert_holds(checkpoint, state)
    assert (checkpoint.path.name, checkpoint.meta["samples_seen"]) == ("step-7", 56)
    assert (checkpoint.path / "config.json").read_text() == '{"architectures": ["Net"]}'
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.safetensors is missing: model.saf"):
        open_source(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names the file \.\./a\.safetensors, outside"):
        open_source(tmp_path)


def test_older_files_of_torch_in_a_folder_as_the_hub_has_it(tmp_path):
    torch.save(net().state_dict(), tmp_path / "pytorch_model.bin")
    assert_holds(convert_source(tmp_path, tmp_path / "new"), net().state_dict())


def test_a_checkpoint_of_the_first_format_becomes_one_of_the_second(tmp_path):
    old = tmp_path / "checkpoints" / "step-5"
    old.mkdir(parents=True)
    values = net().state_dict()
    moments = {f"{n}.exp_avg": v.float() + 1 for n, v in values.items()}
    files = {}
    for part, tensors in (("model", values), ("optimizer", moments)):
        file = old / f"{part}.safetensors"
        state = {name: StateTensor.of(value) for name, value in tensors.items()}
        write_tensors(file, state, RunContext.alone())
        data = file.read_bytes()
        files[file.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    meta = {"format": 1, "step": 5, "samples_seen": 40, "random": [], "seed": 9, "files": files}
    (old / "state.json").write_text(json.dumps(meta))
    checkpoint = convert_source(tmp_path, tmp_path)
    assert checkpoint.manifest.format == 2
    assert_holds(checkpoint, values)
    assert checkpoint.meta["seed"] == 9
    assert (checkpoint.meta["step"], checkpoint.meta["samples_seen"]) == (5, 40)
    for name, value in moments.items():
        assert torch.equal(checkpoint.read(f"optimizer.{name}"), value)
    data = (old / "model.safetensors").read_bytes()
    (old / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        open_source(tmp_path / "checkpoints")


def zero_folder(folder, stage, version="0.19.8", **more):
    """A DeepSpeed checkpoint of 2 ranks: a trained and a frozen parameter, and a buffer."""
    folder.mkdir(exist_ok=True)
    trained, frozen = torch.arange(5.0), torch.arange(3.0) + 10
    module = {"trained": trained.half(), "frozen": frozen.half(), "buffer": torch.tensor([4])}
    padded = torch.cat([trained, torch.zeros(1)])
    pieces = padded.view(2, 3) if stage == 3 else (trained[:3], trained[3:])
    for rank, piece in enumerate(pieces):
        fragments = torch.cat([frozen, torch.zeros(1)]).view(2, 2)[rank] if stage == 3 else frozen
        empty = torch.empty(0).half()
        on_rank = {**module, "trained": empty.clone(), "frozen": empty} if stage == 3 else module
        described = {
            "module": on_rank,
            "buffer_names": ["buffer"],
            "param_shapes": [OrderedDict(trained=torch.Size([5]))],
            "frozen_param_shapes": OrderedDict(frozen=torch.Size([3])),
            "frozen_param_fragments": OrderedDict(frozen=fragments),
            "global_steps": 4,
            "global_samples": 32,
            "ds_version": version,
        }
        base = {
            "state": {0: {"exp_avg": piece + 1, "exp_avg_sq": piece + 2}},
            "param_groups": [{"params": [0], "step": 4}],
        }
        key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        flat = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        states = {"zero_stage": stage, "partition_count": 2, flat: [piece.clone()], key: base}
        states |= more
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        name = f"{prefix}_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(described, folder / name)
        torch.save({"optimizer_state_dict": states}, folder / f"{prefix}_optim_states.pt")
    return folder


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_buffers_and_uneven_pieces_of_deepspeed(stage, tmp_path):
    """Steps that DeepSpeed's kernels count in the groups are converted, too."""
    checkpoint = convert_source(zero_folder(tmp_path / "source", stage), tmp_path)
    frozen = torch.arange(3.0) + 10
    wanted = {"trained": torch.arange(5.0), "frozen": frozen, "buffer": torch.tensor([4])}
    if stage == 2:
        assert torch.equal(checkpoint.read("model.frozen"), frozen)
    assert_holds(checkpoint, wanted)
    for key, added in (("exp_avg", 1), ("exp_avg_sq", 2)):
        tensor = checkpoint.read(f"optimizer.trained.{key}")
        assert torch.equal(tensor, torch.arange(5.0) + added)
    assert checkpoint.read("optimizer.trained.step") == 4
    assert (checkpoint.meta["step"], checkpoint.meta["samples_seen"]) == (4, 32)


def test_a_version_that_was_never_tried_is_named(tmp_path):
    assert open_source(zero_folder(tmp_path / "tried", 2)).notes == ()
    (note,) = open_source(zero_folder(tmp_path / "other", 3, version="0.17.1")).notes
    assert note == (
        "DeepSpeed 0.17.1 wrote it, and only files of 0.19.8 are tested: compare some values."
    )
    (note,) = open_source(zero_folder(tmp_path / "old", 2, version=None)).notes
    assert note.startswith("No version of DeepSpeed is named, and only files of 0.19.8 are tested")
    dcp.save({"model": net().state_dict()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert open_source(tmp_path / "dcp").notes == ()
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    metadata.version = "2.0.0"
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    (note,) = open_source(tmp_path / "dcp").notes
    assert note.startswith("Format 2.0.0 wrote it, and only files of 1.0.0")


def test_incomplete_and_foreign_layouts_of_deepspeed_are_refused(tmp_path):
    source = zero_folder(tmp_path / "source", 2)
    os.remove(source / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match=r"states of 1 ranks, and 2 ranks wrote .*Copy the"):
        open_source(source)
    (source / "layer_01-model_states.pt").touch()
    with pytest.raises(CheckpointError, match=r"by a pipeline or with tensor parallelism"):
        open_source(source)
    source = zero_folder(tmp_path / "third", 3, fp32_flat_groups=[torch.zeros(2)])
    with pytest.raises(CheckpointError, match=r"partition has 2 elements, and 3 are needed for 2"):
        open_source(source)


PICKLES = {
    "a file of torch.save": lambda folder, evil: torch.save({"w": evil}, folder / "model.pt"),
    "among the tensors": lambda folder, evil: torch.save(
        {**net().state_dict(), "more": [evil]}, folder / "model.pt"
    ),
    "a bare pickle": lambda folder, evil: (folder / "model.pt").write_bytes(pickle.dumps(evil)),
    "the newest protocol": lambda folder, evil: torch.save(
        {"w": evil}, folder / "model.pt", pickle_protocol=5
    ),
    "as torch saved once": lambda folder, evil: torch.save(
        {"w": evil}, folder / "model.pt", _use_new_zipfile_serialization=False
    ),
    "of the Hub": lambda folder, evil: torch.save({"w": evil}, folder / "pytorch_model.bin"),
    "of DeepSpeed": lambda folder, evil: zero_folder(folder, 2, loss_scaler=evil),
    "metadata of DCP": lambda folder, evil: (folder / ".metadata").write_bytes(pickle.dumps(evil)),
}


@pytest.mark.parametrize("make", PICKLES.values(), ids=PICKLES)
def test_no_code_in_a_pickle_is_ever_run(make, tmp_path):
    source, proof = tmp_path / "source", tmp_path / "it ran"
    source.mkdir()
    evil = Evil(tmp_path / "it\\ ran")
    make(source, evil)
    file = source / "model.pt"
    with pytest.raises(CheckpointError) as refused:
        open_source(file if file.exists() else source)
    assert re.search(r"system|not in the format of torch|protocol 3 to 5", str(refused.value)), (
        refused.value
    )
    assert not proof.exists()
    pickle.loads(pickle.dumps(evil))  # the standard unpickler would have run it
    assert proof.exists()


def test_no_code_in_a_piece_of_dcp_is_ever_run(tmp_path):
    """The metadata is correct, but the tensor's file contains something else."""
    source, proof = tmp_path / "source", tmp_path / "ran"
    dcp.save({"w": torch.zeros(64)}, checkpoint_id=str(source), no_dist=True)
    (piece,) = source.glob("*.distcp")
    length = piece.stat().st_size
    torch.save(Evil(proof), piece)
    assert piece.stat().st_size <= length
    with pytest.raises(CheckpointError):
        convert(open_source(source), tmp_path / "made")
    metadata = (source / ".metadata").read_bytes()
    described = pickle.loads(metadata)
    for storage_info in described.storage_data.values():
        storage_info.length = piece.stat().st_size
    (source / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(CheckpointError, match=r"more than tensors.*system"):
        convert(open_source(source), tmp_path / "made")
    assert not proof.exists()
    for storage_info in described.storage_data.values():
        storage_info.relative_path = "../elsewhere"
    (source / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(CheckpointError, match=r"names the file \.\./elsewhere, outside of it"):
        open_source(source)


def test_classes_of_deepspeed_are_not_looked_up(tmp_path, monkeypatch):
    """A class name of its module is treated as data: nothing is imported or called."""
    calls = []

    class Scaler:
        def __setstate__(self, state):
            calls.append(state)

        def __getstate__(self):
            return {"scale": 1.0}

    Scaler.__module__, Scaler.__qualname__ = "deepspeed.scaler", "Scaler"
    module = ModuleType("deepspeed.scaler")
    module.Scaler = Scaler
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
        patched.setitem(sys.modules, "deepspeed.scaler", module)
        source = zero_folder(tmp_path / "source", 2, loss_scaler=Scaler())
        assert open_source(source).step == 4
    assert open_source(source).step == 4
    assert not calls


def test_optimizer_state_under_numbers_is_left_out_and_named(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 12}
    dcp.save(state, checkpoint_id=str(tmp_path / "source"), no_dist=True)
    source = open_source(tmp_path / "source")
    assert (source.step, source.optimizer) == (12, {})
    assert source.notes[0].startswith("12 tensors of the optimizer's state were left out: they")
    assert_holds(convert_source(tmp_path / "source", tmp_path), model.state_dict())


def test_two_models_in_one_are_refused(tmp_path):
    state = {"student": net().state_dict(), "teacher": net().state_dict()}
    dcp.save(state, checkpoint_id=str(tmp_path / "source"), no_dist=True)
    with pytest.raises(CheckpointError, match=r"two tensors of the name up.weight: two models"):
        open_source(tmp_path / "source")
    torch.save({"_orig_mod.a": torch.ones(1), "a": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"_orig_mod.a and a are both a: two models"):
        open_source(tmp_path / "w.pt")


def test_what_lies_beside_the_model_is_left_out_and_named(tmp_path):
    state = {"model": net().state_dict(), "ema": net().state_dict(), "rng": torch.get_rng_state()}
    dcp.save(state, checkpoint_id=str(tmp_path / "source"), no_dist=True)
    assert open_source(tmp_path / "source").notes == ("Left out: ema, rng.",)
    assert_holds(convert_source(tmp_path / "source", tmp_path), net().state_dict())


def test_what_is_no_checkpoint_is_refused_by_what_it_is(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere does not exist. Give a checkpoint of bigtr"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"is not a supported checkpoint. Give a checkpoint of"):
        open_source(tmp_path)
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match=r"has a list instead of named tensors. Save mod"):
        open_source(tmp_path / "list.pt")
    torch.save({"epoch": 1}, tmp_path / "empty.pt")
    with pytest.raises(CheckpointError, match=r"has no named tensors of a model"):
        open_source(tmp_path / "empty.pt")
    torch.save({"a": torch.ones(2).to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(CheckpointError, match=r"sparse.pt"):
        open_source(tmp_path / "sparse.pt")
    torch.save(net().state_dict(), tmp_path / "cut.pt")
    data = (tmp_path / "cut.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"cut.pt"):
        open_source(tmp_path / "cut.pt")


def test_where_a_converted_checkpoint_goes(tmp_path):
    torch.save(net().state_dict(), tmp_path / "w.pt")
    source = open_source(tmp_path / "w.pt")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    assert convert(source, run).path == run / "checkpoints" / "step-0"
    assert (run / "checkpoints" / "latest").read_text() == "step-0"
    assert convert(source, run, step=3).path == run / "checkpoints" / "step-3"
    assert convert(source, tmp_path / "step-8").path == tmp_path / "step-8"
    assert (run / "checkpoints" / "step-0").is_dir()
    with pytest.raises(ConfigError, match=r"there is a checkpoint at .*step-3 already. Give anot"):
        convert(source, run, step=3)
    with pytest.raises(ConfigError, match=r"step-9 is not of step 4. Leave --step out"):
        convert(source, tmp_path / "step-9", step=4)


def test_a_conversion_holds_a_few_pieces_and_not_the_whole(tmp_path):
    """Converting 192 MiB of weights needs three pieces of 16 MiB and the tensors of two of them."""
    whole = {f"w{number}": torch.full((1 << 20,), float(number)) for number in range(48)}
    torch.save(whole, tmp_path / "w.pt")
    del whole
    with StorageTracker() as tracker:
        path = convert(open_source(tmp_path / "w.pt"), tmp_path).path
    assert tracker.timeline().peak().bytes < (3 + 2) * (16 << 20) + 3 * (4 << 20)
    checkpoint = Checkpoint(path)
    assert float(checkpoint.read("model.w47")[-1]) == 47
    assert len(list(Path(path).glob("model-*"))) == 1


CONVERTS = """
import sys
from bigtrain.checkpoint.command import main
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
before = peak()
assert main(["convert", *sys.argv[1:]]) == 0
print((peak() - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM exists only on Linux")
def test_a_process_that_converts_grows_by_a_few_pieces(tmp_path):
    """The process's peak grows little, too, for 512 MiB of weights in tensors of 16 MiB."""
    whole = {f"w{number}": torch.full((1 << 22,), float(number)) for number in range(32)}
    torch.save(whole, tmp_path / "w.pt")
    words = [sys.executable, "-c", CONVERTS, str(tmp_path / "w.pt"), str(tmp_path / "new")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 160
