"""Which axes of a model are sliced: each weight along one dim at most, at the least cost."""

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
from bigtrain.slice_planning.single_layers import SingleForm, single_forms
from bigtrain.slice_planning.slice_specs import kept_names
from bigtrain.slicing.slices import Slices
from bigtrain.units import format_bytes

ENOUGH = 0.9
"""Share of the parameters that is to be sliced where nothing else is asked for."""
SMALL = 0.01
"""Share of the parameters below which a table stays whole, where enough is sliced without it."""
NEARLY_MOST = 0.98
"""Share of the most bytes that classes can slice with which the one that sends least is content."""
Sliced = SliceClass | SingleForm


@dataclass(frozen=True)
class Prices:
    """What exchanges cost and computing saves."""

    exchange: Callable[[CommOp, float], float]
    """Seconds of an exchange of a tensor of so many bytes over the tp axis."""
    seconds_per_flop: float = 0.0
    """Of one rank, forward and backward."""
    state_bytes: float = 4.0
    """What is held for each byte of a parameter: itself, its gradient, the optimizer's state."""


class SlicedWork(Protocol):
    """What is sliced; `bigtrain.core.workload.Workload` is one."""

    @property
    def model(self) -> nn.Module:
        """Whole, on any device."""

    @property
    def micro_batch(self) -> Any:
        """With `inputs`, of which only shapes matter."""

    @property
    def loss(self) -> Any:
        """With `class_dim`, where it is a cross entropy along that dim of the output."""


def plan_slices(
    workload: SlicedWork,
    ranks: int,
    prices: Prices | None = None,
    limit: float | None = None,
    keep: Sequence[str] = (),
    repeats: Mapping[str, int] = MappingProxyType({}),
) -> SlicingPlan:
    """The slices of a model over a number of ranks.

    Without prices and a limit as much as can be is sliced in whole classes, then the largest of
    the other weights by themselves until `ENOUGH` is. Else it is what takes the least time; without
    prices that is what sends the fewest bytes. Where no slices pay, nothing is sliced.

    Args:
        workload: the model, its loss and a micro-batch.
        ranks: of the tp axis.
        prices: what exchanges and computing take.
        limit: bytes of a rank for parameters with gradients and optimizer state, and activations.
        keep: modules or parameters that stay whole, by patterns of names.
        repeats: for how many blocks of a longer model one stands: its parameters and exchanges
            count so often, and where no prices are given the choice is that of the longer model.

    Raises:
        ConfigError: nothing can be sliced over so many ranks, or it does not fit.
    """
    class_dim = getattr(workload.loss, "class_dim", None)
    trace = trace_axes(workload.model, workload.micro_batch.inputs, class_dim)
    kept = kept_names(keep, workload.model)
    return _Choice(trace, ranks, kept, repeats).plan(prices, limit)


def refuse_listed(workload: SlicedWork, slices: Collection[str]) -> None:
    """Refuse slices of what a model takes out of a list of all: there a rank finds what it holds.

    Args:
        workload: the model and a micro-batch.
        slices: names of what is sliced.

    Raises:
        ConfigError: with the module that does it.
    """
    trace = trace_axes(workload.model, workload.micro_batch.inputs, None)
    for name in slices:
        if name in trace.listed:
            why = listed_reason(trace.listed[name])
            raise ConfigError(
                f"strategy.slice.slices: {name} is sliced, and {why}: "
                "there a rank finds its slices. Take it by its name there (self.layer.weight), or "
                f"keep it whole: a line {name}: whole."
            )


def listed_reason(where: str) -> str:
    """Why what is taken out of a list of parameters stays whole.

    Args:
        where: the module whose code does it.
    """
    return f"{where or 'the model'!r} takes it from a list of all, as parameters() gives it"


def fullest_share(slices: Slices, ranks: int) -> float:
    """The share of a tensor that the rank with most of it has."""
    return slices.length(0, ranks) / slices.total


