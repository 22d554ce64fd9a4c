"""Make the table of memory at the end of a run, and the notes below the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from bigtrain.memory.added_bytes import StatePeak
from bigtrain.memory.timeline import MemoryKind, Peak, kinds_in
from bigtrain.prediction.memory_report import MemoryReport, RankMemory
from bigtrain.units import format_bytes, format_seconds, signed_share

NO_SECONDS = "no predicted seconds:"
"""The beginning of the note on missing predicted seconds."""
MOST_RANKS = 2
"""The most ranks that the table shows. Of more ranks it shows those with the highest and the lowest
peak."""


def memory_table(report: MemoryReport) -> Table:
    """Return a table of peak memory by part and the seconds of a step, measured and predicted.

    The error of a part is a share of the rank's measured peak. So the errors of the parts sum to
    the error of the peak, and a small part has a small error. The error of a step is a share of its
    measured seconds.
    """
    shown = _shown(report)
    table = Table(title=f"Peak memory, {report.strategy} on {report.device}", title_justify="left")
    table.add_column("part")
    for rank in shown:
        table.add_column(f"rank {rank.rank}", justify="right")
        table.add_column("predicted", justify="right", style="dim")
        table.add_column("error", justify="right")
    peaks = [peak for rank in shown for peak in (rank.measured.peak, rank.predicted) if peak]
    for kind in kinds_in(peak.breakdown.by_kind() for peak in peaks):
        table.add_row(kind, *(c for r in shown for c in (*_pair(r, kind), _error(r, kind))))
    table.add_section()
    table.add_row("peak", *(c for r in shown for c in (*_peaks(r), _error(r))), style="bold")
    table.add_row("difference", *(c for r in shown for c in ("", _difference(r), "")))
    table.add_row("reached in", *(c for r in shown for c in (*_phases(r), "")))
    table.add_row("process", *(c for r in shown for c in (_process(r), "", "")))
    if any(r.measured.reserved_bytes is not None for r in shown):
        table.add_row(
            "allocated", *(c for r in shown for c in (_size(r.measured.allocated_bytes), "", ""))
        )
        table.add_row(
            "reserved", *(c for r in shown for c in (_size(r.measured.reserved_bytes), "", ""))
        )
    if any(r.measured.devices for r in shown):
        table.add_row("fullest device", *(c for r in shown for c in (_fullest(r), "", "")))
    for row in _state_rows(shown):
        table.add_row(*row)
    table.add_section()
    table.add_row("step", *(c for r in shown for c in _step(report, r)))
    if any(v and v.kinds for r in shown for v in (r.volume, r.predicted_volume)):
        for direction in ("sent", "received"):
            table.add_row(direction, *(c for r in shown for c in _exchanged(r, direction)))
    return table


def _state_rows(shown: Sequence[RankMemory]) -> Iterator[list[str]]:
    """Yield the rows for the peaks of a save and of a resume, also on the host of GPUs."""
    for name in ("save", "resume"):
        pairs = [(getattr(r.measured.state, name), getattr(r.predicted_state, name)) for r in shown]
        if any(seen is not None for seen, _ in pairs):
            yield [name, *(c for pair in pairs for c in _state(*pair, "bytes"))]
        if any(seen is not None and seen.host_bytes for seen, _ in pairs):
            yield [f"{name}, host", *(c for pair in pairs for c in _state(*pair, "host_bytes"))]


def _state(seen: StatePeak | None, expected: StatePeak | None, field: str) -> tuple[str, str, str]:
    measured, predicted = (getattr(peak, field) if peak else None for peak in (seen, expected))
    if not measured or predicted is None:
        return _size(measured), _size(predicted), "-"
    return _size(measured), _size(predicted), _share(predicted - measured, measured)


def _shown(report: MemoryReport) -> list[RankMemory]:
    ranks = list(report.ranks)
    if len(ranks) <= MOST_RANKS:
        return ranks
    ordered = sorted(ranks, key=lambda r: r.measured.peak.bytes if r.measured.peak else 0)
    return [ordered[-1], ordered[0]]


def memory_notes(report: MemoryReport) -> list[str]:
    """Return notes on the table: the meaning of its rows, and reasons for missing values."""
    lines = ["process: resident memory on top of that before the model was built"]
    if any(_is_below_tensors(r) for r in report.ranks):
        lines[0] += "; it is below the peak if tensors use memory that the process had before"
    if any(r.error_bytes() is not None for r in report.ranks):
        lines.insert(0, "error: predicted minus measured, as a share of the measured peak")
    if any(r.measured.state.save for r in report.ranks):
        lines.append("save: the peak of the state and the copies made to write it")
    if any(r.measured.devices for r in report.ranks):
        lines.append(
            "peak: the sum over a process's devices, whose peaks may be at different times"
        )
    if len(report.ranks) > MOST_RANKS:
        lines.insert(
            0, f"shown: the ranks with the highest and the lowest peak of {len(report.ranks)}"
        )
    notes = {r.note for r in report.ranks if r.note}
    lines += [f"no prediction: {note}" for note in sorted(notes)]
    return [*lines, *_step_notes(report), *_volume_notes(report)]


def _is_below_tensors(rank: RankMemory) -> bool:
    """Return whether a process on a CPU grew by less than the bytes of its tensors."""
    measured = rank.measured
    process, peak = measured.process_peak_bytes, measured.peak
    on_host = measured.reserved_bytes is None
    return on_host and process is not None and peak is not None and process < peak.bytes


def _volume_notes(report: MemoryReport) -> Iterator[str]:
    """Yield notes on the bytes that a step exchanges, or on why they are missing."""
    exchanges = [r for r in report.ranks if r.predicted_volume and r.predicted_volume.kinds]
    if any(r.volume and r.volume.kinds for r in report.ranks):
        yield "sent, received: between ranks in a step, each exchange by its textbook algorithm"
    elif exchanges and all(r.volume is None for r in report.ranks):
        yield "sent, received: not counted; torch 2.14 and later has the hooks for that"


def _step_notes(report: MemoryReport) -> Iterator[str]:
    """Yield notes on the measured and the predicted seconds of a step."""
    count = report.steps.count if report.steps else 0
    if not count:
        yield "step: not measured, because memory was tracked in every step (memory.track_steps)"
    else:
        steps = "1 step" if count == 1 else f"{count} steps"
        busy = "; other programs used the machine" if report.busy else ""
        yield f"step: the median of {steps} whose memory was not tracked{busy}"
    if report.step.seconds is None:
        yield f"{NO_SECONDS} {report.step.source}"


def _pair(rank: RankMemory, kind: str) -> tuple[str, str]:
    return _part(rank.measured.peak, kind), _part(rank.predicted, kind)


def _part(peak: Peak | None, kind: str) -> str:
    return format_bytes(getattr(peak.breakdown, kind)) if peak else "-"


def _peaks(rank: RankMemory) -> tuple[str, str]:
    measured, predicted = rank.measured.peak, rank.predicted
    return (
        format_bytes(measured.bytes) if measured else "-",
        format_bytes(predicted.bytes) if predicted else "-",
    )


def _phases(rank: RankMemory) -> tuple[str, str]:
    measured, predicted = rank.measured.peak, rank.predicted
    return measured.phase if measured else "-", predicted.phase if predicted else "-"


def _process(rank: RankMemory) -> str:
    return _size(rank.measured.process_peak_bytes)


def _fullest(rank: RankMemory) -> str:
    return _size(max((device.peak_bytes for device in rank.measured.devices), default=None))


def _step(report: MemoryReport, rank: RankMemory) -> tuple[str, str, str]:
    measured, predicted = rank.steps.seconds if rank.steps else None, report.step.seconds
    error = signed_share(predicted / measured - 1) if measured and predicted else "-"
    return _seconds(measured), _seconds(predicted), error


def _exchanged(rank: RankMemory, direction: str) -> tuple[str, str, str]:
    volumes = (rank.volume, rank.predicted_volume)
    counted, predicted = (getattr(v, f"{direction}_bytes") if v else None for v in volumes)
    error = "exact" if counted is not None and counted == predicted else "-"
    if counted and predicted is not None and counted != predicted:
        error = signed_share(predicted / counted - 1)
    return _size(counted), _size(predicted), error


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def _error(rank: RankMemory, kind: MemoryKind | None = None) -> str:
    difference, peak = rank.error_bytes(kind), rank.measured.peak
    if difference is None or peak is None or peak.bytes == 0:
        return "-"
    return _share(difference, peak.bytes)


def _share(difference: int, measured: int) -> str:
    if difference == 0:
        return "exact"
    return signed_share(difference / measured)


def _difference(rank: RankMemory) -> str:
    difference = rank.error_bytes()
    if difference is None:
        return ""
    return f"{'+' if difference > 0 else ''}{format_bytes(difference)}"
