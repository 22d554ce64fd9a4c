"""How far forecasts of peaks and of seconds were off, and the safety margin that follows.

At the end of a run its main rank adds one entry for each rank, and one for its step, to
`residuals.json` in the cache folder, under the device that it ran on. Later forecasts on that
device take their safety margin from there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, cast

from bigtrain.devices import accelerator, device_names
from bigtrain.files.parse import parse_json
from bigtrain.machine.cache import Cache, device_fingerprint
from bigtrain.machine.rates import cpu_name
from bigtrain.memory.cap import ACCELERATOR_BYTES, NON_TENSOR_BYTES

EngineName = Literal["torch", "deepspeed", "fairscale"]
StepBasis = Literal["blocks", "rates"]
"""The basis of a forecast of seconds: blocks timed on the machine, or its rates alone."""
_Number = TypeVar("_Number", int, float)

RESIDUALS = Cache("residuals")
QUANTILE = 0.99
"""The share of the recorded ranks for which the margin was enough."""
MIN_RANKS = 20
"""The margin is a quantile from this many ranks of an engine on; below, the default applies. Up to
100 ranks the quantile is the maximum."""
MAX_ENTRIES = 500
"""The number of newest entries that are stored for a device, of ranks and of steps each."""
DEFAULT_MARGIN: dict[EngineName, float] = {"torch": 0.005, "deepspeed": 0.05, "fairscale": 0.05}
"""Share of the predicted peak, by engine: the bars that the benchmarks hold."""
MIN_RUNS = 10
"""The uncertainty of seconds is a quantile from this many runs of an engine on."""
STEP_QUANTILE = 0.9
"""The share of the recorded runs whose seconds were within the stated uncertainty."""


@dataclass(frozen=True, kw_only=True)
class PeakRecord:
    """The peak of one rank of one run that ended normally."""

    when: str
    """The end of the run, ISO 8601 in UTC with microseconds; the same for all its ranks."""
    engine: EngineName
    strategy: str
    device: str
    """'cuda', 'xpu' or 'cpu'."""
    precision: str
    predicted_bytes: int
    """The rank's predicted peak; above 0."""
    tracked_bytes: int
    """The rank's measured peak: tracked tensors on a CPU, bytes requested from the allocator on
    CUDA."""
    process_bytes: int | None
    """CUDA: bytes that the caching allocator took from the device. CPU: resident memory above that
    of the process before the model was built; None where the system does not report it."""

    @property
    def residual(self) -> float:
        """The share of the prediction by which the measured peak is above it; 0 where below."""
        return max(0.0, self.tracked_bytes / self.predicted_bytes - 1)

    @property
    def non_tensor_bytes(self) -> int | None:
        """Bytes of the process that are no tensors."""
        if self.process_bytes is None:
            return None
        return max(0, self.process_bytes - self.tracked_bytes)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The seconds of a step of one run that ended normally on an otherwise idle machine."""

    when: str
    """The end of the run, ISO 8601 in UTC."""
    engine: EngineName
    strategy: str
    device: str
    """'cuda', 'xpu' or 'cpu'."""
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
    """The reserve that is added to a prediction before it is compared with a limit."""

    margin: float
    """Share by which a predicted peak is enlarged: 0.01 is 1 %."""
    non_tensor_bytes: int
    """Bytes to add per rank: the `QUANTILE` of `PeakRecord.non_tensor_bytes`; 0 if no run of the
    engine has reported them."""
    runs: int
    """Recorded runs of the engine on the device."""
    ranks: int
    """Ranks of these runs."""
    explanation: str
    """The margin and its source, in one sentence."""


def record_residuals(entries: Iterable[PeakRecord | StepRecord]) -> None:
    """Add the ranks of a run and its step to the cache; only the run's main rank calls it.

    The entries are stored under this machine's device. If the cache cannot be written, nothing
    happens.
    """
    new_records = list(entries)
    if not new_records:
        return

    def add(stored: dict[str, Any]) -> None:
        for entry in new_records:
            key = hardware_key(entry.device)
            key = _step_key(key) if isinstance(entry, StepRecord) else key
            stored[key] = [*_dicts(stored.get(key)), asdict(entry)]
        for key in list(stored):
            if isinstance(stored[key], list):
                stored[key] = _dicts(stored[key])[-MAX_ENTRIES:]
            else:  # damaged: it would never be read
                del stored[key]

    RESIDUALS.update(add)


def safety_margin(
    engine: str, *, device_key: str | None = None, foreign_device: str | None = None
) -> SafetyMargin:
    """Return the margin for an engine on a device, from the runs that were recorded there.

    Args:
        engine: 'torch', 'deepspeed' or 'fairscale'; see `prediction.memory_report.engine_of`.
        device_key: a key from `hardware_key`; None means this machine's GPUs, or its CPU without
            any.
        foreign_device: the name of a device that this machine lacks: the default applies.
    """
    if foreign_device is not None:
        return SafetyMargin(
            margin=_default(engine),
            non_tensor_bytes=0,
            runs=0,
            ranks=0,
            explanation=f"margin {_percent(_default(engine))}: the default of {engine}, as no run "
            f"on {foreign_device} is known here",
        )
    if device_key is None:
        device_key = hardware_key(accelerator() or "cpu")
    records = [entry for entry in _peak_records(device_key) if entry.engine == engine]
    sizes = [entry.non_tensor_bytes for entry in records if entry.non_tensor_bytes is not None]
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
        non_tensor_bytes=_quantile(sizes) if sizes else 0,
        runs=len({entry.when for entry in records}),
        ranks=len(records),
        explanation=line,
    )


def non_tensor_reserve(kind: str, name: str | None = None) -> int:
    """Return the bytes below a rank's limit that its tensors must leave free.

    A limit on a CPU is on tensors. A limit on an accelerator is on everything that its allocator
    took: the `QUANTILE` of the recorded ranks, or, without any, a reserve for workspaces and for
    rounding.

    Args:
        kind: 'cuda', 'xpu' or 'cpu'.
        name: the name of the device, which this machine may lack; None means this machine's.
    """
    if kind == "cpu":
        return NON_TENSOR_BYTES
    here = name is None or has_device(kind, name)
    records = _peak_records(hardware_key(kind)) if here else []
    measured = [entry.non_tensor_bytes for entry in records if entry.non_tensor_bytes is not None]
    return _quantile(measured) if measured else ACCELERATOR_BYTES


def step_uncertainty(engine: str, basis: StepBasis, device: str) -> str:
    """Describe the errors of earlier forecasts of seconds on this machine.

    Args:
        engine: see `safety_margin`.
        basis: the basis of the forecast; records of the other basis do not count.
        device: 'cuda', 'xpu' or 'cpu'.
    """
    records = [
        entry
        for entry in map(_step_record, _stored(_step_key(hardware_key(device))))
        if entry is not None and entry.engine == engine and entry.basis == basis
    ]
    kind = f"of {engine} by {'timed blocks' if basis == 'blocks' else 'rates'}"
    if not records:
        return f"how far off is not known: no earlier runs {kind} on this device"
    errors = sorted(entry.error for entry in records)
    median = f"predicted {1 + errors[(len(errors) - 1) // 2]:.2f} of the measured (median)"
    count = "1 earlier run" if len(records) == 1 else f"{len(records)} earlier runs"
    if len(records) < MIN_RUNS:
        return f"{count} {kind}: {median}; a ± is shown after {MIN_RUNS} runs"
    within = _quantile([abs(error) for error in errors], STEP_QUANTILE)
    share = f"{STEP_QUANTILE:.0%} of {count} {kind}"
    return f"± {_percent(within)}, the error of {share}; {median}"


def _step_key(device_key: str) -> str:
    """The key of the seconds of runs on a device, next to the key of its ranks' bytes."""
    return json.dumps({"step_seconds": parse_json(device_key, "a key")})


