"""Compute a run with another number of rows, or with finer slices, from two runs on fake tensors.

The run is interpolated, and not executed. Two runs can be interpolated if they differ only in the
sizes of their tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigtrain.memory.timeline import Span, Timeline
from bigtrain.prediction.record_sections import RecordedSections
from bigtrain.prediction.sections import (
    Anchor,
    OpLog,
    PassPair,
    Section,
    SectionPass,
    SectionTensor,
    Storage,
)
from bigtrain.slicing.exchange import TensorExchange

TICK_TOLERANCE = 64
"""The most ticks between the releases of one storage in two runs. The releases differ because
autocast's copies of weights are released together, in the order of their addresses."""


def interpolate_sections(
    small: RecordedSections, large: RecordedSections, share: float
) -> tuple[RecordedSections, bool] | None:
    """Interpolate a run with other rows, or with finer slices.

    Args:
        small: a run with fewer rows, or with fewer slices.
        large: a run with more rows, or with more slices.
        share: position between the two: 0 is `small`, 1 is `large`, and more than 1 extrapolates.

    Returns:
        The run, and whether it is exact. It is not exact if the loss runs in another number of
        chunks in `small` than in `large`; the part after the blocks then has the memory of `large`.
        None if the runs differ in more than sizes.
    """
    if len(small.sections) != len(large.sections) or small.profile is not None:
        return None
    sections: list[Section] = []
    is_exact = True
    for small_section, large_section in zip(small.sections, large.sections, strict=True):
        passes = interpolate_passes(small_section.passes, large_section.passes, share)
        if passes is None and large_section is not large.sections[-1]:
            return None
        is_exact = passes is not None
        sections.append(
            _section(small_section, large_section, passes or large_section.passes, share)
        )
    spans = _spans(small.step.spans, large.step.spans, share)
    interpolated = replace(
        small,
        sections=tuple(sections),
        step=small.step if spans is None else Timeline(spans, small.step.phases),
        step_work=_work(small.step_work, large.step_work, share),
        batch_bytes=_line(small.batch_bytes, large.batch_bytes, share),
        rows=_line(small.rows, large.rows, share),
    )
    return interpolated, is_exact


def _section(small: Section, large: Section, passes: PassPair, share: float) -> Section:
    forward, backward = (
        _exchanges(a, b, share) for a, b in zip(small.exchanges, large.exchanges, strict=True)
    )
    tensors = small.tensors
    if tensors != large.tensors:
        pairs = zip(small.tensors, large.tensors, strict=True)
        tensors = tuple(_tensor(a, b, share) for a, b in pairs)
    return replace(
        small,
        passes=passes,
        forward=_work(small.forward, large.forward, share),
        backward=_work(small.backward, large.backward, share),
        tensors=tensors,
        incoming=_line(small.incoming, large.incoming, share),
        incoming_gradients=_line(small.incoming_gradients, large.incoming_gradients, share),
        sequence_shards=_line(small.sequence_shards, large.sequence_shards, share),
        exchanges=(forward, backward),
    )


def _tensor(small: SectionTensor, large: SectionTensor, share: float) -> SectionTensor:
    return replace(
        small,
        shape=_shape(small.shape, large.shape, share),
        nbytes=_line(small.nbytes, large.nbytes, share),
        state_bytes=_line(small.state_bytes, large.state_bytes, share),
    )


def _shape(small: Sequence[int], large: Sequence[int], share: float) -> tuple[int, ...]:
    return tuple(_line(a, b, share) for a, b in zip(small, large, strict=True))


