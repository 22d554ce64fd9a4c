"""From a model and a number of stages to a cut: named by the user, or balanced exactly."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bigtrain.cutting.cut import Cut, cut_at
from bigtrain.cutting.cut_points import CutPoint, legal_points
from bigtrain.cutting.partition import AtomicUnits, Partition, partition
from bigtrain.cutting.traced_model import TracedModel
from bigtrain.cutting.uneven import uneven_note
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.tracing.records import ForwardTrace


@dataclass(frozen=True)
class DeviceRates:
    """What a device does in a second."""

    flops: float
    nbytes: float
    """Read and written by operations."""
    sent: float
    """Bytes sent to the next stage."""


_GPU = DeviceRates(flops=3e14, nbytes=2.5e12, sent=5e10)
NOMINAL_RATES = {
    "cpu": DeviceRates(flops=5e10, nbytes=1e10, sent=2e9),
    "cuda": _GPU,
    "xpu": _GPU,
}
"""One core's and one data-centre GPU's order of magnitude: only their ratios matter here."""


@dataclass(frozen=True)
class CutRequest:
    """How a model is to be cut."""

    stages: int
    at: tuple[str, ...] = ()
    """Modules before which the cuts stand; empty to find them."""
    in_flight: tuple[int, ...] = ()
    """For each stage the micro-batches that it holds at most."""
    devices: tuple[int, ...] = ()
    """For each stage its rank."""
    memory: int | None = None
    """Bytes of a rank for states and activations."""
    state_factor: float = 4.0
    """Bytes held for each byte of a parameter: itself, its gradient, the optimizer's state."""
    rates: DeviceRates = NOMINAL_RATES["cpu"]


@dataclass(frozen=True)
class ChosenCut:
    """A cut and what it is expected to be."""

    cut: Cut
    partition: Partition
    flops: tuple[int, ...]
    """Of each stage, forward, one micro-batch."""
    parameter_bytes: tuple[int, ...]
    crossing_bytes: tuple[int, ...]
    """Over each cut, one micro-batch, one direction."""
    uneven: str = ""
    """A line on a rank with far more work than the others; empty where there is none."""


def choose_cut(rehearsal: TracedModel, micro_batch: MicroBatch, request: CutRequest) -> ChosenCut:
    """Cut a model.

    Args:
        rehearsal: of the model.
        micro_batch: one of the run's size.
        request: stages, and what they may take.

    Raises:
        ConfigError: it cannot be cut so, or in fewer stages; with the names, the reasons and the
            fix.
    """
    trace, _ = rehearsal.trace(micro_batch, training=True)
    points = _common(trace, rehearsal, micro_batch)
    if not request.at and request.stages > len(points) + 1:
        raise _too_few(trace, points, request.stages)
    pieces = _pieces(trace, points, request.rates)
    if request.at:
        chosen = _named(trace, points, request)
        in_flight, state = list(request.in_flight), request.state_factor
        partitioned = _given(
            pieces, chosen, in_flight or [1] * request.stages, state, request.rates
        )
    else:
        partitioned = partition(
            pieces,
            request.stages,
            bandwidth=request.rates.sent,
            state_factor=request.state_factor,
            in_flight=request.in_flight or [1] * request.stages,
            memory=None if request.memory is None else [request.memory] * request.stages,
            devices=request.devices or None,
        )
        chosen = list(partitioned.cuts)
    calls = [points[piece - 1].call for piece in chosen]
    cut = cut_at(trace, calls, rehearsal)
    ticks = [points[piece - 1].tick for piece in chosen]
    flops = [0] * request.stages
    for cost in trace.costs:
        flops[bisect_right(ticks, cost.tick)] += cost.flops
    parameter_bytes = tuple(_parameter_bytes(rehearsal, cut, n) for n in range(request.stages))
    crossing = tuple(points[piece - 1].nbytes for piece in chosen)
    uneven = uneven_note(
        trace,
        [points[piece - 1] for piece in chosen],
        partitioned.seconds,
        request.devices or range(request.stages),
        named=bool(request.at),
    )
    return ChosenCut(cut, partitioned, tuple(flops), parameter_bytes, crossing, uneven)


def _parameter_bytes(rehearsal: TracedModel, cut: Cut, stage: int) -> int:
    parameters = dict(rehearsal.fake_model.named_parameters())
    own = [parameters[name] for name in cut.tensor_names_of([stage]) if name in parameters]
    return sum(parameter.numel() * parameter.element_size() for parameter in own)


def _common(found: ForwardTrace, rehearsal: TracedModel, micro_batch: MicroBatch) -> list[CutPoint]:
    """The places where the model can be cut in training and in evaluation."""
    points, _ = legal_points(found)
    other, _ = rehearsal.trace(micro_batch, training=False)
    there = {(point.name, point.number) for point in legal_points(other)[0]}
    return [point for point in points if (point.name, point.number) in there]


