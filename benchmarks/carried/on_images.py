"""Classify images: a rate that rises and falls, and the accuracy after each epoch."""

import sys
from functools import partial

import torch
from samples import classifier, digits, report
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import bigtrain

BATCH, EPOCHS = 64, 2

train, test = digits()
torch.manual_seed(0)
model = classifier()
optimizer = partial(torch.optim.Adam, lr=1e-3)
engine = bigtrain.prepare(
    model,
    nn.functional.cross_entropy,
    optimizer,
    strategy=sys.argv[1],
    example=train[:8],
    metrics={"accuracy": lambda found, labels: (found.argmax(1) == labels).float().mean()},
    train__global_batch_size=BATCH,
)
loader = engine.loader(train, shuffle=False, drop_last=True)
schedule = OneCycleLR(engine.optimizer, max_lr=1e-2, total_steps=EPOCHS * len(loader))
for _ in range(EPOCHS):
    for batch in loader:
        loss = engine.step(batch).loss
        report(loss=float(loss), lr=schedule.get_last_lr()[0])
        schedule.step()
    report(accuracy=engine.evaluate(engine.loader(test, training=False))["accuracy"])
engine.close()