def _exchanges(
    small: Sequence[TensorExchange], large: Sequence[TensorExchange], share: float
) -> tuple[TensorExchange, ...]:
    """Interpolate the bytes of exchanges, and the number of exchanges if it differs."""
    kinds = [exchange.kind for exchange in large]
    if [exchange.kind for exchange in small] == kinds:
        pairs = zip(small, large, strict=True)
        return tuple(TensorExchange(a.kind, _line(a.nbytes, b.nbytes, share)) for a, b in pairs)
    exchanges: list[TensorExchange] = []
    for kind in dict.fromkeys(kinds):
        less, more = (
            [exchange.nbytes for exchange in run if exchange.kind == kind] for run in (small, large)
        )
        count = max(1, _line(len(less), len(more), share))
        exchanges += [TensorExchange(kind, _line(sum(less), sum(more), share) // count)] * count
    return tuple(exchanges)


def interpolate_named(
    runs: Sequence[dict[str, PassPair] | None], share: float
) -> dict[str, PassPair] | None:
    """Interpolate the passes of sections by their names; see `interpolate_sections`.

    Args:
        runs: the passes of the small and of the large run; None if a run was impossible.
        share: see `interpolate_sections`.

    Returns:
        None if a run is None, or if the two runs differ in more than sizes.
    """
    small_passes, large_passes = runs
    if small_passes is None or large_passes is None:
        return None
    interpolated = {}
    for name, passes in small_passes.items():
        between = interpolate_passes(passes, large_passes[name], share)
        if between is None:
            return None
        interpolated[name] = between
    return interpolated


def interpolate_passes(small: PassPair, large: PassPair, share: float) -> PassPair | None:
    """Interpolate the passes of a step's first micro-batch and of later ones.

    None if the two runs differ in more than sizes; see `interpolate_sections`.
    """
    first, later = (interpolate(a, b, share) for a, b in zip(small, large, strict=True))
    return None if first is None or later is None else (first, later)


def interpolate(small: SectionPass, large: SectionPass, share: float) -> SectionPass | None:
    """Interpolate the passes of a micro-batch through a section; see `interpolate_sections`.

    None if the passes in the two runs differ in more than sizes.
    """
    if small.lengths != large.lengths or len(small.storages) != len(large.storages):
        return None
    ticks, others = small.ticks, large.ticks
    if ticks != others:  # with finer slices the shapes differ
        if ticks is None or others is None or replace(others, shapes=ticks.shapes) != ticks:
            return None
        pairs = zip(ticks.shapes, others.shapes, strict=True)
        ticks = replace(ticks, shapes=tuple(_shape(a, b, share) for a, b in pairs))
    storages = []
    for a, b in zip(small.storages, large.storages, strict=True):
        if (a.kind, a.window, a.birth) != (b.kind, b.window, b.birth):
            return None
        later = _later(a, b, small.lengths)
        if later is None:
            return None
        nbytes = a.nbytes if a.nbytes == b.nbytes else _line(a.nbytes, b.nbytes, share)
        storages.append(later._replace(nbytes=nbytes))
    return replace(small, storages=tuple(storages), ticks=ticks)


def _later(a: Storage, b: Storage, lengths: Sequence[int]) -> Storage | None:
    """Return the storage that is released later; None if the releases are far from each other."""
    if max(a.until, b.until) > Anchor.WEIGHTS:
        return a if a.until == b.until else None
    tick_a, tick_b = (sum(lengths[: s.until]) + s.death for s in (a, b))
    if abs(tick_a - tick_b) > TICK_TOLERANCE:
        return None
    return a if tick_a >= tick_b else b


def _spans(small: Sequence[Span], large: Sequence[Span], share: float) -> tuple[Span, ...] | None:
    if len(small) != len(large):
        return None
    spans = []
    for a, b in zip(small, large, strict=True):
        if (a.kind, a.birth) != (b.kind, b.birth) or abs(a.death - b.death) > TICK_TOLERANCE:
            return None
        nbytes = a.nbytes if a.nbytes == b.nbytes else _line(a.nbytes, b.nbytes, share)
        spans.append(Span(nbytes, a.kind, a.birth, max(a.death, b.death)))
    return tuple(spans)


def _line(small: float, large: float, share: float) -> int:
    return max(0, round(small + (large - small) * share))


def _work(small: OpLog, large: OpLog, share: float) -> OpLog:
    sizes = ("flops", "low_flops", "nbytes", "times", "products")
    # The runs have different operations: scale those of the larger run to the right sums.
    if len(small.times) != len(large.times):
        figures = []
        for key in sizes[:3]:
            less, more = (float((getattr(log, key) * log.times).sum()) for log in (small, large))
            figures.append(getattr(large, key) * (_line(less, more, share) / more if more else 0))
        return OpLog(figures[0], figures[1], figures[2], large.times, large.products)
    rows = [(getattr(small, key), getattr(large, key)) for key in sizes]
    figures = [(a + (b - a) * share).clip(min=0.0) for a, b in rows]
    return OpLog(*figures)
