"""Classify texts with a BERT of transformers: padded batches, a warm-up, accuracy and F1."""

import torch
from samples import Lines, bert, pad, report
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

BATCH, STEPS = 32, 24

train, test = Lines(0, BATCH * STEPS), Lines(BATCH * STEPS, BATCH * STEPS + 100)
torch.manual_seed(0)
model = bert()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 4, STEPS)
model.train()
for inputs, labels in DataLoader(train, BATCH, collate_fn=pad):
    optimizer.zero_grad()
    loss = model(**inputs, labels=labels).loss
    loss.backward()
    optimizer.step()
    report(loss=float(loss), lr=schedule.get_last_lr()[0])
    schedule.step()
model.eval()
found, true = [], []
with torch.no_grad():
    for inputs, labels in DataLoader(test, BATCH, collate_fn=pad):
        found.append(model(**inputs).logits.argmax(1))
        true.append(labels)
found, true = torch.cat(found), torch.cat(true)
scores = []
for label in range(8):
    hits = int(((found == label) & (true == label)).sum())
    scores.append(2 * hits / max(1, int((found == label).sum() + (true == label).sum())))
report(accuracy=float((found == true).float().mean()), f1=sum(scores) / len(scores))
