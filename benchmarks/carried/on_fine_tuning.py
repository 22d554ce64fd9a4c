"""Train the head on a frozen body, and from the second epoch on the body as well, more slowly."""

import sys

import torch
from samples import classifier, digits, report
from torch import nn

import bigtrain

BATCH, EPOCHS = 76, 3

train, test = digits()


def begin(frozen):
    torch.manual_seed(0)
    model = classifier()
    body = model[:5]
    of_body = {id(parameter) for parameter in body.parameters()}

    def optimizer(parameters):
        slow = [p for p in parameters if id(p) in of_body]
        fast = [p for p in parameters if id(p) not in of_body]
        return torch.optim.AdamW([{"params": fast, "lr": 5e-3}, {"params": slow, "lr": 5e-4}])

    for parameter in body.parameters():
        parameter.requires_grad = not frozen
    return bigtrain.prepare(
        model,
        nn.functional.cross_entropy,
        optimizer,
        strategy=sys.argv[1],
        example=train[:4],
        train__global_batch_size=BATCH,
    )


engine = begin(frozen=True)
for epoch in range(EPOCHS):
    if epoch == 1:
        engine.save(sys.argv[2])
        engine.close()
        engine = begin(frozen=False)
        engine.load(sys.argv[2])
    for batch in engine.loader(train, shuffle=False, drop_last=True):
        report(loss=engine.step(batch).loss)
engine.close()
