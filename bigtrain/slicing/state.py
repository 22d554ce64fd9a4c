"""Which tensors of a model are sliced; the state and the gradient norm of a sliced model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.errors import CheckpointError
from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.slices import Slices
from bigtrain.tensors.shards import Extent, SavedTensor, StateTensor, nested_extents


@dataclass(frozen=True)
class ModelSlices:
    """How a model is sliced: equal on all ranks, and known before they connect."""

    by_name: Mapping[str, Slices] = field(default_factory=dict)
    """Slices of parameters and buffers; a tied tensor is listed under each of its names."""
    gathered: frozenset[str] = frozenset()
    """Sliced weights whose product is gathered immediately, so that it is whole afterwards."""
    size: int = 1
    """Ranks of the tp axis."""
    sequence_dim: int | None = None
    """The dim of activations (batch, seq, width) that is sharded between linear layers, or None."""
    lines: Mapping[str, str] = field(default_factory=dict)
    """The slices as a user would write `strategy.slice.slices`: specifications by name pattern."""
    whole_reasons: Mapping[str, str] = field(default_factory=dict)
    """Parameters that stay whole, with the reason."""

    def summary(self, model: nn.Module) -> str:
        """Return one line: how much of a model is sliced, and its largest whole parameters."""
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        whole_sizes = {name: n for name, n in sizes.items() if name not in self.by_name}
        share = 1 - sum(whole_sizes.values()) / max(1, sum(sizes.values()))
        largest = sorted(whole_sizes, key=lambda name: -whole_sizes[name])
        text = f"in slices over {self.size} ranks: {share:.1%} of the parameters"
        if not largest:
            return text
        names = ", ".join(
            f"{name} ({self.whole_reasons[name]})" if self.whole_reasons.get(name) else name
            for name in largest[:2]
        )
        more = f" and {len(largest) - 2} smaller" if len(largest) > 2 else ""
        return f"{text}; whole: {names}{more}"

    def on(
        self, rank: int, group: torch.distributed.ProcessGroup | None, **options: Any
    ) -> SlicedState:
        """Return the slices as one rank sees them.

        Args:
            rank: the index of the rank on the tp axis.
            group: the process group of the axis; None to send nothing.
            options: further fields of `SliceGroup`.
        """
        return SlicedState(
            self, SliceGroup(rank, self.size, group, sequence_dim=self.sequence_dim, **options)
        )


@dataclass(frozen=True)
class SlicedState:
    """A model's slices on one rank."""

    model: ModelSlices
    group: SliceGroup

    @property
    def by_name(self) -> Mapping[str, Slices]:
        """See `ModelSlices.by_name`."""
        return self.model.by_name

    def whole(self, state: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
        """Describe this rank's tensors by their extents in the whole tensors.

        Args:
            state: the tensors, by key: `model.NAME` or `optimizer.NAME.KEY`.
        """
        shapes = {name: tensor.shape for name, tensor in state.items()}
        whole_state = dict(state)
        for name, tensor in state.items():
            slices = self.slices_of(name, shapes)
            if slices is not None:
                shape, extents = self.placed(slices, tensor.shape, tensor.extents)
                whole_state[name] = replace(tensor, shape=shape, extents=extents, in_slices=True)
        return whole_state

    def slices_of(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Slices | None:
        """Return the slices of a tensor of the state; None if it is equal on all ranks.

        Args:
            name: `model.NAME` or `optimizer.NAME.KEY`.
            shapes: the shapes of all tensors of the state, either all of this rank's parts or all
                as saved.
        """
        part, _, parameter_name = name.partition(".")
        if part == "optimizer":
            parameter_name = parameter_name.rpartition(".")[0]
        slices = self.by_name.get(parameter_name)
        if slices is None or len(shapes[name]) <= slices.dim:
            return None
        # Optimizer state whose shape is not that of its parameter is a step count.
        return (
            slices if shapes.get(f"model.{parameter_name}", shapes[name]) == shapes[name] else None
        )

    def placed(
        self, slices: Slices, shape: Sequence[int], extents: Iterable[Extent]
    ) -> tuple[tuple[int, ...], tuple[Extent, ...]]:
        """Translate elements of this rank's part to elements of the whole tensor.

        Args:
            slices: the slices of the whole tensor.
            shape: the shape of the part.
            extents: elements of the part.

        Returns:
            The shape of the whole tensor, and the elements in it.
        """
        whole_shape = tuple(slices.total if dim == slices.dim else n for dim, n in enumerate(shape))
        return whole_shape, tuple(self._in_whole(slices, whole_shape, extents))

    def _in_whole(
        self, slices: Slices, shape: Sequence[int], local_extents: Iterable[Extent]
    ) -> Iterator[Extent]:
        outer = slices.extents(shape, self.group.rank, self.group.size)
        for extent in local_extents:
            for run in range(extent.count):
                begin = extent.start + run * extent.pitch
                yield from nested_extents(outer, begin, begin + extent.length)

    def own(self, saved: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
        """Return saved whole tensors as this rank's parts of them.

        Raises:
            CheckpointError: a saved tensor has another length than the model's sliced dim.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        parts = dict(saved)
        for name, tensor in saved.items():
            slices = self.slices_of(name, shapes)
            if slices is None:
                continue
            if tensor.shape[slices.dim] != slices.total:
                raise CheckpointError(
                    f"{name} has shape {shapes[name]} in the checkpoint, and its dim {slices.dim} "
                    f"is {slices.total} long in the model. Use the model.args it was saved with."
                )
            parts[name] = _LocalPart(tensor, slices, self)
        return parts

    def norm(self, sliced: Tensor, whole: Tensor) -> Tensor:
        """Return the norm of all gradients (0-dim); a whole gradient counts once. Collective.

        Args:
            sliced: 0-dim, the norm of this rank's parts of sliced gradients.
            whole: 0-dim, the norm of the whole gradients.
        """
        square = sliced.double().square()
        if self.group.group is not None:
            square = square.to(sliced.device)
            torch.distributed.all_reduce(square, group=self.group.group)
        return (square + whole.to(square).square()).sqrt()


@dataclass(frozen=True)
class _LocalPart:
    """A `SavedTensor` that reads this rank's slices of a saved whole tensor."""

    saved: SavedTensor
    slices: Slices
    state: SlicedState

    @property
    def dtype(self) -> torch.dtype:
        """The saved dtype."""
        return self.saved.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        group = self.state.group
        return self.slices.local_shape(self.saved.shape, group.rank, group.size)

    def read(self, extents: Sequence[Extent]) -> Tensor:
        """Read elements of this rank's part."""
        return self.saved.read(self.state.placed(self.slices, self.shape, extents)[1])
