"""Random numbers: a stream for each rank, and only kernels that give the same bits each time."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from bigtrain.checkpoint.random_state import set_random_state
from bigtrain.checkpoint.together import streams_of
from bigtrain.devices import is_accelerator
from bigtrain.job.schema import TrainConfig
from bigtrain.models.compiled import programs_for_every_size
from bigtrain.ranks.context import RunContext


@contextmanager
def kernels_as_asked(train: TrainConfig, device: torch.device) -> Iterator[None]:
    """Kernels that give the same bits each time, where `deterministic`, and as exact as `matmul`.

    torch names the kernels that cannot give the same bits. On a CPU `matmul` changes nothing.
    """
    if train.deterministic and device.type == "cuda":  # cuBLAS asks for it before its first call
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    precision, in_tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.use_deterministic_algorithms(train.deterministic or was_deterministic)
    if is_accelerator(device):
        torch.set_float32_matmul_precision(train.matmul)
        torch.backends.cudnn.allow_tf32 = train.matmul != "highest"  # torch's own is True
    try:
        with programs_for_every_size() if train.compile == "blocks" else nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        if is_accelerator(device):
            torch.set_float32_matmul_precision(precision)
            torch.backends.cudnn.allow_tf32 = in_tf32


def seed_everything(seed: int, rank: int) -> None:
    """Dropout and the like differ between ranks; weights and data order do not come from here."""
    mixed = (seed * 1_000_003 + rank) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def stream_of(context: RunContext) -> int:
    """Whose stream a rank draws from: those that hold slices of the same layers draw alike."""
    return streams_of(context)[context.rank]


def continue_streams(meta: Mapping[str, Any], context: RunContext, steps_done: int) -> None:
    """Draw on where a checkpoint's ranks stopped.

    Args:
        meta: of the checkpoint: `random` has the states of its ranks.
        context: this rank.
        steps_done: of the run.
    """
    states = meta["random"]
    as_then = meta.get("streams", [*range(len(states))]) == streams_of(context)
    if as_then and states[context.rank] is not None:
        set_random_state(states[context.rank])
    else:  # other ranks, or one that was lost: fresh streams, a function of where the run stands
        seed_everything(context.seed + steps_done, stream_of(context))