def _default(engine: str) -> float:
    """The default margin; an unknown engine gets the largest."""
    defaults = cast("dict[str, float]", DEFAULT_MARGIN)
    return defaults.get(engine, max(defaults.values()))


def has_device(kind: str, name: str) -> bool:
    """Whether this machine has the device of a description, by the words of its name.

    Args:
        kind: 'cuda', 'xpu' or 'cpu'.
        name: the name as in the description, 'NVIDIA A100 SXM 80GB'.
    """
    if kind != "cpu" and accelerator() != kind:
        return False
    local_name = cpu_name() if kind == "cpu" else device_names()[0]
    local_words, words = (
        set(re.findall(r"[a-z0-9]+", each.lower())) for each in (local_name, name)
    )
    return bool(words) and words <= local_words


def hardware_key(kind: str) -> str:
    """Return the key under which residuals of this machine's 'cuda', 'xpu' or 'cpu' are stored."""
    return json.dumps(device_fingerprint(kind))


def _quantile(values: Sequence[_Number], share: float = QUANTILE) -> _Number:
    """The lowest of the values such that at least the share of them is at or below it."""
    return sorted(values)[math.ceil(share * (len(values) - 1))]


def _percent(share: float) -> str:
    """Rounded up: a margin that is called enough must be enough."""
    return f"{math.ceil(share * 1000 - 1e-9) / 10:.1f} %"


def _dicts(entries: object) -> list[dict[str, Any]]:
    """The objects of a list from JSON; an entry that is none is damaged."""
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict)]


def _stored(key: str) -> list[dict[str, Any]]:
    return _dicts(RESIDUALS.read().get(key))


def _peak_records(key: str) -> list[PeakRecord]:
    parsed = [_peak_record(values) for values in _stored(key)]
    return [entry for entry in parsed if entry is not None]


def _step_record(values: dict[str, Any]) -> StepRecord | None:
    """Return an entry from JSON values; None if they are not one."""
    if set(values) != {f.name for f in fields(StepRecord)}:
        return None
    seconds = (values["predicted_seconds"], values["measured_seconds"])
    is_positive = all(type(s) is float and math.isfinite(s) and s > 0 for s in seconds)
    return StepRecord(**values) if is_positive else None


def _peak_record(values: dict[str, Any]) -> PeakRecord | None:
    """Return an entry from JSON values; None if they are not one."""
    if set(values) != {f.name for f in fields(PeakRecord)}:
        return None
    words = ("when", "engine", "strategy", "device", "precision")
    sizes = [values["predicted_bytes"], values["tracked_bytes"]]
    if values["process_bytes"] is not None:
        sizes.append(values["process_bytes"])
    if not all(isinstance(values[word], str) for word in words):
        return None
    # `type`, because a bool is an int, too.
    if not all(type(size) is int and size >= 0 for size in sizes) or sizes[0] == 0:
        return None
    return PeakRecord(**values)
