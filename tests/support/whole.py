"""Assemble whole tensors from the parts on all ranks, element by element: slow and simple."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bigtrain.checkpoint.read import Checkpoint
from bigtrain.tensors.shards import Extent, StateTensor


def elements(extents: Sequence[Extent]) -> list[int]:
    """The indices of all elements in these extents of a flat tensor."""
    return [
        extent.start + run * extent.pitch + position
        for extent in extents
        for run in range(extent.count)
        for position in range(extent.length)
    ]


def index_of(extents: Sequence[Extent]) -> Tensor:
    """The flat indices of the elements of extents, as a tensor."""
    runs = [
        (extent.start + torch.arange(extent.count)[:, None] * extent.pitch)
        + torch.arange(extent.length)[None, :]
        for extent in extents
    ]
    return torch.cat([run.reshape(-1) for run in runs]) if runs else torch.empty(0).long()


def whole_tensors(state: Mapping[str, StateTensor]) -> dict[str, Tensor]:
    """Every tensor of which any rank has a part, whole, on every rank. Collective."""
    mine = {
        n: (t.dtype, t.shape, index_of(t.extents), t.values().detach().cpu().clone())
        for n, t in state.items()
    }
    parts = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
    tensors: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for part in reversed(parts):  # reversed, so that the first rank's values win
        for name, (dtype, shape, index, values) in part.items():
            assert values.dtype == dtype, name
            assert values.shape == index.shape, name
            size = math.prod(shape)
            tensors.setdefault(name, torch.zeros(size, dtype=dtype))[index] = values
            seen.setdefault(name, torch.zeros(size, dtype=torch.bool))[index] = True
            assert len(tensors[name]) == size, name
    shapes = {n: element[1] for part in parts for n, element in part.items()}
    for name, parts_found in seen.items():
        assert bool(parts_found.all()), f"{name}: not all elements are on some rank"
    order = dict.fromkeys(name for part in parts for name in part)
    return {name: tensors[name].view(shapes[name]) for name in order}


@dataclass(frozen=True)
class InMemory:
    """A tensor in memory with the interface of a saved one."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, extents: Sequence[Extent]) -> Tensor:
        return self.tensor.detach().cpu().reshape(-1)[index_of(extents)]


def as_saved(tensors: Mapping[str, Tensor]) -> dict[str, InMemory]:
    """Tensors in memory as if they were saved."""
    return {name: InMemory(tensor.detach().clone()) for name, tensor in tensors.items()}


def assert_same_tensors(left: str | Path, right: str | Path) -> None:
    """Assert that two checkpoints have the same tensors bit for bit, whichever ranks wrote them."""
    first, second = Checkpoint(Path(left)), Checkpoint(Path(right))
    assert sorted(first.names) == sorted(second.names)
    for name in first.names:
        mine, theirs = first.read(name), second.read(name)
        assert mine.dtype == theirs.dtype, name
        assert mine.shape == theirs.shape, name
        assert torch.equal(mine.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)), name
