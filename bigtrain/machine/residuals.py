"""The errors of earlier forecasts of peaks and of seconds, and the safety margin based on them.

At the end of a run its main rank adds an entry for each rank, and an entry for the step, to
`residuals.json` in the cache folder. The entries are stored under the device that the run used.
Later forecasts for this device take their safety margin from the entries.
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
"""The basis of a forecast of seconds: blocks timed on the machine, or only the machine's rates."""
_Number = TypeVar("_Number", int, float)

RESIDUALS = Cache("residuals")
QUANTILE = 0.99
"""The margin is enough for this share of the recorded ranks."""
MIN_RANKS = 20
"""The fewest recorded ranks of an engine from which the margin is computed. With fewer ranks the
default margin is used. Up to 100 ranks the quantile is the maximum."""
MAX_ENTRIES = 500
"""The most entries of ranks, and of steps, that are stored for a device. Older entries are
dropped."""
DEFAULT_MARGIN: dict[EngineName, float] = {"torch": 0.005, "deepspeed": 0.05, "fairscale": 0.05}
"""The default margin of each engine, as a share of the predicted peak. The benchmarks check that
errors stay below it."""
MIN_RUNS = 10
"""The fewest recorded runs of an engine from which the uncertainty of seconds is computed."""
STEP_QUANTILE = 0.9
"""The share of the recorded runs whose error is within the printed uncertainty."""


@dataclass(frozen=True, kw_only=True)
class PeakRecord:
    """The predicted and the measured peak of one rank of a run that ended normally."""

    when: str
    """The time of the run's end (ISO 8601 in UTC with microseconds), the same for all its ranks."""
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
    """On CUDA the bytes that the caching allocator took from the device. On a CPU the resident
    memory of the process less that before the model was built; None if unknown."""

    @property
    def residual(self) -> float:
        """The excess of the measured over the predicted peak, as a share of the latter; at least 0.

        0.01 means that the measured peak is 1 % above the prediction.
        """
        return max(0.0, self.tracked_bytes / self.predicted_bytes - 1)

    @property
    def non_tensor_bytes(self) -> int | None:
        """Bytes of the process in addition to its tensors; None if unknown."""
        if self.process_bytes is None:
            return None
        return max(0, self.process_bytes - self.tracked_bytes)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The predicted and the measured seconds of a step of a run that ended normally.

    The machine was otherwise idle during the run.
    """

    when: str
    """The time of the run's end (ISO 8601 in UTC)."""
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
        """The relative error of the prediction: 0.01 if it is 1 % above the measured seconds."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True)
class SafetyMargin:
    """The reserve that is added to a prediction before it is compared with a limit."""

    margin: float
    """The share of a predicted peak that is added to it: 0.01 adds 1 %."""
    non_tensor_bytes: int
    """Bytes per rank that are added: the `QUANTILE` of `PeakRecord.non_tensor_bytes`; 0 if they are
    unknown for all recorded ranks."""
    runs: int
    """The number of recorded runs of the engine on the device."""
    ranks: int
    """The number of recorded ranks of these runs."""
    explanation: str
    """The margin and its source, as a sentence for the user."""


def record_residuals(entries: Iterable[PeakRecord | StepRecord]) -> None:
    """Add the entries of a run to the cache; only the run's main rank calls this function.

    The entries are stored under this machine's device. If the cache cannot be written, nothing
    happens.

    Args:
        entries: an entry for each rank, and one for the step.
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
            else:  # the value is damaged, and would never be read
                del stored[key]

    RESIDUALS.update(add)


