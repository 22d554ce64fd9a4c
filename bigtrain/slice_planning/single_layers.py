"""Linear layers that can be sliced alone: their input and their output stay whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from bigtrain.machine.cluster import CommOp
from bigtrain.slice_planning.axis_classes import SliceExchange, entry
from bigtrain.slice_planning.axis_trace import AxisTrace
from bigtrain.slice_planning.dim_axes import Dim, dim_length
from bigtrain.slice_planning.operations import HeldTensor, OpRecord
from bigtrain.slicing.slices import Slices

_PERMUTATIONS = ("t", "transpose", "permute", "numpy_T", "detach")
"""Views that at most change the order of dims."""


@dataclass
class SingleLayer:
    """A weight, with its bias, sliced along one dim."""

    slices: dict[str, Slices]
    gathered: bool
    """Whether it is sliced by output features, which are gathered, and not by input features."""
    parameter_bytes: int
    exchanged: list[SliceExchange] = field(default_factory=list)
    flops: int = 0

    @property
    def units(self) -> int:
        """The largest number of ranks with which each rank gets a part of every tensor."""
        return min(slices.most_ranks for slices in self.slices.values())


def single_layers(trace: AxisTrace) -> dict[str, list[SingleLayer]]:
    """Return the ways to slice a weight alone, by name, for weights used only in plain products.

    If the trace is complete, the result includes weights that the forward pass does not use.
    """
    products: dict[str, list[OpRecord]] = {}
    others: set[str] = set()
    for record in trace.records:
        used = record.weight.weight if record.weight is not None else None
        for tensor in record.inputs:
            if tensor is used and tensor.base.name in trace.trained:
                products.setdefault(tensor.base.name, []).append(record)
            elif tensor.base.name and record.name not in _PERMUTATIONS:
                others.add(tensor.base.name)
    biases = {bias.name for uses in products.values() if (bias := _bias(uses[0])) is not None}
    forms = {}
    for name, uses in products.items():
        if name in others:
            continue
        made = [form for out in (True, False) if (form := _form(uses, gathered=out))]
        if made:
            forms[name] = made
    without_biases = {name: made for name, made in forms.items() if name not in biases}
    return without_biases if trace.failed else {**without_biases, **_unused(trace)}


def _unused(trace: AxisTrace) -> dict[str, list[SingleLayer]]:
    """Return the weights that the forward pass does not use: slicing them sends nothing."""
    used = {tensor.base for record in trace.records for tensor in record.inputs}
    unused = {}
    for tensor in trace.state.values():
        if tensor not in used and tensor.name in trace.trained and len(tensor.dims) > 1:
            n = max(range(len(tensor.dims)), key=lambda at: dim_length(tensor.dims[at]))
            slices = {tensor.name: Slices.even(n, dim_length(tensor.dims[n]))}
            unused[tensor.name] = [
                SingleLayer(slices, gathered=False, parameter_bytes=tensor.nbytes)
            ]
    return unused


def _form(records: list[OpRecord], *, gathered: bool) -> SingleLayer | None:
    """Slice a weight by output features (`gathered`) or input features; None if it cannot be."""
    layer: SingleLayer | None = None
    for record in records:
        use = record.weight
        if use is None:
            return None
        weight, factor = use.weight.base, use.other
        n = _dim_of_product(weight, use.out if gathered else use.summed)
        if n is None:
            return None
        slices = {weight.name: Slices.even(n, dim_length(weight.dims[n]))}
        size = weight.nbytes
        bias = _bias(record)
        if bias is not None and gathered:
            slices[bias.name] = Slices.even(0, dim_length(bias.dims[0]))
            size += bias.nbytes
        kind: CommOp = "all_gather" if gathered else "all_reduce"
        sent = [SliceExchange(kind, record.outputs[0].nbytes, record.where)]
        if factor is not None and factor.trained:
            # Input features that belong to groups are sliced with the groups' output features.
            parts = not gathered or use.summed is None
            back = SliceExchange("all_gather", factor.nbytes, record.where, backward=True)
            sent.append(back if parts else entry(factor, record))
        if layer is None:
            layer = SingleLayer(slices, gathered, size, sent, record.flops)
        elif layer.slices != slices:
            return None
        else:
            layer.exchanged += sent
            layer.flops += record.flops
    return layer


def _dim_of_product(weight: HeldTensor, wanted: Dim | None) -> int | None:
    """Return the index of a weight's dim that a product uses; None if a view changed the dims."""
    places = [n for n, dim in enumerate(weight.dims) if dim is wanted and dim]
    return places[0] if len(places) == 1 else None


def _bias(record: OpRecord) -> HeldTensor | None:
    """Return the one-dimensional parameter that is added to a product, or None."""
    for tensor in record.inputs:
        if tensor.name and len(tensor.dims) == 1:
            return tensor
    return None
