"""Run the checks of `bigtrain doctor --check`.

They show in a few minutes whether bigtrain does what it promises on a new machine. All measured
figures are written to one JSON file, which a user can attach to an issue. Each run is a command
in a separate process, as a user would start it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bigtrain.compare.rows import TRACKED_STEPS, ComparisonRow
from bigtrain.compare.subprocess_runs import QuietRun, run_bigtrain
from bigtrain.devices import accelerator, device_count, device_names, free_bytes
from bigtrain.doctor.checks import CHECKS, SAVE_EVERY, Check
from bigtrain.doctor.probing_data import FOLDER
from bigtrain.doctor.rules import CheckedRun
from bigtrain.errors import ConfigError
from bigtrain.files.parse import read_json
from bigtrain.files.regular import read_text
from bigtrain.machine.versions import hardware_and_versions
from bigtrain.units import GIB, format_bytes, signed_share

LIMIT_S = 300.0
"""The seconds that a run may take by default."""
STEPS = 6

_SHARE = 0.6
"""The largest share of a GPU's free memory that the run `single` may take."""


@dataclass(frozen=True)
class _Size:
    """A transformer of the checks, and its batch."""

    model: Sequence[str]
    """The overrides that choose the model."""
    vocabulary: int
    rows: int
    """The samples of a global batch."""
    peak_bytes: float
    """The peak of the run `single` in fp32: measured on an H100 for 8 rows, and for 4 rows
    interpolated between that and the measured run with micro-batches of 2 rows."""


_SMALL = _Size(
    [
        "model.name=gpt",
        "model.args={num_layers: 4, width: 128, num_heads: 4, vocab_size: 512, "
        "sequence_length: 128}",
    ],
    512,
    8,
    0.0,
)
_SIZES = (
    _Size(["model.name=gpt2"], 50257, 8, 6.4 * GIB),
    _Size(["model.name=gpt2"], 50257, 4, 4.4 * GIB),
    _SMALL,
)
"""The sizes for a GPU, the largest first: the first one is used that fits."""
_IMAGES = [
    "model.name=resnet18",
    "data.name=synthetic",
    "data.args={input_shape: [3, 64, 64], num_classes: 10}",
    "model.args={num_classes: 10}",
]


