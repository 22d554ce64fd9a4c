"""The batch of a step: its size, the micro-batch size, the accumulation, and the replicas."""

from __future__ import annotations

from dataclasses import dataclass

from bigtrain.errors import ConfigError
from bigtrain.job.schema import TrainConfig


@dataclass(frozen=True)
class Batch:
    """The numbers of a step: `global_size = micro_size * accumulation_steps * dp_size`."""

    global_size: int
    micro_size: int
    accumulation_steps: int
    dp_size: int

    @property
    def num_parts(self) -> int:
        """Micro-batches of a global batch, over all replicas."""
        return self.accumulation_steps * self.dp_size


def resolve_batch(train: TrainConfig, dp_size: int) -> Batch:
    """Compute the third of the three batch keys from the other two.

    With one key given, the accumulation is 1 (or, for `accumulation_steps` alone, the
    micro-batch is 1 sample).

    Args:
        train: the section with the three keys.
        dp_size: the number of replicas that share the global batch.

    Raises:
        ConfigError: the numbers contradict each other; the message has the equation.
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
    """The positive multiple of `of` that is nearest to `number`."""
    return max(1, round(number / of)) * of
