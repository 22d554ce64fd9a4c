"""Show the answers of `bigtrain fit`: a table, lines with commands, or a JSON document."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from bigtrain.fit.methods import FitAnswer, Setting
from bigtrain.fit.subject import Subject
from bigtrain.memory.added_bytes import StatePeak
from bigtrain.planner.ask import PlannedAnswer
from bigtrain.planner.evaluate import EvaluatedPlan
from bigtrain.planner.show import plan_figures, plan_values, recompute_summary
from bigtrain.units import format_bytes, format_count, format_seconds

PHASES = ("load", "train", "save", "resume")


@dataclass(frozen=True)
class MethodReport:
    """The parts of an answer that are shown; unlike the answer, they can be pickled."""

    title: str
    fits: bool
    refused: str | None
    """Why there is no answer; None if there is one."""
    parameters: int
    """Number of parameters of the whole model; 0 if there is no answer."""
    cells: Mapping[str, str]
    """The cells of the method's column in the table, by the names of their rows."""
    notes: tuple[str, ...]
    """Lines about adapters."""
    lines: tuple[str, ...]
    """Lines with the command, the changes that would make the method fit, or a refusal."""
    document: Mapping[str, Any]
    """The answer as JSON values."""


def method_report(subject: Subject, setting: Setting, found: FitAnswer) -> MethodReport:
    """Return the parts of an answer that are shown."""
    return MethodReport(
        found.method.title,
        found.fits,
        found.refused,
        0 if found.planned is None else found.planned.num_parameters,
        _column(found),
        _adapter_notes(found),
        tuple(_answer_lines(subject, setting, found)),
        _document(subject, setting, found),
    )


def fit_table(subject: Subject, setting: Setting, reports: Sequence[MethodReport]) -> Table:
    """Return a table with a column for each method; peaks are the highest over all ranks."""
    device, batch = setting.cluster.device, setting.global_batch_size
    tokens = f" of {subject.length} tokens" if subject.length else ""
    size = next((report.parameters for report in reports if report.parameters), 0)
    table = Table(
        title=f"{subject.name}, {format_count(size)} parameters, on {setting.devices} x "
        f"{device.name}: at most {format_bytes(setting.memory.for_tensors)} of tensors a rank; "
        f"bf16, batches of {batch} samples{tokens}",
        title_justify="left",
    )
    table.add_column("")
    for report in reports:
        table.add_column(report.title)
    for name in dict.fromkeys(key for report in reports for key in report.cells):
        table.add_row(name, *(report.cells.get(name, "-") for report in reports))
    return table


def _column(found: FitAnswer) -> dict[str, str]:
    """Return the cells of one way of fine-tuning, by the names of their rows."""
    if found.planned is None or found.shown is None:
        return {"fits": "no answer, see below"}
    shown, planned = found.shown, found.planned
    fits = "yes" if found.fits else f"no: {format_bytes(found.missing_bytes)} too much"
    cells = {"fits": fits, "trained": format_count(_trained(planned))}
    cells |= {f"{name} peak": _peak(peak) for name, peak in _phases(found).items()}
    candidate = shown.candidate
    cells["plan"] = shown.label
    if planned.question.devices > 1:
        cells["pp x dp x tp"] = " x ".join(map(str, candidate.axes))
    cells["micro-batch"] = f"{candidate.rows} x {candidate.micro_batches}"
    cells["recomputed blocks"] = recompute_summary(shown)
    cells["step"] = format_seconds(shown.seconds.total)
    unit = "tokens/s" if planned.setup.data.task.name == "language" else "samples/s"
    cells[unit] = format_count(plan_figures(planned, shown)["targets_per_second"])
    return cells


def _trained(planned: PlannedAnswer) -> int:
    return planned.setup.parameters - planned.setup.frozen_parameters


def _phases(found: FitAnswer) -> dict[str, StatePeak | None]:
    return {} if found.phases is None else dict(found.phases.by_name)


def _peak(peak: StatePeak | None) -> str:
    if peak is None:
        return "unknown"
    host = f" + host {format_bytes(peak.host_bytes)}" if peak.host_bytes else ""
    return f"{format_bytes(peak.bytes)}{host}"


