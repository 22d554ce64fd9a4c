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

from bigtrain.optim.partition import Slice, chunk_elements, merge_slices, partition_evenly
from bigtrain.optim.state_store import StateStore, StoredTensor
from bigtrain.optim.update import MakeOptimizer, is_elementwise, optimizer_tensors, steps_on_device
from bigtrain.tensors.dtensors import (
    as_dtensor_like,
    flat_view,
    full_tensor,
    is_dense,
    local_part,
    local_tensor,
)
from bigtrain.tensors.source import TensorSource

ELEMENTWISE_OPTIMIZERS = {
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "LeanAdamW"),
}
"""Optimizers that treat each element by itself, so that any cut gives the same numbers."""


@dataclass
class OwnedSlice:
    """A cut on its owner."""

    slice: Slice
    shard: nn.Parameter
    """What the optimizer updates: the parameter's own elements, or a copy of them."""
    copied: bool
    shape: torch.Size
    """Of the shard while it is in memory."""
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    """What is put away: slots of the state by their keys, the shard's own values by VALUE."""


VALUE_KEY = ""


@dataclass(frozen=True)
class ReplicaGroup:
    """The ranks that share the updates of the same parameters."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def broadcast(self, tensor: Tensor, owner: int) -> dist.Work | None:
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


class PartitionedUpdate:
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
        replicas: ReplicaGroup | None = None,
        state_store: StateStore | None = None,
        low_names: Collection[str] = (),
    ) -> None:
        self._parameters = parameters
        self._replicas, self._state_store = replicas or ReplicaGroup(), state_store or StateStore()
        self._low = frozenset(low_names)
        for parameter in parameters.values():  # a stretch of one with gaps is no view of it
            if not is_dense(local_tensor(parameter)):
                parameter.data = parameter.data.contiguous()
        may_split = (
            type(make_optimizer([nn.Parameter(torch.zeros(1))])).__name__ in ELEMENTWISE_OPTIMIZERS
        )
        chunked = (
            self._state_store.updates_elsewhere or self._state_store.chunked or bool(low_names)
        )
        sizes = {name: local_tensor(p).numel() for name, p in parameters.items()}
        chunk_size = chunk_elements(sum(sizes.values()), self._replicas.size) if chunked else None
        ranks, rank = self._replicas.size, self._replicas.rank
        self._slices = [
            Slice(*cut) for cut in partition_evenly(sizes, ranks, may_split, chunk_size)
        ]
        self._whole_shape = not may_split
        self._owned: dict[Slice, OwnedSlice] = {}
        own_slices = {
            name: [c for c in self._slices if c.name == name and c.owner == rank] for name in sizes
        }
        self._state_store.ensure_space(
            sum(self._bytes(cuts) for cuts in own_slices.values()),
            [
                self._bytes([cut])
                for name, cuts in own_slices.items()
                for cut in cuts
                if self._copies(name)
            ],
            make_optimizer,
        )
        for name, cuts in own_slices.items():
            self._make_slices(name, cuts)
        self._chunks = _chunks(list(self._owned.values()), chunk_size)
        # A rank without a piece (fewer elements than ranks) still has an optimizer to set rates on.
        shards = [piece.shard for piece in self._owned.values()]
        self.optimizer = make_optimizer(shards or [nn.Parameter(torch.zeros(0))])

    def _copies(self, name: str) -> bool:
        return self._state_store.updates_elsewhere or name in self._low

    def _bytes(self, cuts: Iterable[Slice]) -> int:
        return sum((c.stop - c.start) * self._parameters[c.name].element_size() for c in cuts)

    def _make_slices(self, name: str, cuts: Sequence[Slice]) -> None:
        """Make the pieces of a parameter; the fp32 values first, then what is computed with."""
        copied = self._copies(name)
        for cut in cuts:
            value = self._target(cut)
            value = self._state_store.place(value.clone()) if copied else value
            piece = OwnedSlice(cut, nn.Parameter(value), copied, value.shape)
            self._owned[cut] = piece
            if copied:
                self._store_value(piece, value)
        if name in self._low:
            parameter = self._parameters[name]
            parameter.data = parameter.data.to(torch.bfloat16)

    def _target(self, cut: Slice) -> Tensor:
        """The parameter's elements, as a view."""
        held = local_tensor(self._parameters[cut.name]).detach()
        return held if self._whole_shape else flat_view(held)[cut.start : cut.stop]

    def step(self) -> None:
        """See `Update.step`."""
        for chunk, gradients in self._with_gradients():
            present = [(p, g) for p, g in zip(chunk, gradients, strict=True) if g is not None]
            if not present:
                continue
            self._state_store.prepare_chunk(
                stored for piece, _ in present for stored in piece.stored.values()
            )
            for piece, gradient in present:
                self._load_slice(piece)
                piece.shard.grad = gradient()
            self.optimizer.step()
            for piece, _ in present:
                piece.shard.grad = None
                if piece.copied:
                    self._state_store.copy_back(self._target(piece.slice), piece.shard.detach())
                self._store_slice(piece)
        self._state_store.finish_step()
        self._broadcast_slices()

    def _with_gradients(
        self,
    ) -> Iterator[tuple[list[OwnedSlice], list[Callable[[], Tensor] | None]]]:
        """Each chunk with its gradients; those of the next one are on their way meanwhile."""
        if (
            not self._state_store.updates_elsewhere
        ):  # nothing is under way: converted when their turn comes
            for chunk in self._chunks:
                yield chunk, [self._gradient(piece) for piece in chunk]
            return
        next_gradients = (
            [self._gradient(piece) for piece in self._chunks[0]] if self._chunks else []
        )
        for number, chunk in enumerate(self._chunks):
            gradients = next_gradients
            next_chunk = self._chunks[number + 1] if number + 1 < len(self._chunks) else []
            next_gradients = [self._gradient(piece) for piece in next_chunk]
            yield chunk, gradients

    def _gradient(self, piece: OwnedSlice) -> Callable[[], Tensor] | None:
        """The piece's share of the gradient: a view where it need not be converted or moved."""
        parameter = self._parameters[piece.slice.name]
        if parameter.grad is None:
            return None
        gradient, own_values = local_tensor(parameter.grad).detach(), local_tensor(parameter)
        if not self._whole_shape:
            if gradient.stride() != own_values.stride():
                gradient = torch.empty_like(own_values).copy_(gradient)
            gradient = flat_view(gradient)[piece.slice.start : piece.slice.stop]
        return self._state_store.begin_copy(gradient, piece.shard)

    def _load_slice(self, piece: OwnedSlice) -> None:
        """Bring what is put away of a piece back into memory."""
        slots = self.optimizer.state[piece.shard] if piece.stored.keys() - {VALUE_KEY} else {}
        for key, kept in piece.stored.items():
            if key == VALUE_KEY:
                piece.shard.data = self._state_store.load(kept)
            else:
                slots[key] = self._state_store.load(kept)

    def _store_slice(self, piece: OwnedSlice) -> None:
        """Put a piece away after its update."""
        slots = self.optimizer.state[piece.shard]
        for key in slots:
            self._store_slot(piece, slots, key)
        if VALUE_KEY in piece.stored:
            self._store_value(piece, piece.shard.detach())

    def _store_slot(self, piece: OwnedSlice, slots: dict[Any, Any], key: str) -> None:
        value = slots[key]
        if isinstance(value, Tensor) and value.numel() > 1:  # step counts are read all the time
            stored = self._state_store.store(value, piece.stored.get(key))
            if stored is not None:
                slots[key] = piece.stored[key] = stored

    def _store_value(self, piece: OwnedSlice, value: Tensor) -> None:
        stored = self._state_store.store(value, piece.stored.get(VALUE_KEY))
        if stored is not None:
            piece.stored[VALUE_KEY] = stored
            piece.shard.data = value.new_empty(0)

    def _broadcast_slices(self) -> None:
        """Let every replica have every piece: broadcasts in place, no second copy."""
        broadcasts = []
        for cut in merge_slices(self._slices):
            own_values = flat_view(local_tensor(self._parameters[cut.name]).detach())
            broadcasts.append(self._replicas.broadcast(own_values[cut.start : cut.stop], cut.owner))
        for work in broadcasts:
            if work is not None:
                work.wait()

    def resident_tensors(self) -> Iterable[Tensor]:
        """See `Update.resident_tensors`."""
        yield from optimizer_tensors(self.optimizer)
        yield from (piece.shard for piece in self._owned.values() if piece.copied)

    def state(self) -> dict[str, TensorSource]:
        """See `Update.state`."""
        own_slots: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...] | None]]] = {}
        for cut, piece in self._owned.items():
            for key, value in self.optimizer.state.get(piece.shard, {}).items():
                if isinstance(value, Tensor | StoredTensor):
                    sliced = value.shape == piece.shape and len(value.shape) > 0
                    description = (value.dtype, None if sliced else tuple(value.shape))
                    own_slots.setdefault(cut.name, {})[key] = description
        keys: dict[str, dict[str, Any]] = {}
        for part in self._replicas.gather(own_slots):
            for name, slots in part.items():
                keys.setdefault(name, {}).update(slots)
        return {
            f"{name}.{key}": self._slot(name, key, *description)
            for name in self._parameters
            for key, description in sorted(keys.get(name, {}).items())
        }

    def _slot(
        self, name: str, key: str, dtype: torch.dtype, shape: tuple[int, ...] | None
    ) -> TensorSource:
        def values(piece: OwnedSlice) -> Tensor:
            return self._read(self.optimizer.state[piece.shard][key])

        if shape is None:
            size = tuple(self._parameters[name].shape)
            return TensorSource(dtype, size, lambda: self._assemble(name, dtype, values))
        return TensorSource(dtype, shape, lambda: self._scalar(name, dtype, shape, values))

    def _read(self, value: Tensor | StoredTensor) -> Tensor:
        return self._state_store.load(value) if isinstance(value, StoredTensor) else value

    def _assemble(
        self, name: str, dtype: torch.dtype, values: Callable[[OwnedSlice], Tensor]
    ) -> Tensor:
        parameter = self._parameters[name]
        result = torch.empty_like(local_tensor(parameter).detach(), dtype=dtype)
        elements = flat_view(result)
        for cut in self._slices_of(name):
            section = elements[cut.start : cut.stop]
            if cut in self._owned:
                value = values(self._owned[cut]).detach()
                if value.shape == result.shape:  # laid out in memory as it may be
                    result.copy_(value)
                else:
                    section.copy_(flat_view(value))
            work = self._replicas.broadcast(section, cut.owner)
            if work is not None:
                work.wait()
        return full_tensor(as_dtensor_like(result, parameter))

    def _scalar(
        self,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        values: Callable[[OwnedSlice], Tensor],
    ) -> Tensor:
        first = self._slices_of(name)[0]
        device = local_tensor(self._parameters[name]).device
        result = torch.zeros(shape, dtype=dtype, device=device)
        if first in self._owned:
            result.copy_(values(self._owned[first]))
        work = self._replicas.broadcast(result, first.owner)
        if work is not None:
            work.wait()
        return result

    def _slices_of(self, name: str) -> list[Slice]:
        return [cut for cut in self._slices if cut.name == name]

    def masters(self) -> dict[str, TensorSource]:
        """See `Update.masters`."""

        def value(piece: OwnedSlice) -> Tensor:
            return self._read(piece.stored.get(VALUE_KEY, piece.shard))

        def source(name: str) -> TensorSource:
            shape, dtype = tuple(self._parameters[name].shape), torch.float32
            return TensorSource(dtype, shape, lambda: self._assemble(name, dtype, value))

        return {name: source(name) for name in self._parameters if name in self._low}

    def load_state(self, name: str, key: str, value: Tensor) -> None:
        """See `Update.load_state`."""
        pieces = [self._owned[cut] for cut in self._slices_of(name) if cut in self._owned]
        if not pieces:
            return
        sliced = is_elementwise(key, value, self._parameters[name].shape)
        elements = self._elements(name, value) if sliced else None
        for piece in pieces:
            slots = self.optimizer.state[piece.shard]
            if elements is not None:
                slots[key] = self._part(piece, elements)
            else:
                device = piece.shard.device if steps_on_device(self.optimizer) else value.device
                slots[key] = value.clone().to(device)
            self._store_slot(piece, slots, key)

    def load_master(self, name: str, value: Tensor) -> None:
        """See `Update.load_master`."""
        pieces = [self._owned[cut] for cut in self._slices_of(name) if cut in self._owned]
        copied = [piece for piece in pieces if piece.copied]
        if not copied:
            return
        elements = self._elements(name, value)
        for piece in copied:
            part = self._part(piece, elements)
            if VALUE_KEY in piece.stored:
                self._store_value(piece, part.to(piece.stored[VALUE_KEY].dtype))
            else:
                piece.shard.data.copy_(part)

    def _elements(self, name: str, value: Tensor) -> Tensor:
        """What this rank holds of a whole tensor, in the order of the cuts."""
        parameter = self._parameters[name]
        own_values = torch.empty_like(local_tensor(parameter).detach(), dtype=value.dtype)
        return flat_view(own_values.copy_(local_part(value, parameter)))

    def _part(self, piece: OwnedSlice, elements: Tensor) -> Tensor:
        """A piece's own copy of its elements, in the shape of its shard."""
        part = elements[piece.slice.start : piece.slice.stop]
        if not self._whole_shape:
            return part.to(piece.shard.device, copy=True)
        like = local_tensor(self._parameters[piece.slice.name])
        shaped = torch.empty_like(like, dtype=part.dtype, device=piece.shard.device)
        flat_view(shaped).copy_(part)
        return shaped

    def close(self) -> None:
        """See `Update.close`."""
        self._state_store.close()


def _chunks(pieces: Sequence[OwnedSlice], chunk_size: int | None) -> list[list[OwnedSlice]]:
    if chunk_size is None:
        return [list(pieces)] if pieces else []
    chunks: list[list[OwnedSlice]] = []
    filled = 0
    for piece in pieces:
        size = piece.shape.numel()
        if not chunks or filled + size > chunk_size:
            chunks.append([])
            filled = 0
        chunks[-1].append(piece)
        filled += size
    return chunks
