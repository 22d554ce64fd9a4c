"""An autoencoder that stops when the held-out loss has not fallen for two epochs."""

import torch
from samples import digits, report
from torch import nn
from torch.utils.data import DataLoader

BATCH, MOST, PATIENCE = 100, 12, 2

train, test = digits()
torch.manual_seed(0)
encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64))
model = nn.Sequential(encoder, decoder)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
best, waited = float("inf"), 0
for epoch in range(MOST):
    for images, _ in DataLoader(train, BATCH, drop_last=True):
        loss = nn.functional.mse_loss(model(images), images.flatten(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(loss=float(loss))
    with torch.no_grad():
        total = 0.0
        for images, _ in DataLoader(test, BATCH):
            total += float(nn.functional.mse_loss(model(images), images.flatten(1))) * len(images)
    held_out = total / len(test)
    report(epoch=epoch, held_out=held_out)
    best, waited = (held_out, 0) if held_out < best - 1e-3 else (best, waited + 1)
    if waited == PATIENCE:
        break
