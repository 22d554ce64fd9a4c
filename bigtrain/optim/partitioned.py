"""An optimizer on pieces of the parameters: sharded over replicas, in fp32, or offloaded.

Each replica updates a contiguous share of the parameters and broadcasts it, so the optimizer's
state is sharded over the ranks (ZeRO stage 1, Rajbhandari et al. 2020, arXiv 1910.02054, section
5.1). If layers use bf16 parameters, the pieces are their only fp32 copy. Between the steps, the
pieces and the state may be on the host or on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.optim.partition import (
    Slice,
    chunk_elements,
    merge_slices,
    partition_evenly,
    split_into_chunks,
)
from bigtrain.optim.state_store import StateStore, StoredTensor
from bigtrain.optim.update import (
    MakeOptimizer,
    is_elementwise,
    optimizer_tensors,
    steps_on_device,
)
from bigtrain.optim.whole import WholeOptimizer
from bigtrain.tensors.memory_format import flat_view, is_dense
from bigtrain.tensors.shards import (
    Extent,
    SavedTensor,
    StateTensor,
    extents_of,
    local_tensor,
    read_whole,
    slice_extents,
    whole_extents,
)


@dataclass
class OwnedSlice:
    """A slice on the rank that updates it."""

    slice: Slice
    shard: nn.Parameter
    """The tensor that the optimizer updates: a view of the parameter, or a copy."""
    copied: bool
    shape: torch.Size
    """The shape of `shard`, which is empty while its values are offloaded."""
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    """Offloaded tensors: tensors of the state by key, and the values of `shard` by `VALUE_KEY`."""


VALUE_KEY = ""
"""The key of a shard's values in `OwnedSlice.stored`."""


@dataclass(frozen=True)
class ReplicaGroup:
    """The ranks that share the updates of the same parameters."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def broadcast(self, tensor: Tensor, owner: int) -> dist.Work | None:
        """Begin to broadcast the owner's tensor in place; None if there is one rank.

        Args:
            tensor: this rank's tensor, which is overwritten on the other ranks.
            owner: the rank in the group that has the values.
        """
        if self.group is None or self.size == 1:
            return None
        source = dist.get_global_rank(self.group, owner)
        return dist.broadcast(tensor, src=source, group=self.group, async_op=True)

    def gather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, on every rank. Collective."""
        if self.group is None or self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone


