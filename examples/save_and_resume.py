"""Five steps at a time, each time under any strategy and on any number of ranks.

python examples/save_and_resume.py FOLDER single
torchrun --nproc-per-node 2 examples/save_and_resume.py FOLDER fsdp+offload_disk
"""

import functools
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bigtrain

BATCH, STEPS = 32, 5
folder, strategy = Path(sys.argv[1]), sys.argv[2]


def net() -> nn.Module:
    """A classifier. Its initial weights depend only on the seed and on their names."""
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 10))


adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
with bigtrain.prepare(net, cross_entropy, adamw, strategy=strategy) as engine:
    newest = bigtrain.newest_checkpoint(folder)
    if newest is not None:
        engine.load(newest)  # weights, optimizer, position; saved under any strategy
    share = BATCH // engine.context.dp_size
    for step in range(engine.steps_done, engine.steps_done + STEPS):
        draw = torch.Generator().manual_seed(step)  # the global batch is the same on all ranks
        inputs = torch.randn(BATCH, 16, generator=draw)[engine.context.dp_rank * share :][:share]
        result = engine.step((inputs, inputs[:, :10].argmax(dim=1)))
        if engine.context.is_main:
            print(f"step {result.step}  loss {result.loss:.4f}")
    engine.save(folder)
