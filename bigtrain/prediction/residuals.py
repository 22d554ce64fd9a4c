"""How far forecasts were off: of peaks, with the margin that follows, and of seconds.

At the end of a run its main rank adds one entry for each rank, and one for its step, to
$XDG_CACHE_HOME/bigtrain/residuals.json (left out: ~/.cache), beside the rates, under the device
that it ran on. The next answers on that device take their safety margin from there.

Runs that end at once wait for each other at residuals.lock. Where the file system knows no locks,
the last writer wins; the file is replaced as a whole, so that it is never half of one. What cannot
be read or written is left alone, and no run fails or says a word for it; a damaged file is said to
be one, and made anew.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch

from bigtrain.core.strategy import Plan
from bigtrain.devices import accelerator, device_names
from bigtrain.errors import UnreadableError
from bigtrain.files.drafts import read_cache, write_cache
from bigtrain.files.parse import parse_json
from bigtrain.machine.rate_cache import cache_file, lock_file
from bigtrain.machine.rates import cpu_name
from bigtrain.memory.cap import ACCELERATOR_BYTES, NON_TENSOR_BYTES

EngineName = Literal["torch", "deepspeed", "fairscale"]
StepBasis = Literal["blocks", "rates"]
"""What a forecast of seconds goes by: blocks timed on the machine, or its rates alone."""
_Number = TypeVar("_Number", int, float)

QUANTILE = 0.99
"""The margin was enough for this share of the ranks seen."""
MIN_RANKS = 20
"""Ranks of an engine from which on the margin is read off; of fewer the default applies. Up to
100 ranks the quantile is the highest one seen."""
MAX_ENTRIES = 500
"""Entries that are kept for a device, ranks and steps each: the newest."""
DEFAULT_MARGIN: dict[EngineName, float] = {"torch": 0.005, "deepspeed": 0.05, "fairscale": 0.05}
"""Share of the predicted peak, by engine: the bars that the benchmarks hold."""
MIN_RUNS = 10
"""Runs of an engine from which on the uncertainty of seconds is read off."""
STEP_QUANTILE = 0.9
"""The share of the runs whose seconds were within the stated uncertainty."""
LOCK_TIMEOUT_S = 5.0
"""Seconds after which a run that cannot have the lock leaves its entries out."""


@dataclass(frozen=True, kw_only=True)
class PeakRecord:
    """One rank of one run that came to its end."""

    when: str
    """The end of the run, ISO 8601 in UTC with microseconds; the same for all its ranks."""
    engine: EngineName
    strategy: str
    device: str
    """'cuda' or 'cpu'."""
    precision: str
    predicted_bytes: int
    """The rank's predicted peak; above 0."""
    tracked_bytes: int
    """The rank's measured peak: tensors tracked on a CPU, what the allocator counted on CUDA."""
    process_bytes: int | None
    """CUDA: what the caching allocator took from the device. CPU: resident memory above what the
    process held before the model was built; None where the system does not tell."""

    @property
    def residual(self) -> float:
        """The share of the prediction by which the measured peak is above it; 0 where below."""
        return max(0.0, self.tracked_bytes / self.predicted_bytes - 1)

    @property
    def beside_bytes(self) -> int | None:
        """Bytes of the process that are no tensors."""
        if self.process_bytes is None:
            return None
        return max(0, self.process_bytes - self.tracked_bytes)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The seconds of a step of one run that came to its end, nobody else using the machine."""

    when: str
    """The end of the run, ISO 8601 in UTC."""
    engine: EngineName
    strategy: str
    device: str
    """'cuda' or 'cpu'."""
    basis: StepBasis
    ranks: int
    predicted_seconds: float
    measured_seconds: float
    """The median of the steps in which memory was not tracked."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True)
class SafetyMargin:
    """What to add to a prediction before it is held against a limit."""

    margin: float
    """Share by which a predicted peak is to be enlarged: 0.01 is 1 %."""
    beside_bytes: int
    """To be added per rank: the `QUANTILE` of the bytes that are no tensors, in the meaning of
    `PeakRecord.process_bytes`; 0 where no run of the engine has told."""
    runs: int
    """Runs of the engine on the device that are kept."""
    ranks: int
    """Ranks of these runs."""
    explanation: str
    """The margin and where it is from, in one sentence."""


