"""`memory.on_oom: adapt`: where memory runs out, the run goes on with half the micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bigtrain.checkpoint.folders import newest_checkpoint
from bigtrain.core.strategy import Plan
from bigtrain.engine.remedies import smaller_batch
from bigtrain.errors import OutOfMemoryError
from bigtrain.job.schema import Job
from bigtrain.ranks.restart import Restart, RestartRequest, continuation_words


@contextmanager
def adapt_on_oom(
    job: Job, plan: Plan, model: nn.Module, folder: Path, before: Restart | None = None
) -> Iterator[None]:
    """Have all ranks begin anew with smaller micro-batches where memory runs out inside.

    The global batch stays as it is, and with it what is computed.

    Args:
        job: what runs; with `memory.on_oom=stop` errors go their way.
        plan: how it runs.
        model: as the user wrote it.
        folder: of the run, which goes on in it.
        before: what was changed already, the last time.

    Raises:
        RestartRequest: for `run_guarded`, which does it.
        OutOfMemoryError: half a micro-batch is none, or would not help.
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
        raise RestartRequest(words, _said(error, plan, model, folder)) from None


def _no_half(plan: Plan) -> str:
    return (
        f"memory.on_oom=adapt cannot help: a micro-batch of {plan.batch.micro_size} has no half, "
        "or the model alone is too large."
    )


def _said(error: OutOfMemoryError, plan: Plan, model: nn.Module, folder: Path) -> str:
    size = error.micro_batch_size or 1
    steps = -(-plan.batch.global_size // (size * plan.batch.dp_size))
    checkpoint = newest_checkpoint(folder / "checkpoints")
    since = f"from {checkpoint.name}" if checkpoint else "from the beginning"
    said = (
        f"{str(error).splitlines()[0]} memory.on_oom=adapt: goes on {since} with micro-batch "
        f"{size} x accumulation {steps} (was {plan.batch.micro_size} x "
        f"{plan.batch.accumulation_steps})"
    )
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        said += (
            "; warning: BatchNorm normalises each micro-batch by itself, so from here on the "
            "numbers are those of smaller ones"
        )
    return said
