"""The predicted peak of a run in slices is the measured one."""

import pytest
import torch
from support.peaks import settled
from support.ranks import run_ranks

from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy
from bigtrain.losses.loss import CrossEntropy
from bigtrain.models.gpt import GPT, GPTConfig

CASES = {
    "kept": ({}, CrossEntropy()),
    "full": ({"strategy.recompute": "full"}, CrossEntropy()),
    "selective": ({"strategy.recompute": "selective"}, CrossEntropy()),
    "in bf16": ({"train.precision": "bf16"}, CrossEntropy()),
    "in chunks": ({}, ChunkedCrossEntropy(head="head", chunk_size=20_000)),
}


def peak(context, strategy, case):
    keys, loss = CASES[case]
    sizes = {"num_layers": 3, "width": 64, "num_heads": 4, "vocab_size": 307}
    model = GPT(GPTConfig(**sizes, sequence_length=32, tie_embeddings=False))
    tokens = torch.randint(307, (8, 33))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    job = job_from_keys(
        strategy, {"train.global_batch_size": 8, "memory.track_steps": 4, "mesh.tp": 2, **keys}
    )
    example = MicroBatch(inputs, targets, loss.count(targets), 8)
    with Engine(model, loss, torch.optim.AdamW, job, context, example=example) as engine:
        for _ in range(4):
            engine.step((inputs.clone(), targets.clone()))
        return engine.predicted, engine.meter.measured().peak


@pytest.mark.parametrize("strategy", ["tensor", "tensor_sequence"])
@pytest.mark.parametrize("case", CASES)
def test_the_first_ranks_peak_is_predicted_to_the_byte(strategy, case):
    """The other one's words are fewer by one."""
    rows = settled(
        lambda: run_ranks(peak, 2, strategy, case, tp=2, timeout_s=120),
        lambda row: row[1].bytes > row[0].bytes,
    )
    (predicted, measured), (of_other, other) = rows
    assert predicted.bytes == measured.bytes
    assert predicted.phase == measured.phase
    assert 0.99 * of_other.bytes < other.bytes <= of_other.bytes
