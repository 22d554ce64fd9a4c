"""Five steps at a time, each time under another strategy and on as many ranks as there are.

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
    """A classifier; its first weights depend on the seed and on their names alone."""
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 10))


adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
with bigtrain.prepare(net, cross_entropy, adamw, strategy=strategy) as engine:
    newest = bigtrain.newest_checkpoint(folder)
    if newest is not None:
        engine.load(newest)  # weights, optimizer, position: of any strategy, on any ranks
    share = BATCH // engine.context.dp_size
    for step in range(engine.steps_done, engine.steps_done + STEPS):
        draw = torch.Generator().manual_seed(step)  # the global batch is the same on all ranks
        inputs = torch.randn(BATCH, 16, generator=draw)[engine.context.dp_rank * share :][:share]
        result = engine.step((inputs, inputs[:, :10].argmax(dim=1)))
        if engine.context.is_main:
            print(f"step {result.step}  loss {result.loss:.4f}")
    engine.save(folder)
