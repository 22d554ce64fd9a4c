"""Keep an exponential average of the weights, and judge by it."""

import sys
from functools import partial

import torch
from samples import classifier, digits, report
from torch import nn

import bigtrain

BATCH = 50

train, test = digits()
torch.manual_seed(0)
model = classifier()
optimizer = partial(torch.optim.SGD, lr=0.2, momentum=0.9)
engine = bigtrain.prepare(
    model,
    nn.functional.cross_entropy,
    optimizer,
    strategy=sys.argv[1],
    example=train[:5],
    metrics={"accuracy": lambda found, labels: (found.argmax(1) == labels).float().mean()},
    train__global_batch_size=BATCH,
)
average = bigtrain.ema(engine, decay=0.9)
for batch in engine.loader(train, shuffle=False):
    report(loss=engine.step(batch).loss)
with average.swapped():
    found = engine.evaluate(engine.loader(test, training=False))
report(accuracy=found["accuracy"], held_out=found["loss"])
engine.close()
