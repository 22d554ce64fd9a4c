"""Which tensors of a model lie in slices, and what that means for its state and its norms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.slices import Slices
from bigtrain.tensors.shards import Extent, SavedTensor, StateTensor, nested_extents


@dataclass(frozen=True)
class ModelSlices:
    """How a model is sliced: the same on all ranks, before there are any."""

    by_name: Mapping[str, Slices] = field(default_factory=dict)
    """Of parameters and buffers, tied ones under each of their names."""
    gathered: frozenset[str] = frozenset()
    """Sliced weights whose product is gathered at once, so that what follows has it whole."""
    size: int = 1
    """Ranks of the tp axis."""
    sequence_dim: int | None = None
    """The dim of activations (batch, seq, width) that is split between sliced layers, or None."""
    lines: Mapping[str, str] = field(default_factory=dict)
    """As a user would write them: what is sliced, by patterns of names."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Parameters that stay whole, and why."""

    def summary(self, model: nn.Module) -> str:
        """One line on how much of a model is sliced, and what stays whole."""
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        whole = {name: n for name, n in sizes.items() if name not in self.by_name}
        share = 1 - sum(whole.values()) / max(1, sum(sizes.values()))
        largest = sorted(whole, key=lambda name: -whole[name])
        text = f"in slices over {self.size} ranks: {share:.1%} of the parameters"
        if not largest:
            return text
        names = ", ".join(
            f"{name} ({self.kept[name]})" if self.kept.get(name) else name for name in largest[:2]
        )
        more = f" and {len(largest) - 2} smaller" if len(largest) > 2 else ""
        return f"{text}; whole: {names}{more}"

    def on(self, rank: int, group: torch.distributed.ProcessGroup | None) -> SlicedState:
        """As one rank sees it; without a group nothing is sent."""
        return SlicedState(self, SliceGroup(rank, self.size, group, sequence_dim=self.sequence_dim))


@dataclass(frozen=True)
class SlicedState:
    """A model's slices on one rank."""

    model: ModelSlices
    group: SliceGroup

    @property
    def by_name(self) -> Mapping[str, Slices]:
        """See `ModelSlices`."""
        return self.model.by_name

    def whole(self, state: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
        """What this rank holds of whole tensors, from what it holds of its own.

        Args:
            state: by plain names, or as `model.NAME` and `optimizer.NAME.KEY`.
        """
        return {name: self._whole(name, tensor, state) for name, tensor in state.items()}

    def _whole(
        self, name: str, tensor: StateTensor, state: Mapping[str, StateTensor]
    ) -> StateTensor:
        plain, is_slot = _plain(name, self.by_name)
        slices = self.by_name.get(plain)
        if slices is None:
            return tensor
        of_model = state.get(f"model.{plain}") if is_slot else None
        if len(tensor.shape) <= slices.dim or (of_model and of_model.shape != tensor.shape):
            return tensor  # a step count: the same on all ranks
        shape = _with_total(tensor.shape, slices)
        return replace(
            tensor, shape=shape, extents=tuple(self._in_whole(slices, shape, tensor.extents))
        )

    def _in_whole(
        self, slices: Slices, shape: Sequence[int], own: Iterable[Extent]
    ) -> Iterator[Extent]:
        outer = slices.extents(shape, self.group.rank, self.group.size)
        for extent in own:
            for run in range(extent.count):
                begin = extent.start + run * extent.pitch
                yield from nested_extents(outer, begin, begin + extent.length)

    def own(self, saved: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
        """Saved whole tensors as this rank's own parts of them."""
        found: dict[str, SavedTensor] = {}
        for name, tensor in saved.items():
            plain, is_slot = _plain(name, self.by_name)
            slices = self.by_name.get(plain)
            whole = saved.get(f"model.{plain}") if is_slot else tensor
            is_part = whole is not None and tuple(whole.shape) == tuple(tensor.shape)
            cut = slices is not None and is_part and len(tensor.shape) > slices.dim
            found[name] = _OwnPart(tensor, slices, self) if cut and slices else tensor
        return found

    def norm(self, sliced: Tensor, whole: Tensor) -> Tensor:
        """The norm of all gradients: those in slices over the ranks, whole ones once. Collective.

        Args:
            sliced: 0-dim, of what this rank has of sliced ones.
            whole: 0-dim, of the others.
        """
        square = sliced.double().square()
        if self.group.group is not None:
            square = square.to(sliced.device)
            torch.distributed.all_reduce(square, group=self.group.group)
        return (square + whole.to(square).square()).sqrt()


def _plain(name: str, known: Mapping[str, Slices]) -> tuple[str, bool]:
    """The parameter that a tensor of the state belongs to; and whether it is the optimizer's."""
    if name in known:
        return name, False
    part, _, rest = name.partition(".")
    if part == "optimizer":
        return rest.rpartition(".")[0], True
    return (rest, False) if part == "model" else (name, False)


def _with_total(shape: Sequence[int], slices: Slices) -> tuple[int, ...]:
    return tuple(slices.total if dim == slices.dim else n for dim, n in enumerate(shape))


@dataclass(frozen=True)
class _OwnPart:
    """A saved tensor of which this rank wants its slices: see `SavedTensor`."""

    saved: SavedTensor
    slices: Slices
    state: SlicedState

    @property
    def dtype(self) -> torch.dtype:
        """As it was saved."""
        return self.saved.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what this rank holds."""
        group = self.state.group
        return self.slices.local_shape(self.saved.shape, group.rank, group.size)

    def read(self, extents: Sequence[Extent]) -> Tensor:
        """The elements of these extents of this rank's part."""
        return self.saved.read(tuple(self.state._in_whole(self.slices, self.saved.shape, extents)))
