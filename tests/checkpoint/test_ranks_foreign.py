"""Runs continue from checkpoints that DeepSpeed and torch have written."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from support.foreign import (
    continued_from,
    dcp_run,
    deepspeed_bf16,
    deepspeed_run,
    fsdp1_run,
    trainer_run,
)
from support.ranks import run_ranks
from support.zygote import forked_cli

from bigtrain.checkpoint.foreign.convert import convert, open_source
from bigtrain.checkpoint.read import Checkpoint

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing")


def assert_continues(path, strategies, losses):
    """Assert that each (strategy, ranks) continues from the path with these losses."""
    for strategy, ranks in strategies:
        continued = run_ranks(continued_from, ranks, strategy, str(path))[0]
        assert continued == pytest.approx(losses, rel=1e-6), strategy


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_folder_of_deepspeed_is_gone_on_from(stage, tmp_path):
    losses = run_ranks(deepspeed_run, 2, stage, str(tmp_path / "source"), flavour="deepspeed")[0]
    made = convert(open_source(tmp_path / "source"), tmp_path / "run")
    assert made.source.kind == f"DeepSpeed ZeRO stage {stage}, 2 ranks"
    assert (made.step, made.samples_seen) == (3, 24)
    assert made.path == tmp_path / "run" / "step-3"
    opened = Checkpoint(made.path)
    tied = (opened.read(f"model.{name}.weight") for name in ("head", "embedding"))
    assert torch.equal(*tied)
    assert {n.rpartition(".")[2] for n in opened.names if n.startswith("optimizer.")} == {
        *("exp_avg", "exp_avg_sq", "step")
    }
    assert_continues(
        made.path, [("fsdp", 2), ("single", 1)] if stage == 3 else [("ddp", 2)], losses
    )


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_fp32_values_are_those_that_deepspeeds_own_script_finds(stage, tmp_path):
    """In bf16, with two groups of parameters and one parameter that is not trained."""
    source = tmp_path / "source"
    wanted = run_ranks(deepspeed_bf16, 2, stage, str(source), flavour="deepspeed")[0]
    opened = Checkpoint(convert(open_source(source), tmp_path / "new").path)
    assert len(wanted) >= 7  # for stage 1 DeepSpeed's script omits frozen parameters
    for name, value in wanted.items():
        assert torch.equal(opened.read(f"model.{name}").float(), value.float()), name
    assert "model.up.bias" in opened.names
    slots = [name for name in opened.names if name.startswith("optimizer.")]
    assert len(slots) == 3 * 6


def test_a_folder_of_torchs_distributed_checkpoint_is_gone_on_from(tmp_path):
    source, run = tmp_path / "source", tmp_path / "run"
    losses = run_ranks(dcp_run, 2, str(source))[0]
    done = forked_cli(["checkpoint", "convert", str(source), str(run), "--samples", "24"])
    assert done.returncode == 0, done.stderr
    assert "8 tensors of the model, 21 of the optimizer" in done.stdout
    assert f"Continue from it with: bigtrain train --resume {run / 'step-3'}" in done.stdout
    assert Checkpoint(run / "step-3").meta["samples_seen"] == 24
    assert_continues(run / "step-3", [("ddp", 2), ("fsdp", 2), ("single", 1)], losses)


@pytest.mark.filterwarnings("ignore")
def test_a_file_of_fsdp1_is_gone_on_from(tmp_path):
    losses = run_ranks(fsdp1_run, 2, str(tmp_path / "last.pth.tar"))[0]
    made = convert(open_source(tmp_path / "last.pth.tar"), tmp_path / "run", samples_seen=24)
    assert (made.step, len(made.source.model), len(made.source.optimizer)) == (3, 8, 21)
    assert made.source.notes == ("Left out: epoch.",)
    assert_continues(made.path, [("fsdp", 2), ("single", 1)], losses)


def of_lightning(weights, moments):
    """A file like Lightning's, by its keys; the model is an attribute of its module."""
    state = {f"model.{name}": value for name, value in weights.items()}
    return {
        **{"epoch": 1, "global_step": 3, "pytorch-lightning_version": "2.5.0", "loops": {}},
        **{"state_dict": state, "optimizer_states": [moments], "lr_schedulers": []},
        "hyper_parameters": {"lr": 0.1},
    }


def of_a_trainer(weights, moments):
    """A file like that of a plain trainer."""
    return {"state_dict": weights, "optimizer": moments, "epoch": 3, "arch": "tiny"}


@pytest.mark.parametrize("wrap", [of_lightning, of_a_trainer])
def test_a_trainer_s_file_is_gone_on_from(wrap, tmp_path):
    losses = trainer_run(wrap, tmp_path / "last.ckpt")
    made = convert(open_source(tmp_path / "last.ckpt"), tmp_path / "run", samples_seen=24)
    assert (made.step, len(made.source.model), len(made.source.optimizer)) == (3, 8, 21)
    notes = " ".join(made.source.notes)
    assert "they were matched to the model's tensors in order" in notes
    assert ("Removed from all names: model. (--strip '' keeps" in notes) == (wrap is of_lightning)
    assert_continues(made.path, [("ddp", 2)], losses)