def fit_lines(reports: Sequence[MethodReport]) -> Iterator[str]:
    """Yield the notes of all reports without repetitions, then the lines of each report."""
    yield from dict.fromkeys(note for report in reports for note in report.notes)
    for report in reports:
        yield from report.lines


def _answer_lines(subject: Subject, setting: Setting, found: FitAnswer) -> Iterator[str]:
    title = found.method.title
    if found.refused is not None:
        yield f"{title}: {found.refused}"
    elif found.fits:
        yield f"{title}: {run_command(subject, setting, found)}"
    elif found.shown is not None:
        yield from _missing_lines(setting, found, found.shown)


def _adapter_notes(found: FitAnswer) -> tuple[str, ...]:
    """Return lines on the modules that have adapters or are in 4 bits, which may be few."""
    notes = () if found.planned is None else found.planned.setup.workload.notes
    return tuple(note for note in notes if note.startswith("model.lora"))


def _missing_lines(setting: Setting, found: FitAnswer, smallest: EvaluatedPlan) -> Iterator[str]:
    needed = setting.memory.nbytes + found.missing_bytes
    if found.planned is not None and found.planned.result.best:
        phase, peak = found.highest
        yield (
            f"{found.method.title}: does not fit. Training would, but the {phase} peak is "
            f"{format_bytes(peak)}; devices of {format_bytes(needed)} would hold it."
        )
        return
    breakdown = vars(smallest.peak.breakdown)
    kind = max(breakdown, key=lambda part: breakdown[part])
    yield (
        f"{found.method.title}: does not fit. The smallest peak is "
        f"{format_bytes(smallest.peak.bytes)}, of which {kind} are "
        f"{format_bytes(breakdown[kind])}; devices of {format_bytes(needed)} would hold it."
    )
    for remedy in found.remedies:
        words = " ".join(remedy.words)
        yield (
            f"  with {words}: {remedy.label} fits, {format_bytes(remedy.peak_bytes)} on a device"
        )
    if not found.remedies:
        yield "  more devices do not make it fit either: use a smaller model, or LoRA"


def run_command(subject: Subject, setting: Setting, found: FitAnswer) -> str:
    """Return the command that trains the model; its plan is chosen when it runs on the devices."""
    lora = bool(found.method.words)
    own = [w for w in setting.overrides if lora or not w.startswith("model.lora.")]
    words = [
        *("bigtrain", "train", "-n", str(setting.devices), "--strategy", "auto"),
        *subject.run_words,
        *found.method.words,
        "train.precision=bf16",
        f"train.global_batch_size={setting.global_batch_size}",
        *own,
    ]
    return shlex.join(words)


def fit_document(
    subject: Subject, setting: Setting, reports: Sequence[MethodReport]
) -> dict[str, Any]:
    """Return all answers as JSON values; bytes are integers, and seconds are floats."""
    return {
        "name": subject.name,
        "devices": setting.devices,
        "cluster": setting.cluster.name,
        "memory_bytes": setting.memory.nbytes,
        "limit_bytes": setting.memory.for_tensors,
        "global_batch_size": setting.global_batch_size,
        "length": subject.length,
        "methods": [report.document for report in reports],
    }


def _document(subject: Subject, setting: Setting, found: FitAnswer) -> dict[str, Any]:
    document: dict[str, Any] = {
        "method": found.method.name,
        "words": list(found.method.words),
        "fits": found.fits,
        "refused": found.refused,
    }
    if found.planned is None or found.shown is None:
        return document
    phases = _phases(found)
    return document | {
        "num_parameters": found.planned.num_parameters,
        "trained_parameters": _trained(found.planned),
        "missing_bytes": found.missing_bytes,
        "phases": {
            name: None
            if (peak := phases.get(name)) is None
            else {"device_bytes": peak.bytes, "host_bytes": peak.host_bytes}
            for name in PHASES
        },
        "plan": {"label": found.shown.label, **plan_values(found.planned, found.shown)},
        "command": run_command(subject, setting, found) if found.fits else None,
        "remedies": [asdict(remedy) for remedy in found.remedies],
    }
