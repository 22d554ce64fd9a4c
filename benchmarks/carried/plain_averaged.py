"""Keep an exponential average of the weights, and judge by it."""

import torch
from samples import classifier, digits, report
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

BATCH = 50

train, test = digits()
torch.manual_seed(0)
model = classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
for images, labels in DataLoader(train, BATCH):
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(model)
    report(loss=float(loss))
average.eval()
right, total = 0, 0.0
with torch.no_grad():
    for images, labels in DataLoader(test, BATCH):
        found = average(images)
        right += int((found.argmax(1) == labels).sum())
        total += float(nn.functional.cross_entropy(found, labels)) * len(labels)
report(accuracy=right / len(test), held_out=total / len(test))