def write_figures(path: Path, runs: Iterable[CheckedRun]) -> None:
    """Write all figures of the runs as one JSON document."""
    document = {
        "surroundings": hardware_and_versions(),
        "devices": device_names(),
        "checks": [_as_json(run) for run in runs],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def chosen_checks(only: str | None) -> Iterator[Check]:
    """Yield the checks to run, in their order.

    Args:
        only: the names of checks, separated by commas; None for all. The earlier checks with which
            they are compared also run.

    Raises:
        ConfigError: a name is unknown, or no name is given.
    """
    names = None if only is None else [name.strip() for name in only.split(",") if name.strip()]
    known = [check.name for check in CHECKS]
    for name in names or ():
        if name not in known:
            raise ConfigError(f"--only: there is no check {name}. Use one of {', '.join(known)}.")
    if names == []:
        raise ConfigError(f"--only names no check. Use one of {', '.join(known)}.")
    for check in reversed(CHECKS):
        if names is not None and check.name in names:
            names += check.after
    yield from (c for c in CHECKS if names is None or c.name in names)


def run_check(
    check: Check, before: Mapping[str, CheckedRun], folder: Path, limit_s: float = LIMIT_S
) -> CheckedRun:
    """Run a check and apply its rules.

    Args:
        check: the check.
        before: the earlier results, by name.
        folder: the folder in which the run gets a folder for its files.
        limit_s: the seconds that the run may take.
    """
    reason = _skip_reason(check)
    if reason is not None:
        return CheckedRun(check.name, check.promise, "skipped", reason)
    checked = (
        _train(check, folder, limit_s)
        if check.module is None
        else _run_module(check.module, check, folder, limit_s)
    )
    for rule in check.rules:
        fault = rule(checked, before)
        if fault is not None:
            return replace(checked, verdict="failed", explanation=fault)
    return checked


def _skip_reason(check: Check) -> str | None:
    """Return why a check cannot run here; None if it can."""
    kind = accelerator()
    if check.only == "accelerator" and kind is None:
        return "torch sees no GPU"
    if kind is not None and device_count() < check.ranks:
        return f"it needs {check.ranks} GPUs, and there is {device_count()}"
    if check.needs is not None and find_spec(check.needs) is None:
        return f"{check.needs} is not installed"
    return None


def _train(check: Check, folder: Path, limit_s: float) -> CheckedRun:
    """Run a check that trains."""
    run = QuietRun(
        command="train",
        strategy=check.strategy,
        num_ranks=check.ranks,
        folder=folder / check.name,
        words=_job(check),
        last_words=_checkpoint_words(check, folder),
    )
    reports = folder / f"{check.name}-reports"
    reports.mkdir()
    ended = run.run(limit_s, {FOLDER: str(reports)})
    row = None
    if ended.reason is None:
        row = ComparisonRow.of_run(check.name, check.ranks, run.folder)
    return CheckedRun(
        name=check.name,
        promise=check.promise,
        verdict="passed",
        explanation=_figures(row) if row is not None else str(ended.reason),
        command=shlex.join(["bigtrain", *run.line]),
        status=ended.status,
        leftovers=ended.leftovers,
        row=row,
        memory=None if row is None else run.json("memory.json"),
        figures={path.stem: read_json(path) for path in sorted(reports.glob("gpus-*.json"))},
        checkpoints=sorted(path.name for path in run.folder.glob("checkpoints/step-*")),
        last_lines=_last_lines(run.log),
    )


def _run_module(module: str, check: Check, folder: Path, limit_s: float) -> CheckedRun:
    """Run a check that is a program of its own."""
    path, log = folder / f"{check.name}.json", folder / f"{check.name}.log"
    ended = run_bigtrain([str(path)], log, limit_s, module=module)
    figures = read_json(path) if ended.reason is None else {}
    return CheckedRun(
        name=check.name,
        promise=check.promise,
        verdict="passed",
        explanation=_beside_plain(figures) if figures else str(ended.reason),
        command=f"python -m {module} {path.name}",
        status=ended.status,
        leftovers=ended.leftovers,
        figures=figures,
        last_lines=_last_lines(log),
    )


def _last_lines(log: Path) -> list[str]:
    return read_text(log, errors="replace").splitlines()[-40:]


def _job(check: Check) -> list[str]:
    """Return the overrides of a check's job."""
    size = _size()
    rows = 16 if check.images else size.rows
    common = [
        *(f"train.steps={STEPS}", f"train.global_batch_size={rows}"),
        f"memory.track_steps={TRACKED_STEPS}",
    ]
    if check.images:
        job = _IMAGES
    else:
        name, act = "synthetic", '"kind": "language"'
        if check.act is not None:
            name, act = "bigtrain.doctor.probing_data:language", check.act
            common.append("data.workers=0")
        args = f'{{{act}, "vocabulary": {size.vocabulary}}}'
        job = [*size.model, f"data.name={name}", f"data.args={args}", "train.precision=fp32"]
    on_gpu = check.gpu_words if accelerator() is not None else ()
    return [*job, *common, *check.words, *on_gpu]


def _size() -> _Size:
    """Return the transformer of the checks: a small one on a CPU, the largest that fits a GPU."""
    kind = accelerator()
    if kind is None:
        return _SMALL
    free = min(free_bytes(torch.device(kind, index)) for index in range(device_count()))
    return next(size for size in _SIZES if size.peak_bytes <= _SHARE * free)


def _checkpoint_words(check: Check, folder: Path) -> list[str]:
    """Return the overrides with which a check saves, or continues an earlier check."""
    words = [f"checkpoint.every={SAVE_EVERY}"] if check.saves else []
    if check.continues is not None:
        path = folder / check.continues / "checkpoints" / f"step-{SAVE_EVERY}"
        words.append(f"checkpoint.resume={json.dumps(str(path))}")
    return words


def _figures(row: ComparisonRow) -> str:
    peak = "-" if row.peak_bytes is None else format_bytes(row.peak_bytes)
    error = signed_share(row.error, 2)
    loss = row.losses[-1] if row.losses else float("nan")
    return f"peak {peak}, forecast {error}, loss {loss:.6f}"


def _beside_plain(figures: Mapping[str, Any]) -> str:
    ours, plain = figures["prepared"], figures["plain"]
    share = ours["step_seconds"] / plain["step_seconds"]
    waits = "" if plain["waits"] is None else f", {ours['waits']} and {plain['waits']} waits"
    return (
        f"peak {format_bytes(ours['peak_bytes'])}, plain {format_bytes(plain['peak_bytes'])}; "
        f"{share:.2f} of the plain loop's seconds{waits}"
    )


def _as_json(run: CheckedRun) -> dict[str, Any]:
    values = {**asdict(run), "row": None if run.row is None else run.row.as_json()}
    if run.verdict == "passed":
        values["last_lines"] = []
    if values["row"] is not None:
        values["row"].pop("timeline")  # it is as large as all other values together
    return values
