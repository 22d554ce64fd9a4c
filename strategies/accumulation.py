"""Several micro-batches in a step: a large global batch with the activations of a small one.

Memory: activations of one micro-batch instead of all; gradients stay alive between them.
Communication: unchanged, gradients are averaged once a step.
Constraints: BatchNorm computes the statistics of each micro-batch.
Example: python bigtrain/train.py train.micro_batch_size=4 train.global_batch_size=32
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from bigtrain.core.strategy import Plan, Strategy
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.job.schema import Role


class Accumulation(Strategy):
    """Micro-batches one after the other; their number is `train.accumulation_steps`."""

    name: ClassVar[str] = "accumulation"
    role: ClassVar[Role] = "accumulate"
    summary: ClassVar[str] = "micro-batches one after the other: fewer activations at once"

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Add the later micro-batches, which add to existing gradients, and their inputs."""
        steps = plan.batch.accumulation_steps
        states = forecast.states
        is_server = profile.batch_bytes > 0 and states.activations == 0  # a rank without a batch
        if steps == 1 or is_server:
            return forecast
        if plan.device_type == "cpu":  # a GPU gets each micro-batch just before its forward pass
            waiting = profile.batch_bytes * (steps - 1)
            states = replace(states, activations=states.activations + waiting)
        return replace(forecast, states=states, micro_batches=steps)
