"""Which rank needs the most memory: a run is as large as its fullest rank, whoever prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigtrain.memory.added_bytes import StatePeak
from bigtrain.memory.timeline import Peak
from bigtrain.ranks.context import RunContext
from bigtrain.units import format_bytes


@dataclass(frozen=True)
class FullestRank:
    """The highest predicted peak of all ranks, and who has it."""

    peak: Peak
    rank: int
    """The first that has it."""
    num_ranks: int
    alike: bool
    """Whether every rank needs as much."""
    save: StatePeak | None = None
    """The highest of a save, whichever rank has it."""

    @classmethod
    def among(
        cls, peaks: Mapping[int, Peak], saves: Mapping[int, StatePeak | None] | None = None
    ) -> FullestRank | None:
        """The fullest of some ranks; None where no peak is known."""
        if not peaks:
            return None
        rank = max(peaks, key=lambda one: (peaks[one].bytes, -one))
        alike = all(peak.bytes == peaks[rank].bytes for peak in peaks.values())
        known = [save for save in (saves or {}).values() if save is not None]
        save = max(known, key=lambda one: one.bytes, default=None)
        return cls(peaks[rank], rank, len(peaks), alike, save)

    @classmethod
    def of_all(
        cls, context: RunContext, peak: Peak | None, save: StatePeak | None
    ) -> FullestRank | None:
        """The fullest rank of the run, on rank 0; None elsewhere. Collective.

        Args:
            context: of all ranks.
            peak: predicted for this one.
            save: predicted for a save of this one.
        """
        every = context.gather_objects((peak, save))
        known = {n: own for n, own in enumerate(every or []) if own is not None}
        peaks = {n: own[0] for n, own in known.items() if own[0] is not None}
        return cls.among(peaks, {n: own[1] for n, own in known.items()})

    def __str__(self) -> str:
        """The size, and on which rank: `9.1 MiB on rank 1, the fullest of 2, in backward`."""
        size = format_bytes(self.peak.bytes)
        if self.num_ranks == 1:
            return f"{size}, in {self.peak.phase}"
        where = f"rank {self.rank}, the fullest of {self.num_ranks}"
        if self.alike:
            where = f"each of {self.num_ranks} ranks"
        return f"{size} on {where}, in {self.peak.phase}"
