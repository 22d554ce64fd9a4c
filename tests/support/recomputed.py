"""Settings that save less of a block, and a short run with its state and its peaks."""

from __future__ import annotations

from typing import Any

import torch
from support.parity import adamw
from support.whole import whole_tensors
from torch import nn

from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.models.gpt import GPT, GPTConfig

RECOMPUTE = "strategy.recompute"
WAYS: dict[str, dict[str, Any]] = {
    "full": {f"{RECOMPUTE}.mode": "full"},
    "selective": {f"{RECOMPUTE}.mode": "selective"},
    "every second": {f"{RECOMPUTE}.every": 2},
    "selective, every second": {f"{RECOMPUTE}.mode": "selective", f"{RECOMPUTE}.every": 2},
    "by name": {f"{RECOMPUTE}.layers": ["blocks.1.attention", "blocks.*.mlp"]},
    "moved": {"strategy.offload.activations": "disk"},
    "inputs moved": {f"{RECOMPUTE}.mode": "full", "strategy.offload.activations": "disk"},
    "half recomputed, half moved": {
        f"{RECOMPUTE}.every": 2,
        "strategy.offload.activations": "disk",
    },
}


def gpt(dropout: float = 0.2) -> nn.Module:
    """A GPT of four layers with width 64, for 13 words and 16 tokens."""
    shape = {"vocab_size": 13, "sequence_length": 16, "num_layers": 4, "width": 64}
    return GPT(GPTConfig(**shape, num_heads=4, dropout=dropout))


def text(rows: int = 8, length: int = 16) -> tuple[Any, Any]:
    """Tokens and their targets, both (rows, length)."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(0, 13, (rows, length + 1), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def run(context, model, batch, keys, strategy="single", steps=3):
    """Train a few steps on one batch; return losses, state, (predicted, measured) peaks
    and advice.
    """
    micro = keys.get("train.micro_batch_size", len(batch[0]))
    rows = len(batch[0]) * context.dp_size
    words = {"train.global_batch_size": rows, "memory.track_steps": steps, **keys}
    job, loss = job_from_keys(strategy, words), CrossEntropy()
    inputs, targets = batch[0][:micro], batch[1][:micro]
    example = MicroBatch(inputs, targets, loss.count(targets), micro)
    with Engine(model, loss, adamw, job, context, example=example) as engine:
        losses = [engine.step(tuple(t.clone() for t in batch)).loss for _ in range(steps)]
        state = whole_tensors(engine.runner.state())
        peaks = engine.prediction.peak, engine.meter.measured().peak
        return losses, state, peaks, engine.advice


def gpt_without() -> nn.Module:
    """A GPT without dropout."""
    return gpt(0.0)
