"""The batch of an optimizer step: its size, the micro-batch size, accumulation and replicas."""

from __future__ import annotations

from dataclasses import dataclass

from bigtrain.errors import ConfigError
from bigtrain.job.schema import TrainConfig


@dataclass(frozen=True)
class Batch:
    """The batch of a step: `global_size = micro_size * accumulation_steps * dp_size`."""

    global_size: int
    """Samples of an optimizer step, over all ranks."""
    micro_size: int
    """Samples of one replica in one forward pass."""
    accumulation_steps: int
    """Micro-batches of one replica in an optimizer step."""
    dp_size: int
    """Replicas of the model, which share the global batch."""

    @property
    def num_parts(self) -> int:
        """Micro-batches in a global batch, over all replicas."""
        return self.accumulation_steps * self.dp_size


def resolve_batch(train: TrainConfig, dp_size: int) -> Batch:
    """Return the batch of a step, computed from the batch keys that are given.

    Any two of the three keys give the third. Without `global_batch_size`, a missing
    `micro_batch_size` or `accumulation_steps` is 1. With `global_batch_size` alone,
    `accumulation_steps` is 1.

    Args:
        train: the section with the three keys.
        dp_size: the number of replicas that share the global batch.

    Raises:
        ConfigError: the numbers contradict each other; the message contains the equation.
    """
    total, micro, accumulation = (
        train.global_batch_size,
        train.micro_batch_size,
        train.accumulation_steps,
    )
    if total is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batch(micro * accumulation * dp_size, micro, accumulation, dp_size)
    if micro is None:
        accumulation = accumulation or 1
        pieces = accumulation * dp_size
        if total % pieces:
            raise ConfigError(
                f"train.global_batch_size={total} does not divide into accumulation_steps * dp = "
                f"{accumulation} * {dp_size} = {pieces} micro-batches. "
                f"Use train.global_batch_size={_multiple(total, pieces)}."
            )
        return Batch(total, total // pieces, accumulation, dp_size)
    if accumulation is None:
        if total % (micro * dp_size):
            raise ConfigError(
                f"train.global_batch_size={total} is not a multiple of micro_batch_size * dp = "
                f"{micro} * {dp_size} = {micro * dp_size}. "
                f"Use train.global_batch_size={_multiple(total, micro * dp_size)}, "
                "or leave train.micro_batch_size out."
            )
        return Batch(total, micro, total // (micro * dp_size), dp_size)
    if total != micro * accumulation * dp_size:
        raise ConfigError(
            f"train.global_batch_size={total}, but micro_batch_size * accumulation_steps * dp = "
            f"{micro} * {accumulation} * {dp_size} = {micro * accumulation * dp_size}. "
            "Leave one of the three out."
        )
    return Batch(total, micro, accumulation, dp_size)


def _multiple(number: int, of: int) -> int:
    """Return the positive multiple of `of` that is nearest to `number`."""
    return max(1, round(number / of)) * of
