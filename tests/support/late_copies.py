"""Copies between a device and the host that are done as late as possible."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from bigtrain.tensors.transfer import HostCopies, WaitFn


class LateCopies(HostCopies):
    """Delays each copy until it is waited for, then does all copies up to it in order."""

    is_asynchronous = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.asked: list[tuple[Tensor, Tensor]] = []
        self.done = 0
        self.most_under_way = 0
        self._lock = threading.Lock()

    def copy(self, target: Tensor, source: Tensor, after: Any = None) -> None:
        del after
        with self._lock:
            self.asked.append((target, source))
            self.most_under_way = max(self.most_under_way, len(self.asked) - self.done)

    def _until(self, number: int) -> None:
        with self._lock:
            for target, source in self.asked[self.done : number]:
                target.detach().copy_(source)
            self.done = max(self.done, number)

    def host_wait(self) -> WaitFn:
        number = len(self.asked)
        return lambda: self._until(number)

    device_wait = host_wait
