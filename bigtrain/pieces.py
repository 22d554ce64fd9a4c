"""An optimizer on pieces of the parameters: sharded over replicas, in fp32, or kept elsewhere.

Each replica updates its own contiguous share and passes it on (optimizer state sharded over the
ranks: ZeRO stage 1, Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1). The same pieces keep
the one fp32 copy of parameters that are computed with in bf16, and let the state live on the
host or on disk between the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.checkpoint import TensorSource
from bigtrain.shards import flat, like_parts, local, part_of, whole
from bigtrain.update import MakeOptimizer, counts_on_device, tensors_of

ELEMENTWISE = {
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
}
"""Optimizers of torch that treat each element by itself, so that any cut gives the same numbers."""


@dataclass(frozen=True)
class Cut:
    """A run of a parameter's elements that one rank updates."""

    name: str
    owner: int
    """Place of the rank on the dp axis."""
    start: int
    stop: int
    """Elements [start, stop) of what each rank holds of the parameter, in memory order."""


@dataclass
class Piece:
    """A cut on its owner."""

    cut: Cut
    shard: nn.Parameter
    """What the optimizer updates: the parameter's own elements, or a copy of them."""
    copied: bool


@dataclass(frozen=True)
class Replicas:
    """The ranks that share the updates of the same parameters."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def send(self, tensor: Tensor, owner: int) -> dist.Work | None:
        """Begin to copy the owner's tensor to all."""
        if self.group is None or self.size == 1:
            return None
        source = dist.get_global_rank(self.group, owner)
        return dist.broadcast(tensor, src=source, group=self.group, async_op=True)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's object, on every rank."""
        if self.group is None or self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone


class Home:
    """Where fp32 copies and optimizer state live between the steps: on the parameters' device."""

    moves = False
    """Whether the optimizer updates copies that are somewhere else than the parameters."""
    chunked = False
    """Whether to update a chunk at a time, so that little of the state is in memory at once."""

    def settle(self, value: Tensor) -> Tensor:
        """Bring a new fp32 copy to where it lives."""
        return value

    def leave(self, state: dict[str, Any]) -> None:
        """Put a piece's state away after its update; replace what has moved in the dict."""

    def close(self) -> None:
        """Let go of files."""


