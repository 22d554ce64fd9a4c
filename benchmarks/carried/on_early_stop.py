"""An autoencoder that stops when the held-out loss has not fallen for two epochs."""

import sys
from functools import partial

import torch
from samples import digits, report
from torch import nn

import bigtrain

BATCH, MOST, PATIENCE = 100, 12, 2

train, test = digits()
torch.manual_seed(0)
encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64))
model = nn.Sequential(encoder, decoder)
optimizer = partial(torch.optim.Adam, lr=2e-2)


def same(rows):
    images = torch.stack([image for image, _ in rows])
    return images, images


engine = bigtrain.prepare(
    model,
    lambda found, images: nn.functional.mse_loss(found, images.flatten(1)),
    optimizer,
    strategy=sys.argv[1],
    example=same([train[k] for k in range(10)]),
    train__global_batch_size=BATCH,
)
loader = engine.loader(train, shuffle=False, drop_last=True, collate_fn=same)
best, waited = float("inf"), 0
for epoch in range(MOST):
    for batch in loader:
        report(loss=engine.step(batch).loss)
    held_out = engine.evaluate(engine.loader(test, training=False, collate_fn=same))["loss"]
    report(epoch=epoch, held_out=held_out)
    best, waited = (held_out, 0) if held_out < best - 1e-3 else (best, waited + 1)
    if waited == PATIENCE:
        break
engine.close()
