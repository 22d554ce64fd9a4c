"""Random streams by rank, and deterministic kernels."""

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
    """Set deterministic kernels and the precision of matrix products, as the job's keys say.

    With `train.deterministic` torch refuses kernels that are not deterministic, by name. On a CPU
    `train.matmul` has no effect.
    """
    if train.deterministic and device.type == "cuda":  # cuBLAS reads it at its first call
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
    """Seed Python, NumPy and torch for a rank. Initial weights and data order have other seeds."""
    mixed = (seed * 1_000_003 + rank) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def stream_of(context: RunContext) -> int:
    """The number of a rank's random stream; ranks with slices of the same layers share one."""
    return streams_of(context)[context.rank]


def continue_streams(meta: Mapping[str, Any], context: RunContext, steps_done: int) -> None:
    """Continue the random streams of a checkpoint.

    Args:
        meta: the metadata of the checkpoint; `random` holds the states of its ranks.
        context: this rank.
        steps_done: steps of the run so far.
    """
    states = meta["random"]
    as_then = meta.get("streams", [*range(len(states))]) == streams_of(context)
    if as_then and states[context.rank] is not None:
        set_random_state(states[context.rank])
    else:  # another number of ranks, or a lost one: fresh streams, seeded by the step
        seed_everything(context.seed + steps_done, stream_of(context))