class PiecewiseUpdate:
    """The optimizer on pieces of the parameters, of which each belongs to one replica.

    The parameters, one after the other, are cut into as many stretches of equal length as there
    are replicas, wherever the cuts fall; an optimizer that needs whole tensors gets whole ones.
    In fp32 a piece is a view of the parameter and its gradient a view of the gradient, so nothing
    is held twice. Pieces that need a copy (fp32 of bf16, state on the host or on disk) are
    updated a chunk at a time, so that their fp32 gradients exist for one chunk only.

    Args:
        parameters: those that are trained, by their plain names.
        make_optimizer: called once, on this rank's pieces.
        replicas: who shares the parameters; None is this rank alone.
        home: where the state lives; None is where the parameters are.
        low: names of fp32 parameters that become bf16; the pieces keep their fp32 values.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        make_optimizer: MakeOptimizer,
        *,
        replicas: Replicas | None = None,
        home: Home | None = None,
        low: Collection[str] = (),
    ) -> None:
        self._parameters = parameters
        self._replicas, self._home = replicas or Replicas(), home or Home()
        self._low = frozenset(low)
        splits = type(make_optimizer([nn.Parameter(torch.zeros(1))])).__name__ in ELEMENTWISE
        chunked = self._home.moves or self._home.chunked or bool(low)
        sizes = {name: local(p).numel() for name, p in parameters.items()}
        most = chunk_elements(sum(sizes.values()), self._replicas.size) if chunked else None
        ranks, rank = self._replicas.size, self._replicas.rank
        self._cuts = [Cut(*cut) for cut in cut_evenly(sizes, ranks, splits, most)]
        self._whole_shape = not splits
        self._pieces: dict[Cut, Piece] = {}
        for name in parameters:
            self._settle(name, [c for c in self._cuts if c.name == name and c.owner == rank])
        self._chunks = _chunks(list(self._pieces.values()), most)
        # A rank without a piece (fewer elements than ranks) still has an optimizer to set rates on.
        shards = [piece.shard for piece in self._pieces.values()]
        self.optimizer = make_optimizer(shards or [nn.Parameter(torch.zeros(0))])

    def _settle(self, name: str, cuts: Sequence[Cut]) -> None:
        """Make the pieces of a parameter; the fp32 values first, then what is computed with."""
        copied = self._home.moves or name in self._low
        for cut in cuts:
            value = self._target(cut)
            value = self._home.settle(value.clone()) if copied else value
            self._pieces[cut] = Piece(cut, nn.Parameter(value), copied)
        if name in self._low:
            parameter = self._parameters[name]
            parameter.data = parameter.data.to(torch.bfloat16)

    def _target(self, cut: Cut) -> Tensor:
        """The parameter's elements, as a view."""
        held = local(self._parameters[cut.name]).detach()
        return held if self._whole_shape else flat(held)[cut.start : cut.stop]

    def step(self) -> None:
        """See `Update.step`."""
        for chunk in self._chunks:
            for piece in chunk:
                piece.shard.grad = self._gradient(piece)
            self.optimizer.step()
            for piece in chunk:
                if piece.shard.grad is None:
                    continue
                piece.shard.grad = None
                if piece.copied:
                    self._target(piece.cut).copy_(piece.shard.detach())
                self._home.leave(self.optimizer.state[piece.shard])
        self._spread()

    def _gradient(self, piece: Piece) -> Tensor | None:
        """The piece's share of the gradient: a view where it need not be converted or moved."""
        parameter = self._parameters[piece.cut.name]
        if parameter.grad is None:
            return None
        gradient, held = local(parameter.grad).detach(), local(parameter)
        if not self._whole_shape:
            if gradient.stride() != held.stride():
                gradient = torch.empty_like(held).copy_(gradient)
            gradient = flat(gradient)[piece.cut.start : piece.cut.stop]
        return gradient.to(piece.shard)

    def _spread(self) -> None:
        """Let every replica have every piece: broadcasts in place, no second copy."""
        under_way = []
        for cut in _stretches(self._cuts):
            held = flat(local(self._parameters[cut.name]).detach())
            under_way.append(self._replicas.send(held[cut.start : cut.stop], cut.owner))
        for work in under_way:
            if work is not None:
                work.wait()

    def held(self) -> Iterable[Tensor]:
        """See `Update.held`."""
        yield from tensors_of(self.optimizer)
        yield from (piece.shard for piece in self._pieces.values() if piece.copied)

    def state(self) -> dict[str, TensorSource]:
        """See `Update.state`."""
        mine: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...] | None]]] = {}
        for cut, piece in self._pieces.items():
            for key, value in self.optimizer.state.get(piece.shard, {}).items():
                if isinstance(value, Tensor):
                    sliced = value.shape == piece.shard.shape and value.dim() > 0
                    about = (value.dtype, None if sliced else tuple(value.shape))
                    mine.setdefault(cut.name, {})[key] = about
        keys: dict[str, dict[str, Any]] = {}
        for part in self._replicas.gather(mine):
            for name, slots in part.items():
                keys.setdefault(name, {}).update(slots)
        return {
            f"{name}.{key}": self._slot(name, key, *about)
            for name in self._parameters
            for key, about in sorted(keys.get(name, {}).items())
        }

    def _slot(
        self, name: str, key: str, dtype: torch.dtype, shape: tuple[int, ...] | None
    ) -> TensorSource:
        def values(piece: Piece) -> Tensor:
            found: Tensor = self.optimizer.state[piece.shard][key]
            return found

        if shape is None:
            size = tuple(self._parameters[name].shape)
            return TensorSource(dtype, size, lambda: self._assemble(name, dtype, values))
        return TensorSource(dtype, shape, lambda: self._scalar(name, dtype, shape, values))

    def _assemble(self, name: str, dtype: torch.dtype, values: Callable[[Piece], Tensor]) -> Tensor:
        parameter = self._parameters[name]
        result = torch.empty_like(local(parameter).detach(), dtype=dtype)
        elements = flat(result)
        for cut in self._of(name):
            stretch = elements[cut.start : cut.stop]
            if cut in self._pieces:
                stretch.copy_(flat(values(self._pieces[cut]).detach()))
            work = self._replicas.send(stretch, cut.owner)
            if work is not None:
                work.wait()
        return whole(like_parts(result, parameter))

    def _scalar(
        self,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        values: Callable[[Piece], Tensor],
    ) -> Tensor:
        first = self._of(name)[0]
        device = local(self._parameters[name]).device
        result = torch.zeros(shape, dtype=dtype, device=device)
        if first in self._pieces:
            result.copy_(values(self._pieces[first]))
        work = self._replicas.send(result, first.owner)
        if work is not None:
            work.wait()
        return result

    def _of(self, name: str) -> list[Cut]:
        return [cut for cut in self._cuts if cut.name == name]

    def masters(self) -> dict[str, TensorSource]:
        """See `Update.masters`."""

        def source(name: str) -> TensorSource:
            shape, dtype = tuple(self._parameters[name].shape), torch.float32
            return TensorSource(dtype, shape, lambda: self._assemble(name, dtype, _shard))

        return {name: source(name) for name in self._parameters if name in self._low}

    def load_state(self, name: str, key: str, value: Tensor) -> None:
        """See `Update.load_state`."""
        sliced = value.shape == self._parameters[name].shape and value.dim() > 0
        for cut, piece in self._pieces.items():
            if cut.name != name:
                continue
            slots = self.optimizer.state[piece.shard]
            if sliced:
                slots[key] = self._values(piece, value)
            else:
                device = piece.shard.device if counts_on_device(self.optimizer) else value.device
                slots[key] = value.clone().to(device)
            self._home.leave(slots)

    def load_master(self, name: str, value: Tensor) -> None:
        """See `Update.load_master`."""
        for cut, piece in self._pieces.items():
            if cut.name == name and piece.copied:
                piece.shard.data.copy_(self._values(piece, value))

    def _values(self, piece: Piece, value: Tensor) -> Tensor:
        """The elements of a whole tensor that a piece holds, in the shape of its shard."""
        parameter = self._parameters[piece.cut.name]
        held = torch.empty_like(local(parameter).detach(), dtype=value.dtype)
        held.copy_(part_of(value, parameter))
        elements = flat(held)[piece.cut.start : piece.cut.stop]
        return elements.view(piece.shard.shape).to(piece.shard.device, copy=True)

    def close(self) -> None:
        """See `Update.close`."""
        self._home.close()