def _too_few(trace: ForwardTrace, points: Sequence[CutPoint], stages: int) -> ConfigError:
    """What there is to be said of a model that has fewer places for a cut than are asked for."""
    _, refused = legal_points(trace)
    reasons = Counter(refused.values()).most_common(2)
    first = {reason: next(n for n in refused if refused[n] == reason) for reason, _ in reasons}
    why = "".join(
        f" None can stand before {first[reason]!r}"
        f"{f' and {number - 1} others' if number > 1 else ''}: {reason}."
        for reason, number in reasons
    )
    fix = (
        f"Use mesh.pp={len(points) + 1}, or fewer stages on each rank."
        if points
        else "Use a strategy without a cut."
    )
    return ConfigError(
        f"strategy.cut: {stages} stages, and the model can be cut at {len(points)} places: at "
        f"most {len(points) + 1} stages.{why} {fix}"
    )


def _pieces(trace: ForwardTrace, points: Sequence[CutPoint], rates: DeviceRates) -> AtomicUnits:
    ticks = [point.tick for point in points]
    seconds = [0.0] * (len(points) + 1)
    for cost in trace.costs:
        # Forward, and twice that backward: a product gives two gradients.
        work = max(cost.flops / rates.flops, cost.nbytes / rates.nbytes)
        seconds[bisect_right(ticks, cost.tick)] += 3 * work
    params = [
        (value.tensor.numel() * value.tensor.element_size(), _where(ticks, value.uses))
        for value in trace.values
        if value.root == "parameter" and value.uses
    ]
    saved = [(nbytes, _where(ticks, uses)) for nbytes, uses in trace.saved.values()]
    return AtomicUnits(seconds, [0, *(point.nbytes for point in points)], params, saved)


def _where(ticks: Sequence[int], uses: Sequence[int]) -> list[int]:
    last = len(ticks)
    return sorted({min(last, bisect_right(ticks, use)) for use in uses})


def _named(trace: ForwardTrace, points: Sequence[CutPoint], request: CutRequest) -> list[int]:
    """The pieces before which the user's cuts stand."""
    if len(request.at) != request.stages - 1:
        raise ConfigError(
            f"strategy.cut.at names {len(request.at)} places, and {request.stages} stages have "
            f"{request.stages - 1} cuts. Name {request.stages - 1}, or leave strategy.cut.at out."
        )
    pieces = [_piece_at(trace, points, name) for name in request.at]
    if pieces != sorted(set(pieces)):
        raise ConfigError(
            f"strategy.cut.at={list(request.at)}: these are not different places in the order in "
            "which the model calls them. Name each stage's first module, in order."
        )
    return pieces


def _piece_at(trace: ForwardTrace, points: Sequence[CutPoint], name: str) -> int:
    call_index = {call.name: index for index, call in reversed(list(enumerate(trace.calls)))}
    if name not in call_index:
        hint = did_you_mean(name, [point.name for point in points]) or "."
        raise ConfigError(
            f"strategy.cut.at: the model calls no module {name!r}{hint} Use a name as in "
            "model.named_modules() of a module that its forward calls."
        )
    begin = trace.calls[call_index[name]].begin
    work = sorted(cost.tick for cost in trace.costs)
    for piece, point in enumerate(points, start=1):
        between = bisect_left(work, max(point.tick, begin)) - bisect_left(
            work, min(point.tick, begin)
        )
        if between == 0:
            return piece
    _, refused = legal_points(trace)
    reason = refused.get(name, "it is where the model begins, or it is not there in evaluation")
    raise ConfigError(
        f"strategy.cut.at: no cut can stand before {name!r}: {reason}. "
        f"Near it: {_near(points, begin)}."
    )


def _near(points: Sequence[CutPoint], tick: int) -> str:
    close = sorted(points, key=lambda point: abs(point.tick - tick))[:3]
    return ", ".join(repr(point.name) for point in close) or "nowhere"


def _given(
    pieces: AtomicUnits,
    cuts: Sequence[int],
    in_flight: Sequence[int],
    state_factor: float,
    rates: DeviceRates,
) -> Partition:
    """What a partition that is not ours to choose will take."""
    edges = [0, *cuts, len(pieces.seconds)]
    seconds, stage_bytes = [], []
    for stage, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
        work = sum(pieces.seconds[start:stop])
        sent = 2 * pieces.crossing[stop] / rates.sent if stop < len(pieces.seconds) else 0.0
        seconds.append(work + sent)
        state = sum(size for size, used in pieces.params if any(start <= u < stop for u in used))
        saved = sum(size for size, used in pieces.saved if any(start <= u < stop for u in used))
        stage_bytes.append(round(state_factor * state) + in_flight[stage] * saved)
    crossing = sum(pieces.crossing[cut] for cut in cuts)
    return Partition(tuple(cuts), tuple(seconds), tuple(stage_bytes), crossing, proven=False)
