"""Out of memory: the message for the user, and `memory.on_oom: adapt`, which continues the run.

The message names the rank, the phase, the bytes that were requested, the memory by kind, and the
changes of the job that are predicted to fit. The search for changes takes a few seconds, during
which the other ranks wait. Then all ranks get the result, and end. The first part of the message is
printed before the search. With `adapt` the ranks start again with half the micro-batch.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bigtrain.checkpoint.folders import newest_checkpoint
from bigtrain.core.strategy import Plan
from bigtrain.devices import current_device, is_accelerator, set_current
from bigtrain.engine.remedies import ForecastInputs, RemedySearch, smaller_batch
from bigtrain.errors import OutOfMemoryError
from bigtrain.job.schema import CheckpointConfig, Job
from bigtrain.machine.residuals import non_tensor_reserve
from bigtrain.memory.added_bytes import StatePeak
from bigtrain.memory.cap import requested_bytes
from bigtrain.memory.timeline import MEMORY_KINDS, Peak, Phase
from bigtrain.prediction.memory_report import FullestRank
from bigtrain.ranks.restart import Restart, RestartRequest, continuation_words
from bigtrain.units import format_bytes

REMEDY_TIMEOUT_S = 15.0
"""The most seconds of the search for remedies, so that all ranks end within 30 seconds."""
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
    """The situation of a rank when its allocator failed."""

    rank: int
    step: int
    """The step, counted from 1; 0 before the first step."""
    phase: Phase
    micro_size: int
    """Rows of a micro-batch."""
    peak: Peak | None
    """The peak that was measured so far, or else the predicted peak; None if both are missing."""
    measured: bool
    """Whether `peak` was measured."""
    limit_bytes: int | None
    """Bytes that this rank may allocate; None if unknown."""
    capped: bool
    """Whether the limit is the job's `memory.cap`."""
    activity: str | None
    """A description of the activity, such as writing a checkpoint; None for a phase of a step."""
    adapts: bool
    """Whether the run continues with smaller micro-batches."""
    inputs: ForecastInputs | None
    """The inputs of a forecast; None if the model cannot be forecast."""


def explain_out_of_memory(
    error: BaseException, situation: OutOfMemoryContext, *, speaks: bool, patience_s: float
) -> OutOfMemoryError:
    """Return the error that is raised instead of the allocator's.

    Args:
        error: the allocator's error.
        situation: this rank's situation.
        speaks: whether this is the first rank that ran out of memory. The first rank prints its
            memory by kind and searches for changes that fit. Another rank waits in this call, and
            is ended once the first rank has reported.
        patience_s: seconds after which the other ranks report a hang.
    """
    half = _half(situation)
    text = "\n".join([_headline(error, situation), *_breakdown_lines(situation)])
    if situation.adapts and half is not None:
        return OutOfMemoryError(text, micro_batch_size=half)
    seconds = min(REMEDY_TIMEOUT_S, patience_s / 2)
    if not speaks:
        time.sleep(seconds)
        return OutOfMemoryError(text, micro_batch_size=half)
    sys.stderr.write(f"bigtrain: {text}\n")
    sys.stderr.flush()
    search = _search_in_time(situation.inputs, situation.limit_bytes, seconds)
    message = "\n".join([text, *_remedy_lines(search, situation.limit_bytes)])
    return OutOfMemoryError(message, micro_batch_size=half, printed=text)


def predict_out_of_memory(
    subject: ForecastInputs, fullest: FullestRank | None, limit: int | None
) -> list[str]:
    """Return lines to print before a run that is predicted not to fit.

    The list is empty if the run is predicted to fit, or if the peak or the limit is not known.

    Args:
        subject: the job of the run with its plan and workload.
        fullest: the rank with the highest predicted peak; None if it is not known.
        limit: bytes that a rank may allocate; None if unknown.
    """
    if fullest is None or limit is None:
        return []
    predicted = fullest.peak
    device_type, reserve, reserve_words = subject.resolved.plan.device_type, 0, ""
    if is_accelerator(device_type):  # the limit is on all memory of the allocator, not on tensors
        reserve = non_tensor_reserve(device_type)
        reserve_words = f", of which {format_bytes(reserve)} are for workspaces and rounding"
    if predicted.bytes <= limit - reserve:
        return []
    search = RemedySearch()
    search.run(subject, limit, REMEDY_TIMEOUT_S)
    where = "" if fullest.alike else f" on rank {fullest.rank}"
    headline = (
        f"the predicted peak of {format_bytes(predicted.bytes)}{where} is more than the "
        f"{format_bytes(limit)} that a rank may use{reserve_words}"
    )
    return [headline, *_remedy_lines(search, limit)]


def predict_save_beyond(
    save: StatePeak | None, limit: int | None, config: CheckpointConfig
) -> list[str]:
    """Return lines to print before a run whose saves are predicted not to fit.

    The list is empty if the saves fit, if the job saves nothing, or if a figure is not known.

    Args:
        save: the predicted peak of a save; None if it is not known.
        limit: bytes that a rank may allocate; None if unknown.
        config: the job's `checkpoint` section.
    """
    if save is None or limit is None or not config.saves or save.bytes <= limit:
        return []
    fix = "Use more ranks with --strategy fsdp, or a higher memory.cap"
    if config.asynchronous:
        fix = "Use checkpoint.asynchronous=false, or a lower checkpoint.snapshot_bytes"
    return [
        f"the predicted peak of a save, {format_bytes(save.bytes)}, is more than the "
        f"{format_bytes(limit)} that a rank may use. {fix}."
    ]