def cut_evenly(
    sizes: Mapping[str, int], ranks: int, splits: bool, most: int | None = None
) -> list[tuple[str, int, int, int]]:
    """Give each rank an equal stretch of all parameters laid end to end.

    Args:
        sizes: elements of each parameter, in their order.
        ranks: how many share them.
        splits: whether a parameter may be cut; otherwise it goes whole to the rank that its
            middle falls to.
        most: elements of the largest piece; None is no limit.

    Returns:
        (name, rank, start, stop) of each piece, in order.
    """
    total = sum(sizes.values())
    # Cuts at multiples of 64 elements keep the vector kernels aligned.
    bounds = [round(total * rank / ranks / 64) * 64 for rank in range(ranks)] + [total]
    pieces = []
    offset = 0
    for name, size in sizes.items():
        if not splits:
            middle = offset + size // 2
            owner = max(r for r in range(ranks) if bounds[r] <= middle)
            pieces.append((name, owner, 0, size))
        else:
            for rank in range(ranks):
                start = max(offset, bounds[rank]) - offset
                stop = min(offset + size, bounds[rank + 1]) - offset
                step = most or max(1, stop - start)
                pieces += [
                    (name, rank, at, min(at + step, stop)) for at in range(start, stop, step)
                ]
        offset += size
    return pieces


def chunk_elements(elements: int, ranks: int) -> int:
    """Elements that are updated at a time where copies are needed: a 32nd of a rank's share."""
    return max(1 << 18, math.ceil(elements / ranks / 32 / 64) * 64)


def _chunks(pieces: Sequence[Piece], most: int | None) -> list[list[Piece]]:
    if most is None:
        return [list(pieces)] if pieces else []
    chunks: list[list[Piece]] = []
    filled = most
    for piece in pieces:
        size = piece.shard.numel()
        if filled + size > most:
            chunks.append([])
            filled = 0
        chunks[-1].append(piece)
        filled += size
    return chunks


def _stretches(cuts: Iterable[Cut]) -> list[Cut]:
    """Neighbouring cuts of one owner as one."""
    merged: list[Cut] = []
    for cut in cuts:
        if merged and (merged[-1].name, merged[-1].owner) == (cut.name, cut.owner):
            merged[-1] = replace(merged[-1], stop=cut.stop)
        else:
            merged.append(cut)
    return merged


def _shard(piece: Piece) -> Tensor:
    return piece.shard
