"""Train a GPT-2 of transformers on text: weight decay for matrices alone, clipping, perplexity."""

import math

import torch
from samples import gpt2, report, text_windows
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

BATCH = 32

data = text_windows()
train, test = Subset(data, range(448)), Subset(data, range(448, 512))
torch.manual_seed(0)
model = gpt2()
optimizer = torch.optim.AdamW(
    [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ],
    lr=3e-3,
)
model.train()
for _ in range(2):
    for tokens, following in DataLoader(train, BATCH):
        logits = model(input_ids=tokens).logits
        loss = cross_entropy(logits.flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        report(loss=float(loss), norm=float(norm))
model.eval()
total = 0.0
with torch.no_grad():
    for tokens, following in DataLoader(test, BATCH):
        logits = model(input_ids=tokens).logits
        total += float(cross_entropy(logits.flatten(0, 1), following.flatten())) * len(tokens)
report(perplexity=math.exp(total / len(test)))
