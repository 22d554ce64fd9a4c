"""Classify images: a rate that rises and falls, and the accuracy after each epoch."""

import torch
from samples import classifier, digits, report
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

BATCH, EPOCHS = 64, 2

train, test = digits()
torch.manual_seed(0)
model = classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(train, BATCH, drop_last=True)
schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=EPOCHS * len(loader))
for _ in range(EPOCHS):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        report(loss=float(loss), lr=schedule.get_last_lr()[0])
        schedule.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in DataLoader(test, BATCH):
            right += int((model(images).argmax(1) == labels).sum())
    report(accuracy=right / len(test))
