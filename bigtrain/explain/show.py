"""Show the explanation of a file as text, or as one JSON document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bigtrain.explain.outlook import Better, Outlook
from bigtrain.explain.request import FINDING_KINDS, Asked, Finding, ToolRequest, shown_value
from bigtrain.explain.settle import command
from bigtrain.explain.subject import ExplainedModel
from bigtrain.machine.cluster import Cluster
from bigtrain.units import format_bytes, format_count, format_seconds

_HEADINGS = {
    "contradiction": "contradicts",
    "no effect": "does nothing",
    "not forecast": "not forecast",
}
_MICRO, _STEPS = "train.micro_batch_size", "train.accumulation_steps"
_GLOBAL, _LENGTH = "train.global_batch_size", "data.args.sequence_length"


@dataclass(frozen=True)
class Explanation:
    """The settings of a file, its forecast, and a better plan."""

    request: ToolRequest
    """The settings that the file requests."""
    subject: ExplainedModel
    """The model."""
    ranks: Asked
    """The number of ranks."""
    cluster: Cluster
    """The devices."""
    cluster_note: str
    """Where the devices come from; empty if the user has named them."""
    file: Outlook
    """The forecast of the file's plan."""
    better: Better
    """The better plan, if there is one."""

    @property
    def command(self) -> str:
        """The command that runs the file's plan."""
        return command(self.ranks.value, self.cluster, self.file.words)

    @property
    def better_command(self) -> str | None:
        """The command that runs the better plan; None without one."""
        if self.better.plan is None:
            return None
        return command(self.ranks.value, self.cluster, self.better.plan.words)

    @property
    def fits(self) -> bool | None:
        """Whether the file's plan fits the devices; None if it has no forecast."""
        return None if self.file.peak is None else self.file.peak.bytes <= self.better.limit


def text_lines(told: Explanation) -> Iterator[str]:
    """Yield the lines of the explanation for a person."""
    request, subject = told.request, told.subject
    note = f" ({told.cluster_note})" if told.cluster_note else ""
    yield (
        f"{request.file.path} ({request.tool}) with {subject.name} ({subject.class_name}, "
        f"{format_count(subject.parameters)} parameters) on {told.ranks.value} x "
        f"{told.cluster.device.name}{note}"
    )
    yield ""
    yield "it asks for"
    rows = list(asked_rows(told))
    width = max(len(row[1]) for row in rows)
    for name, value, source in rows:
        yield f"  {name:<11} {value:<{width}}  {source}".rstrip()
    yield ""
    yield from _figures(told)
    for kind in FINDING_KINDS:
        found = request.of_kind(kind)
        if found:
            yield ""
            yield _HEADINGS[kind]
            for finding in found:
                yield f"  {finding.line(request.file.path)}"
    if request.outside:
        yield ""
        yield "no influence on the memory or the seconds of a step"
        yield f"  {', '.join(dict.fromkeys(request.outside))}"
    yield ""
    yield "the file's plan in words:"
    yield told.command
    if told.better_command is not None:
        yield f"a better plan ({told.better.reason}):"
        yield told.better_command
    else:
        yield f"a better plan: {told.better.reason}"


