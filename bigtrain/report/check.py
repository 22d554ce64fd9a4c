"""`bigtrain check`: compare a job's predicted peak with a limit, and with an earlier forecast.

It is for continuous integration. If a change makes a model, a batch or a strategy need more memory,
a check of seconds on a machine without a GPU fails before a run on many GPUs does.
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
from bigtrain.errors import ConfigError, UnreadableError
from bigtrain.files.parse import parse_json
from bigtrain.files.regular import read_text
from bigtrain.job.arguments import peak_check_arguments
from bigtrain.job.load import load_job
from bigtrain.job.schema import Job
from bigtrain.report.dry_run import fullest_rank, predict_ranks
from bigtrain.units import format_bytes, parse_bytes

FORECAST_FORMAT = 1
"""The version of the file's format; a file of another version is refused."""
_LISTED = 5
"""The most changed modules, and the most changed keys, that are listed."""


@dataclass(frozen=True)
class SavedForecast:
    """The highest predicted peak of a job's ranks, and the facts on which the peak depends."""

    format: int
    """`FORECAST_FORMAT` of the version that wrote the file."""
    strategy: str
    ranks: int
    """The number of ranks of the run."""
    device: str
    """The type of the devices."""
    peak_bytes: int
    """The highest predicted peak of the ranks."""
    phase: str
    """The phase of a step in which the peak occurs."""
    breakdown: dict[str, int]
    """Bytes at the peak by kind: parameters, gradients, activations, ..."""
    modules: dict[str, int]
    """Bytes of a module's own parameters and buffers, by the module's name, for the whole model."""
    keys: dict[str, Any]
    """The keys of the job that differ from the defaults, by dotted name."""

    @classmethod
    def read(cls, path: str) -> SavedForecast:
        """Read a file that `bigtrain check --save` has written.

        Raises:
            ConfigError: the file cannot be read, or is not a forecast of this version.
        """
        fix = "Write one with bigtrain check --save FILE."
        try:
            text = read_text(path, fix)
        except UnreadableError as error:
            raise ConfigError(f"--against: {error}") from None
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
    """Run `bigtrain check`: predict the job's peak, compare it with the limit, and print both.

    Without `--peak` the limit is the peak of the forecast given by `--against`. Without either
    there is no limit.

    Args:
        arguments: the command's arguments.

    Returns:
        The exit status: 1 if the peak is above the limit, otherwise 0.

    Raises:
        ConfigError: the job is wrong or has no prediction, a size or a file cannot be read, or a
            file cannot be written.
    """
    options = peak_check_arguments(arguments)
    limit = None if options.peak is None else parse_bytes(options.peak, "--peak")
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
    """Predict the peak of the rank with the most memory.

    Args:
        job: the job.
        parts: the job's model, data and plan.

    Raises:
        ConfigError: a rank has no prediction; the message contains the reason.
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
    """Return one line with the peak, the limit and their difference.

    Args:
        forecast: the forecast.
        limit: the limit in bytes; None if there is no limit.
        written: the argument of `--peak`; None if the limit is that of an earlier forecast.
    """
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
    """Return lines with the differences of two forecasts: bytes by kind, keys, modules."""
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
