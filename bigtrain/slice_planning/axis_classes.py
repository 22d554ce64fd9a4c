"""Classes of axes that are sliced together or not at all, with their costs and savings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from bigtrain.machine.cluster import CommOp
from bigtrain.slice_planning.axis_trace import AxisTrace
from bigtrain.slice_planning.dim_axes import Dim, DimAxis, dim_length, expanded, leaves
from bigtrain.slice_planning.operations import HeldTensor, OpRecord
from bigtrain.slicing.slices import Slices, SliceSection


@dataclass(frozen=True)
class SliceExchange:
    """One collective of a micro-batch that slices cause."""

    kind: CommOp
    nbytes: int
    """Bytes of the whole tensor."""
    where: str
    """The module in whose code the collective runs."""
    backward: bool = False
    of: int = field(default=0, repr=False, compare=False)
    """The id of the whole tensor whose gradient is summed, once for all its users; otherwise 0."""


@dataclass
class SliceClass:
    """Axes that are sliced together because they are unified, or are parts of one dim."""

    slices: dict[str, Slices] = field(default_factory=dict)
    """Slices of parameters and buffers by plain name; a tied tensor has one of its names."""
    exchanged: list[SliceExchange] = field(default_factory=list)
    """The collectives of a micro-batch."""
    flops: int = 0
    """FLOPs of a forward pass in operations that the ranks share."""
    parameter_bytes: int = 0
    """Bytes of the whole parameters."""
    activation_bytes: int = 0
    """Bytes of the whole tensors that are saved for the backward pass."""
    is_table: bool = False
    """Whether the class slices the rows of an embedding table."""
    in_activations: bool = False
    """Whether activations have the axes, not only parameters."""

    @property
    def units(self) -> int:
        """The largest number of ranks with which each rank gets a part of every tensor."""
        return min(slices.most_ranks for slices in self.slices.values())

    @property
    def name(self) -> str:
        """The name of the tensor with the longest sliced dim, and that dim, as text."""
        name = max(self.slices, key=lambda n: (self.slices[n].total, -len(n)))
        return f"{name} dim {self.slices[name].dim}"


Ids = set[int]


def sections_of(
    dim: Dim, wanted: Ids, before: Ids | None = None
) -> tuple[SliceSection, ...] | None:
    """Return the sections of a dim if these axes are sliced.

    Args:
        dim: a dim of a tensor.
        wanted: ids of the axes that are sliced.
        before: ids of axes, or None. One of these axes must precede each wanted axis; the two are
            then sliced as one axis.

    Returns:
        None if a part of a sum has none of the axes, if a product has several of them, or if no
        axis of `before` precedes a wanted axis.
    """
    axes = expanded(dim)
    inner = dim_length(axes)
    sections: tuple[SliceSection, ...] | None = None
    outer = 1
    for n, axis in enumerate(axes):
        inner //= axis.length
        axis_sections = _sections_of_axis(axis, wanted, before)
        if axis_sections is not None:
            if sections is not None:
                return None
            if before is not None and not axis.parts:
                if n == 0 or id(axes[n - 1]) not in before:
                    return None
                outer //= axes[n - 1].length
                axis_sections = (SliceSection(axes[n - 1].length * axis.length),)
            scaled = tuple(SliceSection(n * inner, unit * inner) for n, unit in axis_sections)
            sections = scaled * outer
        outer *= axis.length
    return sections


def _sections_of_axis(
    axis: DimAxis, wanted: Ids, before: Ids | None
) -> tuple[SliceSection, ...] | None:
    if not axis.parts:
        return (SliceSection(axis.length),) if id(axis) in wanted else None
    parts = [sections_of(part, wanted, before) for part in axis.parts]
    if any(part is None for part in parts):
        return None
    return tuple(section for part in parts if part is not None for section in part)


class AxisClasses:
    """The classes of axes of a trace; see `SliceClass`.

    Args:
        trace: the trace of a model.
    """

    def __init__(self, trace: AxisTrace) -> None:
        self._trace = trace
        self._group: dict[int, int] = {}
        self._blocked: dict[int, str] = {}
        self._axes: dict[int, DimAxis] = {}
        for tensor in trace.tensors:
            for dim in tensor.dims:
                for axis in leaves(dim):
                    self._axes[id(axis)] = axis
        for key, axis in self._axes.items():
            self._group[key] = key
            if axis.blocked:
                self._blocked[key] = axis.blocked
        self._in_dims: dict[int, tuple[frozenset[int], ...]] = {}
        while self._settle_sums():
            pass
        self._block_repeated()
        while self._settle_sums():
            pass

    @cached_property
    def classes(self) -> dict[int, SliceClass]:
        """The classes with parameters that the forward pass uses, by the id of one of the axes."""
        members = self._members
        classes: dict[int, SliceClass] = {root: SliceClass() for root in members}
        seen: set[int] = set()
        for tensor in self._trace.state.values():
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            for n, dim in enumerate(tensor.dims):
                for root in self._in_dim(dim):
                    sections = sections_of(dim, members[root])
                    if sections is not None and tensor.name not in classes[root].slices:
                        classes[root].slices[tensor.name] = Slices(n, sections)
                        if tensor.name in self._trace.trained:
                            classes[root].parameter_bytes += tensor.nbytes
        classes = {
            root: slice_class
            for root, slice_class in classes.items()
            if slice_class.parameter_bytes
        }
        used = _add_costs(self, self._trace, classes)
        return {root: slice_class for root, slice_class in classes.items() if root in used}

    @cached_property
    def _members(self) -> dict[int, set[int]]:
        """The ids of the axes of each class that is not blocked, by the id of one of them."""
        members = defaultdict(set)
        for key in self._axes:
            root = self._root(key)
            if root not in self._blocked:
                members[root].add(key)
        return members

    def merged_with_outer(self) -> list[SliceClass]:
        """Return classes merged with the axis that precedes them in every dim.

        With grouped queries the heads are (key heads x queries of a group). If neither factor has
        enough units for all ranks, the product of both may have enough; keys and values then stay
        whole.
        """
        before: dict[int, set[int]] = defaultdict(set)
        repeated = self.repeated
        for tensor in self._trace.tensors:
            for dim in tensor.dims:
                for first, second in _neighbours(dim):
                    root = self._root(id(second))
                    if (root, tensor) not in repeated:
                        before[root].add(self._root(id(first)) if first is not None else -1)
        merged = []
        for root, slice_class in self.classes.items():
            outer = next(iter(before[root])) if len(before[root]) == 1 else -1
            if outer not in self._members:
                continue
            slices = {
                state_tensor.name: Slices(slice_class.slices[state_tensor.name].dim, sections)
                for state_tensor in self._trace.state.values()
                if state_tensor.name in slice_class.slices
                for dim in (state_tensor.dims[slice_class.slices[state_tensor.name].dim],)
                if (sections := sections_of(dim, self._members[root], self._members[outer]))
            }
            if slices.keys() == slice_class.slices.keys():
                merged.append(replace(slice_class, slices=slices))
        return merged

    @cached_property
    def repeated(self) -> set[tuple[int, HeldTensor]]:
        """Pairs of a class and a tensor that has axes of the class only by repetition.

        An operation such as expand repeated a tensor without the class. The result may stay whole
        on every rank.
        """
        repeated_in: set[tuple[int, HeldTensor]] = set()
        for record in self._trace.records:
            for tensor in record.outputs:
                for root in self.of(tensor):
                    having = [
                        input_tensor
                        for input_tensor in record.inputs
                        if root in self.of(input_tensor)
                    ]
                    if tensor not in having and all(
                        (root, input_tensor) in repeated_in for input_tensor in having
                    ):
                        repeated_in.add((root, tensor))
        return repeated_in

    def of(self, tensor: HeldTensor) -> frozenset[int]:
        """Return the classes of all dims of a tensor."""
        return frozenset[int]().union(*map(self._in_dim, tensor.dims))

    def of_dim(self, dim: Dim) -> frozenset[int]:
        """Return the classes of a dim."""
        return self._in_dim(dim)

    def why_not(self, dim: Dim) -> str:
        """Return why a dim cannot be sliced; '' if it can."""
        reasons = [self._blocked.get(self._root(id(axis)), "") for axis in leaves(dim)]
        if not reasons:
            return "it has length 1"
        return "" if "" in reasons else reasons[0]

    def _root(self, key: int) -> int:
        while self._group[key] != key:
            self._group[key] = self._group[self._group[key]]
            key = self._group[key]
        return key

    def _in_dim(self, dim: Dim) -> frozenset[int]:
        """Return the classes that slice a dim; a sum has the classes that all of its parts have."""
        classes: set[int] = set()
        for axis in expanded(dim):
            classes |= self._in_axis(axis)
        return frozenset(classes)

    def _in_axis(self, axis: DimAxis) -> frozenset[int]:
        if not axis.parts:
            root = self._root(id(axis))
            return frozenset() if root in self._blocked else frozenset((root,))
        first, *others = map(self._in_dim, axis.parts)
        return first.intersection(*others)

    def _settle_sums(self) -> bool:
        """Merge or block classes so that either all parts of a sum are sliced or none.

        Returns:
            Whether a class changed; the caller must then call again.
        """
        changed = False
        seen: set[int] = set()
        for tensor in self._trace.tensors:
            for dim in tensor.dims:
                for axis in _sums(dim):
                    if id(axis) not in seen:
                        seen.add(id(axis))
                        changed |= self._settle(axis)
        return changed

    def _settle(self, axis: DimAxis) -> bool:
        parts = [self._in_dim(part) for part in axis.parts]
        shared = parts[0].intersection(*parts[1:])
        every = parts[0].union(*parts[1:])
        if shared == every:
            return False
        if not shared and all(parts):
            # Independent parts, such as a DenseNet's concatenated features, are sliced together.
            first, *others = (self._outermost(part) for part in axis.parts)
            for member in others:
                self._group[self._root(member)] = self._root(first)
            return True
        for root in every - shared:
            self._blocked[root] = "it shares a dim with others that cannot be sliced like it"
        return True

    def _outermost(self, dim: Dim) -> int:
        for axis in expanded(dim):
            for root in self._in_axis(axis):
                return root
        raise ValueError("a dim without a class")

    def _block_repeated(self) -> None:
        """Block classes that occur twice in one activation, because only one dim can be sliced."""
        for tensor in self._trace.tensors:
            counts: dict[int, int] = defaultdict(int)
            for dim in tensor.dims:
                occurrences: dict[int, int] = defaultdict(int)
                for axis in expanded(dim):
                    for root in self._in_axis(axis):
                        occurrences[root] += 1
                for root, count in occurrences.items():
                    counts[root] += 1 if tensor.of_weights else count
                    if count > 1:
                        self._blocked[root] = "it is twice in one dim"
            for root, count in counts.items():
                if count > 1 and not tensor.of_weights:
                    self._blocked[root] = "it is in two dims of one tensor"


def _neighbours(dim: Dim) -> Iterable[tuple[DimAxis | None, DimAxis]]:
    """Yield (previous axis, axis) for each atomic axis of a dim, also of the parts of sums.

    The previous axis is None for the first axis of a dim or of a part, and after a sum.
    """
    last: DimAxis | None = None
    for axis in expanded(dim):
        for part in axis.parts:
            yield from _neighbours(part)
        if not axis.parts:
            yield last, axis
        last = None if axis.parts else axis


def _sums(dim: Dim) -> Iterable[DimAxis]:
    for axis in expanded(dim):
        if axis.parts:
            for part in axis.parts:
                yield from _sums(part)
            yield axis


def _add_costs(
    groups: AxisClasses, trace: AxisTrace, classes: Mapping[int, SliceClass]
) -> set[int]:
    """Add to each class its exchanges, FLOPs and saved bytes.

    Returns:
        The classes that the forward pass uses.
    """
    used: set[int] = set()
    entered: set[tuple[int, int]] = set()
    repeated = groups.repeated
    for record in trace.records:
        given_out = frozenset[int]().union(*map(groups.of, record.outputs))
        summed = frozenset[int]().union(*map(groups.of_dim, record.summed))
        for root in (given_out | summed) & classes.keys():
            slice_class = classes[root]
            used.add(root)
            if not any(root in groups.of(t) and (root, t) not in repeated for t in record.inputs):
                continue  # a repeated tensor stays whole until it meets slices
            slice_class.flops += record.flops
            slice_class.is_table |= record.name == "embedding"
            slice_class.in_activations |= any(
                root in groups.of(made) for made in record.outputs if not made.of_weights
            )
            if root not in given_out:
                slice_class.exchanged.append(_whole_sum(record))
                continue
            for tensor in record.inputs:
                inside = root in groups.of(tensor)
                if (root, tensor) in repeated and tensor.trained:
                    slice_class.exchanged.append(
                        SliceExchange("all_gather", tensor.nbytes, record.where, backward=True)
                    )
                elif root in summed and inside and not tensor.of_weights:
                    slice_class.exchanged += _gathered(tensor, record)
                elif tensor.trained and not inside and (root, id(tensor.root)) not in entered:
                    entered.add((root, id(tensor.root)))
                    slice_class.exchanged.append(entry(tensor, record))
    for saved_tensor, nbytes in trace.saved:
        for root in groups.of(saved_tensor) & classes.keys():
            classes[root].activation_bytes += nbytes
    return used


def entry(tensor: HeldTensor, record: OpRecord) -> SliceExchange:
    """Return the all-reduce of the gradient of a whole tensor that is used with slices."""
    number = id(tensor.root)
    return SliceExchange("all_reduce", tensor.nbytes, record.where, backward=True, of=number)


def _whole_sum(record: OpRecord) -> SliceExchange:
    return SliceExchange("all_reduce", record.outputs[0].nbytes, record.where)


def _gathered(tensor: HeldTensor, record: OpRecord) -> list[SliceExchange]:
    """Return the exchanges of a product that gathers its input: the weight has the same slices."""
    back = SliceExchange("reduce_scatter", tensor.nbytes, record.where, backward=True)
    return [SliceExchange("all_gather", tensor.nbytes, record.where), back]
