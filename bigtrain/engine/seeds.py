"""Seed the random number generators of a rank, and select deterministic kernels."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from bigtrain import devices
from bigtrain.checkpoint.random_state import set_random_state
from bigtrain.checkpoint.together import streams_of
from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.job.schema import TrainConfig
from bigtrain.models.compiled import programs_for_every_size
from bigtrain.ranks.context import RunContext

_CUBLAS_VARIABLE, _CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def _check_products(device: torch.device) -> None:
    """Check that products on a GPU are deterministic, by computing one.

    torch reads cuBLAS's variable at the first product of a process and never again.

    Raises:
        ConfigError: this process computed a product before the variable was set, or the variable
            has a value with which products are not deterministic.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # noqa: FBT003 - torch's own
    try:
        devices.multiply(device)
    except RuntimeError as error:
        if _CUBLAS_VARIABLE not in str(error):
            raise
        raise ConfigError(
            "train.deterministic=true: this process computed a product on the GPU before "
            f"{_CUBLAS_VARIABLE} had a value with which products are deterministic, and torch "
            f"reads it only once. Start it with {_CUBLAS_VARIABLE}={_CUBLAS_WORKSPACE}, or prepare "
            "before the first product."
        ) from None
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


@contextmanager
def kernels_as_asked(train: TrainConfig, device: torch.device) -> Iterator[None]:
    """Apply `train.deterministic`, `train.matmul` and `train.compile` in a `with` block.

    With `train.deterministic` torch raises an error at a kernel that is not deterministic, and
    names it. On a CPU `train.matmul` has no effect.

    Args:
        train: the job's section `train`.
        device: the device of this rank.

    Raises:
        ConfigError: `train.deterministic` is set, and it is too late in this process to make
            products on the GPU deterministic.
    """
    if train.deterministic and device.type == "cuda":
        os.environ.setdefault(_CUBLAS_VARIABLE, _CUBLAS_WORKSPACE)
        _check_products(device)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    precision, in_tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.use_deterministic_algorithms(train.deterministic or was_deterministic)
    if is_accelerator(device):
        torch.set_float32_matmul_precision(train.matmul)
        torch.backends.cudnn.allow_tf32 = train.matmul != "highest"  # True by default
    try:
        with programs_for_every_size() if train.compile == "blocks" else nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        if is_accelerator(device):
            torch.set_float32_matmul_precision(precision)
            torch.backends.cudnn.allow_tf32 = in_tf32


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch for a rank.

    Initial weights and the order of the data do not depend on these random numbers.

    Args:
        seed: the seed of the run.
        rank: the number of the random stream; see `stream_of`.
    """
    mixed = (seed * 1_000_003 + rank) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def stream_of(context: RunContext) -> int:
    """Return the number of a rank's random stream.

    Ranks with slices of the same layers share a stream.
    """
    return streams_of(context)[context.rank]


def continue_streams(meta: Mapping[str, Any], context: RunContext, steps_done: int) -> None:
    """Set the random state of this rank to that of a checkpoint.

    The rank is seeded anew if the checkpoint has no state for this rank, or if other ranks shared a
    random stream when the checkpoint was saved; see `stream_of`. The new seed is the seed of the
    run plus the number of steps.

    Args:
        meta: the metadata of the checkpoint; the key `random` has the states of its ranks.
        context: this rank's context.
        steps_done: the number of steps that the run has taken.
    """
    states = meta["random"]
    as_then = meta.get("streams", [*range(len(states))]) == streams_of(context)
    if as_then and states[context.rank] is not None:
        set_random_state(states[context.rank])
    else:  # the saved run had another number of ranks or tp size, or had lost this rank
        seed_everything(context.seed + steps_done, stream_of(context))
