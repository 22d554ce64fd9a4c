"""Choose the cut of a model: at the modules that the user named, or balanced."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigtrain.cutting.cut import Cut, cut_at
from bigtrain.cutting.cut_points import CutPoint, legal_points
from bigtrain.cutting.partition import LayerCosts, Partition, partition
from bigtrain.cutting.partition_tables import make_tables, partition_at
from bigtrain.cutting.traced_model import TracedModel
from bigtrain.cutting.uneven import uneven_note
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.tracing.records import ForwardTrace


@dataclass(frozen=True)
class DeviceRates:
    """Rates of a device, per second."""

    flops: float
    nbytes: float
    """Bytes that operations read and write per second."""
    sent: float
    """Bytes that a stage sends to the next stage per second."""


_GPU = DeviceRates(flops=3e14, nbytes=2.5e12, sent=5e10)
NOMINAL_RATES = {
    "cpu": DeviceRates(flops=5e10, nbytes=1e10, sent=2e9),
    "cuda": _GPU,
    "xpu": _GPU,
}
"""Orders of magnitude for one CPU core and for a data-centre GPU, by device type. Only their ratios
matter for a cut."""


@dataclass(frozen=True)
class CutRequest:
    """A number of stages, and the limits and rates by which to choose them."""

    stages: int
    at: tuple[str, ...] = ()
    """Names of the modules at which the second and later stages begin; empty to choose them."""
    in_flight: tuple[int, ...] = ()
    """The most micro-batches in flight on each stage; empty for 1 on each stage."""
    devices: tuple[int, ...] = ()
    """The rank of each stage; empty for one stage on each rank."""
    memory: int | None = None
    """The bytes that a rank has for states and activations; None for no limit."""
    state_factor: float = 4.0
    """Resident bytes of parameter, gradient and optimizer's state for each byte of a parameter."""
    rates: DeviceRates = NOMINAL_RATES["cpu"]


@dataclass(frozen=True)
class ChosenCut:
    """A cut and its expected costs."""

    cut: Cut
    partition: Partition
    flops: tuple[int, ...]
    """FLOPs of each stage's forward pass of one micro-batch."""
    parameter_bytes: tuple[int, ...]
    """Bytes of the parameters of each stage."""
    crossing_bytes: tuple[int, ...]
    """Bytes over each cut, for one micro-batch, in one direction."""
    uneven: str = ""
    """A line about a rank with far more work than the others; empty if there is none."""


def choose_cut(
    traced_model: TracedModel, micro_batch: MicroBatch, request: CutRequest
) -> ChosenCut:
    """Cut a model into stages.

    Args:
        traced_model: the model.
        micro_batch: a micro-batch of the run's size, of which only shapes matter.
        request: the number of stages, and their limits.

    Raises:
        ConfigError: the model cannot be cut in this way; the message has names, reasons and the
            fix.
    """
    trace, _ = traced_model.trace(micro_batch, training=True)
    points = _common_points(trace, traced_model, micro_batch)
    if not request.at and request.stages > len(points) + 1:
        raise _too_few(trace, points, request.stages)
    layers = _layer_costs(trace, points, request.rates)
    in_flight = request.in_flight or [1] * request.stages
    if request.at:
        chosen = _named(trace, points, request)
        tables = make_tables(layers, request.rates.sent, request.state_factor, in_flight)
        partitioned = replace(partition_at(tables, tuple(chosen)), proven=False)
    else:
        partitioned = partition(
            layers,
            request.stages,
            bandwidth=request.rates.sent,
            state_factor=request.state_factor,
            in_flight=in_flight,
            memory=None if request.memory is None else [request.memory] * request.stages,
            devices=request.devices or None,
        )
        chosen = list(partitioned.cuts)
    calls = [points[layer - 1].call for layer in chosen]
    cut = cut_at(trace, calls, traced_model)
    ticks = [points[layer - 1].tick for layer in chosen]
    flops = [0] * request.stages
    for cost in trace.costs:
        flops[bisect_right(ticks, cost.tick)] += cost.flops
    parameter_bytes = tuple(_parameter_bytes(traced_model, cut, n) for n in range(request.stages))
    crossing = tuple(points[layer - 1].nbytes for layer in chosen)
    uneven = uneven_note(
        trace,
        [points[layer - 1] for layer in chosen],
        partitioned.seconds,
        request.devices or range(request.stages),
        named=bool(request.at),
    )
    return ChosenCut(cut, partitioned, tuple(flops), parameter_bytes, crossing, uneven)


