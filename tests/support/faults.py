"""A data source and a model for runs in which one rank fails: `data.name=support.faults:points`.

Arguments of the source: `data.args.fault=sleep|raise|stop|kill|nan` is the failure,
`data.args.rank` the rank that fails, and `data.args.at` the number of the sample that this rank
reads as it fails.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from bigtrain.data.source import Data
from bigtrain.losses.tasks import ClassificationTask


class Points(Dataset[Any]):
    """Points of 8 numbers; read number `at` of this process fails."""

    def __init__(self, fault: str, at: int) -> None:
        self.fault, self.at, self.reads = fault, at, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        if self.reads == self.at:
            go_wrong(self.fault)
            if self.fault == "nan":
                return torch.full((8,), torch.nan), index % 4
        return torch.full((8,), index / 64), index % 4


def go_wrong(fault: str) -> None:
    """Sleep, raise, stop or kill this process, as `fault` says."""
    if fault == "sleep":
        time.sleep(60)
    if fault == "raise":
        raise ValueError("this sample is broken")
    if fault in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)


def points(fault: str = "none", rank: int = 1, at: int = 20) -> Data:
    """The data source: in rank `rank`, read number `at` fails with `fault`."""
    fault_here = fault if os.environ.get("RANK", "0") == str(rank) else "none"
    return Data(Points(fault_here, at), None, ClassificationTask(4))


class Block(nn.Module):
    """A linear layer and its activation, which may fail in one rank."""

    def __init__(self, width: int, fault: str = "none", at: int = 3) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(width, width), nn.GELU()
        self.fault, self.at, self.passes = fault, at, 0

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor) and x.device.type != "meta":
            self.passes += 1
            if self.passes == self.at:
                go_wrong(self.fault)
        return self.act(self.linear(x))


class Net(nn.Module):
    """Four blocks between two layers, one of which may fail in one rank."""

    def __init__(self, fault: str = "none", rank: int = 1, block: int = 2, width: int = 32) -> None:
        super().__init__()
        fault_here = fault if os.environ.get("RANK", "0") == str(rank) else "none"
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            Block(width, fault_here if n == block else "none") for n in range(4)
        )
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)