class PartitionedUpdate:
    """The optimizer on pieces of the parameters; one replica updates each piece.

    The concatenation of all parameters is cut into equal shares, one for each replica. If the
    optimizer's step is not elementwise, each parameter is one piece. An fp32 piece is a view of the
    parameter, and its gradient is a view of the parameter's gradient, so nothing is copied. If
    pieces are copies (fp32 copies of bf16 parameters, or copies on the host), or if the state is on
    disk, one chunk of the pieces is updated at a time. So the copied gradients exist for one chunk
    only.

    Args:
        parameters: the trained parameters of this rank, by name in the model.
        make_optimizer: makes the optimizer; see `WholeOptimizer`.
        replicas: the ranks that share the update; None for this rank alone.
        state_store: stores the state between the steps; None for the parameters' device.
        low_names: names of fp32 parameters that are converted to bf16. The pieces have their fp32
            values.
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
        for parameter in parameters.values():  # a slice of a tensor with gaps would not be a view
            if not is_dense(local_tensor(parameter)):
                parameter.data = parameter.data.contiguous()
        whole_optimizer = WholeOptimizer.of(make_optimizer, parameters)
        may_split = whole_optimizer.kind.elementwise
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
        owned = list(self._owned.values())
        numbers = split_into_chunks([piece.shape.numel() for piece in owned], chunk_size)
        self._chunks = [[owned[number] for number in chunk] for chunk in numbers]
        # A rank without a piece (fewer elements than ranks) still has groups with learning rates.
        shards: dict[str, list[nn.Parameter]] = {name: [] for name in parameters}
        for cut, piece in self._owned.items():
            shards[cut.name].append(piece.shard)
        self.optimizer = whole_optimizer.put_on(shards)

    def _copies(self, name: str) -> bool:
        return self._state_store.updates_elsewhere or name in self._low

    def _bytes(self, cuts: Iterable[Slice]) -> int:
        return sum((c.stop - c.start) * self._parameters[c.name].element_size() for c in cuts)

    def _make_slices(self, name: str, cuts: Sequence[Slice]) -> None:
        """Make the pieces of a parameter from its fp32 values, then convert it to bf16."""
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
        """Return the slice of the parameter as a view; the whole parameter if none are cut."""
        local = local_tensor(self._parameters[cut.name]).detach()
        return local if self._whole_shape else flat_view(local)[cut.start : cut.stop]

    @property
    def stays_on_device(self) -> bool:
        """Whether all pieces and their state are on the device of the parameters."""
        return type(self._state_store) is StateStore

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
        """Yield each chunk with functions that return its gradients; None for absent gradients.

        If the host updates the pieces, the gradients of the next chunk are copied meanwhile.
        """
        if not self._state_store.updates_elsewhere:
            for chunk in self._chunks:  # no copies in advance: gradients are converted when used
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
        """Return a function that returns the piece's gradient: a view, or a converted copy."""
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
        """Load the offloaded tensors of a piece into memory."""
        slots = self.optimizer.state[piece.shard] if piece.stored.keys() - {VALUE_KEY} else {}
        for key, stored in piece.stored.items():
            if key == VALUE_KEY:
                piece.shard.data = self._state_store.load(stored)
            else:
                slots[key] = self._state_store.load(stored)

    def _store_slice(self, piece: OwnedSlice) -> None:
        """Offload the values and the state of a piece after its update, if they are offloaded."""
        slots = self.optimizer.state[piece.shard]
        for key in slots:
            self._store_slot(piece, slots, key)
        if VALUE_KEY in piece.stored:
            self._store_value(piece, piece.shard.detach())

    def _store_slot(self, piece: OwnedSlice, slots: dict[Any, Any], key: str) -> None:
        value = slots[key]
        if isinstance(value, Tensor) and value.numel() > 1:  # step counts stay in memory
            stored = self._state_store.store(value, piece.stored.get(key))
            if stored is not None:
                slots[key] = piece.stored[key] = stored

    def _store_value(self, piece: OwnedSlice, value: Tensor) -> None:
        stored = self._state_store.store(value, piece.stored.get(VALUE_KEY))
        if stored is not None:
            piece.stored[VALUE_KEY] = stored
            piece.shard.data = value.new_empty(0)

    def _broadcast_slices(self) -> None:
        """Broadcast every piece from its owner, in place and without copies."""
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

    def state(self) -> dict[str, StateTensor]:
        """See `Update.state`."""
        tensors: dict[str, StateTensor] = {}
        for name in self._parameters:
            pieces = self._owned_of(name)
            for key in sorted({k for p in pieces for k in self.optimizer.state.get(p.shard, {})}):
                slot = self._slot(name, key, pieces)
                if slot is not None:
                    tensors[f"{name}.{key}"] = slot
        return tensors

    def _owned_of(self, name: str) -> list[OwnedSlice]:
        return [piece for cut, piece in self._owned.items() if cut.name == name]

    def _slot(self, name: str, key: str, pieces: Sequence[OwnedSlice]) -> StateTensor | None:
        first = self.optimizer.state[pieces[0].shard][key]
        if not isinstance(first, Tensor | StoredTensor):
            return None
        if first.shape == pieces[0].shape and len(first.shape) > 0:
            return self._joined(
                name, pieces, first.dtype, lambda piece: self.optimizer.state[piece.shard][key]
            )
        shape = tuple(first.shape)
        return StateTensor(
            first.dtype, shape, whole_extents(shape), lambda: self._read(first).detach().reshape(-1)
        )

    def _read(self, value: Tensor | StoredTensor) -> Tensor:
        return self._state_store.load(value) if isinstance(value, StoredTensor) else value

    def _joined(
        self,
        name: str,
        pieces: Sequence[OwnedSlice],
        dtype: torch.dtype,
        value_of: Callable[[OwnedSlice], Tensor | StoredTensor],
    ) -> StateTensor:
        """Return the elementwise values of a parameter's pieces as one tensor of the state."""
        parameter = self._parameters[name]

        def values() -> Tensor:
            parts = [torch.empty(0, dtype=dtype)] if not pieces else []
            for piece in pieces:
                value = self._read(value_of(piece)).detach()
                # A whole tensor is saved in row-major order, a slice in the order in memory.
                flat = value.reshape(-1) if self._whole_shape else flat_view(value)
                parts.append(flat.to(dtype))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return StateTensor(dtype, tuple(parameter.shape), self._extents(name, pieces), values)

    def _extents(self, name: str, pieces: Iterable[OwnedSlice]) -> tuple[Extent, ...]:
        """Return the elements of the parameter that are in these pieces."""
        parameter = self._parameters[name]
        if self._whole_shape:
            return extents_of(parameter)
        cuts = merge_slices(piece.slice for piece in pieces)
        return tuple(e for cut in cuts for e in slice_extents(parameter, cut.start, cut.stop))

    def masters(self) -> dict[str, StateTensor]:
        """See `Update.masters`."""
        return {
            name: self._joined(
                name,
                self._owned_of(name),
                torch.float32,
                lambda piece: piece.stored.get(VALUE_KEY, piece.shard),
            )
            for name in self._parameters
            if name in self._low
        }

    def load_state(self, name: str, key: str, saved: SavedTensor) -> None:
        """See `Update.load_state`."""
        sliced = is_elementwise(key, saved, self._parameters[name].shape)
        for piece in self._owned_of(name):
            slots = self.optimizer.state[piece.shard]
            if sliced:
                slots[key] = self._part(piece, saved)
            else:
                device = piece.shard.device if steps_on_device(self.optimizer) else "cpu"
                slots[key] = read_whole(saved).to(device)
            self._store_slot(piece, slots, key)

    def load_master(self, name: str, saved: SavedTensor) -> None:
        """See `Update.load_master`."""
        for piece in self._owned_of(name):
            if piece.copied:
                part = self._part(piece, saved)
                if VALUE_KEY in piece.stored:
                    self._store_value(piece, part.to(piece.stored[VALUE_KEY].dtype))
                else:
                    piece.shard.data.copy_(part)

    def _part(self, piece: OwnedSlice, saved: SavedTensor) -> Tensor:
        """Read a piece's elements of a saved tensor, in the shape of its shard."""
        part = saved.read(self._extents(piece.slice.name, [piece])).to(piece.shard.device)
        if not self._whole_shape:
            return part
        like = local_tensor(self._parameters[piece.slice.name])
        shaped = torch.empty_like(like, dtype=part.dtype, device=piece.shard.device)
        return shaped.copy_(part.view(like.shape))

    def close(self) -> None:
        """See `Update.close`."""
        self._state_store.close()
