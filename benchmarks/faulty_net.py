"""A net, its data, and system calls that end the process: copied for benchmarks/faults.py.

The calls that write checkpoints are counted. Before the call that `FAULT_CALL` names (RANK:NUMBER)
the process of that rank is killed, before the first restart only.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from bigtrain.data import Data
from bigtrain.losses.tasks import ClassificationTask

_FOLDER = Path(os.environ["FAULT_FOLDER"])
_RANK = os.environ.get("RANK", "0")
_LIFE = os.environ.get("BIGTRAIN_LAUNCH", "/0").rpartition("/")[2]
_CALLS = ("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
_lock = threading.Lock()
_made = [0]


def _counted(call: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*arguments: Any, **named: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        files: list[str] = []
        while frame is not None and len(files) < 8:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        if any("/bigtrain/checkpoint/" in file for file in files):
            with _lock:
                _count()
        return call(*arguments, **named)

    return counting


def _count() -> None:
    _made[0] += 1
    if f"{_RANK}:{_made[0]}" == os.environ.get("FAULT_CALL") and _LIFE == "0":
        latest = _FOLDER / "runs" / "r" / "checkpoints" / "latest"
        name = latest.read_bytes() if latest.exists() else b""
        (_FOLDER / "fault").write_bytes(name or b"none")
        os.kill(os.getpid(), signal.SIGKILL)
    (_FOLDER / f"calls-{_RANK}").write_text(str(_made[0]))


for name in _CALLS:
    setattr(os, name, _counted(getattr(os, name)))
(_FOLDER / f"pid-{_RANK}-{_LIFE}").write_text(str(os.getpid()))


def points() -> Data:
    """Return samples of 8 numbers in 4 classes."""
    drawn = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(64, 8, generator=drawn), torch.arange(64) % 4
    return Data(torch.utils.data.TensorDataset(inputs, targets), None, ClassificationTask(4))


class Net(nn.Sequential):
    """Two layers with dropout, and a head for the classes."""

    def __init__(self) -> None:
        first, second = nn.Linear(8, 24), nn.Linear(24, 24)
        super().__init__(first, nn.GELU(), nn.Dropout(0.1), second, nn.GELU(), nn.Linear(24, 4))
