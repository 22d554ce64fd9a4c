"""Take the blocks of a run on fake tensors for another run that differs in its loss only."""

from __future__ import annotations

from dataclasses import replace

from bigtrain.prediction.record_sections import RecordedSections
from bigtrain.prediction.sections import Anchor, Section


def holds_beyond(section: Section) -> bool:
    """Whether a storage of a section lives until a moment of the first section or of the last."""
    return any(
        storage.until >= Anchor.FIRST
        for section_pass in section.passes
        for storage in section_pass.storages
    )


def with_ends_of(run: RecordedSections, ends: RecordedSections) -> RecordedSections:
    """A run whose sections before and after the blocks are those of another one."""
    sections = (ends.sections[0], *run.sections[1:-1], ends.sections[-1])
    return replace(run, sections=sections)
