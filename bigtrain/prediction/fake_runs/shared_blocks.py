"""Use the blocks of one run on fake tensors for another run that differs only in its loss."""

from __future__ import annotations

from dataclasses import replace

from bigtrain.prediction.record_sections import RecordedSections
from bigtrain.prediction.sections import Anchor, Section


def holds_beyond(section: Section) -> bool:
    """Whether the first or the last section of the model decides when a storage is freed."""
    return any(
        storage.until >= Anchor.FIRST
        for section_pass in section.passes
        for storage in section_pass.storages
    )


def with_ends_of(run: RecordedSections, ends: RecordedSections) -> RecordedSections:
    """Return a run with the blocks of `run`, and the sections of `ends` before and after them."""
    sections = (ends.sections[0], *run.sections[1:-1], ends.sections[-1])
    return replace(run, sections=sections)
