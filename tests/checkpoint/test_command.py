"""`bigtrain checkpoint`: its output, its return values and all its refusals."""

from __future__ import annotations

import json
import math
import subprocess

import pytest
import torch
from safetensors import safe_open
from support.zygote import forked_cli, interpreter

from bigtrain.checkpoint.command import main
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.checkpoint.save import save_checkpoint
from bigtrain.errors import CheckpointError, ConfigError
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import StateTensor

TENSORS = {
    "model.a.weight": torch.arange(6.0).view(2, 3),
    "model.a.count": torch.tensor(3),
    "optimizer.a.weight.exp_avg": torch.ones(2, 3),
    "optimizer.a.weight.step": torch.tensor(4.0),
}
JOB = {
    "strategy": {"name": "ddp"},
    "mesh": {"pp": None, "dp": -1, "tp": 1, "backend": "auto"},
    "model": {"name": "gpt"},
    "optim": {"name": "adamw"},
}


def write(folder, step=4, **changed):
    values = {**TENSORS, **{f"model.{name}": value for name, value in changed.items()}}
    state = {n: StateTensor.of(v) for n, v in values.items() if v is not None}
    meta = {"samples_seen": 32, "job": JOB, "world_size": 2, "random": []}
    return save_checkpoint(folder / "checkpoints", step, state, meta, RunContext.alone())


def run(capsys, *words):
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    assert not captured.err
    return status, captured.out


def run_json(capsys, *words):
    status, text = run(capsys, *words, "--json")
    return status, json.loads(text)


def test_the_command_is_there_and_says_what_it_can_do(tmp_path):
    path = write(tmp_path)
    done = forked_cli(["checkpoint", "verify", str(tmp_path)])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{path}: 5 files, ")
    done = forked_cli(["checkpoint", "--help"])
    for word in ("inspect", "verify", "convert", "export", "diff"):
        assert word in done.stdout
    done = forked_cli(["checkpoint", "verify", str(path / "model.safetensors.index.json")])
    assert done.returncode == 2
    assert done.stderr.startswith("bigtrain: verify: there is no checkpoint of bigtrain at '")
    assert "of another library with: bigtrain checkpoint convert " in done.stderr
    done = forked_cli(["checkpoint", "inspect", str(tmp_path / "nowhere")])
    assert done.returncode == 2
    assert done.stderr.startswith(f"bigtrain: inspect: there is nothing at '{tmp_path}/nowhere'. ")
    assert "convert" not in done.stderr


def test_inspect_says_what_is_in_it(tmp_path, capsys):
    path = write(tmp_path)
    for folder in (tmp_path, tmp_path / "checkpoints", path):
        status, text = run(capsys, "inspect", folder)
        assert status == 0
        assert "step 4, 32 samples, 2 ranks" in text
        assert "strategy ddp, mesh pp 1 x dp 2 x tp 1" in text
        assert "model gpt, optimizer adamw" in text
        assert "a.weight" not in text
    assert "model.a.weight" in run(capsys, "inspect", path, "--tensors")[1]
    status, document = run_json(capsys, "inspect", path)
    assert (document["step"], document["format"], document["strategy"]) == (4, 2, "ddp")
    model, optimizer = document["parts"]["model"], document["parts"]["optimizer"]
    assert (model["tensors"], model["elements"], model["bytes"]) == (2, 7, 32)
    assert model["dtypes"] == {"float32": 1, "int64": 1}
    assert {name: entry["bytes"] for name, entry in optimizer["slots"].items()} == {
        "exp_avg": 24,
        "step": 4,
    }
    about = {"name": "model.a.weight", "dtype": "float32", "shape": [2, 3], "bytes": 24}
    assert about in document["tensors"]
    sizes = {entry["name"]: entry["bytes"] for entry in document["files"]}
    assert sizes == {n: (path / n).stat().st_size for n in sizes}


@pytest.mark.parametrize(
    ("pp", "cut", "world_size", "mesh"),
    [
        (None, None, 4, {"pp": 1, "dp": 4, "tp": 1}),
        (None, {"name": "pipeline"}, 4, {"pp": 4, "dp": 1, "tp": 1}),
        (2, {"name": "pipeline"}, 4, {"pp": 2, "dp": 2, "tp": 1}),
        (None, None, 0, None),
    ],
)
def test_inspect_says_on_which_mesh_it_was_written(pp, cut, world_size, mesh, tmp_path, capsys):
    job = {**JOB, "strategy": {"name": "x", "cut": cut}, "mesh": {**JOB["mesh"], "pp": pp}}
    meta = {"samples_seen": 0, "random": [], "job": job, "world_size": world_size}
    state = {"model.a": StateTensor.of(torch.ones(1))}
    save_checkpoint(tmp_path, 1, state, meta, RunContext.alone())
    assert run_json(capsys, "inspect", tmp_path)[1]["mesh"] == mesh
    assert ("mesh" in run(capsys, "inspect", tmp_path)[1]) == (mesh is not None)


