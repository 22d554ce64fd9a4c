"""The memory of every rank and the seconds of a step, both measured and predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any, cast, get_args

from bigtrain.core.strategy import Plan
from bigtrain.costs.traffic import StepVolume
from bigtrain.machine.busy import CpuUse, is_busy
from bigtrain.machine.residuals import EngineName, PeakRecord, StepBasis, StepRecord
from bigtrain.memory.added_bytes import StatePeak, StatePeaks
from bigtrain.memory.meter import MemoryMeasurement
from bigtrain.memory.timeline import MemoryKind, Peak, kinds_in
from bigtrain.ranks.context import RunContext
from bigtrain.units import format_bytes


@dataclass(frozen=True)
class StepForecast:
    """The predicted seconds of a step, or the reason why there is no prediction."""

    seconds: float | None
    """The predicted seconds of a step; None if there is no prediction."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part of a step; they sum to `seconds`."""
    basis: StepBasis = "rates"
    source: str = "nothing was forecast"
    """A text on the source of the prediction, or on the reason why there is none."""


@dataclass(frozen=True)
class StepMeasurement:
    """The steps of one rank in which memory was not tracked."""

    count: int
    """The number of these steps."""
    seconds: float
    """The median of their seconds."""
    cpu: CpuUse
    """The CPU time used since the first of these steps."""


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank, measured and predicted, in bytes."""

    rank: int
    measured: MemoryMeasurement
    predicted: Peak | None
    """The predicted peak; None if there is no prediction."""
    note: str | None = None
    """The reason why there is no prediction; None if there is one."""
    steps: StepMeasurement | None = None
    """The measured step seconds; None if memory was tracked in every step."""
    predicted_state: StatePeaks = StatePeaks()
    """The predicted peaks of a save and of a resume. The measured peaks are in `measured`."""
    volume: StepVolume | None = None
    """Bytes that the rank exchanged in a step; None if they could not be counted."""
    predicted_volume: StepVolume | None = None
    """The predicted bytes of these exchanges; None if there is no prediction."""

    def error_bytes(self, kind: MemoryKind | None = None) -> int | None:
        """Return the predicted less the measured bytes at the peak; None if either is missing.

        Args:
            kind: the kind of memory; None for the whole peak, which is the sum over kinds.
        """
        measured, predicted = self.measured.peak, self.predicted
        if measured is None or predicted is None:
            return None
        if kind is None:
            return predicted.bytes - measured.bytes
        part: int = getattr(predicted.breakdown, kind) - getattr(measured.breakdown, kind)
        return part

    def as_json(self) -> dict[str, Any]:
        """Return the rank's entry of memory.json."""
        peak, predicted = self.measured.peak, self.predicted
        entry: dict[str, Any] = {
            "rank": self.rank,
            "peak_bytes": peak.bytes if peak else None,
            "predicted_peak_bytes": predicted.bytes if predicted else None,
            "process_peak_bytes": self.measured.process_peak_bytes,
            "process_base_bytes": self.measured.process_base_bytes,
            "phase": peak.phase if peak else None,
            "breakdown": peak.breakdown.by_kind() if peak else None,
            "predicted_phase": predicted.phase if predicted else None,
            "predicted_breakdown": predicted.breakdown.by_kind() if predicted else None,
        }
        if self.measured.reserved_bytes is not None:
            entry["allocated_bytes"] = self.measured.allocated_bytes
            entry["reserved_bytes"] = self.measured.reserved_bytes
            entry["capacity_bytes"] = self.measured.capacity_bytes
            entry["alloc_retries"] = self.measured.alloc_retries
        if self.measured.devices:
            entry["devices"] = [asdict(device) for device in self.measured.devices]
        for name in ("save", "resume"):
            seen, expected = getattr(self.measured.state, name), getattr(self.predicted_state, name)
            entry[f"{name}_peak_bytes"] = seen.bytes if seen else None
            entry[f"predicted_{name}_peak_bytes"] = expected.bytes if expected else None
            if self.measured.reserved_bytes is not None:
                entry[f"{name}_host_bytes"] = seen.host_bytes if seen else None
                entry[f"predicted_{name}_host_bytes"] = expected.host_bytes if expected else None
        if self.steps is not None:
            entry["step_seconds"] = self.steps.seconds
        if self.volume is not None or self.predicted_volume is not None:
            entry["traffic"] = self._traffic_json()
        return entry

    def _traffic_json(self) -> dict[str, dict[str, int | None]]:
        """Return the bytes of a step by kind of exchange, measured and predicted."""
        pair = (("", self.volume), ("predicted_", self.predicted_volume))
        return {
            kind: {
                f"{prefix}{way}_bytes": getattr(volume, way).get(kind, 0) if volume else None
                for prefix, volume in pair
                for way in ("sent", "received")
            }
            for kind in sorted({kind for _, v in pair if v is not None for kind in v.kinds})
        }