def safety_margin(
    engine: str, *, device_key: str | None = None, foreign_device: str | None = None
) -> SafetyMargin:
    """Return the margin for an engine on a device, from the recorded runs on this device.

    Args:
        engine: 'torch', 'deepspeed' or 'fairscale'; see `prediction.memory_report.engine_of`.
        device_key: a key from `hardware_key`; None means this machine's GPUs, or the CPU if there
            are none.
        foreign_device: the name of a device that this machine does not have. The result is then
            the engine's default margin.
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
    """Return the bytes of a rank's limit that its tensors must leave free.

    On a CPU a limit applies only to tensors, and the result is `NON_TENSOR_BYTES`. On an
    accelerator it applies to all memory that the allocator takes. The result is then the `QUANTILE`
    of `PeakRecord.non_tensor_bytes` of the recorded ranks, or `ACCELERATOR_BYTES` if none are
    recorded.

    Args:
        kind: the type of the device: 'cuda', 'xpu' or 'cpu'.
        name: the name of the device, which this machine need not have; None means this machine's
            device.
    """
    if kind == "cpu":
        return NON_TENSOR_BYTES
    here = name is None or has_device(kind, name)
    records = _peak_records(hardware_key(kind)) if here else []
    measured = [entry.non_tensor_bytes for entry in records if entry.non_tensor_bytes is not None]
    return _quantile(measured) if measured else ACCELERATOR_BYTES


def step_uncertainty(engine: str, basis: StepBasis, device: str) -> str:
    """Describe the errors of earlier forecasts of seconds on this machine, as words for a line.

    Args:
        engine: see `safety_margin`.
        basis: the basis of the forecast. Only records with the same basis count.
        device: the type of the device: 'cuda', 'xpu' or 'cpu'.
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
    """Return the key for the seconds of steps on a device, given the key for peaks."""
    return json.dumps({"step_seconds": parse_json(device_key, "a key")})


def _default(engine: str) -> float:
    """Return the default margin of an engine; the largest for an unknown engine."""
    defaults = cast("dict[str, float]", DEFAULT_MARGIN)
    return defaults.get(engine, max(defaults.values()))


def has_device(kind: str, name: str) -> bool:
    """Return whether this machine has a device whose name contains all words of `name`.

    Args:
        kind: the type of the device: 'cuda', 'xpu' or 'cpu'.
        name: the name in a cluster file, such as 'NVIDIA A100 SXM 80GB'.
    """
    if kind != "cpu" and accelerator() != kind:
        return False
    local_name = cpu_name() if kind == "cpu" else device_names()[0]
    local_words, words = (
        set(re.findall(r"[a-z0-9]+", each.lower())) for each in (local_name, name)
    )
    return bool(words) and words <= local_words


def hardware_key(kind: str) -> str:
    """Return the key under which the entries of this machine's device are stored.

    Args:
        kind: the type of the device: 'cuda', 'xpu' or 'cpu'.
    """
    return json.dumps(device_fingerprint(kind))


def _quantile(values: Sequence[_Number], share: float = QUANTILE) -> _Number:
    """Return the quantile at a share, rounded up to a value of the list (numpy's method 'higher').

    At least this share of the values does not exceed the result.
    """
    return sorted(values)[math.ceil(share * (len(values) - 1))]


def _percent(share: float) -> str:
    """Format a share in percent, rounded up, so that a printed margin is not too small."""
    return f"{math.ceil(share * 1000 - 1e-9) / 10:.1f} %"


def _dicts(entries: object) -> list[dict[str, Any]]:
    """Return the objects in a JSON list; other values in the list are damaged entries."""
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict)]


def _stored(key: str) -> list[dict[str, Any]]:
    return _dicts(RESIDUALS.read().get(key))


def _peak_records(key: str) -> list[PeakRecord]:
    parsed = [_peak_record(values) for values in _stored(key)]
    return [entry for entry in parsed if entry is not None]


def _step_record(values: dict[str, Any]) -> StepRecord | None:
    """Return an entry from JSON values; None if the values are not an entry."""
    if set(values) != {f.name for f in fields(StepRecord)}:
        return None
    seconds = (values["predicted_seconds"], values["measured_seconds"])
    is_positive = all(type(s) is float and math.isfinite(s) and s > 0 for s in seconds)
    return StepRecord(**values) if is_positive else None


def _peak_record(values: dict[str, Any]) -> PeakRecord | None:
    """Return an entry from JSON values; None if the values are not an entry."""
    if set(values) != {f.name for f in fields(PeakRecord)}:
        return None
    words = ("when", "engine", "strategy", "device", "precision")
    sizes = [values["predicted_bytes"], values["tracked_bytes"]]
    if values["process_bytes"] is not None:
        sizes.append(values["process_bytes"])
    if not all(isinstance(values[word], str) for word in words):
        return None
    # `type` and not `isinstance`, because a bool is also an int.
    if not all(type(size) is int and size >= 0 for size in sizes) or sizes[0] == 0:
        return None
    return PeakRecord(**values)
