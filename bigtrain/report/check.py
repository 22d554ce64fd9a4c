"""`bigtrain check`: compare a job's predicted peak with a limit, and with an earlier forecast.

For continuous integration: a change that makes a model, a batch or a strategy need more memory
fails a check of seconds on a machine without a GPU, before a run fails on one with many.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bigtrain.assembly.make_plan import device_type_of, make_plan
from bigtrain.engine.setup import RunSetup, check_job, open_setup
from bigtrain.errors import ConfigError
from bigtrain.files.parse import parse_json
from bigtrain.files.regular import read_text
from bigtrain.job.arguments import peak_check_arguments
from bigtrain.job.load import load_job
from bigtrain.job.schema import Job
from bigtrain.report.dry_run import fullest_rank, predict_ranks
from bigtrain.units import format_bytes, parse_bytes

FORECAST_FORMAT = 1
"""The version of the file; a file of another version is refused."""
_LISTED = 5
"""Modules whose parameters grew, and changed keys, that are named."""


@dataclass(frozen=True)
class SavedForecast:
    """The predicted peak of a job's fullest rank, with what it depends on."""

    format: int
    strategy: str
    ranks: int
    device: str
    peak_bytes: int
    phase: str
    breakdown: dict[str, int]
    """Bytes at the peak by kind: parameters, gradients, activations, ..."""
    modules: dict[str, int]
    """Bytes of the whole model's own parameters and buffers, by the module that holds them."""
    keys: dict[str, Any]
    """The keys of the job that differ from the defaults, by dotted name."""

    @classmethod
    def read(cls, path: str) -> SavedForecast:
        """Read a file of `bigtrain check --save`.

        Raises:
            ConfigError: there is no such file, or it is no forecast of this version.
        """
        fix = "Write one with bigtrain check --save FILE."
        try:
            text = read_text(path, fix)
        except OSError as error:
            raise ConfigError(f"--against {path}: {error.strerror}. {fix}") from None
        values = parse_json(text, path, fix)
        if not isinstance(values, dict) or values.get("format") != FORECAST_FORMAT:
            raise ConfigError(f"--against {path}: it is no forecast of this version. {fix}")
        try:
            return TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            part = ".".join(str(name) for name in error.errors()[0]["loc"])
            raise ConfigError(
                f"--against {path}: {part} is missing, or is not what a forecast has. {fix}"
            ) from None


def main(arguments: list[str]) -> int:
    """Predict the job's peak and compare it; returns 1 if it is above the limit.

    Raises:
        ConfigError: the job is wrong, has no prediction, or a file or size cannot be read.
    """
    options = peak_check_arguments(arguments)
    limit = None if options.peak is None else parse_bytes(options.peak)
    earlier = None if options.against is None else SavedForecast.read(options.against)
    job = load_job(options.job, options.strategy, options.overrides)
    plan = make_plan(job, options.num_ranks, device_type_of(job))
    parts = open_setup(job, plan, check_job(job))
    forecast = forecast_of(job, parts)
    if limit is None and earlier is not None:
        limit = earlier.peak_bytes
    if options.save is not None:
        _write(options.save, forecast)
    fits = limit is None or forecast.peak_bytes <= limit
    growth = [] if earlier is None else growth_lines(earlier, forecast)
    if options.as_json:
        found = {**asdict(forecast), "limit_bytes": limit, "fits": fits, "growth": growth}
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return 0 if fits else 1
    stream = sys.stdout if fits else sys.stderr
    for line in (summary_line(forecast, limit, options.peak), *growth):
        print(line, file=stream)
    return 0 if fits else 1


def forecast_of(job: Job, parts: RunSetup) -> SavedForecast:
    """Predict the peak of the fullest rank.

    Raises:
        ConfigError: a rank has no prediction, with the reason.
    """
    ranks = predict_ranks(parts)
    fullest = fullest_rank(parts, ranks)
    if fullest is None:
        note = next((rank.prediction.note for rank in ranks if rank.prediction.note), "")
        raise ConfigError(
            f"check: there is no prediction to compare: {note or 'no reason is known'}. "
            "Run bigtrain train --dry-run with the same words to see the plan."
        )
    modules: dict[str, int] = {}
    model = parts.workload.model
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        module = name.rpartition(".")[0]
        modules[module] = modules.get(module, 0) + tensor.nbytes
    return SavedForecast(
        format=FORECAST_FORMAT,
        strategy=parts.plan.strategy.name,
        ranks=parts.plan.world_size,
        device=parts.plan.device_type,
        peak_bytes=fullest.peak.bytes,
        phase=fullest.peak.phase,
        breakdown=fullest.peak.breakdown.by_kind(),
        modules=modules,
        keys=_flat(job.model_dump(mode="json", exclude_defaults=True)),
    )


def summary_line(forecast: SavedForecast, limit: int | None, written: str | None) -> str:
    """Return one line with the peak, the limit and their difference."""
    ranks = "1 rank" if forecast.ranks == 1 else f"{forecast.ranks} ranks"
    line = (
        f"{forecast.strategy} on {ranks} of {forecast.device}: predicted peak "
        f"{format_bytes(forecast.peak_bytes)} in {forecast.phase}"
    )
    if limit is None:
        return line
    name = f"--peak {written}" if written is not None else f"the earlier {format_bytes(limit)}"
    difference = forecast.peak_bytes - limit
    if difference > 0:
        return f"{line}, {format_bytes(difference)} above {name}"
    return f"{line}, {format_bytes(-difference)} below {name}"


def growth_lines(earlier: SavedForecast, now: SavedForecast) -> list[str]:
    """Say what differs between two forecasts: bytes by kind, keys of the job, modules."""
    change = now.peak_bytes - earlier.peak_bytes
    if not change and now == earlier:
        return ["nothing has changed since the earlier forecast"]
    lines = [f"since the earlier forecast: {_signed(change)} at the peak"]
    for kind, size in sorted(
        _differences(earlier.breakdown, now.breakdown).items(), key=lambda item: -abs(item[1])
    ):
        lines.append(f"  {kind:12} {_signed(size):>12}")
    facts = {"strategy": (earlier.strategy, now.strategy), "ranks": (earlier.ranks, now.ranks)}
    facts |= {"device": (earlier.device, now.device)}
    facts |= {
        key: (earlier.keys.get(key, "the default"), now.keys.get(key, "the default"))
        for key in sorted(earlier.keys.keys() | now.keys.keys())
    }
    changed = [f"  {key}: {a} -> {b}" for key, (a, b) in facts.items() if a != b]
    modules = sorted(
        _differences(earlier.modules, now.modules).items(), key=lambda item: -abs(item[1])
    )
    grown = [f"  {name or 'the model'}: {_signed(size)} of tensors" for name, size in modules]
    return [*lines, *_first(changed), *_first(grown)]


def _differences(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    names = dict.fromkeys((*after, *before))
    sizes = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    return {name: size for name, size in sizes.items() if size}


def _first(lines: list[str]) -> list[str]:
    more = [f"  and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return lines[:_LISTED] + more


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_bytes(abs(size))}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _write(path: str, forecast: SavedForecast) -> None:
    try:
        Path(path).write_text(json.dumps(asdict(forecast), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(
            f"--save {path}: {error.strerror}. Give a file in a folder that exists."
        ) from None
