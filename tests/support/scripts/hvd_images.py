"""A Horovod script like those for ImageNet: warm-up and several batches before a step.

It averages metrics by explicit exchanges, writes a checkpoint after each epoch, and only rank 0
reads it on a resume.

Arguments: a folder for checkpoints and figures, and the number of epochs.
"""

import json
import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import bigtrain.hvd as hvd  # was: import horovod.torch as hvd

BATCH, PASSES, WARM_UP, BASE_LR = 4, 2, 1, 0.05


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), Block(6), Block(6)]
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))


def images(count: int, seed: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 3, 8, 8, generator=drawn, dtype=torch.float64)
    return TensorDataset(pixels, pixels.mean((2, 3)).argmax(1))


def rate(epoch: int, batch: int, batches: int, size: int) -> float:
    """The learning rate of a step: warmed up from that of one rank to that of all ranks."""
    share = 1.0
    if epoch < WARM_UP:
        share = ((epoch + (batch + 1) / batches) * (size - 1) / WARM_UP + 1) / size
    return BASE_LR * size * PASSES * share


class Metric:
    def __init__(self, name: str) -> None:
        self.name = name
        self.sum, self.count = torch.tensor(0.0), 0

    def update(self, value: torch.Tensor) -> None:
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.count += 1

    @property
    def average(self) -> float:
        return (self.sum / self.count).item()


def main(folder: str, epochs: str) -> None:
    torch.set_default_dtype(torch.float64)
    hvd.init()
    torch.manual_seed(hvd.rank())
    begun = max((n for n in range(1, 9) if (Path(folder) / f"{n}.pth.tar").exists()), default=0)
    begun = hvd.broadcast(torch.tensor(begun), root_rank=0, name="resume_from_epoch").item()
    train, held_out = images(44, 1), images(16, 2)
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, batch_size=BATCH * PASSES, sampler=sampler)
    held_sampler = DistributedSampler(held_out, num_replicas=hvd.size(), rank=hvd.rank())
    held_loader = DataLoader(held_out, batch_size=BATCH, sampler=held_sampler)
    model = resnet()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=BASE_LR * PASSES * hvd.size(), momentum=0.9, weight_decay=5e-5
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=PASSES
    )
    if begun > 0 and hvd.rank() == 0:
        checkpoint = torch.load(Path(folder) / f"{begun}.pth.tar", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    figures = []
    for epoch in range(begun, int(epochs)):
        model.train()
        sampler.set_epoch(epoch)
        train_loss, held_loss = Metric("train_loss"), Metric("held_loss")
        for number, (data, target) in enumerate(loader):
            for group in optimizer.param_groups:
                group["lr"] = rate(epoch, number, len(loader), hvd.size())
            optimizer.zero_grad()
            # The last step has one micro-batch instead of two.
            for first in range(0, len(data), BATCH):
                part = slice(first, first + BATCH)
                loss = functional.cross_entropy(model(data[part]), target[part])
                train_loss.update(loss)
                (loss / math.ceil(len(data) / BATCH)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for data, target in held_loader:
                held_loss.update(functional.cross_entropy(model(data), target))
        figures.append([train_loss.average, held_loss.average])
        if hvd.rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(folder) / f"{epoch + 1}.pth.tar")
    if hvd.rank() == 0:
        (Path(folder) / f"figures-{begun}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
