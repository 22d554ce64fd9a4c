"""Runs that fail in one rank: the page names the right rank and its activity."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from support.faults import Net
from support.zygote import forked_cli

from bigtrain.models.blocks import find_blocks
from bigtrain.recorder.blocks import mark_blocks, unmark_blocks
from bigtrain.recorder.ring import FlightRecorder

WORDS = [
    "data.name=support.faults:points",
    "model.name=support.faults:Net",
    "mesh.timeout=2",
    "train.global_batch_size=8",
    "train.steps=8",
    "checkpoint.at_end=false",
    "log.name=run",
]


def run_failing_job(folder: Path, *words: str, ranks: int = 2) -> tuple[str, dict]:
    """Run a job that fails; return its output and the file of the page."""
    done = forked_cli(["train", "-n", str(ranks), *WORDS, *words], cwd=folder, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr, json.loads((folder / "runs/run/flight_recorder.json").read_text())


def test_a_rank_that_sleeps_in_its_data_set(tmp_path):
    output, file = run_failing_job(tmp_path, "data.args.fault=sleep")
    assert "rank 0 waits for the number of targets (all_gather, 96 B) for " in file["headline"]
    expected = "rank 1 never came: it reads data (micro-batch 1 of step 4), in go_wrong of "
    assert expected in file["headline"]
    assert f"bigtrain: {file['headline']}\n" in output
    assert "stack of rank 1:" in output
    assert "runs/run/flight_recorder.json" in output
    assert "Traceback" not in output
    assert file["ranks"][1]["stack"][-1].endswith(" go_wrong")
    assert file["ranks"][0]["exchanges"][-1]["done"] is False


def test_a_rank_that_is_stopped(tmp_path):
    output, file = run_failing_job(tmp_path, "data.args.fault=stop")
    assert "rank 1 has not answered: it is stopped" in file["headline"]
    assert file["headline"].startswith("rank 0 waits for the number of targets")
    assert "rank 1: no answer\n" in output


def test_a_rank_that_is_killed(tmp_path):
    output, file = run_failing_job(tmp_path, "data.args.fault=kill")
    assert "rank 1 ended without a message" in file["headline"]
    assert "rank 0 lost rank 1" in output
    assert file["lines"][1] == "rank 1: ended without a message"


def test_rank_0_is_killed_and_the_hub_with_it(tmp_path):
    words = ("data.args.fault=kill", "data.args.rank=0", "train.global_batch_size=9")
    output, file = run_failing_job(tmp_path, *words, ranks=3)
    assert re.match("rank [12] waits for .* s; rank 0 ended without a message$", file["headline"])
    assert output.count("the last events of each rank") == 1
    assert "rank 2: waits for " in output  # rank 2 has left its record in the folder
    assert file["lines"][0] == "rank 0: ended without a message"


def test_a_rank_that_raises(tmp_path):
    output, file = run_failing_job(tmp_path, "data.args.fault=raise")
    assert file["headline"].startswith(
        "rank 1 failed: ValueError: this sample is broken. It reads data (micro-batch 1 of step 4)"
    )
    assert (
        "bigtrain: rank 1 failed while it read data (micro-batch 1 of step 4), in go_wrong"
        in output
    )
    assert output.count("stack of") == 0
    assert output.index("rank 1 failed") < output.index("Traceback")


def test_a_loss_that_is_not_finite_on_one_rank_is_not_said_to_be_another_one_s(tmp_path):
    output, file = run_failing_job(tmp_path, "data.args.fault=nan")
    assert "the loss of rank 1 is nan" in file["headline"]
    assert "rank 0 failed" not in output
    assert output.count("the loss of rank 1 is nan") == 1
    assert "runs/run/flight_recorder.json" in output


def test_memory_that_runs_out(tmp_path):
    output, file = run_failing_job(
        tmp_path, "model.args.width=1024", "memory.cap=30MiB", "mesh.timeout=30"
    )
    assert "OutOfMemoryError: rank " in file["headline"]
    assert "predicted to fit" in output
    assert file["cause"]["kind"] == "failed"


def test_a_block_of_one_rank_while_others_wait_for_gradients(tmp_path):
    words = ("model.args.fault=sleep", "train.global_batch_size=9")
    _, file = run_failing_job(tmp_path, *words, "--strategy", "ddp", ranks=3)
    assert " waits for the gradients at blocks.0 (all_reduce, " in file["headline"]
    assert file["headline"].endswith(
        "; rank 1 never came: it is in the forward pass of blocks.2 (micro-batch 1 of step 3)"
    )


@pytest.mark.parametrize(
    ("exchange", "shown"),
    [("sockets", "(all_gather, "), ("shared_memory", "(all_gather in shared memory) for ")],
)
def test_fully_shard(exchange, shown, tmp_path):
    words = ("model.args.fault=sleep", "--strategy", "fsdp")
    _, file = run_failing_job(tmp_path, *words, f"strategy.replicate.exchange={exchange}")
    assert file["headline"].startswith(f"rank 0 waits for the weights at blocks.3 {shown}")
    assert file["headline"].endswith(
        "; rank 1 never came: it is in the forward pass of blocks.2 (micro-batch 1 of step 3)"
    )


def test_a_pipeline_whose_first_stage_never_sends(tmp_path):
    words = ("model.args.fault=sleep", "model.args.rank=0", "model.args.block=0")
    _, file = run_failing_job(tmp_path, *words, "train.micro_batch_size=2", "--strategy", "1f1b")
    assert file["headline"].startswith("rank 1 waits for a message from rank 0 (recv, 256 B) for ")
    assert file["headline"].endswith(
        "; rank 0 never came: it is in the forward pass of blocks.0 (micro-batch 3 of step 1)"
    )


def test_one_process_leaves_its_page_too(tmp_path):
    words = ("data.args.fault=raise", "data.args.rank=0")
    done = forked_cli(["train", *WORDS, *words], cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    file = json.loads((tmp_path / "runs/run/flight_recorder.json").read_text())
    assert file["headline"].startswith("rank 0 failed: ValueError: this sample is broken. It reads")


def test_blocks_say_when_they_are_computed_and_the_numbers_stay():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(3, 8)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    recorder = FlightRecorder()
    mark_blocks(find_blocks(model), recorder)
    recorder.enter("forward")
    loss = model(x).sum()
    recorder.enter("backward")
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.equal(gradient)
    blocks = [f"blocks.{number}" for number in range(4)]
    events = [(phase, block) for _, phase, block, _, _ in recorder.events()]
    assert events == [
        ("forward", ""),
        *(("forward", name) for name in blocks),
        ("backward", ""),
        *(("backward", name) for name in reversed(blocks)),
    ]
    assert pickle.loads(pickle.dumps(model))(x).equal(model(x))
    assert copy.deepcopy(model)(x).equal(model(x))
    unmark_blocks(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
