"""The lines before a run's first step: model, data, strategy, optimizer, batch, predicted peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bigtrain.core.strategy import Plan
from bigtrain.devices import is_accelerator
from bigtrain.engine.setup import RunSetup
from bigtrain.job.optim_keys import OptimConfig
from bigtrain.job.schema import Job
from bigtrain.memory.cap import device_capacity_bytes
from bigtrain.prediction.memory_report import FullestRank
from bigtrain.units import format_bytes, format_count, format_share


def banner_lines(parts: RunSetup, num_ranks: int, device_type: str) -> Iterator[str]:
    """Yield a line each for model, data, strategy, optimizer with its learning rates, and batch.

    Data without a description has no line.

    Args:
        parts: the parts of the run.
        num_ranks: the number of ranks of the run.
        device_type: the type of the ranks' devices, such as `cuda`.
    """
    yield f"model: {model_words(parts)}, {parts.job.train.precision}"
    if parts.data.description:
        yield parts.data.description
    yield f"strategy {strategy_words(parts.plan, num_ranks, device_type)}"
    yield f"optimizer: {optimizer_words(parts)}"
    yield batch_line(parts)


def model_words(parts: RunSetup) -> str:
    """Describe the model, its number of parameters, its trained part, and its initial weights."""
    model, frozen = parts.job.model, parts.frozen_parameters
    trained = "all trained"
    if frozen:
        trained = (
            f"{format_count(parts.parameters - frozen)} trained, {format_count(frozen)} frozen"
        )
    start = "" if model.pretrained is None else f", from {model.pretrained}"
    return f"{model.name}, {format_count(parts.parameters)} parameters ({trained}){start}"


def strategy_words(plan: Plan, num_ranks: int, device_type: str) -> str:
    """Describe the strategy, the number of ranks, and the mesh if it has a dimension pp or tp."""
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    mesh = ""
    if plan.pp > 1 or plan.tp > 1:
        mesh = f", mesh pp {plan.pp} x dp {plan.dp} x tp {plan.tp}"
    return f"{plan.strategy.name}: {ranks} on {device_type}{mesh}"


def optimizer_words(parts: RunSetup) -> str:
    """Describe the optimizer, its options that have an effect, and its learning rates."""
    optim = parts.job.optim
    words: list[str] = [optim.name]
    if optim.momentum:
        words.append(f"momentum {optim.momentum:g}")
    if optim.weight_decay:
        words.append(f"weight decay {optim.weight_decay:g}")
    if optim.clip_norm is not None:
        words.append(f"clipped to norm {optim.clip_norm:g}")
    if optim.state != "fp32":
        words.append(f"moments in {optim.state}")
    return f"{', '.join(words)}; rate {_rate_words(parts, optim)}"


def _rate_words(parts: RunSetup, optim: OptimConfig) -> str:
    """Describe the learning rates: the highest rate, the warm-up, and the final rate."""
    steps = parts.total_steps
    rates = [parts.learning_rate(step) for step in _sampled_steps(steps)]
    highest, last = max(rates), rates[-1]
    if parts.schedule is not None:
        kind, total, more = type(parts.schedule).__name__, parts.schedule.total(), ""
        if total is not None and total != steps:
            more = f"; it decays over {total} steps, and this run has {steps}"
        return (
            f"by {kind} of {parts.job.strategy.deepspeed_file}: {rates[0]:g} in step 1, "
            f"{highest:g} at most, {last:g} in step {steps}{more}"
        )
    warmup = parts.warmup_steps
    if warmup >= steps:
        return (
            f"{rates[0]:.3g} in step 1, up to {last:.3g} in step {steps} ({warmup} warm-up steps)"
        )
    begun = f"{highest:.3g} after {warmup} warm-up steps" if warmup else f"{highest:.3g}"
    if optim.schedule == "constant":
        return f"{begun}, constant"
    if optim.schedule == "step":
        epochs = ", ".join(f"{epoch:g}" for epoch in optim.milestones)
        return f"{begun}, times {optim.step_factor:g} at epochs {epochs}"
    return f"{begun}, {optim.schedule} down to {last:.3g} in step {steps}"


_MOST_SAMPLED = 10_000


def _sampled_steps(steps: int) -> range | list[int]:
    """Return the steps whose rates are computed: all steps, or in a long run a sample of them.

    The last step is always included.
    """
    if steps <= _MOST_SAMPLED:
        return range(steps)
    return [*range(0, steps - 1, -(-steps // _MOST_SAMPLED)), steps - 1]


def batch_line(parts: RunSetup) -> str:
    """Describe the global batch as a product, and the length of the run in steps."""
    batch = parts.plan.batch
    return (
        f"global batch {batch.global_size} = micro-batch {batch.micro_size} x accumulation "
        f"{batch.accumulation_steps} x dp {batch.dp_size}; {parts.total_steps} steps, "
        f"{parts.order.steps_per_epoch} to an epoch"
    )


def peak_line(fullest: FullestRank | None, note: str | None, limit: MemoryLimit) -> str:
    """Describe the predicted peak, its rank, and its share of the limit.

    Args:
        fullest: the rank with the highest predicted peak; None if there is no prediction.
        note: the reason why there is no prediction.
        limit: the memory of which the peak is a share.
    """
    if fullest is None:
        return f"predicted peak: none ({note})"
    share = f" ({format_share(fullest.peak.bytes, limit.bytes)} of {limit})" if limit.bytes else ""
    return f"predicted peak: {fullest}{share}"


@dataclass(frozen=True)
class MemoryLimit:
    """The memory of which a rank's peak is shown as a share."""

    bytes: int | None
    """The size of the memory; None if unknown."""
    owner: str
    """Words before the size: "memory.cap,", "the device's" or "the host's"."""

    @classmethod
    def of(cls, job: Job, device: torch.device) -> MemoryLimit:
        """Return the job's `memory.cap`; without a cap return the memory of the device."""
        if job.memory.cap is not None:
            return cls(job.memory.cap, "memory.cap,")
        owner = "the device's" if is_accelerator(device) else "the host's"
        return cls(device_capacity_bytes(device), owner)

    def __str__(self) -> str:
        """Return text such as "the host's 24.9 GiB"."""
        return f"{self.owner} {format_bytes(self.bytes or 0)}"
