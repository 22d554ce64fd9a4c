"""Train the head on a frozen body, and from the second epoch on the body as well, more slowly."""

import sys

import torch
from samples import classifier, digits, report
from torch import nn

import bigtrain

BATCH, EPOCHS = 75, 3

train, test = digits()
torch.manual_seed(0)
model = classifier()
body, head = model[:5], model[5:]


def optimizer(parameters):
    of_body = {id(parameter) for parameter in body.parameters()}
    slow = [p for p in parameters if id(p) in of_body]
    fast = [p for p in parameters if id(p) not in of_body]
    return torch.optim.AdamW([{"params": fast, "lr": 5e-3}, {"params": slow, "lr": 5e-4}])


def begin():
    return bigtrain.prepare(
        model,
        nn.functional.cross_entropy,
        optimizer,
        strategy=sys.argv[1],
        example=train[:5],
        train__global_batch_size=BATCH,
    )


for parameter in body.parameters():
    parameter.requires_grad = False
engine = begin()
for epoch in range(EPOCHS):
    if epoch == 1:
        engine.save(sys.argv[2])
        engine.close()
        for parameter in body.parameters():
            parameter.requires_grad = True
        engine = begin()
        engine.load(sys.argv[2])
    for batch in engine.loader(train, shuffle=False, drop_last=True):
        report(loss=engine.step(batch).loss)
engine.close()