@dataclass(frozen=True)
class MemoryReport:
    """The memory of all ranks of one run, and the seconds of its steps."""

    strategy: str
    """The name of the strategy."""
    device: str
    """The type of the device, such as 'cuda' or 'cpu'."""
    ranks: tuple[RankMemory, ...]
    step: StepForecast = StepForecast(None)

    def __str__(self) -> str:
        """Return a table of the rank with the highest measured peak, by kinds of memory."""
        if not self.ranks:
            return f"Peak memory, {self.strategy} on {self.device}: no rank has reported its peak"
        rank = max(
            self.ranks, key=lambda rank: rank.measured.peak.bytes if rank.measured.peak else 0
        )
        fullest = f", the fullest of {len(self.ranks)}" if len(self.ranks) > 1 else ""
        measured, predicted = rank.measured.peak, rank.predicted
        both = (measured, predicted)
        rows: list[tuple[str, ...]] = [("", "measured", "predicted")]
        for kind in kinds_in(peak.breakdown.by_kind() for peak in both if peak):
            rows.append((kind, *(_shown(peak and getattr(peak.breakdown, kind)) for peak in both)))
        rows.append(("peak", *(_shown(peak and peak.bytes) for peak in both)))
        rows.append(("reached in", *(peak.phase if peak else "-" for peak in both)))
        if rank.note:
            rows.append((f"no prediction: {rank.note}", "", ""))
        lines = [f"Peak memory, {self.strategy} on {self.device}, rank {rank.rank}{fullest}"]
        lines += [
            f"  {name:<12}{measured_text:>12}{foretold:>12}".rstrip()
            for name, measured_text, foretold in rows
        ]
        return "\n".join(lines)

    @property
    def steps(self) -> StepMeasurement | None:
        """The measured steps of the first rank: in each step all ranks wait for each other."""
        return self.ranks[0].steps if self.ranks else None

    @property
    def step_error(self) -> float | None:
        """The predicted seconds of a step divided by the measured seconds, less one.

        None if either is missing.
        """
        if self.step.seconds is None or self.steps is None:
            return None
        return self.step.seconds / self.steps.seconds - 1

    @property
    def busy(self) -> bool:
        """Whether other processes used the CPU cores while steps were measured."""
        uses = [rank.steps.cpu for rank in self.ranks if rank.steps is not None]
        return bool(uses) and is_busy(uses)

    @property
    def peak_bytes(self) -> int | None:
        """The largest measured peak over the ranks, in bytes; None if none was measured."""
        peaks = [r.measured.peak.bytes for r in self.ranks if r.measured.peak is not None]
        return max(peaks, default=None)

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The largest predicted peak over the ranks, in bytes; None if none was predicted."""
        peaks = [r.predicted.bytes for r in self.ranks if r.predicted is not None]
        return max(peaks, default=None)

    def course(self) -> dict[str, Any] | None:
        """Return the content of timeline.json: one step of the rank with the highest peak.

        None if no rank has tracked a step to its end.
        """
        tracked = [r for r in self.ranks if r.measured.peak and r.measured.curve]
        if not tracked:
            return None
        highest_rank = max(tracked, key=lambda r: r.measured.peak.bytes if r.measured.peak else 0)
        return (
            {"rank": highest_rank.rank, **asdict(highest_rank.measured.curve)}
            if highest_rank.measured.curve
            else None
        )

    def residuals(self, engine: EngineName, precision: str) -> list[PeakRecord]:
        """Return a record for each rank whose peak was both predicted and measured.

        Args:
            engine: the result of `engine_of`.
            precision: the precision of the run, such as "fp32".
        """
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        records = []
        for rank in self.ranks:
            measured, predicted = rank.measured, rank.predicted
            if measured.peak is None or predicted is None or predicted.bytes == 0:
                continue
            reserved, process = measured.reserved_bytes, measured.process_peak_bytes
            entry = PeakRecord(
                when=now,
                engine=engine,
                strategy=self.strategy,
                device=self.device,
                precision=precision,
                predicted_bytes=predicted.bytes,
                tracked_bytes=measured.peak.bytes,
                process_bytes=process if reserved is None else reserved,
            )
            records.append(entry)
        return records

    def step_residual(self, engine: EngineName) -> StepRecord | None:
        """Return the predicted and the measured seconds of a step as a record.

        None if either is missing, or if other processes used the CPU cores meanwhile.

        Args:
            engine: the result of `engine_of`.
        """
        measured, predicted = self.steps, self.step.seconds
        if measured is None or not predicted or not measured.seconds or self.busy:
            return None
        return StepRecord(
            when=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            engine=engine,
            strategy=self.strategy,
            device=self.device,
            basis=self.step.basis,
            ranks=len(self.ranks),
            predicted_seconds=predicted,
            measured_seconds=measured.seconds,
        )

    def _step_json(self) -> dict[str, Any]:
        return {
            "predicted_seconds": self.step.seconds,
            "predicted_parts": dict(self.step.parts),
            "source": self.step.source,
            "measured_seconds": self.steps.seconds if self.steps else None,
            "measured_steps": self.steps.count if self.steps else 0,
            "busy": self.busy,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the content of memory.json."""
        return {
            "strategy": self.strategy,
            "world_size": len(self.ranks),
            "device": self.device,
            "peak_bytes": self.peak_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "step": self._step_json(),
            "ranks": [rank.as_json() for rank in self.ranks],
        }


