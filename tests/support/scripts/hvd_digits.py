"""A Horovod script like those for MNIST: epochs, a test after each epoch, averaged metrics.

Arguments: a file for its figures, a factor for `gradient_predivide_factor`, and "fp16" or "none".
"""

import json
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import bigtrain.hvd as hvd  # was: import horovod.torch as hvd

EPOCHS, BATCH, ROWS, TESTED = 2, 32, 320, 160


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 8, 3)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv1(x))
        x = functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        return functional.log_softmax(self.fc(x.flatten(1)), dim=1)


def digits() -> tuple[TensorDataset, TensorDataset]:
    data = load_digits()
    images = torch.tensor(data.images / 16.0)[:, None]
    labels = torch.tensor(data.target)
    test = slice(ROWS, ROWS + TESTED)
    return TensorDataset(images[:ROWS], labels[:ROWS]), TensorDataset(images[test], labels[test])


def average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def main(file: str, factor: str, compression: str) -> None:
    torch.set_default_dtype(torch.float64)
    hvd.init()
    torch.manual_seed(hvd.rank())
    train, test = digits()
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, batch_size=BATCH // 2, sampler=sampler)
    test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test, batch_size=50, sampler=test_sampler)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        op=hvd.Average,
        gradient_predivide_factor=float(factor),
    )
    figures = []
    for epoch in range(EPOCHS):
        model.train()
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            functional.nll_loss(model(data), target).backward()
            optimizer.step()
        model.eval()
        loss = right = 0.0
        for data, target in test_loader:
            with torch.no_grad():
                output = model(data)
            loss += functional.nll_loss(output, target, reduction="sum").item()
            right += output.argmax(1).eq(target).sum().item()
        count = len(test_sampler)
        figures.append([average(loss / count, "loss"), average(right / count, "accuracy")])
    if hvd.rank() == 0:
        Path(file).write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
