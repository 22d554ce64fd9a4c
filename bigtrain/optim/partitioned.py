"""An optimizer on pieces of the parameters: sharded over replicas, in fp32, or kept elsewhere.

Each replica updates its own contiguous share and passes it on (optimizer state sharded over the
ranks: ZeRO stage 1, Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1). The same pieces keep
the one fp32 copy of parameters that are computed with in bf16, and let the state live on the
host or on disk between the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.optim.partition import Cut, chunk_elements, cut_evenly, stretches
from bigtrain.optim.state_store import Home, Kept
from bigtrain.optim.update import MakeOptimizer, counts_on_device, is_elementwise, tensors_of
from bigtrain.tensors.dtensors import flat, is_dense, like_parts, local, part_of, whole
from bigtrain.tensors.source import TensorSource

ELEMENTWISE = {
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "LeanAdamW"),
}
"""Optimizers that treat each element by itself, so that any cut gives the same numbers."""


@dataclass
class Piece:
    """A cut on its owner."""

    cut: Cut
    shard: nn.Parameter
    """What the optimizer updates: the parameter's own elements, or a copy of them."""
    copied: bool
    shape: torch.Size
    """Of the shard while it is in memory."""
    kept: dict[str, Kept] = field(default_factory=dict)
    """What is put away: slots of the state by their keys, the shard's own values by VALUE."""


