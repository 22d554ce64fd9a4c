"""Train the head on a frozen body, and from the second epoch on the body as well, more slowly."""

import torch
from samples import classifier, digits, report
from torch import nn
from torch.utils.data import DataLoader

BATCH, EPOCHS = 76, 3

train, test = digits()
torch.manual_seed(0)
model = classifier()
body, head = model[:5], model[5:]
optimizer = torch.optim.AdamW(
    [{"params": head.parameters(), "lr": 5e-3}, {"params": body.parameters(), "lr": 5e-4}]
)
for parameter in body.parameters():
    parameter.requires_grad = False
for epoch in range(EPOCHS):
    if epoch == 1:
        for parameter in body.parameters():
            parameter.requires_grad = True
    for images, labels in DataLoader(train, BATCH, drop_last=True):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(loss=float(loss))
