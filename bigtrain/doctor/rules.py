"""The rules that a check of `bigtrain doctor --check` must meet, and the result of a check.

A rule reads the figures of a run, and those of the runs before it. It runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bigtrain.compare.rows import ComparisonRow
from bigtrain.devices import accelerator
from bigtrain.units import MIB, format_bytes, signed_share

PEAK_TOLERANCE = {"cpu": 0.005, "accelerator": 0.01}
"""The share of the measured peak by which a forecast may be off. It is larger on an accelerator,
whose kernels allocate workspaces that a forecast does not include."""
WORKSPACES = {"cpu": 0, "accelerator": 64 * MIB}
"""The bytes by which a forecast may be off, if they are more than that share: for a small model,
workspaces are a large part of the peak."""
LOSS_TOLERANCE = 1e-5
"""The share by which losses may differ if sums are in another order. It is that of `verify` in
fp32."""

CheckVerdict = Literal["passed", "failed", "skipped"]
Rule = Callable[["CheckedRun", Mapping[str, "CheckedRun"]], str | None]
"""Returns the fault of a run; None if it has none. The arguments are the run, and the earlier runs
by name."""


@dataclass(frozen=True)
class CheckedRun:
    """The result of a check."""

    name: str
    promise: str
    verdict: CheckVerdict
    explanation: str
    """The figures if the check passed, the fault if it failed, the reason if it was skipped."""
    command: str = ""
    """The command line that repeats the run; empty if the check was skipped."""
    status: int | None = None
    """The exit status of the run, 1 if it took too long; None if the check was skipped."""
    leftovers: int = 0
    """How many processes of the run were still there at its end, and had to be killed."""
    row: ComparisonRow | None = None
    """The measured and predicted figures of the run; None if it was skipped or failed."""
    memory: dict[str, Any] | None = None
    """The content of the run's memory.json: the bytes that tensors requested, and the bytes that
    the allocator took for them."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Figures of the check's program, as JSON values: those of `plain_loop.compare`, or by rank the
    GPUs on which it has a context."""
    checkpoints: list[str] = field(default_factory=list)
    """The names of the checkpoints that the run wrote."""
    last_lines: list[str] = field(default_factory=list)
    """The last lines that the run printed."""


def forecast_holds(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
    """The rule that the predicted peak equals the measured one, within the tolerance.

    Args:
        run: the run to check.
        before: not used.

    Returns:
        The fault; None if the rule is met.
    """
    del before
    if run.row is None:
        return run.explanation
    kind = "cpu" if accelerator() is None else "accelerator"
    row, share, size = run.row, PEAK_TOLERANCE[kind], WORKSPACES[kind]
    if row.error is None or row.peak_bytes is None or row.predicted_peak_bytes is None:
        return "there is no forecast of its peak"
    off = abs(row.predicted_peak_bytes - row.peak_bytes)
    if off <= max(share * row.peak_bytes, size):
        return None
    allowed = f"{share:.1%}" if share * row.peak_bytes >= size else format_bytes(size)
    error = f"{signed_share(row.error, 2)} off ({format_bytes(off)})"
    return f"its forecast is {error}; {allowed} is allowed"


def same_losses(reference_name: str, share: float = LOSS_TOLERANCE) -> Rule:
    """Return the rule that the loss of every step equals that of another run, within a tolerance.

    Args:
        reference_name: the name of the check whose run is the reference.
        share: the share of the reference's loss by which a loss may differ.
    """

    def rule(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
        row, reference = run.row, before[reference_name].row
        if row is None or reference is None:
            return (
                run.explanation
                if row is None
                else f"{reference_name} has no losses to compare with"
            )
        if len(row.losses) != len(reference.losses):
            return f"it has {len(row.losses)} losses, and {reference_name} {len(reference.losses)}"
        pairs = zip(row.losses, reference.losses, strict=True)
        shares = [abs(a - b) / abs(b) for a, b in pairs]
        large = [each for each in shares if not each <= share]  # `not <=` so that nan counts
        return (
            f"its losses differ by {large[0]:.1e} from those of {reference_name}" if large else None
        )

    return rule


def smaller_than(reference_name: str) -> Rule:
    """Return the rule that the peak of a run is below that of another run.

    Args:
        reference_name: the name of the check whose run is the reference.
    """

    def rule(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
        row, reference = run.row, before[reference_name].row
        peaks = [None if each is None else each.peak_bytes for each in (row, reference)]
        if peaks[0] is None or peaks[1] is None:
            return f"a peak is missing, that of this run or of {reference_name}"
        if peaks[0] < peaks[1]:
            return None
        size, limit = format_bytes(peaks[0]), format_bytes(peaks[1])
        return f"its peak of {size} is not below the {limit} of {reference_name}"

    return rule


def explains_out_of_memory(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
    """The rule that the run ends with status 1 and prints changes that are predicted to fit.

    Args:
        run: the run to check, whose job does not fit its memory cap.
        before: not used.

    Returns:
        The fault; None if the rule is met.
    """
    del before
    text = "\n".join(run.last_lines)
    if run.status != 1:
        return f"it ended with status {run.status} instead of 1"
    missing = [
        words
        for words in ("out of memory", "predicted to fit:")
        if words.lower() not in text.lower()
    ]
    return f"it does not say '{missing[0]}'" if missing else None


def has_saved(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
    """The rule that the run wrote a checkpoint.

    Args:
        run: the run to check.
        before: not used.

    Returns:
        The fault; None if the rule is met.
    """
    del before
    if run.row is None:
        return run.explanation
    return None if run.checkpoints else "it wrote no checkpoint"


def continues(reference_name: str) -> Rule:
    """Return the rule that the losses are the last ones of another run, bit for bit.

    Args:
        reference_name: the name of the check whose run is the reference.
    """

    def rule(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
        row, reference = run.row, before[reference_name].row
        if row is None or reference is None:
            return run.explanation if row is None else f"{reference_name} has no losses"
        if not 0 < len(row.losses) < len(reference.losses):
            return (
                f"it has {len(row.losses)} losses, and a part of the {len(reference.losses)} of "
                f"{reference_name} was expected"
            )
        expected = reference.losses[-len(row.losses) :]
        if row.losses == expected:
            return None
        off = max(abs(a - b) / abs(b) for a, b in zip(row.losses, expected, strict=True))
        return f"its losses differ by {off:.1e} from the last ones of {reference_name}"

    return rule


def ends_with_lost_rank(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
    """The rule that a run whose rank 1 was killed ends, says so, and leaves no process behind.

    Args:
        run: the run to check.
        before: not used.

    Returns:
        The fault; None if the rule is met.
    """
    del before
    if run.status != 1:
        return f"it ended with status {run.status} instead of 1"
    if not any("rank 1 was killed" in line for line in run.last_lines):
        return "no line says that rank 1 was killed"
    if run.leftovers:
        return f"{run.leftovers} of its processes were left behind"
    return None


def one_context_per_rank(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
    """The rule that the process of each rank has a context on the rank's GPU alone.

    Args:
        run: the run to check.
        before: not used.

    Returns:
        The fault; None if the rule is met.
    """
    del before
    if run.row is None:
        return run.explanation
    found = {name: gpus for name, gpus in run.figures.items() if name.startswith("gpus-")}
    if len(found) != run.row.num_ranks:
        return f"{len(found)} of {run.row.num_ranks} ranks reported their GPUs"
    for name, gpus in found.items():
        rank = int(name.removeprefix("gpus-"))
        if gpus != [rank]:
            return f"rank {rank} has contexts on the GPUs {gpus}"
    return None


def no_more_than_plain_torch(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
    """The rule that the losses are those of a plain torch loop, and the peak is not above its peak.

    Args:
        run: the run to check; its figures are those of `plain_loop.compare`.
        before: not used.

    Returns:
        The fault; None if the rule is met.
    """
    del before
    if not run.figures:
        return run.explanation
    ours, plain = run.figures["prepared"], run.figures["plain"]
    pairs = zip(ours["losses"], plain["losses"], strict=True)
    off = max(abs(a - b) / abs(b) for a, b in pairs)
    if not off <= LOSS_TOLERANCE:
        return f"its losses differ by {off:.1e} from those of the plain loop"
    kind = "cpu" if accelerator() is None else "accelerator"
    limit = plain["peak_bytes"] * (1 + PEAK_TOLERANCE[kind])
    if ours["peak_bytes"] > limit:
        size, most = format_bytes(ours["peak_bytes"]), format_bytes(plain["peak_bytes"])
        return f"its peak is {size}, and the plain loop's is {most}"
    return None
