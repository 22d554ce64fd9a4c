"""safetensors reads checkpoints of several ranks, and training can start from weights alone."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.nets import BlockLM, tokens
from support.ranks import run_ranks
from support.zygote import forked_cli

from bigtrain.checkpoint.foreign.convert import convert, open_source
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def rank_batch(context, step):
    """This replica's part of a step's eight samples."""
    samples, size = tokens(48, ignored=False), 8 // len(context.ranks_of("dp"))
    start = 8 * step + context.dp_rank * size
    return samples.inputs[start : start + size], samples.targets[start : start + size]


def save_run(context, strategy, keys, folder, load=None, steps=2):
    """Run some steps from a checkpoint or the beginning and save; return (path, losses)."""
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **keys})
    inputs, targets = rank_batch(context, 0)
    example = MicroBatch(inputs, targets, targets.numel(), len(inputs))
    with Engine(BlockLM, CrossEntropy(), adamw, job, context, example=example) as engine:
        if load is not None:
            engine.load(Path(load))
        losses = [engine.step(rank_batch(context, step)).loss for step in range(steps)]
        return str(engine.save(Path(folder))), losses


def test_stages_and_shards_of_four_ranks_are_read_by_safetensors(tmp_path):
    path, _ = run_ranks(
        *(save_run, 4, "1f1b+fsdp", {"mesh.pp": 2}, str(tmp_path / "four")), pp=2, timeout_s=90
    )[0]
    model = BlockLM()
    opened = Checkpoint(Path(path))
    for part in ("model", "optimizer"):
        files = sorted(Path(path).glob(f"{part}-*.safetensors"))
        assert len(files) == 4
        places = json.loads((Path(path) / f"{part}.safetensors.index.json").read_text())
        tensors = {}
        for file in files:
            with safe_open(file, framework="pt") as tensors_file:
                for name in tensors_file.keys():  # noqa: SIM118
                    tensors[name] = tensors_file.get_tensor(name)
                    assert places["weight_map"][name] == file.name
                    assert torch.equal(tensors[name], opened.read(f"{part}.{name}"))
        assert tensors.keys() == places["weight_map"].keys()
        assert places["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
        if part == "model":
            model.load_state_dict(tensors)
    done = forked_cli(["checkpoint", "export", path, str(tmp_path / "whole.pt")])
    assert done.returncode == 0, done.stderr
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole.keys() == model.state_dict().keys()
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())


WEIGHTS = {
    "ddp": (2, {}, {}),
    "fsdp": (2, {}, {}),
    "1f1b": (2, {"mesh.pp": 2}, {"pp": 2}),
    "zero3": (2, {}, {}),
}


@pytest.mark.parametrize("strategy", WEIGHTS)
def test_weights_alone_are_where_a_fine_tuning_begins(strategy, tmp_path):
    if strategy == "zero3" and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is missing")
    torch.manual_seed(8)
    torch.save({"model": BlockLM().state_dict()}, tmp_path / "w.pt")
    start = convert(open_source(tmp_path / "w.pt"), tmp_path / "start").path
    _, wanted = run_ranks(save_run, 1, "single", {}, str(tmp_path / "one"), str(start))[0]
    ranks, keys, mesh = WEIGHTS[strategy]
    arguments = (strategy, keys, str(tmp_path / "many"), str(start))
    _, losses = run_ranks(save_run, ranks, *arguments, **mesh)[0]
    assert losses == pytest.approx(wanted, rel=1e-5)


def test_a_run_says_that_it_begins_the_optimizers_state_anew(tmp_path):
    words = ["data.name=digits", "model.name=lenet", "train.global_batch_size=8", "train.steps=2"]
    words += [f"log.dir={tmp_path}", "train.eval_every=0"]
    first = ["train", *words, "log.name=first"]
    done = forked_cli(first)
    assert done.returncode == 0, done.stderr
    weights, made = str(tmp_path / "w.safetensors"), str(tmp_path / "made")
    for command in (["export", str(tmp_path / "first"), weights], ["convert", weights, made]):
        done = forked_cli(["checkpoint", *command])
        assert done.returncode == 0, done.stderr
    done = forked_cli(["train", *words, "log.name=second", "--resume", made])
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert "continues after step 0 from" in output
    assert "step-0 has no optimizer state: that of AdamW starts empty" in output
    done = forked_cli(["train", *words, "log.name=third", "--resume", str(tmp_path / "first")])
    assert done.returncode == 0, done.stderr
    assert "anew" not in done.stdout + done.stderr