def _half(situation: OutOfMemoryContext) -> int | None:
    if situation.phase == "build" or situation.activity is not None:
        return None
    size = situation.micro_size
    return size // 2 if size % 2 == 0 else None


def _headline(error: BaseException, situation: OutOfMemoryContext) -> str:
    requested = requested_bytes(error)
    allocation = f"an allocation of {format_bytes(requested)}" if requested else "an allocation"
    limit = "the memory of its device"
    if situation.limit_bytes:
        limit = f"the {format_bytes(situation.limit_bytes)} that this rank may use"
    if situation.capped:
        limit = f"memory.cap={format_bytes(situation.limit_bytes or 0).replace(' ', '')}"
    where = situation.activity or _WHERE[situation.phase]
    step = f" of step {situation.step}" if situation.step else ""
    rank = f"rank {situation.rank}"
    return f"{rank} ran out of memory {where}{step}: {allocation} would exceed {limit}."


def _breakdown_lines(situation: OutOfMemoryContext) -> list[str]:
    peak = situation.peak
    if peak is None or not peak.bytes:
        return []
    parts = sorted(
        ((getattr(peak.breakdown, kind), kind) for kind in MEMORY_KINDS), key=lambda part: -part[0]
    )
    shown = ", ".join(f"{kind} {format_bytes(size)}" for size, kind in parts if size)
    peak_words = "peak so far" if situation.measured else "predicted peak"
    largest, kind = parts[0]
    return [
        f"{peak_words}: {format_bytes(peak.bytes)} ({shown}). The largest part is {kind}, "
        f"{largest / peak.bytes:.0%}"
    ]


def _remedy_lines(search: RemedySearch, limit: int | None) -> list[str]:
    remedies = list(search.remedies)
    cut_short = []
    if search.begun and not search.complete:
        cut_short = ["the search for such changes reached its time limit: others may fit, too"]
    if remedies:
        lines = ["with one of these changes the job is predicted to fit:"]
        lines += [f"  {remedy}" for remedy in remedies]
        return lines + cut_short
    if limit is None or not search.forecasts or not search.complete:
        return ["use a smaller train.micro_batch_size, or strategy.recompute=full", *cut_short]
    return [
        f"no change that was tried is predicted to fit in {format_bytes(limit)}. Use a smaller "
        "model, more ranks with --strategy fsdp, or a device with more memory"
    ]


def _search_in_time(
    subject: ForecastInputs | None, limit: int | None, seconds: float
) -> RemedySearch:
    """Search for remedies in a thread; return the search when it ends or its time is over.

    In the second case the thread continues the search.
    """
    search = RemedySearch()
    if subject is None or limit is None:
        return search
    # A new thread would use the first device, and so take memory of the rank on that device.
    device = current_device(subject.resolved.plan.device_type)

    def run() -> None:
        set_current(device)
        search.run(subject, limit, seconds * 0.6)

    thread = threading.Thread(target=run, name="bigtrain-remedies", daemon=True)
    thread.start()
    thread.join(seconds)
    return search


@contextmanager
def adapt_on_oom(
    job: Job, plan: Plan, model: nn.Module, folder: Path, before: Restart | None = None
) -> Iterator[None]:
    """Request a restart with smaller micro-batches if memory runs out in a `with` block.

    The global batch stays the same, so the run computes the same numbers.

    Args:
        job: the job of the run.
        plan: the plan of the run.
        model: the model as the user wrote it.
        folder: the folder of the run, in which the restarted run continues.
        before: the last restart of this run; None before the first restart.

    Raises:
        RestartRequest: handled by `run_guarded`, which starts the ranks again.
        OutOfMemoryError: the job has `memory.on_oom=stop`; or the rows of a micro-batch are odd; or
            the memory ran out where smaller micro-batches do not help.
    """
    try:
        yield
    except OutOfMemoryError as error:
        if job.memory.on_oom == "stop":
            raise
        if error.micro_batch_size is None:
            raise OutOfMemoryError(f"{error}\n{_no_half(plan)}") from None
        words = [
            *(before.words if before else ()),
            *smaller_batch(job, plan, error.micro_batch_size),
        ]
        words += continuation_words(folder, job.checkpoint.resume)
        raise RestartRequest(words, _restart_reason(error, plan, model, folder)) from None


def _no_half(plan: Plan) -> str:
    return (
        f"memory.on_oom=adapt cannot help: a micro-batch of {plan.batch.micro_size} rows cannot be "
        "halved, or the model alone is too large."
    )


def _restart_reason(error: OutOfMemoryError, plan: Plan, model: nn.Module, folder: Path) -> str:
    size = error.micro_batch_size or 1
    steps = -(-plan.batch.global_size // (size * plan.batch.dp_size))
    checkpoint = newest_checkpoint(folder / "checkpoints")
    since = f"from {checkpoint.name}" if checkpoint else "from the beginning"
    reason = (
        f"{str(error).splitlines()[0]} memory.on_oom=adapt: continues {since} with micro-batch "
        f"{size} x accumulation {steps} (was {plan.batch.micro_size} x "
        f"{plan.batch.accumulation_steps})"
    )
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        reason += (
            "; warning: BatchNorm normalizes each micro-batch separately, so from now on the "
            "numbers are those of smaller micro-batches"
        )
    return reason