def engine_of(plan: Plan) -> EngineName | None:
    """Return the library whose implementation a plan uses; None if a technique is a user's.

    A user's technique makes its own forecasts, whose errors say nothing about bigtrain's forecasts.
    """
    techniques = plan.techniques.values()
    if not all(type(t).__module__.startswith("bigtrain.strategies.") for t in techniques):
        return None
    engines = {technique.traits.engine for technique in techniques}
    default, *libraries = cast("tuple[EngineName, ...]", get_args(EngineName))
    return next((name for name in libraries if name in engines), default)


def _shown(nbytes: Any) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


@dataclass(frozen=True)
class FullestRank:
    """The highest predicted peak of all ranks, and the rank that has it."""

    peak: Peak
    rank: int
    """The first rank with this peak."""
    num_ranks: int
    """The number of ranks with a predicted peak."""
    alike: bool
    """Whether the peaks of all these ranks have the same number of bytes."""
    save: StatePeak | None = None
    """The highest predicted peak of a save, over all ranks; None if none is known."""

    @classmethod
    def among(
        cls, peaks: Mapping[int, Peak], saves: Mapping[int, StatePeak | None] | None = None
    ) -> FullestRank | None:
        """Return the fullest of some ranks; None if no peak is known.

        Args:
            peaks: the predicted peaks, by rank.
            saves: the predicted peaks of a save, by rank; a value is None if it is not known.
        """
        if not peaks:
            return None
        rank = max(peaks, key=lambda candidate: (peaks[candidate].bytes, -candidate))
        alike = all(peak.bytes == peaks[rank].bytes for peak in peaks.values())
        known = [save for save in (saves or {}).values() if save is not None]
        save = max(known, key=lambda candidate: candidate.bytes, default=None)
        return cls(peaks[rank], rank, len(peaks), alike, save)

    @classmethod
    def of_all(
        cls, context: RunContext, peak: Peak | None, save: StatePeak | None
    ) -> FullestRank | None:
        """Return the fullest rank of the run on rank 0, and None on other ranks. Collective.

        Args:
            context: this rank's context.
            peak: the predicted peak of this rank; None if it is not known.
            save: the predicted peak of a save on this rank; None if it is not known.
        """
        every = context.gather_objects((peak, save))
        known = {n: report for n, report in enumerate(every or []) if report is not None}
        peaks = {n: report[0] for n, report in known.items() if report[0] is not None}
        return cls.among(peaks, {n: report[1] for n, report in known.items()})

    def __str__(self) -> str:
        """Return the size and the rank: `9.1 MiB on rank 1, the fullest of 2, in backward`."""
        size = format_bytes(self.peak.bytes)
        if self.num_ranks == 1:
            return f"{size}, in {self.peak.phase}"
        where = f"rank {self.rank}, the fullest of {self.num_ranks}"
        if self.alike:
            where = f"each of {self.num_ranks} ranks"
        return f"{size} on {where}, in {self.peak.phase}"