def test_a_mesh_that_was_written_down_is_what_is_said(tmp_path, capsys):
    mesh = {"pp": 1, "dp": 2, "tp": 2}
    meta = {"samples_seen": 0, "random": [], "job": JOB, "world_size": 4, "mesh": mesh}
    state = {"model.a": StateTensor.of(torch.ones(1))}
    save_checkpoint(tmp_path, 1, state, meta, RunContext.alone())
    assert run_json(capsys, "inspect", tmp_path)[1]["mesh"] == mesh
    assert "mesh pp 1 x dp 2 x tp 2" in run(capsys, "inspect", tmp_path)[1]


def test_a_reader_that_has_enough_is_no_failure(tmp_path):
    path = write(tmp_path, **{f"t{number}": torch.ones(1) for number in range(4000)})
    command = [interpreter(), "-m", "bigtrain", "checkpoint", "inspect", "--tensors", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


def test_verify_names_every_file_that_is_damaged(tmp_path, capsys):
    path = write(tmp_path)
    status, document = run_json(capsys, "verify", path)
    assert (status, document["damaged"], len(document["files"])) == (0, 0, 5)
    file = path / "model-00001-of-00001.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    (path / "optimizer.safetensors.index.json").unlink()
    status, text = run(capsys, "verify", path)
    assert status == 1
    assert f"{file} is damaged: its contents changed on disk." in text
    assert "optimizer.safetensors.index.json is missing." in text
    assert "2 of 5 damaged" in text
    status, document = run_json(capsys, "verify", tmp_path)
    assert (status, document["damaged"]) == (1, 2)
    (path / "manifest.json").write_text("{")
    status, document = run_json(capsys, "verify", path)
    assert (status, [entry["name"] for entry in document["files"]]) == (1, ["manifest.json"])
    assert "is not readable" in document["files"][0]["damage"]


def test_diff_says_how_far_two_are_apart(tmp_path, capsys):
    first = write(tmp_path / "a")
    changed = TENSORS["model.a.weight"].clone()
    changed[1, 2] = 5.5
    second = write(tmp_path / "b", **{"a.weight": changed, "a.count": None, "more": torch.ones(1)})
    status, text = run(capsys, "diff", first, second)
    assert status == 0  # as with git, a difference is a result and not a failure
    assert "1 of 3 tensors differ, 2 are equal" in text
    assert f"only in {first}: model.a.count" in text
    assert f"only in {second}: model.more" in text
    status, document = run_json(capsys, "diff", first, second, "--exit-code")
    assert status == 1
    assert document["only_in_first"] == ["model.a.count"]
    assert document["only_in_second"] == ["model.more"]
    (difference,) = document["different"]
    assert (difference["name"], difference["elements"]) == ("model.a.weight", 1)
    assert difference["absolute"] == pytest.approx(0.5)
    assert difference["relative"] == pytest.approx(0.5 / 5.5)
    assert run(capsys, "diff", first, tmp_path / "a", "--exit-code")[0] == 0


@pytest.mark.parametrize(
    ("values", "others", "absolute"),
    [
        (torch.tensor([2**53, 1]), torch.tensor([2**53 + 1, 1]), 1.0),  # equal in fp64
        (torch.tensor([1, 5]), torch.tensor([1, 2]), 3.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([1 + 1j, 2]), torch.tensor([1 + 3j, 2]), 2.0),
    ],
)
def test_diff_of_numbers_that_fp64_cannot_hold(values, others, absolute, tmp_path, capsys):
    first, second = write(tmp_path / "a", x=values), write(tmp_path / "b", x=others)
    (difference,) = run_json(capsys, "diff", first, second)[1]["different"]
    assert (difference["name"], difference["elements"]) == ("model.x", 1)
    assert difference["absolute"] == absolute
    assert run_json(capsys, "diff", first, first)[1]["different"] == []


def test_diff_of_what_is_no_number_of_other_shapes_and_of_other_types(tmp_path, capsys):
    weight = TENSORS["model.a.weight"]
    same = {"nan": torch.tensor([math.nan, 1.0]), "inf": torch.tensor([-math.inf])}
    first = write(tmp_path / "a", **same, x=torch.ones(2), y=torch.zeros(1))
    second = write(
        tmp_path / "b",
        **same,
        **{"a.weight": weight.half()},
        x=torch.tensor([1.0, math.nan]),
        y=torch.zeros(2),
    )
    status, document = run_json(capsys, "diff", first, second)
    rows = {difference["name"]: difference for difference in document["different"]}
    assert set(rows) == {"model.a.weight", "model.x", "model.y"}
    assert (rows["model.x"]["absolute"], rows["model.x"]["elements"]) == ("inf", 1)
    assert rows["model.y"]["shapes"] == [[1], [2]]
    assert rows["model.a.weight"]["dtypes"] == ["float32", "float16"]
    assert rows["model.a.weight"]["absolute"] == 0
    text = run(capsys, "diff", first, second)[1]
    assert "(1,) and (2,)" in text
    assert "float32 and float16" in text


def test_export_makes_one_file_that_others_read(tmp_path, capsys):
    path = write(tmp_path)
    out = tmp_path / "model.safetensors"
    assert run(capsys, "export", path, out)[1] == f"{out}: 2 tensors, {out.stat().st_size} B\n"
    with safe_open(out, framework="pt") as file:
        assert set(file.keys()) == {"a.weight", "a.count"}
        assert torch.equal(file.get_tensor("a.weight"), TENSORS["model.a.weight"])
    status, document = run_json(
        *(capsys, "export", tmp_path, tmp_path / "half.pt", "--dtype", "bf16")
    )
    assert (status, document["tensors"]) == (0, 2)
    loaded = torch.load(tmp_path / "half.pt", weights_only=True)
    assert loaded["a.weight"].dtype == torch.bfloat16
    assert torch.equal(loaded["a.count"], TENSORS["model.a.count"])
    run(capsys, "export", path, tmp_path / "optimizer.pt", "--part", "optimizer")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert set(loaded) == {"a.weight.exp_avg", "a.weight.step"}
    assert not list(tmp_path.glob(".*"))


def test_export_refuses_what_it_cannot_write(tmp_path, capsys):
    path = write(tmp_path)
    with pytest.raises(ConfigError, match=r"out\.npz has to end in \.safetensors or \.pt"):
        run(capsys, "export", path, tmp_path / "out.npz")
    (tmp_path / "there.pt").touch()
    with pytest.raises(ConfigError, match=r"there\.pt is there already. Give another name, or"):
        run(capsys, "export", path, tmp_path / "there.pt")
    with pytest.raises(ConfigError, match=r"there is no folder .*: mkdir -p .*nowhere$"):
        run(capsys, "export", path, tmp_path / "nowhere" / "a.pt")
    file = path / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"safetensors is damaged: it has "):
        run(capsys, "export", path, tmp_path / "a.pt")
    state = {"model.a": StateTensor.of(torch.ones(1))}
    meta = {"samples_seen": 0, "random": []}
    save_checkpoint(tmp_path / "w", 1, state, meta, RunContext.alone())
    with pytest.raises(ConfigError, match=r"has no optimizer state, only model\."):
        run(capsys, "export", tmp_path / "w", tmp_path / "a.pt", "--part", "optimizer")


