"""Accumulate gradients of answers of unequal length: each step is a mean over all its tokens."""

import sys
from functools import partial

import torch
from samples import Lines, gpt2, pad, report
from torch.nn.functional import cross_entropy

import bigtrain

MICRO, PARTS, STEPS = 8, 4, 12

train = Lines(0, MICRO * PARTS * STEPS)
torch.manual_seed(0)
model = gpt2()
optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def answers(rows):
    inputs, _ = pad(rows)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return inputs, labels


def loss(outputs, labels):
    return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


engine = bigtrain.prepare(
    model,
    loss,
    optimizer,
    strategy=sys.argv[1],
    example=answers([train[k] for k in range(MICRO)]),
    train__global_batch_size=MICRO * PARTS,
    train__micro_batch_size=MICRO,
)
for batch in engine.loader(train, shuffle=False, collate_fn=answers):
    report(loss=engine.step(batch).loss)
engine.close()