def asked_rows(told: Explanation) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and source of each setting that the file requests."""
    request, keys = told.request, told.request.keys
    words = [request.strategy, *request.added.values()]
    yield "strategy", request.words, _source(told, *words)
    precision = keys.get("train.precision", Asked("fp32", why="the default"))
    masters = keys.get("optim.master_weights")
    value = str(precision.value)
    if value == "bf16":
        value += ", fp32 masters" if masters is None else ", no masters"
    yield "precision", value, _source(told, precision, *([masters] if masters else []))
    micro, steps = keys[_MICRO], keys[_STEPS]
    replicas = keys[_GLOBAL].value // (micro.value * steps.value)
    yield (
        "batch",
        f"{micro.value} x {steps.value} steps x {replicas} ranks = {keys[_GLOBAL].value}",
        _source(told, micro, steps),
    )
    yield "ranks", str(told.ranks.value), _source(told, told.ranks)
    if _LENGTH in keys:
        yield "sequence", f"{keys[_LENGTH].value} tokens", _source(told, keys[_LENGTH])
    adapters = {k.rpartition(".")[2]: v for k, v in keys.items() if k.startswith("model.lora.")}
    if adapters:
        named = ", ".join(f"{key} {shown_value(each.value)}" for key, each in adapters.items())
        yield "adapters", named, _source(told, *adapters.values())
    recompute = {"full": "every block", "selective": "all but matrix products"}
    again = [word for word in request.added if word in recompute]
    value = recompute[again[0]] if again else "nothing"
    yield "recompute", value, _source(told, *(request.added[word] for word in again))
    moved = [word for word in request.added if word.startswith("offload")]
    names = {
        "offload_cpu": "optimizer state to the host",
        "offload_parameters_cpu": "parameters to the host",
        "offload_activations_cpu": "activations to the host",
        "offload_activations_disk": "activations to a disk",
    }
    value = ", ".join(names[word] for word in moved) or "nothing"
    yield "offload", value, _source(told, *(request.added[word] for word in moved))
    optimizer = keys.get("optim.name", Asked("adamw", why="the default"))
    rate = keys.get("optim.lr")
    value = str(optimizer.value) + (f", lr {rate.value:g}" if rate is not None else "")
    yield "optimizer", value, _source(told, optimizer, *([rate] if rate is not None else []))
    loss = keys.get("model.chunked_loss")
    if loss is not None and told.subject.is_language:
        yield "loss", "in chunks" if loss.value else "of whole logits", _source(told, loss)


def _source(told: Explanation, *parts: Asked) -> str:
    """Return where values come from: lines of a file, or the reasons for the values."""
    written = dict.fromkeys(each for part in parts for each in part.written)
    path = told.request.file.path
    words = []
    for each in written:
        line = "" if each.line is None else f"line {each.line} "
        file = "" if each.path == path else f"{each.path} "
        words.append(f"{file}{line}{each.key.rpartition('.')[2]}")
    words += dict.fromkeys(part.why for part in parts if part.why)
    return "; ".join(words)


def _figures(told: Explanation) -> Iterator[str]:
    """Yield the table with the forecasts of the file's plan and of the better plan."""
    plans = [("this file", told.file)]
    if told.better.plan is not None:
        plans.append((f"better: {told.better.plan.label}", told.better.plan))
    if told.file.peak is None:
        yield f"the file's plan has no forecast: {told.file.note}"
    width = max(12, *(len(name) for name, _ in plans))
    yield f"{'forecast':<18}" + "".join(f"{name:>{width + 2}}" for name, _ in plans)

    def row(name: str, values: list[str]) -> str:
        return f"{name:<18}" + "".join(f"{value:>{width + 2}}" for value in values)

    yield row("peak of a rank", [_size(p.peak.bytes if p.peak else None) for _, p in plans])
    kinds = dict.fromkeys(kind for _, plan in plans for kind in plan.breakdown)
    for kind in kinds:
        yield row(f"  {kind}", [_size(plan.breakdown.get(kind)) for _, plan in plans])
    yield row("peak in", [p.peak.phase if p.peak else "-" for _, p in plans])
    seconds = [p.seconds for _, p in plans]
    yield row("a step takes", ["-" if s is None else format_seconds(s) for s in seconds])
    if told.file.peak is not None and told.file.note:
        yield told.file.note
    limit = format_bytes(told.better.limit)
    if told.fits is not None and told.file.peak is not None:
        over = told.file.peak.bytes - told.better.limit
        words = "fits" if over <= 0 else f"does not fit, {format_bytes(over)} too much"
        yield f"the file's plan {words}: the tensors of a rank may take {limit}"
    yield (
        "a forecast is of the plan as bigtrain runs it; seconds are by the rates of "
        f"{told.cluster.name}"
    )


def _size(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)


def document(told: Explanation) -> dict[str, Any]:
    """Return the explanation as JSON values. Bytes are integers, seconds floats."""
    request = told.request
    return {
        "file": request.file.path,
        "tool": request.tool,
        "model": told.subject.name,
        "parameters": told.subject.parameters,
        "ranks": told.ranks.value,
        "cluster": told.cluster.name,
        "limit_bytes": told.better.limit,
        "fits": told.fits,
        "asks": {
            "strategy": request.words,
            **{key: asked.value for key, asked in request.keys.items()},
        },
        "sources": [
            {"part": name, "value": value, "source": source}
            for name, value, source in asked_rows(told)
        ],
        "forecast": _outlook(told.file, told.command),
        "better": None
        if told.better.plan is None or told.better_command is None
        else _outlook(told.better.plan, told.better_command),
        "reason": told.better.reason,
        "findings": [_finding(finding) for finding in request.findings],
        "no_influence": list(dict.fromkeys(request.outside)),
    }


def _outlook(plan: Outlook, pasted: str) -> dict[str, Any]:
    peak = plan.peak
    return {
        "strategy": plan.label,
        "peak_bytes": None if peak is None else peak.bytes,
        "phase": None if peak is None else peak.phase,
        "breakdown": plan.breakdown,
        "step_seconds": plan.seconds,
        "note": plan.note,
        "command": pasted,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "keys": [asdict(each) for each in finding.written],
        "reason": finding.reason,
        "fix": finding.fix,
    }
