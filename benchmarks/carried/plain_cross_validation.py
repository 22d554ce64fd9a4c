"""Three folds, a model for each, and the vote of all three on the held-out samples."""

import torch
from samples import classifier, digits, report
from torch import nn
from torch.utils.data import DataLoader, Subset

BATCH, FOLDS = 50, 3

train, test = digits()
votes = torch.zeros(len(test), 10)
for fold in range(FOLDS):
    torch.manual_seed(fold)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rest = Subset(train, [k for k in range(len(train)) if k % FOLDS != fold])
    model.train()
    for images, labels in DataLoader(rest, BATCH, drop_last=True):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(fold=fold, loss=float(loss))
    model.eval()
    with torch.no_grad():
        for first in range(0, len(test), 99):
            images = test.tensors[0][first : first + 99]
            votes[first : first + 99] += model(images).softmax(1)
right = (votes.argmax(1) == test.tensors[1]).float().mean()
report(accuracy=float(right))