VALUE = ""


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
        for parameter in parameters.values():  # a stretch of one with gaps is no view of it
            if not is_dense(local(parameter)):
                parameter.data = parameter.data.contiguous()
        splits = type(make_optimizer([nn.Parameter(torch.zeros(1))])).__name__ in ELEMENTWISE
        chunked = self._home.moves or self._home.chunked or bool(low)
        sizes = {name: local(p).numel() for name, p in parameters.items()}
        most = chunk_elements(sum(sizes.values()), self._replicas.size) if chunked else None
        ranks, rank = self._replicas.size, self._replicas.rank
        self._cuts = [Cut(*cut) for cut in cut_evenly(sizes, ranks, splits, most)]
        self._whole_shape = not splits
        self._pieces: dict[Cut, Piece] = {}
        mine = {
            name: [c for c in self._cuts if c.name == name and c.owner == rank] for name in sizes
        }
        self._home.reserve(
            sum(self._bytes(cuts) for cuts in mine.values()),
            sum(self._bytes(cuts) for name, cuts in mine.items() if self._copies(name)),
            make_optimizer,
        )
        for name, cuts in mine.items():
            self._settle(name, cuts)
        self._chunks = _chunks(list(self._pieces.values()), most)
        # A rank without a piece (fewer elements than ranks) still has an optimizer to set rates on.
        shards = [piece.shard for piece in self._pieces.values()]
        self.optimizer = make_optimizer(shards or [nn.Parameter(torch.zeros(0))])

    def _copies(self, name: str) -> bool:
        return self._home.moves or name in self._low

    def _bytes(self, cuts: Iterable[Cut]) -> int:
        return sum((c.stop - c.start) * self._parameters[c.name].element_size() for c in cuts)

    def _settle(self, name: str, cuts: Sequence[Cut]) -> None:
        """Make the pieces of a parameter; the fp32 values first, then what is computed with."""
        copied = self._copies(name)
        for cut in cuts:
            value = self._target(cut)
            value = self._home.settle(value.clone()) if copied else value
            piece = Piece(cut, nn.Parameter(value), copied, value.shape)
            self._pieces[cut] = piece
            if copied:
                self._put_value(piece, value)
        if name in self._low:
            parameter = self._parameters[name]
            parameter.data = parameter.data.to(torch.bfloat16)

    def _target(self, cut: Cut) -> Tensor:
        """The parameter's elements, as a view."""
        held = local(self._parameters[cut.name]).detach()
        return held if self._whole_shape else flat(held)[cut.start : cut.stop]

    def step(self) -> None:
        """See `Update.step`."""
        for chunk, gradients in self._with_gradients():
            present = [(p, g) for p, g in zip(chunk, gradients, strict=True) if g is not None]
            if not present:
                continue
            self._home.expect(kept for piece, _ in present for kept in piece.kept.values())
            for piece, gradient in present:
                self._fetch(piece)
                piece.shard.grad = gradient()
            self.optimizer.step()
            for piece, _ in present:
                piece.shard.grad = None
                if piece.copied:
                    self._home.give_back(self._target(piece.cut), piece.shard.detach())
                self._put(piece)
        self._home.rest()
        self._spread()

    def _with_gradients(
        self,
    ) -> Iterator[tuple[list[Piece], list[Callable[[], Tensor] | None]]]:
        """Each chunk with its gradients; those of the next one are on their way meanwhile."""
        if not self._home.moves:  # nothing is under way: converted when their turn comes
            for chunk in self._chunks:
                yield chunk, [self._gradient(piece) for piece in chunk]
            return
        coming = [self._gradient(piece) for piece in self._chunks[0]] if self._chunks else []
        for number, chunk in enumerate(self._chunks):
            here = coming
            following = self._chunks[number + 1] if number + 1 < len(self._chunks) else []
            coming = [self._gradient(piece) for piece in following]
            yield chunk, here

    def _gradient(self, piece: Piece) -> Callable[[], Tensor] | None:
        """The piece's share of the gradient: a view where it need not be converted or moved."""
        parameter = self._parameters[piece.cut.name]
        if parameter.grad is None:
            return None
        gradient, held = local(parameter.grad).detach(), local(parameter)
        if not self._whole_shape:
            if gradient.stride() != held.stride():
                gradient = torch.empty_like(held).copy_(gradient)
            gradient = flat(gradient)[piece.cut.start : piece.cut.stop]
        return self._home.bring(gradient, piece.shard)

    def _fetch(self, piece: Piece) -> None:
        """Bring what is put away of a piece back into memory."""
        slots = self.optimizer.state[piece.shard] if piece.kept.keys() - {VALUE} else {}
        for key, kept in piece.kept.items():
            if key == VALUE:
                piece.shard.data = self._home.fetch(kept)
            else:
                slots[key] = self._home.fetch(kept)

    def _put(self, piece: Piece) -> None:
        """Put a piece away after its update."""
        slots = self.optimizer.state[piece.shard]
        for key in slots:
            self._put_slot(piece, slots, key)
        if VALUE in piece.kept:
            self._put_value(piece, piece.shard.detach())

    def _put_slot(self, piece: Piece, slots: dict[Any, Any], key: str) -> None:
        value = slots[key]
        if isinstance(value, Tensor) and value.numel() > 1:  # step counts are read all the time
            kept = self._home.keep(value, piece.kept.get(key))
            if kept is not None:
                slots[key] = piece.kept[key] = kept

    def _put_value(self, piece: Piece, value: Tensor) -> None:
        kept = self._home.keep(value, piece.kept.get(VALUE))
        if kept is not None:
            piece.kept[VALUE] = kept
            piece.shard.data = value.new_empty(0)

    def _spread(self) -> None:
        """Let every replica have every piece: broadcasts in place, no second copy."""
        under_way = []
        for cut in stretches(self._cuts):
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
                if isinstance(value, Tensor | Kept):
                    sliced = value.shape == piece.shape and len(value.shape) > 0
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
            return self._read(self.optimizer.state[piece.shard][key])

        if shape is None:
            size = tuple(self._parameters[name].shape)
            return TensorSource(dtype, size, lambda: self._assemble(name, dtype, values))
        return TensorSource(dtype, shape, lambda: self._scalar(name, dtype, shape, values))

    def _read(self, value: Tensor | Kept) -> Tensor:
        return self._home.fetch(value) if isinstance(value, Kept) else value

    def _assemble(self, name: str, dtype: torch.dtype, values: Callable[[Piece], Tensor]) -> Tensor:
        parameter = self._parameters[name]
        result = torch.empty_like(local(parameter).detach(), dtype=dtype)
        elements = flat(result)
        for cut in self._of(name):
            stretch = elements[cut.start : cut.stop]
            if cut in self._pieces:
                value = values(self._pieces[cut]).detach()
                if value.shape == result.shape:  # laid out in memory as it may be
                    result.copy_(value)
                else:
                    stretch.copy_(flat(value))
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

        def value(piece: Piece) -> Tensor:
            return self._read(piece.kept.get(VALUE, piece.shard))

        def source(name: str) -> TensorSource:
            shape, dtype = tuple(self._parameters[name].shape), torch.float32
            return TensorSource(dtype, shape, lambda: self._assemble(name, dtype, value))

        return {name: source(name) for name in self._parameters if name in self._low}

    def load_state(self, name: str, key: str, value: Tensor) -> None:
        """See `Update.load_state`."""
        pieces = [self._pieces[cut] for cut in self._of(name) if cut in self._pieces]
        if not pieces:
            return
        sliced = is_elementwise(key, value, self._parameters[name].shape)
        elements = self._elements(name, value) if sliced else None
        for piece in pieces:
            slots = self.optimizer.state[piece.shard]
            if elements is not None:
                slots[key] = self._part(piece, elements)
            else:
                device = piece.shard.device if counts_on_device(self.optimizer) else value.device
                slots[key] = value.clone().to(device)
            self._put_slot(piece, slots, key)

    def load_master(self, name: str, value: Tensor) -> None:
        """See `Update.load_master`."""
        pieces = [self._pieces[cut] for cut in self._of(name) if cut in self._pieces]
        copied = [piece for piece in pieces if piece.copied]
        if not copied:
            return
        elements = self._elements(name, value)
        for piece in copied:
            part = self._part(piece, elements)
            if VALUE in piece.kept:
                self._put_value(piece, part.to(piece.kept[VALUE].dtype))
            else:
                piece.shard.data.copy_(part)

    def _elements(self, name: str, value: Tensor) -> Tensor:
        """What this rank holds of a whole tensor, in the order of the cuts."""
        parameter = self._parameters[name]
        held = torch.empty_like(local(parameter).detach(), dtype=value.dtype)
        return flat(held.copy_(part_of(value, parameter)))

    def _part(self, piece: Piece, elements: Tensor) -> Tensor:
        """A piece's own copy of its elements, in the shape of its shard."""
        part = elements[piece.cut.start : piece.cut.stop]
        if not self._whole_shape:
            return part.to(piece.shard.device, copy=True)
        like = local(self._parameters[piece.cut.name])
        shaped = torch.empty_like(like, dtype=part.dtype, device=piece.shard.device)
        flat(shaped).copy_(part)
        return shaped

    def close(self) -> None:
        """See `Update.close`."""
        self._home.close()


def _chunks(pieces: Sequence[Piece], most: int | None) -> list[list[Piece]]:
    if most is None:
        return [list(pieces)] if pieces else []
    chunks: list[list[Piece]] = []
    filled = 0
    for piece in pieces:
        size = piece.shape.numel()
        if not chunks or filled + size > most:
            chunks.append([])
            filled = 0
        chunks[-1].append(piece)
        filled += size
    return chunks