def test_convert_says_what_it_made_and_what_it_left_out(tmp_path, capsys):
    torch.save({"state_dict": {"a": torch.ones(2)}, "epoch": 3}, tmp_path / "w.pt")
    status, text = run(capsys, "convert", tmp_path / "w.pt", tmp_path / "run", "--step", "2")
    path = tmp_path / "run" / "step-2"
    assert status == 0
    assert f"{path}: 1 tensors of the model, 0 of the optimizer, from state dict in w.pt" in text
    assert "Left out: epoch." in text
    assert "No optimizer state was converted: a run from here starts with a new one." in text
    assert "data start from the beginning. Use --samples N to set it." in text
    assert f"Continue from it with: bigtrain train --resume {path}" in text
    words = ("convert", tmp_path / "w.pt", tmp_path / "again", "--samples", "9", "--tie", "b=a")
    status, document = run_json(capsys, *words)
    assert (document["model"], document["samples_seen"], document["step"]) == (2, 9, 0)
    opened = Checkpoint(tmp_path / "again" / "step-0")
    assert torch.equal(opened.read("model.b"), opened.read("model.a"))
    with pytest.raises(ConfigError, match=r"convert: --step -1: at least 0 is needed"):
        run(capsys, "convert", tmp_path / "w.pt", tmp_path / "c", "--step", "-1")
    with pytest.raises(ConfigError, match=r"--tie b=c: there is no 'c'.* Write --tie NAME=OTHER"):
        run(capsys, "convert", tmp_path / "w.pt", tmp_path / "c", "--tie", "b=c")
    with pytest.raises(ConfigError, match=r"--tie a=a: 'a' exists already"):
        run(capsys, "convert", tmp_path / "w.pt", tmp_path / "c", "--tie", "a=a")
