"""Memory ran out: what is said of it, in the words of the job that ran.

The message names the rank, the phase, what was asked for, what the memory was made of, and the
changes after which it is predicted to fit. Working these out is given a few seconds, in which the
other ranks wait; then all ranks are told, and end. What is known already is said before.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass

from bigtrain.devices import current_device, is_accelerator, set_current
from bigtrain.engine.remedies import ForecastInputs, RemedySearch
from bigtrain.errors import OutOfMemoryError
from bigtrain.job.schema import CheckpointConfig
from bigtrain.machine.residuals import non_tensor_reserve
from bigtrain.memory.added_bytes import StatePeak
from bigtrain.memory.cap import requested_bytes
from bigtrain.memory.timeline import MEMORY_KINDS, Peak, Phase
from bigtrain.prediction.fullest_rank import FullestRank
from bigtrain.units import format_bytes

REMEDY_TIMEOUT_S = 15.0
"""Seconds for the remedies: all ranks are to have ended within 30."""
_WHERE = {
    "build": "while the model was built",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "step": "in the optimizer's step",
    "evaluate": "in validation",
    "save": "while a checkpoint was written",
}


@dataclass(frozen=True)
class OutOfMemoryContext:
    """Where a rank stood when it got no more memory."""

    rank: int
    step: int
    """Counted from 1; 0 before the first."""
    phase: Phase
    micro_size: int
    """Rows of a micro-batch."""
    peak: Peak | None
    """What was measured until then, or had been predicted."""
    measured: bool
    limit_bytes: int | None
    """Bytes that this rank could take, where known."""
    capped: bool
    """Whether the job's `memory.cap` is that limit."""
    activity: str | None
    """What was being done, where it is none of a step's phases."""
    adapts: bool
    """Whether the run is to go on with less at a time."""
    inputs: ForecastInputs | None
    """None where the model cannot be forecast."""


def explain_out_of_memory(
    error: BaseException, situation: OutOfMemoryContext, *, speaks: bool, patience_s: float
) -> OutOfMemoryError:
    """The error that a user sees instead of the allocator's.

    Args:
        error: the allocator's.
        situation: where the rank stood.
        speaks: whether this is the first rank that ran out. It prints what it held and looks for
            what would fit; any other waits, and is ended when the first one has reported.
        patience_s: seconds that the other ranks wait before they take the run for one that hangs.
    """
    half = _half(situation)
    text = "\n".join([_what(error, situation), *_held(situation)])
    if situation.adapts and half is not None:
        return OutOfMemoryError(text, micro_batch_size=half)
    seconds = min(REMEDY_TIMEOUT_S, patience_s / 2)
    if not speaks:
        time.sleep(seconds)
        return OutOfMemoryError(text, micro_batch_size=half)
    sys.stderr.write(f"bigtrain: {text}\n")
    sys.stderr.flush()
    search = _in_time(situation.inputs, situation.limit_bytes, seconds)
    whole = "\n".join([text, *_fits(search, situation.limit_bytes)])
    return OutOfMemoryError(whole, micro_batch_size=half, printed=text)


def predict_out_of_memory(
    subject: ForecastInputs, fullest: FullestRank | None, limit: int | None
) -> list[str]:
    """What to say before a run that is predicted not to fit; nothing where it is to fit.

    Args:
        subject: what will be run.
        fullest: its fullest rank.
        limit: bytes that a rank may take.
    """
    if fullest is None or limit is None:
        return []
    predicted = fullest.peak
    kind, beside, kept = subject.resolved.plan.device_type, 0, ""
    if is_accelerator(kind):  # its limit is on all that the allocator takes, not on tensors alone
        beside = non_tensor_reserve(kind)
        kept = f", of which {format_bytes(beside)} are for workspaces and what is rounded up"
    if predicted.bytes <= limit - beside:
        return []
    search = RemedySearch()
    search.run(subject, limit, REMEDY_TIMEOUT_S)
    where = "" if fullest.alike else f" on rank {fullest.rank}"
    headline = (
        f"the predicted peak of {format_bytes(predicted.bytes)}{where} is more than the "
        f"{format_bytes(limit)} that a rank can take{kept}"
    )
    return [headline, *_fits(search, limit)]