def _parameter_bytes(traced_model: TracedModel, cut: Cut, stage: int) -> int:
    parameters = dict(traced_model.fake_model.named_parameters())
    stage_parameters = [
        parameters[name] for name in cut.tensor_names_of([stage]) if name in parameters
    ]
    return sum(parameter.numel() * parameter.element_size() for parameter in stage_parameters)


def _common_points(
    trace: ForwardTrace, traced_model: TracedModel, micro_batch: MicroBatch
) -> list[CutPoint]:
    """Return the cut points that are legal both in training and in evaluation."""
    points, _ = legal_points(trace)
    evaluated, _ = traced_model.trace(micro_batch, training=False)
    in_evaluation = {(point.name, point.number) for point in legal_points(evaluated)[0]}
    return [point for point in points if (point.name, point.number) in in_evaluation]


def _too_few(trace: ForwardTrace, points: Sequence[CutPoint], stages: int) -> ConfigError:
    """Return the error for a model with fewer cut points than the number of stages needs."""
    _, refused = legal_points(trace)
    reasons = Counter(refused.values()).most_common(2)
    first = {reason: next(n for n in refused if refused[n] == reason) for reason, _ in reasons}
    why = "".join(
        f" It cannot be cut before {first[reason]!r}"
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


def _layer_costs(trace: ForwardTrace, points: Sequence[CutPoint], rates: DeviceRates) -> LayerCosts:
    ticks = [point.tick for point in points]
    seconds = [0.0] * (len(points) + 1)
    for cost in trace.costs:
        # The backward pass takes twice the time of the forward pass, because each matrix product
        # has the gradients of two operands.
        work = max(cost.flops / rates.flops, cost.nbytes / rates.nbytes)
        seconds[bisect_right(ticks, cost.tick)] += 3 * work
    params = [
        (value.tensor.numel() * value.tensor.element_size(), _layers_of(ticks, value.uses))
        for value in trace.values
        if value.root == "parameter" and value.uses
    ]
    saved = [(nbytes, _layers_of(ticks, uses)) for nbytes, uses in trace.saved.values()]
    return LayerCosts(seconds, [0, *(point.nbytes for point in points)], params, saved)


def _layers_of(ticks: Sequence[int], uses: Sequence[int]) -> list[int]:
    last = len(ticks)
    return sorted({min(last, bisect_right(ticks, use)) for use in uses})


def _named(trace: ForwardTrace, points: Sequence[CutPoint], request: CutRequest) -> list[int]:
    """Return the first layers of the second and later stages, which the user named."""
    if len(request.at) != request.stages - 1:
        raise ConfigError(
            f"strategy.cut.at names {len(request.at)} places, and {request.stages} stages have "
            f"{request.stages - 1} cuts. Name {request.stages - 1}, or leave strategy.cut.at out."
        )
    layers = [_layer_at(trace, points, name) for name in request.at]
    if layers != sorted(set(layers)):
        raise ConfigError(
            f"strategy.cut.at={list(request.at)}: these are not different places in the order in "
            "which the model calls them. Name each stage's first module, in order."
        )
    return layers


def _layer_at(trace: ForwardTrace, points: Sequence[CutPoint], name: str) -> int:
    call_index = {call.name: index for index, call in reversed(list(enumerate(trace.calls)))}
    if name not in call_index:
        hint = did_you_mean(name, [point.name for point in points]) or "."
        raise ConfigError(
            f"strategy.cut.at: the model calls no module {name!r}{hint} Use a name as in "
            "model.named_modules() of a module that its forward calls."
        )
    begin = trace.calls[call_index[name]].begin
    work = sorted(cost.tick for cost in trace.costs)
    for layer, point in enumerate(points, start=1):
        between = bisect_left(work, max(point.tick, begin)) - bisect_left(
            work, min(point.tick, begin)
        )
        if between == 0:
            return layer
    _, refused = legal_points(trace)
    reason = refused.get(name, "the model begins there, or does not call it in evaluation")
    raise ConfigError(
        f"strategy.cut.at: the model cannot be cut before {name!r}: {reason}. Use a module near "
        f"it: {_near(points, begin)}."
    )


def _near(points: Sequence[CutPoint], tick: int) -> str:
    close = sorted(points, key=lambda point: abs(point.tick - tick))[:3]
    return ", ".join(repr(point.name) for point in close) or "nowhere"
