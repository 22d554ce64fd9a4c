"""Faults that made runs with adapters silently wrong in public projects in 2026."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.checkpoint.read import FileTensor
from bigtrain.core import state
from bigtrain.hub import lora
from bigtrain.tensors.shards import Extent, StateTensor, local_tensor, whole_extents

FAULTS = ("slice of rank 0", "not averaged", "zeros in B", "first slice reloaded")
FAULTS_IN_4_BITS = ("other codes on rank 1", "first slice on each rank")
"""Faults of a base in 4 bits that a run would not notice either."""


@contextmanager
def put_in(fault: str | None, rank: int, model: nn.Module) -> Iterator[None]:
    """Run the `with` block with one of `FAULTS`; without any if it is None."""
    if fault in (None, "first slice on each rank"):
        yield
    elif fault == "other codes on rank 1":
        made = lora.quantized
        with mock.patch.object(lora, "quantized", lambda *args: _other_codes(made(*args), rank)):
            yield
    elif fault == "not averaged":  # "N ranks train N adapters": nothing reduces their gradients
        names = [name for name, _ in model.named_parameters() if "lora_" in name]
        model._ddp_params_and_buffers_to_ignore = names[1:]  # type: ignore[assignment]
        yield
    elif fault == "first slice reloaded":
        with mock.patch.object(FileTensor, "read", _first_slice):
            yield
    else:
        change = _own_slice if fault == "slice of rank 0" else _zeros
        with mock.patch.object(state.StateTensor, "of", _changed(change, rank)):
            yield


def spoil_shards(fault: str | None, model: nn.Module) -> None:
    """Give every rank the first rank's slice of each weight in 4 bits, if that is the fault."""
    if fault != "first slice on each rank":
        return
    for parameter in model.parameters():
        if parameter.dtype == torch.uint8:
            dist.broadcast(local_tensor(parameter.detach()), src=0)


def _other_codes(carrier: Tensor, rank: int) -> Tensor:
    """The bytes of a weight; on rank 1 one code of each hundred is another."""
    if rank == 1:
        carrier[-carrier.numel() // 2 :: 50] ^= 1
    return carrier


def _changed(change: Any, rank: int) -> Any:
    """`StateTensor.of` whose result is changed for slices."""
    made = StateTensor.of

    def of(tensor: Tensor, dtype: torch.dtype | None = None) -> StateTensor:
        whole = made(tensor, dtype)
        return change(whole, rank) if is_slice(whole) else whole

    return of


def is_slice(tensor: StateTensor) -> bool:
    held = sum(extent.size for extent in tensor.extents)
    return 0 < held < torch.Size(tensor.shape).numel()


def _own_slice(tensor: StateTensor, rank: int) -> StateTensor:
    """A save that does not gather: the whole tensor is taken to be the slice of rank 0."""
    values = tensor.values()
    shape = (len(values) // tensor.shape[-1], tensor.shape[-1])
    return replace(tensor, shape=shape, extents=whole_extents(shape) if rank == 0 else ())


def _zeros(tensor: StateTensor, rank: int) -> StateTensor:
    """A gather that gets the slice of rank 0 only, and zeros of all others."""
    return tensor if rank == 0 else replace(tensor, values=lambda: tensor.values() * 0)


_read = FileTensor.read


def _first_slice(tensor: FileTensor, extents: Sequence[Extent]) -> Tensor:
    """A loader that gives every rank the first slice."""
    first = min(extent.start for extent in extents)
    return _read(tensor, [replace(extent, start=extent.start - first) for extent in extents])
