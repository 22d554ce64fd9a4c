"""Accumulate gradients of answers of unequal length: each step is a mean over all its tokens."""

import torch
from samples import Lines, gpt2, pad, report
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

MICRO, PARTS, STEPS = 8, 4, 12

train = Lines(0, MICRO * PARTS * STEPS)
torch.manual_seed(0)
model = gpt2()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batches = iter(DataLoader(train, MICRO, collate_fn=pad))
model.train()
for _ in range(STEPS):
    parts = [next(batches)[0] for _ in range(PARTS)]
    valid = sum(int(part["attention_mask"][:, 1:].sum()) for part in parts)
    total = 0.0
    for part in parts:
        logits = model(**part).logits[:, :-1]
        labels = part["input_ids"].masked_fill(part["attention_mask"] == 0, -100)[:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / valid
        loss.backward()
        total += float(loss)
    optimizer.step()
    optimizer.zero_grad()
    report(loss=total)
