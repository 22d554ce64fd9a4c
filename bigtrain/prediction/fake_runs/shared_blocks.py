"""What one run on fake tensors has shown of blocks, for others to take over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from bigtrain.prediction.record_sections import RecordedSections
from bigtrain.prediction.sections import Anchor, OpLog, Section


def holds_beyond(section: Section) -> bool:
    """Whether something lives until a moment of the first section or of the last."""
    return any(one.until >= Anchor.FIRST for found in section.passes for one in found.storages)


def with_ends_of(run: RecordedSections, other: RecordedSections) -> RecordedSections:
    """A run with what is before and after its blocks as in another one."""
    sections = (other.sections[0], *run.sections[1:-1], other.sections[-1])
    return replace(run, sections=sections)


def middles_are_first(run: RecordedSections, stands_for: Mapping[str, str]) -> bool:
    """Whether every block of a run is as the first of those that one stands for."""
    first: dict[str, Section] = {}
    blocks = [section for section in run.sections if section.name]
    return all(_alike(one, first.setdefault(stands_for[one.name], one)) for one in blocks)


def _alike(one: Section, other: Section) -> bool:
    """Whether two sections do the same, but for the names of their parameters."""
    bare, others_bare = (
        replace(
            section,
            name="",
            tensors=tuple(replace(t, name="") for t in section.tensors),
            forward=other.forward,
            backward=other.backward,
        )
        for section in (one, other)
    )
    works = zip((one.forward, one.backward), (other.forward, other.backward), strict=True)
    return bare == others_bare and all(same_work(work, own) for work, own in works)


def same_work(one: OpLog, other: OpLog) -> bool:
    """Whether both have the same operations in the same order."""
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return one is other or all(np.array_equal(a, b) for a, b in pairs)


def with_middles(
    run: RecordedSections, complete: RecordedSections, stands_for: Mapping[str, str]
) -> RecordedSections:
    """A run of few blocks with as many as another one has, and the optimizer's step of that."""
    blocks = {section.name: section for section in run.sections[1:-1]}
    sections = [
        replace(blocks[stands_for[one.name]], name=one.name, tensors=one.tensors)
        for one in complete.sections[1:-1]
    ]
    return replace(
        run,
        sections=(run.sections[0], *sections, run.sections[-1]),
        step=complete.step,
        step_work=complete.step_work,
        state_slots=complete.state_slots,
    )
