"""Random numbers: a stream for each rank, and only kernels that give the same bits each time."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Only kernels that give the same bits each time; torch names those that cannot."""
    if device.type == "cuda":  # cuBLAS asks for this before its first call
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def seed_everything(seed: int, rank: int) -> None:
    """Dropout and the like differ between ranks; weights and data order do not come from here."""
    mixed = (seed * 1_000_003 + rank) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
