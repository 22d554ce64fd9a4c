"""The largest value of a key with which a strategy runs, by doubling and bisection."""

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
"""The value at which doubling ends."""
RELATIVE_RESOLUTION = 32
"""The answer is exact up to this number; above it, it is at most a 32nd too low."""


def job_key_of(name: str) -> str:
    """Return the key of a job that the user's word for `--largest` means."""
    return name if "." in name else MODEL_KEY_ALIASES.get(name, f"model.args.{name}")


def words_for(key: str, value: int, plan: Plan) -> list[str]:
    """Return the words that set the key; a larger micro-batch makes the global batch larger."""
    if key != "train.micro_batch_size":
        return [f"{key}={value}"]
    steps = f"train.accumulation_steps={plan.batch.accumulation_steps}"
    return [f"{key}={value}", steps, "train.global_batch_size=null"]


def first_value(key: str, job: Job, plan: Plan) -> int:
    """Return the value to begin with: the job's, or 1.

    Raises:
        ConfigError: the key's value in the job is no positive whole number.
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
    """Find the largest value that runs, and the fault of a higher one.

    Args:
        fault: runs with a value; returns None, or in one line why it does not run. If a value does
            not run, no higher one is taken to run.
        first: the value to begin with; at least 1.
        maximum: the value to end with.

    Returns:
        The value, None if not even 1 runs; the fault, None if `maximum` was reached.
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
