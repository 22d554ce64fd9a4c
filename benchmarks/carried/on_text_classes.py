"""Classify texts with a BERT of transformers: padded batches, a warm-up, accuracy and F1."""

import sys
from functools import partial

import torch
from samples import Lines, bert, pad, report
from torch.nn.functional import cross_entropy
from transformers import get_linear_schedule_with_warmup

import bigtrain

BATCH, STEPS = 32, 24

train, test = Lines(0, BATCH * STEPS), Lines(BATCH * STEPS, BATCH * STEPS + 100)
torch.manual_seed(0)
model = bert()
optimizer = partial(torch.optim.AdamW, lr=2e-3)


def accuracy(found, true):
    return (found.logits.argmax(1) == true).float().mean()


def counts(label, found, true):
    found = found.logits.argmax(1)
    hits = 2 * ((found == label) & (true == label)).sum()
    return hits, (found == label).sum() + (true == label).sum()


engine = bigtrain.prepare(
    model,
    lambda found, labels: cross_entropy(found.logits, labels),
    optimizer,
    strategy=sys.argv[1],
    example=pad([train[k] for k in range(8)]),
    learning_rate=lambda optimizer: get_linear_schedule_with_warmup(optimizer, 4, STEPS),
    metrics={"accuracy": accuracy, **{f"f{k}": partial(counts, k) for k in range(8)}},
    train__global_batch_size=BATCH,
)
for batch in engine.loader(train, shuffle=False, collate_fn=pad):
    rate = engine.optimizer.param_groups[0]["lr"]
    report(loss=engine.step(batch).loss, lr=rate)
found = engine.evaluate(engine.loader(test, training=False, collate_fn=pad))
report(accuracy=found["accuracy"], f1=sum(found[f"f{k}"] for k in range(8)) / 8)
engine.close()
