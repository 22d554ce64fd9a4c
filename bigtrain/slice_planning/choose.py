"""The choice of slices: each weight along one dim at most, at the least cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.machine.cluster import CommOp
from bigtrain.slice_planning.axis_classes import AxisClasses, SliceClass, SliceExchange
from bigtrain.slice_planning.axis_trace import AxisTrace, trace_axes
from bigtrain.slice_planning.dim_axes import dim_length
from bigtrain.slice_planning.plan import SlicingPlan
from bigtrain.slice_planning.set_packing import Option, Point, frontier
from bigtrain.slice_planning.single_layers import SingleLayer, single_layers
from bigtrain.slice_planning.slice_specs import kept_names
from bigtrain.slicing.slices import Slices
from bigtrain.units import format_bytes

ENOUGH = 0.9
"""Without prices, weights are sliced until this fraction of the parameters is sliced."""
SMALL = 0.01
"""Without prices, an embedding table with a smaller fraction of the parameters stays whole, unless
less than `ENOUGH` is then sliced."""
NEARLY_MOST = 0.98
"""Among the sets of classes that slice at least this fraction of the most bytes that any set can
slice, the set that sends the fewest bytes is chosen."""
SliceCandidate = SliceClass | SingleLayer


@dataclass(frozen=True)
class Prices:
    """The cost of exchanges and of arithmetic."""

    exchange: Callable[[CommOp, float], float]
    """Returns the seconds of a collective over the tp axis, from its kind and its bytes."""
    seconds_per_flop: float = 0.0
    """The seconds of a FLOP on one rank, forward and backward together."""
    state_bytes: float = 4.0
    """Bytes of a parameter, its gradient and its optimizer state, per byte of the parameter."""


class SlicedWork(Protocol):
    """A model, its loss and a micro-batch; `bigtrain.core.workload.Workload` is one."""

    @property
    def model(self) -> nn.Module:
        """The whole model, on any device."""

    @property
    def micro_batch(self) -> Any:
        """An object with `inputs`; only the shapes of the inputs matter."""

    @property
    def loss(self) -> Any:
        """The loss; a cross entropy along a dim of the output has that dim as `class_dim`."""


def plan_slices(
    workload: SlicedWork,
    ranks: int,
    prices: Prices | None = None,
    limit: float | None = None,
    keep: Sequence[str] = (),
    repeats: Mapping[str, int] = MappingProxyType({}),
) -> SlicingPlan:
    """Choose the slices of a model over a number of ranks.

    Without prices and a limit, the classes that slice the most bytes are chosen. Then the largest
    of the other weights are sliced alone until `ENOUGH` of the parameters is sliced. With prices,
    the choice takes the least time; with a limit alone, it sends the fewest bytes. If no slices
    pay, nothing is sliced.

    Args:
        workload: the model, its loss and a micro-batch.
        ranks: the number of ranks of the tp axis.
        prices: seconds of exchanges and arithmetic.
        limit: bytes per rank for parameters, gradients, optimizer state and saved activations.
        keep: modules or parameters that stay whole, by patterns of names.
        repeats: how many blocks of a deeper model a block represents, by the block's name. The
            block's parameters and exchanges count that often, so that without prices the choice is
            the same as for the deeper model.

    Raises:
        ConfigError: nothing can be sliced over so many ranks, or the limit is exceeded.
    """
    class_dim = getattr(workload.loss, "class_dim", None)
    trace = trace_axes(workload.model, workload.micro_batch.inputs, class_dim)
    whole_names = kept_names(keep, workload.model)
    return _Choice(trace, ranks, whole_names, repeats).plan(prices, limit)


def refuse_listed(workload: SlicedWork, slices: Collection[str]) -> None:
    """Refuse to slice parameters that the model reads from a list, such as `parameters()`.

    Such a list contains this rank's slices, so the model would compute with slices.

    Args:
        workload: the model and a micro-batch.
        slices: names of the sliced parameters.

    Raises:
        ConfigError: the model reads one of `slices` from a list; the message has the module that
            reads the list.
    """
    trace = trace_axes(workload.model, workload.micro_batch.inputs, None)
    for name in slices:
        if name in trace.listed:
            why = listed_reason(trace.listed[name])
            raise ConfigError(
                f"strategy.slice.slices slices {name}, and {why}, where each rank sees only its "
                "slice. Read it by its name in the model's code (self.layer.weight), or keep it "
                f"whole: a line {name}: whole."
            )


def listed_reason(where: str) -> str:
    """Return why a parameter that is read from a list stays whole.

    Args:
        where: the module whose code reads the list.
    """
    return f"{where or 'the model'!r} reads it from a list of parameters, such as parameters()"


def fullest_share(slices: Slices, ranks: int) -> float:
    """Return the fraction of a tensor on the rank with the largest part."""
    return slices.length(0, ranks) / slices.total


def most_ranks(workload: SlicedWork) -> int:
    """Return the largest tp size over which a tensor of the model can be sliced; 1 if none can."""
    class_dim = getattr(workload.loss, "class_dim", None)
    trace = trace_axes(workload.model, workload.micro_batch.inputs, class_dim)
    units = [candidate.units for candidate in AxisClasses(trace).classes.values()]
    units += [form.units for forms in single_layers(trace).values() for form in forms]
    return max(units, default=1)


class _Choice:
    """Chooses among the classes and single layers of a trace."""

    def __init__(
        self, trace: AxisTrace, ranks: int, keep: frozenset[str], repeats: Mapping[str, int]
    ) -> None:
        self._trace, self._ranks, self._keep, self._repeats = trace, ranks, keep, repeats
        self._whole = {*keep, *trace.listed}
        self._axis_classes = AxisClasses(trace)
        self._nbytes = {
            tensor.name: tensor.nbytes * self._times(tensor.name)
            for name, tensor in trace.state.items()
            if name in trace.trained
        }
        self._chosen_slices: dict[str, Slices] = {}
        self._all_single_layers = single_layers(trace)
        self._single_layers = {
            name: fit
            for name, forms in self._all_single_layers.items()
            if (
                fit := [form for form in forms if form.units >= ranks and self._may_be_sliced(form)]
            )
        }
        classes = [
            candidate
            for candidate in self._axis_classes.classes.values()
            if self._is_more_than_a_layer(candidate) and self._may_be_sliced(candidate)
        ]
        self._classes = [candidate for candidate in classes if candidate.units >= ranks]
        if len(self._classes) < len(classes):
            known = {name for candidate in self._classes for name in candidate.slices}
            merged = [
                candidate
                for candidate in self._axis_classes.merged_with_outer()
                if known.isdisjoint(candidate.slices) and self._may_be_sliced(candidate)
            ]
            self._classes += [
                candidate
                for candidate in merged
                if candidate.units >= ranks and self._is_more_than_a_layer(candidate)
            ]

    def plan(self, prices: Prices | None, limit: float | None) -> SlicingPlan:
        """See `plan_slices`."""
        if not self._classes and not self._single_layers:
            raise ConfigError(self._refusal())
        if prices is None and limit is None:
            chosen = self._most_bytes()
        else:
            chosen = self._cheapest(
                prices or Prices(lambda kind, n: n * _sent_per_byte(kind)), limit
            )
        for part in chosen:
            self._chosen_slices |= part.slices
        taken = self._chosen_slices
        twins = self._unused_twins(taken)
        taken |= {name: taken[twin] for name, twin in twins.items()}
        slices = {n: taken[h.name] for n, h in self._trace.state.items() if h.name in taken}
        layers = tuple(part for part in chosen if isinstance(part, SingleLayer))
        gathered = {next(iter(form.slices)) for form in layers if form.gathered}
        gathered |= {name for name, twin in twins.items() if twin in gathered}
        return SlicingPlan(
            ranks=self._ranks,
            slices=slices,
            gathered=frozenset(gathered),
            whole_reasons={
                name: self._why_whole(name)
                for name in self._trace.state
                if name in self._trace.trained and name not in slices
            },
            classes=tuple(part for part in chosen if isinstance(part, SliceClass)),
            single_layers=layers,
            flops=sum(record.flops for record in self._trace.records),
            failed=self._trace.failed,
            guessed=self._trace.guessed,
        )

    def _may_be_sliced(self, candidate: SliceCandidate) -> bool:
        """Whether none of the candidate's tensors must stay whole."""
        return not any(name in self._whole for name in candidate.slices)

    def _unused_twins(self, chosen: Mapping[str, Slices]) -> dict[str, str]:
        """Match unused with used parameters whose names differ only in numbers (experts).

        Returns:
            For each matched unused parameter, the name of the parameter whose slices it gets.
        """
        kinds: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        unused = []
        for tensor in {id(tensor): tensor for tensor in self._trace.state.values()}.values():
            kind = (re.sub(r"\d+", "*", tensor.name), tuple(map(dim_length, tensor.dims)))
            if tensor in self._used:
                kinds.setdefault(kind, []).append(tensor.name)
            elif tensor.name in self._trace.trained:
                unused.append((tensor.name, kind))
        matches = {}
        for name, kind in unused:
            used_names = kinds.get(kind, [])
            if (
                used_names
                and len({chosen.get(used_name) for used_name in used_names}) == 1
                and used_names[0] in chosen
            ):
                matches[name] = used_names[0]
        return matches

    def _is_more_than_a_layer(self, candidate: SliceClass) -> bool:
        """Whether a class does more than slice linear layers alone, as `single_layers` can."""
        return (
            candidate.in_activations
            or candidate.is_table
            or not all(n in self._all_single_layers for n in candidate.slices)
        )

    def _most_bytes(self) -> list[SliceCandidate]:
        """Choose the classes with the most bytes; then single layers, the largest first."""
        total = sum(self._nbytes.values())
        chosen = self._most_classes(alone=False)
        if sum(map(self._sliced_bytes, chosen)) < ENOUGH * total:
            chosen = self._most_classes(alone=True)
        sliced = sum(map(self._sliced_bytes, chosen))
        for candidate in sorted(chosen, key=self._sliced_bytes):
            nbytes = self._sliced_bytes(candidate)
            table = isinstance(candidate, SliceClass) and not candidate.flops
            if table and nbytes < SMALL * total and sliced - nbytes >= ENOUGH * total:
                chosen = [rest for rest in chosen if rest is not candidate]
                sliced -= nbytes
        taken = {name for candidate in chosen for name in candidate.slices}
        kinds: dict[str, list[SingleLayer]] = {}
        for name in self._single_layers:
            form = self._best_single(name, taken)
            if form is not None:
                kinds.setdefault(re.sub(r"\d+", "*", name), []).append(form)
        for forms in sorted(kinds.values(), key=lambda f: -sum(map(self._sliced_bytes, f))):
            if sliced >= ENOUGH * total:
                break
            chosen += forms
            sliced += sum(map(self._sliced_bytes, forms))
        return chosen

    def _most_classes(self, *, alone: bool) -> list[SliceCandidate]:
        """Return the set of classes that sends least, among those with nearly the most bytes.

        Args:
            alone: whether the other weights will be sliced alone, which sends bytes as well.
        """
        options = []
        for candidate in self._classes:
            names = candidate.slices if alone else ()
            instead = sum(self._sent(self._best_single(name)) for name in names)
            options.append(self._option(candidate, self._sent(candidate) - instead, 1.0, 0.0))
        points = frontier(options)
        enough = NEARLY_MOST * min(point.nbytes for point in points)
        chosen = list(next(point for point in points if point.nbytes <= enough).taken)
        taken = {name for candidate in chosen for name in candidate.slices}
        for candidate in sorted(self._classes, key=self._sliced_bytes, reverse=True):
            if taken.isdisjoint(candidate.slices):  # left out to send less, but compatible
                chosen.append(candidate)
                taken |= candidate.slices.keys()
        return chosen

    def _cheapest(self, prices: Prices, limit: float | None) -> list[SliceCandidate]:
        """Return the set of candidates that takes the least time and fits the limit."""
        parts: list[SliceCandidate] = [
            *self._classes,
            *(f for forms in self._single_layers.values() for f in forms),
        ]
        options = []
        for candidate in parts:
            share = max(fullest_share(slices, self._ranks) for slices in candidate.slices.values())
            saved = (1 - share) * candidate.flops * 3 * prices.seconds_per_flop
            seconds = sum(
                prices.exchange(sent.kind, sent.nbytes) * self._times(sent.where)
                for sent in candidate.exchanged
            )
            options.append(self._option(candidate, seconds - saved, prices.state_bytes, 1 - share))
        if limit is None:
            best = frontier(options, best_key=lambda point: (point.cost, point.nbytes))[0]
            return list(best.taken)
        total = sum(nbytes for _, nbytes in self._trace.saved)
        total += int(sum(self._nbytes.values()) * prices.state_bytes)
        points = frontier(options)
        fitting: list[Point] = [point for point in points if total + point.nbytes <= limit]
        if not fitting:
            least = total + points[-1].nbytes
            raise ConfigError(
                f"mesh.tp={self._ranks}: the limit of a rank is {format_bytes(int(limit))}, and "
                "even with everything sliced that can be sliced it needs "
                f"{format_bytes(int(least))} for parameters, gradients, optimizer state and "
                "activations. Use more ranks, or a smaller micro-batch."
            )
        return list(fitting[0].taken)

    def _option(
        self, candidate: SliceCandidate, cost: float, state: float, activations: float
    ) -> Option:
        """Return a class or a single layer as an option, with the bytes that it saves on a rank."""
        saved_states = sum(
            self._nbytes.get(name, 0) * (1 - fullest_share(slices, self._ranks))
            for name, slices in candidate.slices.items()
        )
        saved_activations = (
            candidate.activation_bytes * activations if isinstance(candidate, SliceClass) else 0.0
        )
        return Option(
            candidate,
            frozenset(candidate.slices),
            cost,
            -(saved_states * state + saved_activations),
        )

    def _times(self, where: str) -> int:
        """Return how many modules or parameters of a deeper model a name represents."""
        counts = (n for block, n in self._repeats.items() if f"{where}.".startswith(f"{block}."))
        return next(counts, 1)

    def _sent(self, candidate: SliceCandidate | None) -> int:
        """Return about how many bytes a rank sends for a candidate's exchanges in a micro-batch."""
        exchanged: Sequence[SliceExchange] = candidate.exchanged if candidate is not None else ()
        return sum(
            sent.nbytes * _sent_per_byte(sent.kind) * self._times(sent.where) for sent in exchanged
        )

    def _sliced_bytes(self, candidate: SliceCandidate) -> int:
        return sum(self._nbytes.get(name, 0) for name in candidate.slices)

    def _best_single(self, name: str, taken: Iterable[str] = ()) -> SingleLayer | None:
        """Return the way to slice a weight alone that sends the fewest bytes.

        Only ways with nearly even slices are compared: the largest part of the weight on a rank is
        at most 10 % larger than the smallest such part of all ways.

        Args:
            name: the name of the weight.
            taken: the names of tensors that are sliced already. A way that slices any of them is
                left out.

        Returns:
            None if no way is left.
        """
        used = set(taken)
        free = [f for f in self._single_layers.get(name, ()) if used.isdisjoint(f.slices)]
        if not free:
            return None
        shares = [fullest_share(f.slices[name], self._ranks) for f in free]
        even = [f for f, share in zip(free, shares, strict=True) if share <= 1.1 * min(shares)]
        return min(even, key=self._sent)

    def _why_whole(self, name: str) -> str:
        """Return why a parameter is not sliced."""
        tensor = self._trace.state[name]
        if name in self._keep:
            return "as strategy.slice.keep says"
        if name in self._trace.listed:
            return listed_reason(self._trace.listed[name])
        if tensor not in self._used:
            return self._trace.failed or "this forward pass does not use it"
        reasons = []
        for n, dim in enumerate(tensor.dims):
            reason = self._why_dim(tensor.name, n) or self._axis_classes.why_not(dim)
            if reason and dim:
                reasons.append(f"dim {n}: {reason}")
        return "; ".join(reasons) or "it is a scalar"

    @cached_property
    def _used(self) -> set[Any]:
        return {tensor.base for record in self._trace.records for tensor in record.inputs}

    def _why_dim(self, name: str, n: int) -> str:
        """Return why a dim that can be sliced is not sliced; '' if the dim cannot be sliced."""
        for candidate in self._axis_classes.classes.values():
            slices = candidate.slices.get(name)
            if slices is None or slices.dim != n:
                continue
            if candidate.units < self._ranks:
                few = f"it has {candidate.units} parts that stay together, for {self._ranks} ranks"
                return (
                    few if candidate.units < 2 else (f"{few}: mesh.tp={candidate.units} would work")
                )
            for other_name, other_slices in candidate.slices.items():
                taken = self._chosen_slices.get(other_name)
                if taken is not None and (other_name == name or taken.dim != other_slices.dim):
                    return f"{other_name!r}, which goes with it, is sliced along dim {taken.dim}"
            share = candidate.parameter_bytes / sum(self._nbytes.values())
            sent = format_bytes(sum(sent.nbytes for sent in candidate.exchanged))
            return f"it is {share:.2%} of the parameters, and slices of it would send {sent}"
        return ""

    def _refusal(self) -> str:
        """Return the message that nothing can be sliced, with reasons for the largest weights."""
        largest = sorted(self._nbytes, key=lambda name: -self._nbytes[name])[:3]
        lines, could_be = [], 1
        for name in largest:
            units = [
                candidate.units
                for candidate in self._axis_classes.classes.values()
                if name in candidate.slices
            ]
            units += [form.units for form in self._all_single_layers.get(name, ())]
            most = 1 if name in self._whole else max(units, default=1)
            could = (
                f"over {most} ranks at most" if most > 1 else f"not at all: {self._why_whole(name)}"
            )
            lines.append(f"{name!r} {tuple(self._shape(name))} can be sliced {could}")
            could_be = max(could_be, most)
        fix = "Use a smaller mesh.tp, or mesh.tp=1." if could_be > 1 else "Use mesh.tp=1."
        if not self._keep.isdisjoint(largest):
            fix = "Leave modules out of strategy.slice.keep, or use mesh.tp=1."
        elif not self._trace.listed.keys().isdisjoint(largest):
            fix = "Read each by its name in the model's code (self.layer.weight), or use mesh.tp=1."
        why = f" ({self._trace.failed})" if self._trace.failed else ""
        return (
            f"mesh.tp={self._ranks}: nothing of the model can be sliced{why}: "
            f"{'; '.join(lines)}. {fix}"
        )

    def _shape(self, name: str) -> list[int]:
        return [dim_length(dim) for dim in self._trace.state[name].dims]


def _sent_per_byte(kind: CommOp) -> int:
    return 2 if kind == "all_reduce" else 1
