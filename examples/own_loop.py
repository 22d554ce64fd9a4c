"""Your own loop: `torchrun --nproc-per-node 2 examples/own_loop.py fsdp+full` or another."""

import functools
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bigtrain

BATCH, MICRO, STEPS = 32, 8, 10  # samples of a step on all ranks, of a micro-batch; steps


def net() -> nn.Module:
    """Four equal blocks; the strategy decides where it is called."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 10))


inputs = torch.randn(STEPS * BATCH, 16, generator=torch.Generator().manual_seed(0))
targets = inputs[:, :10].argmax(dim=1)
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
with bigtrain.prepare(
    net,
    cross_entropy,
    adamw,
    strategy=sys.argv[1],
    example=(inputs[:MICRO], targets[:MICRO]),  # pipelines need it, to cut the model
    train__global_batch_size=BATCH,
    train__micro_batch_size=MICRO,
) as engine:
    share = BATCH // engine.context.dp_size
    for first in range(engine.context.dp_rank * share, STEPS * BATCH, BATCH):
        rows = slice(first, first + share)  # this replica's samples of the global batch
        result = engine.step((inputs[rows], targets[rows]))
        if engine.context.is_main:
            print(f"step {result.step}  loss {result.loss:.4f}")
