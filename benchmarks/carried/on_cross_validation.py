"""Three folds, a model for each, and the vote of all three on the held-out samples."""

import sys
from functools import partial

import torch
from samples import classifier, digits, report
from torch import nn
from torch.utils.data import Subset

import bigtrain

BATCH, FOLDS = 50, 3

train, test = digits()
votes = torch.zeros(len(test), 10)
for fold in range(FOLDS):
    torch.manual_seed(fold)
    model = classifier()
    optimizer = partial(torch.optim.AdamW, lr=2e-3)
    rest = Subset(train, [k for k in range(len(train)) if k % FOLDS != fold])
    engine = bigtrain.prepare(
        model,
        nn.functional.cross_entropy,
        optimizer,
        strategy=sys.argv[1],
        example=train[:5],
        train__global_batch_size=BATCH,
    )
    for batch in engine.loader(rest, shuffle=False, drop_last=True):
        report(fold=fold, loss=engine.step(batch).loss)
    for first in range(0, len(test), 99):
        images = test.tensors[0][first : first + 99]
        votes[first : first + 99] += engine.predict(images).softmax(1)
    engine.close()
right = (votes.argmax(1) == test.tensors[1]).float().mean()
report(accuracy=float(right))