def most_ranks(workload: SlicedWork) -> int:
    """Over how many ranks something of a model can be sliced; 1 where nothing can be."""
    class_dim = getattr(workload.loss, "class_dim", None)
    trace = trace_axes(workload.model, workload.micro_batch.inputs, class_dim)
    units = [own.units for own in AxisClasses(trace).classes.values()]
    units += [form.units for forms in single_forms(trace).values() for form in forms]
    return max(units, default=1)


class _Choice:
    """Chooses among what a trace allows."""

    def __init__(
        self, trace: AxisTrace, ranks: int, keep: frozenset[str], repeats: Mapping[str, int]
    ) -> None:
        self._trace, self._ranks, self._keep, self._repeats = trace, ranks, keep, repeats
        self._whole = {*keep, *trace.listed}
        self._groups = AxisClasses(trace)
        self._nbytes = {
            held.name: held.nbytes * self._times(held.name)
            for name, held in trace.state.items()
            if name in trace.trained
        }
        self._taken: dict[str, Slices] = {}
        self._all_singles = single_forms(trace)
        self._singles = {
            name: fit
            for name, forms in self._all_singles.items()
            if (fit := [form for form in forms if form.units >= ranks and self._is_free(form)])
        }
        classes = [
            own
            for own in self._groups.classes.values()
            if self._is_of_many(own) and self._is_free(own)
        ]
        self._classes = [own for own in classes if own.units >= ranks]
        if len(self._classes) < len(classes):
            known = {name for own in self._classes for name in own.slices}
            wider = [
                own
                for own in self._groups.widened()
                if known.isdisjoint(own.slices) and self._is_free(own)
            ]
            self._classes += [own for own in wider if own.units >= ranks and self._is_of_many(own)]

    def plan(self, prices: Prices | None, limit: float | None) -> SlicingPlan:
        """See `plan_slices`."""
        if not self._classes and not self._singles:
            raise ConfigError(self._refusal())
        if prices is None and limit is None:
            chosen = self._most()
        else:
            chosen = self._cheapest(prices or Prices(lambda kind, n: n * _weight(kind)), limit)
        for part in chosen:
            self._taken |= part.slices
        own = self._taken
        alike = self._alike(own)
        own |= {name: own[other] for name, other in alike.items()}
        slices = {n: own[h.name] for n, h in self._trace.state.items() if h.name in own}
        singles = tuple(part for part in chosen if isinstance(part, SingleForm))
        gathered = {next(iter(form.slices)) for form in singles if form.gathered}
        gathered |= {name for name, other in alike.items() if other in gathered}
        return SlicingPlan(
            ranks=self._ranks,
            slices=slices,
            gathered=frozenset(gathered),
            kept={
                name: self._why_whole(name)
                for name in self._trace.state
                if name in self._trace.trained and name not in slices
            },
            classes=tuple(part for part in chosen if isinstance(part, SliceClass)),
            singles=singles,
            flops=sum(record.flops for record in self._trace.records),
            failed=self._trace.failed,
            guessed=self._trace.guessed,
        )

    def _is_free(self, own: Sliced) -> bool:
        """Whether nothing of it is to stay whole."""
        return not any(name in self._whole for name in own.slices)

    def _alike(self, own: Mapping[str, Slices]) -> dict[str, str]:
        """Of parameters that were not used those that lie as one that differs in numbers: experts.

        Returns:
            For each the other's name.
        """
        kinds: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        unused = []
        for held in {id(held): held for held in self._trace.state.values()}.values():
            kind = (re.sub(r"\d+", "*", held.name), tuple(map(dim_length, held.dims)))
            if held in self._used:
                kinds.setdefault(kind, []).append(held.name)
            elif held.name in self._trace.trained:
                unused.append((held.name, kind))
        found = {}
        for name, kind in unused:
            others = kinds.get(kind, [])
            if others and len({own.get(other) for other in others}) == 1 and others[0] in own:
                found[name] = others[0]
        return found

    def _is_of_many(self, own: SliceClass) -> bool:
        """Whether it is more than a weight by itself, which is a single form as well."""
        return own.carried or own.looked_up or not all(n in self._all_singles for n in own.slices)

    def _most(self) -> list[Sliced]:
        """Whole classes first, most bytes; then the largest of the rest."""
        whole = sum(self._nbytes.values())
        chosen = self._most_classes(alone=False)
        if sum(map(self._sliced_bytes, chosen)) < ENOUGH * whole:
            chosen = self._most_classes(alone=True)
        sliced = sum(map(self._sliced_bytes, chosen))
        for own in sorted(chosen, key=self._sliced_bytes):
            nbytes = self._sliced_bytes(own)
            table = isinstance(own, SliceClass) and not own.flops
            if table and nbytes < SMALL * whole and sliced - nbytes >= ENOUGH * whole:
                chosen = [other for other in chosen if other is not own]
                sliced -= nbytes
        taken = {name for own in chosen for name in own.slices}
        kinds: dict[str, list[SingleForm]] = {}
        for name in self._singles:
            form = self._best_single(name, taken)
            if form is not None:
                kinds.setdefault(re.sub(r"\d+", "*", name), []).append(form)
        for forms in sorted(kinds.values(), key=lambda f: -sum(map(self._sliced_bytes, f))):
            if sliced >= ENOUGH * whole:
                break
            chosen += forms
            sliced += sum(map(self._sliced_bytes, forms))
        return chosen

    def _most_classes(self, *, alone: bool) -> list[Sliced]:
        """Of the sets of classes with nearly the most bytes the one that sends least.

        Args:
            alone: the other weights will be sliced by themselves, which is sent instead.
        """
        options = []
        for own in self._classes:
            names = own.slices if alone else ()
            instead = sum(self._sent(self._best_single(name)) for name in names)
            options.append(self._option(own, self._sent(own) - instead, 1.0, 0.0))
        points = frontier(options)
        enough = NEARLY_MOST * min(point.nbytes for point in points)
        chosen = list(next(point for point in points if point.nbytes <= enough).taken)
        taken = {name for own in chosen for name in own.slices}
        for own in sorted(self._classes, key=self._sliced_bytes, reverse=True):
            if taken.isdisjoint(own.slices):  # left to send less, and excluded by nothing
                chosen.append(own)
                taken |= own.slices.keys()
        return chosen

    def _cheapest(self, prices: Prices, limit: float | None) -> list[Sliced]:
        """The least time of what fits."""
        parts: list[Sliced] = [
            *self._classes,
            *(f for forms in self._singles.values() for f in forms),
        ]
        options = []
        for own in parts:
            share = max(fullest_share(slices, self._ranks) for slices in own.slices.values())
            saved = (1 - share) * own.flops * 3 * prices.seconds_per_flop
            seconds = sum(
                prices.exchange(sent.kind, sent.nbytes) * self._times(sent.where)
                for sent in own.exchanged
            )
            options.append(self._option(own, seconds - saved, prices.state_bytes, 1 - share))
        if limit is None:
            best = frontier(options, first_of=lambda point: (point.cost, point.nbytes))[0]
            return list(best.taken)
        held = sum(nbytes for _, nbytes in self._trace.saved)
        held += int(sum(self._nbytes.values()) * prices.state_bytes)
        points = frontier(options)
        fitting: list[Point] = [point for point in points if held + point.nbytes <= limit]
        if not fitting:
            least = held + points[-1].nbytes
            raise ConfigError(
                f"mesh.tp={self._ranks}: a rank is to hold {format_bytes(int(limit))}, and with "
                f"all that can be sliced it holds {format_bytes(int(least))} of parameters with "
                "their gradients and optimizer state, and of activations. Use more ranks, or a "
                "smaller micro-batch."
            )
        return list(fitting[0].taken)

    def _option(self, own: Sliced, cost: float, state: float, activations: float) -> Option:
        """A class or single form, with what a rank holds less of."""
        held = sum(
            self._nbytes.get(name, 0) * (1 - fullest_share(slices, self._ranks))
            for name, slices in own.slices.items()
        )
        kept = own.activation_bytes * activations if isinstance(own, SliceClass) else 0.0
        return Option(own, frozenset(own.slices), cost, -(held * state + kept))

    def _times(self, where: str) -> int:
        """For how many parameters, or places in the model, the one of this name stands."""
        own = (n for block, n in self._repeats.items() if f"{where}.".startswith(f"{block}."))
        return next(own, 1)

    def _sent(self, own: Sliced | None) -> int:
        """Bytes that a rank sends for it, nearly."""
        exchanged: Sequence[SliceExchange] = own.exchanged if own is not None else ()
        return sum(sent.nbytes * _weight(sent.kind) * self._times(sent.where) for sent in exchanged)

    def _sliced_bytes(self, own: Sliced) -> int:
        return sum(self._nbytes.get(name, 0) for name in own.slices)

    def _best_single(self, name: str, taken: Iterable[str] = ()) -> SingleForm | None:
        """The form of a weight that sends least, of those that divide it well."""
        used = set(taken)
        free = [f for f in self._singles.get(name, ()) if used.isdisjoint(f.slices)]
        if not free:
            return None
        shares = [fullest_share(f.slices[name], self._ranks) for f in free]
        even = [f for f, share in zip(free, shares, strict=True) if share <= 1.1 * min(shares)]
        return min(even, key=self._sent)

    def _why_whole(self, name: str) -> str:
        """Why a parameter is in no slices, in words."""
        held = self._trace.state[name]
        if name in self._keep:
            return "as strategy.slice.keep says"
        if name in self._trace.listed:
            return listed_reason(self._trace.listed[name])
        if held not in self._used:
            return self._trace.failed or "this forward pass does not use it"
        reasons = []
        for n, dim in enumerate(held.dims):
            reason = self._why_dim(held.name, n) or self._groups.why_not(dim)
            if reason and dim:
                reasons.append(f"dim {n}: {reason}")
        return "; ".join(reasons) or "it is one number"

    @cached_property
    def _used(self) -> set[Any]:
        return {tensor.base for record in self._trace.records for tensor in record.inputs}

    def _why_dim(self, name: str, n: int) -> str:
        """Why a dim that could be sliced is not; '' where it could not."""
        for own in self._groups.classes.values():
            slices = own.slices.get(name)
            if slices is None or slices.dim != n:
                continue
            if own.units < self._ranks:
                few = f"it has {own.units} parts that stay together, for {self._ranks} ranks"
                return few if own.units < 2 else f"{few}: mesh.tp={own.units} would do"
            for other, lying in own.slices.items():
                taken = self._taken.get(other)
                if taken is not None and (other == name or taken.dim != lying.dim):
                    return f"{other!r}, which goes with it, is sliced along dim {taken.dim}"
            share = own.parameter_bytes / sum(self._nbytes.values())
            sent = format_bytes(sum(sent.nbytes for sent in own.exchanged))
            return f"it is {share:.2%} of the parameters, and slices of it would send {sent}"
        return ""

    def _refusal(self) -> str:
        """That nothing can be sliced, and what the largest weights would take."""
        largest = sorted(self._nbytes, key=lambda name: -self._nbytes[name])[:3]
        lines, could_be = [], 1
        for name in largest:
            units = [own.units for own in self._groups.classes.values() if name in own.slices]
            units += [form.units for form in self._all_singles.get(name, ())]
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
            fix = "Take each by its name there (self.layer.weight), or use mesh.tp=1."
        why = f" ({self._trace.failed})" if self._trace.failed else ""
        return (
            f"mesh.tp={self._ranks}: nothing of the model can be sliced{why}: "
            f"{'; '.join(lines)}. {fix}"
        )

    def _shape(self, name: str) -> list[int]:
        return [dim_length(dim) for dim in self._trace.state[name].dims]


def _weight(kind: CommOp) -> int:
    return 2 if kind == "all_reduce" else 1