def record_residuals(entries: Iterable[PeakRecord | StepRecord]) -> None:
    """Add the ranks of a run and its step; to be called by its main rank alone.

    The device is that of the caller. A cache that cannot be written is left as it is.
    """
    new_records = list(entries)
    if not new_records:
        return
    path = residuals_file()
    with contextlib.suppress(OSError, UnreadableError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(path.with_suffix(".lock"), LOCK_TIMEOUT_S):
            stored = _read(path)
            for entry in new_records:
                key = hardware_key(entry.device)
                key = _step_key(key) if isinstance(entry, StepRecord) else key
                stored.setdefault(key, []).append(asdict(entry))
            kept = {key: ranks[-MAX_ENTRIES:] for key, ranks in stored.items()}
            write_cache(path, kept, indent=1)


def safety_margin(
    engine: str, *, device_key: str | None = None, foreign_device: str | None = None
) -> SafetyMargin:
    """The margin for an engine on a device, from the runs that were seen there.

    Args:
        engine: 'torch', 'deepspeed' or 'fairscale'; see `engine_of`.
        device_key: of `hardware_key`; left out, this machine's GPUs, or its CPU where it has none.
        foreign_device: the name of a device that is not at hand: the engine's default.
    """
    if foreign_device is not None:
        return SafetyMargin(
            margin=_default(engine),
            beside_bytes=0,
            runs=0,
            ranks=0,
            explanation=f"margin {_percent(_default(engine))}: the default of {engine}, as no run "
            f"on {foreign_device} is known here",
        )
    if device_key is None:
        device_key = hardware_key(accelerator() or "cpu")
    records = [entry for entry in _seen(device_key) if entry.engine == engine]
    non_tensor_bytes = [entry.beside_bytes for entry in records if entry.beside_bytes is not None]
    if len(records) < MIN_RANKS:
        margin = _default(engine)
        line = (
            f"margin {_percent(margin)}: the default of {engine}, as fewer than {MIN_RANKS} ranks "
            f"({len(records)}) have run on this device"
        )
    else:
        margin = _quantile([entry.residual for entry in records])
        line = (
            f"margin {_percent(margin)}: {QUANTILE * 100:.0f} % of {len(records)} ranks on this "
            "device needed no more"
        )
    return SafetyMargin(
        margin=margin,
        beside_bytes=_quantile(non_tensor_bytes) if non_tensor_bytes else 0,
        runs=len({entry.when for entry in records}),
        ranks=len(records),
        explanation=line,
    )


def kept_beside_tensors(kind: str, name: str | None = None) -> int:
    """Bytes under the limit of a rank that its tensors may not be, beside a share of it.

    A CPU's limit is on the tensors themselves. That of an accelerator is on all that its allocator
    took: what runs on it have shown (`QUANTILE` of the ranks), or a room for workspaces and for
    what is rounded up.

    Args:
        kind: 'cuda', 'xpu' or 'cpu'.
        name: of a device that need not be at hand; left out, it is this machine's.
    """
    if kind == "cpu":
        return NON_TENSOR_BYTES
    here = name is None or is_at_hand(kind, name)
    records = _seen(hardware_key(kind)) if here else []
    measured = [entry.beside_bytes for entry in records if entry.beside_bytes is not None]
    return _quantile(measured) if measured else ACCELERATOR_BYTES


def step_uncertainty(engine: str, basis: StepBasis, device: str) -> str:
    """How far forecasts of seconds were off on this machine, in words.

    Args:
        engine: see `engine_of`.
        basis: of the forecast; others say nothing of it.
        device: 'cuda' or 'cpu'.
    """
    records = [
        entry
        for entry in map(_step_of, _stored(_step_key(hardware_key(device))))
        if entry is not None and entry.engine == engine and entry.basis == basis
    ]
    kind = f"of {engine} by {'timed blocks' if basis == 'blocks' else 'rates'}"
    if not records:
        return f"how far off is not known: no earlier runs {kind} on this device"
    errors = sorted(entry.error for entry in records)
    median = f"predicted {1 + errors[(len(errors) - 1) // 2]:.2f} of the measured (median)"
    count = "1 earlier run" if len(records) == 1 else f"{len(records)} earlier runs"
    if len(records) < MIN_RUNS:
        return f"{count} {kind}: {median}; from {MIN_RUNS} on there is a ± here"
    within = _quantile([abs(error) for error in errors], STEP_QUANTILE)
    share = f"{STEP_QUANTILE:.0%} of {count} {kind}"
    return f"± {_percent(within)}: so far off at most were {share}; {median}"


def _step_key(device_key: str) -> str:
    """What the seconds of runs on a device are kept under, beside the bytes of its ranks."""
    return json.dumps({"step_seconds": parse_json(device_key, "a key")})


def _default(engine: str) -> float:
    """What is not known is trusted as little as the engine that is trusted least."""
    defaults = cast("dict[str, float]", DEFAULT_MARGIN)
    return defaults.get(engine, max(defaults.values()))


def is_at_hand(kind: str, name: str) -> bool:
    """Whether a device of a description is of this machine's, by the words of its name.

    Args:
        kind: 'cuda' or 'cpu'.
        name: as in the description, 'NVIDIA A100 SXM 80GB'.
    """
    if kind != "cpu" and accelerator() != kind:
        return False
    own = cpu_name() if kind == "cpu" else device_names()[0]
    own_words, words = (set(re.findall(r"[a-z0-9]+", each.lower())) for each in (own, name))
    return bool(words) and words <= own_words


def engine_of(plan: Plan) -> EngineName | None:
    """Whose implementation a plan runs on; None where a technique is not bigtrain's own.

    What such a technique predicts is its author's, and says nothing about the others.
    """
    techniques = plan.techniques.values()
    if not all(type(t).__module__.startswith("bigtrain.strategies.") for t in techniques):
        return None
    named = {technique.traits.engine for technique in techniques}
    foreign: tuple[EngineName, ...] = ("deepspeed", "fairscale")
    return next((name for name in foreign if name in named), "torch")


def hardware_key(kind: str) -> str:
    """What residuals of 'cuda', 'xpu' or 'cpu' on this machine are kept under: hardware and torch.

    Neither the number of GPUs nor that of threads counts: a rank's tensors are the same.
    """
    names = [cpu_name()] if kind == "cpu" else sorted(set(device_names()))
    return json.dumps({"device": kind, "names": names, "torch": str(torch.__version__)})


def residuals_file() -> Path:
    """Where residuals are kept."""
    return cache_file().with_name("residuals.json")


def _quantile(values: Sequence[_Number], share: float = QUANTILE) -> _Number:
    """The lowest value that was seen, of which at least the stated share is at or below."""
    return sorted(values)[math.ceil(share * (len(values) - 1))]


def _percent(share: float) -> str:
    """Rounded up: what is said to be enough is enough."""
    return f"{math.ceil(share * 1000 - 1e-9) / 10:.1f} %"


def _read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The entries by device; a file that is damaged has none.

    Raises:
        UnreadableError: there is a file and it cannot be read, so it must not be replaced.
    """
    return {
        key: [entry for entry in ranks if isinstance(entry, dict)]
        for key, ranks in read_cache(path).items()
        if isinstance(ranks, list)
    }


def _stored(key: str) -> list[dict[str, Any]]:
    try:
        return _read(residuals_file()).get(key, [])
    except UnreadableError:
        return []


def _seen(key: str) -> list[PeakRecord]:
    parsed = [_entry_of(values) for values in _stored(key)]
    return [entry for entry in parsed if entry is not None]


def _step_of(values: dict[str, Any]) -> StepRecord | None:
    """An entry from JSON values; None where these are none."""
    if set(values) != {f.name for f in fields(StepRecord)}:
        return None
    seconds = (values["predicted_seconds"], values["measured_seconds"])
    is_positive = all(type(s) is float and math.isfinite(s) and s > 0 for s in seconds)
    return StepRecord(**values) if is_positive else None


def _entry_of(values: dict[str, Any]) -> PeakRecord | None:
    """An entry from JSON values; None where these are none."""
    if set(values) != {f.name for f in fields(PeakRecord)}:
        return None
    words = ("when", "engine", "strategy", "device", "precision")
    sizes = [values["predicted_bytes"], values["tracked_bytes"]]
    if values["process_bytes"] is not None:
        sizes.append(values["process_bytes"])
    if not all(isinstance(values[word], str) for word in words):
        return None
    # A bool is an int, too, and no size.
    if not all(type(size) is int and size >= 0 for size in sizes) or sizes[0] == 0:
        return None
    return PeakRecord(**values)
