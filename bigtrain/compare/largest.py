"""How far a strategy can raise a number before it no longer runs: doubling, then bisection."""

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
"""Where doubling ends."""
RELATIVE_RESOLUTION = 32
"""The answer is exact up to this number, and within a 32nd of it above."""


def job_key_of(name: str) -> str:
    """The key of a job that a name given to `--largest` stands for."""
    return name if "." in name else MODEL_KEY_ALIASES.get(name, f"model.args.{name}")


def words_for(key: str, value: int, plan: Plan) -> list[str]:
    """The words that set the key; a micro-batch takes the global batch with it."""
    if key != "train.micro_batch_size":
        return [f"{key}={value}"]
    steps = f"train.accumulation_steps={plan.batch.accumulation_steps}"
    return [f"{key}={value}", steps, "train.global_batch_size=null"]


def first_value(key: str, job: Job, plan: Plan) -> int:
    """Where to begin: at what the job says, or at 1.

    Raises:
        ConfigError: the key is no number that can grow.
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
            f"--largest {key}: it is {value!r} in this job, and only whole numbers from 1 can be "
            "raised. Use --largest micro_batch_size or --largest n_layer."
        )
    return value


def find_largest(
    fault: Callable[[int], str | None], first: int, maximum: int = MAX_VALUE
) -> tuple[int | None, str | None]:
    """The largest value without a fault, and the fault just above it.

    Args:
        fault: runs with a value; returns None, or in one line why it does not run. What is said
            of a value is taken to be so of all higher ones.
        first: where to begin; at least 1.
        maximum: where to end.

    Returns:
        The value, None where not even 1 runs; the reason, None where `maximum` was reached.
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
