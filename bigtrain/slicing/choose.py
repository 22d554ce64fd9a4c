"""Which classes of axes are sliced: each weight along one dim at most."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.machine.cluster import CommOp
from bigtrain.slicing.analysis.axis_trace import AxisTrace, trace_axes
from bigtrain.slicing.analysis.classes import AxisClasses, SliceClass, SliceExchange
from bigtrain.slicing.analysis.singles import SingleForm, single_forms
from bigtrain.slicing.plan import SlicingPlan
from bigtrain.slicing.slices import Slices

ENOUGH = 0.9
"""Share of the parameters that is to be sliced where nothing else is asked for."""
SMALL = 0.01
"""Share of the parameters below which a table is sliced only where that is needed for the rest."""


@dataclass(frozen=True)
class Prices:
    """What exchanges cost and computing saves."""

    exchange: Callable[[CommOp, float], float]
    """Seconds of an exchange of so many bytes over the tp axis."""
    seconds_per_flop: float = 0.0
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
    workload: SlicedWork, ranks: int, prices: Prices | None = None, limit: float | None = None
) -> SlicingPlan:
    """The slices of a model over a number of ranks.

    Args:
        workload: the model, its loss and a micro-batch.
        ranks: of the tp axis.
        prices: what exchanges and computing take; without them as much as can be is sliced.
        limit: bytes of a rank for parameters with what the optimizer holds, and activations.

    Raises:
        ConfigError: nothing can be sliced over so many ranks.
    """
    del limit
    class_dim = getattr(workload.loss, "class_dim", None)
    trace = trace_axes(workload.model, workload.micro_batch.inputs, class_dim)
    groups = AxisClasses(trace)
    found = [own for own in groups.classes.values() if own.units >= ranks]
    singles = {
        name: [form for form in forms if form.units >= ranks]
        for name, forms in single_forms(trace).items()
    }
    chosen = best_classes(found, singles, prices)
    alone = _alone(trace, chosen, singles)
    return _plan(trace, groups, ranks, chosen, alone)


def most_ranks(workload: SlicedWork) -> int:
    """Over how many ranks something of a model can be sliced; 1 where nothing can be."""
    class_dim = getattr(workload.loss, "class_dim", None)
    trace = trace_axes(workload.model, workload.micro_batch.inputs, class_dim)
    units = [own.units for own in AxisClasses(trace).classes.values()]
    units += [form.units for forms in single_forms(trace).values() for form in forms]
    return max(units, default=1)


def best_classes(
    classes: Sequence[SliceClass],
    singles: Mapping[str, Sequence[SingleForm]],
    prices: Prices | None = None,
) -> list[SliceClass]:
    """Those with most bytes of which no two slice one tensor along two dims."""
    del prices
    left = sorted(classes, key=lambda own: -own.parameter_bytes)
    taken: set[str] = set()
    chosen = []
    for own in left:
        if taken.isdisjoint(own.slices):
            taken |= own.slices.keys()
            chosen.append(own)
    del singles
    return chosen


def _alone(
    trace: AxisTrace,
    chosen: Iterable[SliceClass],
    singles: Mapping[str, Sequence[SingleForm]],
) -> list[SingleForm]:
    """Of the weights in no class the largest kinds, until enough is sliced."""
    taken = {name for own in chosen for name in own.slices}
    sizes = {held.name: held.nbytes for n, held in trace.state.items() if n in trace.trained}
    kinds: dict[str, list[SingleForm]] = {}
    for name, forms in singles.items():
        free = [form for form in forms if taken.isdisjoint(form.slices)]
        if name not in taken and free:
            best = min(free, key=lambda form: sum(_weighed(sent) for sent in form.exchanged))
            kinds.setdefault(re.sub(r"\d+", "*", name), []).append(best)
    total, sliced = sum(sizes.values()), sum(sizes.get(name, 0) for name in taken)
    found: list[SingleForm] = []
    for forms in sorted(kinds.values(), key=lambda f: -sum(form.parameter_bytes for form in f)):
        if sliced >= ENOUGH * total:
            break
        found += forms
        sliced += sum(form.parameter_bytes for form in forms)
    return found


def _weighed(sent: SliceExchange) -> int:
    """Bytes that a rank sends, nearly."""
    return sent.nbytes * (2 if sent.kind == "all_reduce" else 1)


def _plan(
    trace: AxisTrace,
    groups: AxisClasses,
    ranks: int,
    chosen: Sequence[SliceClass],
    alone: Sequence[SingleForm],
) -> SlicingPlan:
    own: dict[str, Slices] = {}
    for slices in (*(c.slices for c in chosen), *(form.slices for form in alone)):
        own |= slices
    if not own:
        raise ConfigError(f"mesh.tp={ranks}: nothing of the model can be sliced. {trace.failed}")
    slices = {name: own[held.name] for name, held in trace.state.items() if held.name in own}
    gathered = {next(iter(form.slices)) for form in alone if form.gathered}
    kept = {}
    for name, held in trace.state.items():
        if name not in slices and name in trace.trained:
            reasons = [groups.why_not(dim) for dim in held.dims]
            kept[name] = "; ".join(f"dim {n}: {why}" for n, why in enumerate(reasons) if why)
    return SlicingPlan(ranks, slices, frozenset(gathered), kept, tuple(chosen), tuple(alone))
