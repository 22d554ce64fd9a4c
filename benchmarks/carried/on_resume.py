"""Save in the midst of an epoch, begin again from the file, and go on at the next batch."""

import sys
from functools import partial
from pathlib import Path

import torch
from samples import classifier, digits, report
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import bigtrain

BATCH, STEPS, STOP = 50, 20, 8

folder = Path(sys.argv[2])
train, _ = digits()
torch.manual_seed(0)
model = classifier()
optimizer = partial(torch.optim.AdamW, lr=3e-3)
engine = bigtrain.prepare(
    model,
    nn.functional.cross_entropy,
    optimizer,
    strategy=sys.argv[1],
    example=train[:5],
    learning_rate=lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    train__global_batch_size=BATCH,
)
if folder.exists():
    engine.load(folder)
for batch in engine.loader(train, shuffle=False):
    result = engine.step(batch)
    report(step=result.step, loss=result.loss)
    if result.step in (STOP, STEPS):
        engine.save(folder)
        break
engine.close()
