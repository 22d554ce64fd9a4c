"""Models whose linear layers DeepSpeed's AutoTP slices compute what one process computes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parity import Record, largest_difference, train
from support.ranks import run_ranks
from torch import nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data.source import Samples, TensorSamples
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.ranks.context import RunContext

WORDS = 29
SIZES: dict[str, Any] = {"num_layers": 2, "width": 24, "num_heads": 4, "vocab_size": WORDS}


def gpt(*, tied: bool = True, dropout: float = 0.0) -> nn.Module:
    return GPT(GPTConfig(**SIZES, sequence_length=6, tie_embeddings=tied, dropout=dropout))


MODELS = {"tied": gpt, "untied": partial(gpt, tied=False)}


def samples() -> Samples:
    """14 of them, of which some have few valid targets or none."""
    numbers = torch.Generator().manual_seed(4)
    words = torch.randint(WORDS, (14, 7), generator=numbers)
    inputs, targets = words[:, :-1].contiguous(), words[:, 1:].contiguous()
    share = torch.linspace(0, 1.2, 14)[:, None]
    targets[torch.rand(14, 6, generator=numbers) < share] = -100
    return TensorSamples(inputs, targets)


def trained(context: RunContext, strategy: str, keys: dict[str, Any]) -> dict[str, Record]:
    """Three steps of each model; batches of eight rows, and of the six that are left."""
    keys = {"train.micro_batch_size": 2, "optim.clip_norm": 0.5, **keys}
    return {
        name: train(context, make, samples(), strategy, keys, 3) for name, make in MODELS.items()
    }


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 1": (2, {}),
    "stage 2": (2, {"strategy.replicate.stage": 2}),
    "stage 1, beside replicas": (4, {}),
    "stage 2, beside replicas": (4, {"strategy.replicate.stage": 2}),
    "over four": (4, {"mesh.tp": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_slices_of_autotp_equal_one_process(case: str) -> None:
    """Losses, norms before clipping, gradients, weights; and every rank has the same."""
    ranks, keys = CASES[case]
    keys = {"mesh.tp": 2, **keys}
    (one,) = run_ranks(trained, 1, "single", {}, timeout_s=100)
    found = run_ranks(trained, ranks, "autotp", keys, timeout_s=200, tp=keys["mesh.tp"])
    for records in found:
        for name, record in records.items():
            assert largest_difference(one[name], record) < 1e-5, name
