"""With a chunked loss, every strategy has the numbers of one process, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.nets import TinyLM, tokens
from support.parity import Record, largest_difference, sgd, train
from support.ranks import run_ranks
from torch import nn

from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy
from bigtrain.losses.loss import CrossEntropy
from bigtrain.memory.timeline import MEMORY_KINDS
from bigtrain.models import make_model

CHUNKED = ChunkedCrossEntropy(head="head", chunk_size=1024)
FP64 = {"train.precision": "fp64", "optim.clip_norm": 0.5, "train.micro_batch_size": 2}


@pytest.fixture(scope="module")
def whole() -> Record:
    """The run of one process with the plain loss."""
    return run_ranks(train, 1, TinyLM, tokens(22), "single", FP64)[0]


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("single", 1),
        ("ddp", 2),
        ("fsdp", 2),
        ("zero2", 2),
        ("zero3", 2),
        ("gpipe", 2),
        ("zero_bubble", 2),
        ("pipeline_deepspeed", 2),
        ("layer_split_devices", 1),
        ("gpipe_fairscale", 1),
    ],
)
def test_a_run_in_chunks_is_the_plain_run_on_one_process(whole, strategy, ranks):
    keys, within, expected = FP64, 1e-10, whole
    if strategy in ("zero2", "zero3"):  # DeepSpeed updates in fp32
        keys, within = {**FP64, "train.precision": "fp32"}, 1e-5
        expected = run_ranks(train, 1, TinyLM, tokens(22), "single", keys)[0]
    pp = 2 if strategy in ("gpipe", "zero_bubble", "pipeline_deepspeed") else 1
    arguments = (train, ranks, TinyLM, tokens(22), strategy, keys, 6, sgd, CHUNKED)
    for record in run_ranks(*arguments, pp=pp):
        assert record.losses == pytest.approx(expected.losses, rel=1e-6)
        assert largest_difference(expected, record) < within


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_under_ddp_with_a_function_of_its_own_behind_the_output(whole, option):
    keys = {**FP64, f"strategy.replicate.{option}": True}
    for record in run_ranks(train, 2, TinyLM, tokens(22), "ddp", keys, 6, sgd, CHUNKED):
        assert largest_difference(whole, record) < 1e-10


def large(vocabulary: int = 50257, *, tied: bool = True) -> nn.Module:
    args = {"num_layers": 2, "width": 16, "num_heads": 2, "vocab_size": vocabulary}
    return make_model("gpt", {**args, "sequence_length": 32, "tie_embeddings": tied})


def untied_model() -> nn.Module:
    """A large model whose head is not tied."""
    return large(tied=False)


def peaks(context, loss: CrossEntropy, strategy: str, keys: dict[str, Any], rows: int = 8):
    """Train two steps; return the losses, and the predicted and the measured peak."""
    everything = {"train.global_batch_size": rows * context.dp_size}
    job = job_from_keys(strategy, {**everything, **keys})
    made = torch.Generator().manual_seed(context.rank)
    inputs, targets = (torch.randint(50257, (rows, 32), generator=made) for _ in range(2))
    size = job.train.micro_batch_size or rows
    example = MicroBatch(inputs[:size], targets[:size], size * 32, size)
    # Without tied weights: their exchange between stages would be the peak of a stage this small.
    model = untied_model if strategy == "gpipe" else large
    with Engine(model, loss, sgd, job, context, example=example) as engine:
        losses = [engine.step((inputs, targets)).loss for _ in range(2)]
        evaluated = engine.evaluate([example])
        return losses, evaluated, engine.prediction.peak, engine.meter.measured().peak


def test_at_least_nine_tenths_of_the_logits_are_gone():
    logits = 8 * 32 * 50257 * 4
    small = ChunkedCrossEntropy(head="head", chunk_size=2**20)
    keys = {"train.precision": "fp32"}
    (plain,) = run_ranks(peaks, 1, CrossEntropy(), "single", keys)
    (chunked,) = run_ranks(peaks, 1, small, "single", keys)
    assert chunked[0] == pytest.approx(plain[0], rel=1e-6)
    assert chunked[1] == pytest.approx(plain[1], rel=1e-6)
    saved = plain[3].bytes - chunked[3].bytes
    assert saved >= 0.9 * logits, (saved / logits, plain[3], chunked[3])


@pytest.mark.parametrize(
    ("strategy", "ranks", "keys"),
    [
        ("single", 1, {}),
        ("single", 1, {"train.precision": "bf16"}),
        ("single", 1, {"train.precision": "fp64", "train.micro_batch_size": 4}),
        ("ddp", 2, {"train.micro_batch_size": 4}),
        ("fsdp", 2, {}),
        ("gpipe", 2, {"train.micro_batch_size": 4}),
    ],
)
def test_the_predicted_peak_is_the_measured_one(strategy, ranks, keys):
    small = ChunkedCrossEntropy(head="head", chunk_size=2**20)
    pp = 2 if strategy == "gpipe" else 1
    for result in run_ranks(peaks, ranks, small, strategy, keys, pp=pp):
        predicted, measured = result[2:]
        assert predicted.bytes == pytest.approx(measured.bytes, rel=0.005), (predicted, measured)
        for kind in MEMORY_KINDS:
            mine = getattr(predicted.breakdown, kind)
            real = getattr(measured.breakdown, kind)
            assert mine == pytest.approx(real, abs=0.01 * measured.bytes), kind