def predict_save_beyond(
    save: StatePeak | None, limit: int | None, config: CheckpointConfig
) -> list[str]:
    """What to say before a run whose saves are predicted not to fit; nothing where they are to.

    Args:
        save: its predicted peak.
        limit: bytes that a rank may take.
        config: whether anything is saved, and how.
    """
    if save is None or limit is None or not config.saves or save.bytes <= limit:
        return []
    fix = "Use more ranks with --strategy fsdp, or a higher memory.cap"
    if config.asynchronous:
        fix = "Use checkpoint.asynchronous=false, or a lower checkpoint.snapshot_bytes"
    return [
        f"the predicted peak of a save, {format_bytes(save.bytes)}, is more than the "
        f"{format_bytes(limit)} that a rank can take. {fix}."
    ]


def _half(situation: OutOfMemoryContext) -> int | None:
    if situation.phase == "build" or situation.activity is not None:
        return None
    size = situation.micro_size
    return size // 2 if size % 2 == 0 else None


def _what(error: BaseException, situation: OutOfMemoryContext) -> str:
    requested = requested_bytes(error)
    request_words = (
        f"{format_bytes(requested)} more were asked for" if requested else "more was asked for"
    )
    limit = "the memory of its device"
    if situation.limit_bytes:
        limit = f"the {format_bytes(situation.limit_bytes)} that it could take"
    if situation.capped:
        limit = f"memory.cap={format_bytes(situation.limit_bytes or 0).replace(' ', '')}"
    where = situation.activity or _WHERE[situation.phase]
    step = f" of step {situation.step}" if situation.step else ""
    rank = f"rank {situation.rank}"
    return f"{rank} ran out of memory {where}{step}: {request_words} than {limit} leaves."


def _held(situation: OutOfMemoryContext) -> list[str]:
    peak = situation.peak
    if peak is None or not peak.bytes:
        return []
    parts = sorted(
        ((getattr(peak.breakdown, kind), kind) for kind in MEMORY_KINDS), key=lambda part: -part[0]
    )
    shown = ", ".join(f"{kind} {format_bytes(size)}" for size, kind in parts if size)
    held_words = "it held" if situation.measured else "by prediction it needs"
    largest, kind = parts[0]
    return [
        f"{held_words} {format_bytes(peak.bytes)}: {shown}. {kind} dominate: "
        f"{largest / peak.bytes:.0%}"
    ]


def _fits(search: RemedySearch, limit: int | None) -> list[str]:
    remedies = list(search.remedies)
    cut_short = []
    if search.begun and not search.complete:
        cut_short = ["the search for what fits was ended by its time limit: there may be more"]
    if remedies:
        lines = ["what would fit, by prediction:", *(f"  {remedy}" for remedy in remedies)]
        return lines + cut_short
    if limit is None or not search.forecasts or not search.complete:
        return ["set a smaller train.micro_batch_size, or strategy.recompute=full", *cut_short]
    return [
        f"no change that was tried is predicted to fit {format_bytes(limit)}. Use a smaller model, "
        "more ranks with --strategy fsdp, or a device with more memory"
    ]


def _in_time(subject: ForecastInputs | None, limit: int | None, seconds: float) -> RemedySearch:
    """The search, as far as it comes in time; it may go on, and is not waited for."""
    search = RemedySearch()
    if subject is None or limit is None:
        return search
    # A new thread's device is the first; there it would take memory of another rank's.
    device = current_device(subject.resolved.plan.device_type)

    def run() -> None:
        set_current(device)
        search.run(subject, limit, seconds * 0.6)

    thread = threading.Thread(
        target=run,
        name="bigtrain-remedies",
        daemon=True,
    )
    thread.start()
    thread.join(seconds)
    return search
