"""Find the largest value of a key with which a strategy runs, by doubling and bisection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bigtrain.core.strategy import Plan
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job

MODEL_KEY_ALIASES = {
    "micro_batch_size": "train.micro_batch_size",
    "n_layer": "model.args.num_layers",
    "n_layers": "model.args.num_layers",
    "depth": "model.args.num_layers",
}
"""Short names of keys; any other bare name is an argument of the model."""
MAX_VALUE = 2**20
"""The highest value that is tried."""
RELATIVE_RESOLUTION = 32
"""A result below twice this number is exact. A higher result is too low by at most a 32nd."""


def job_key_of(name: str) -> str:
    """Return the dotted key of a job for the user's value of `--largest`."""
    return name if "." in name else MODEL_KEY_ALIASES.get(name, f"model.args.{name}")


def words_for(key: str, value: int, plan: Plan) -> list[str]:
    """Return the KEY=VALUE words that set a key to a value.

    For the micro-batch they also fix the number of accumulation steps, so that the global batch
    grows with it.
    """
    if key != "train.micro_batch_size":
        return [f"{key}={value}"]
    steps = f"train.accumulation_steps={plan.batch.accumulation_steps}"
    return [f"{key}={value}", steps, "train.global_batch_size=null"]


def first_value(key: str, job: Job, plan: Plan) -> int:
    """Return the value from which the search starts: that in the job, or 1 if the job has none.

    Raises:
        ConfigError: the key's value in the job is not a positive whole number.
    """
    if key == "train.micro_batch_size":
        return plan.batch.micro_size
    value: Any = job.model_dump()
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"--largest {key}: it is {value!r} in this job, and only whole numbers from 1 on can "
            "be raised. Use --largest micro_batch_size or --largest n_layer."
        )
    return value


def find_largest(
    fault: Callable[[int], str | None], first: int, maximum: int = MAX_VALUE
) -> tuple[int | None, str | None]:
    """Find the largest value with which a run succeeds, and why a higher value fails.

    If a value fails, higher values are assumed to fail as well.

    Args:
        fault: runs with a value. It returns None if the run succeeds, otherwise the reason why it
            fails, in one line.
        first: the first value to try; at least 1.
        maximum: the highest value to try.

    Returns:
        The largest value (None if the run fails even with 1), and the reason why a higher value
        fails (None if the run succeeds with `maximum`).
    """
    value, reason = first, fault(first)
    if reason is None:
        good = value
        while reason is None:
            good = value
            if value >= maximum:
                return good, None
            value = min(maximum, value * 2)
            reason = fault(value)
        bad = value
    else:
        bad, good = value, 0
        while good == 0 and bad > 1:
            value = bad // 2
            problem = fault(value)
            if problem is None:
                good = value
            else:
                bad, reason = value, problem
        if good == 0:
            return None, reason
    while bad - good > max(1, good // RELATIVE_RESOLUTION):
        value = (good + bad) // 2
        problem = fault(value)
        if problem is None:
            good = value
        else:
            bad, reason = value, problem
    return good, reason
