"""Replicas that step by themselves, and agree on the parameters every so many steps.

`outer: average` replaces the parameters by their average over the replicas. `outer: nesterov`
(DiLoCo) takes how far the replicas have come on average since they last agreed as a gradient, the
outer gradient, and does a step of SGD with Nesterov momentum with it. The inner optimizer's state
stays each replica's own: it is neither averaged nor begun anew. The learning rate's schedule counts
inner steps.

Memory: as one process; with `nesterov` the parameters where the replicas last agreed and a
momentum, once more the trained parameters each; with `delay` what is on its way.
Communication: the parameters, 2 (n-1)/n times, once in `every` steps; in each step three numbers
(targets, loss, a signal to stop). With `fragments` the same bytes a part at a time; with `delay`
the message of a part goes while that many steps are computed.
Constraints: the numbers are not those of one process, but for `every: 1` with SGD, no clipping and
`average`, which is `ddp`. Gradients are clipped by each replica's own norm. Whole models only.
BatchNorm statistics are each replica's own; validation is of each replica's own weights. What a
checkpoint has as the model, and as the optimizer's state, is the first replica's; beside it
are those of the others, so that a resumed run goes on bit for bit.
Example: bigtrain train -n 2 --strategy diloco strategy.replicate.every=50

Source: Stich 2019, Local SGD Converges Fast and Communicates Little (arXiv 1805.09767), algorithm
1; DiLoCo: Douillard et al. 2023 (arXiv 2311.08105), algorithm 1; fragments and delay: Streaming
DiLoCo, Douillard et al. 2025 (arXiv 2501.18512), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from bigtrain.core.strategy import Assembly, Plan, Strategy
from bigtrain.core.traits import Need, Traits
from bigtrain.core.variants import Shape, Variant
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import Traffic, parameter_shapes
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Role
from bigtrain.strategies.local_sgd.outer import Outer, OuterSettings
from bigtrain.strategies.local_sgd.replica import Replica


class LocalSGD(Strategy):
    """Averaging every k steps, and DiLoCo."""

    name: ClassVar[str] = "local_sgd"
    role: ClassVar[Role] = "replicate"
    summary: ClassVar[str] = "replicas step by themselves and agree every so many steps"

    every: int = Field(8, ge=1)
    """Steps from one agreement on a parameter to the next."""
    outer: Literal["average", "nesterov"] = "average"
    """What is done then: the average is taken, or the outer optimizer of DiLoCo does a step."""
    outer_learning_rate: float = Field(0.7, gt=0)
    """The learning rate of the outer optimizer."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """The Nesterov momentum of the outer optimizer."""
    fragments: int = Field(1, ge=1)
    """Parts of the parameters, each with a turn of its own within `every` steps."""
    delay: int = Field(0, ge=0)
    """Steps that are computed while a part is on its way, after which it is applied."""
    mixing: float = Field(0.5, ge=0, le=1)
    """With `delay`: the share of a replica's own parameters in what it goes on with."""

    @property
    def need(self) -> Need:
        """See `Strategy.need`: replicas exchange once in many steps."""
        return "slow links"

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(
            inexact_reason=f"replicas step by themselves and agree every {self.every} steps: by "
            "intent the losses are not those of one process"
        )

    def variants(self, shape: Shape) -> Iterable[Variant]:
        """None: what changes the numbers is for the user to choose."""
        del shape
        return ()

    def warning(self) -> str | None:
        """See `Strategy.warning`."""
        return f"local_sgd: {self.traits.inexact_reason}"

    def check(self, plan: Plan) -> None:
        """Refuse turns that do not fit into the steps between two agreements, and cut models."""
        if self.fragments > self.every:
            raise ConfigError(
                f"strategy.replicate.fragments={self.fragments} take turns in "
                f"strategy.replicate.every={self.every} steps, one in a step at most. "
                f"Set strategy.replicate.fragments={self.every} or fewer."
            )
        if self.delay and self.outer == "average":
            raise ConfigError(
                f"strategy.replicate.delay={self.delay} applies an outer gradient late, and "
                "strategy.replicate.outer=average has none. Set strategy.replicate.outer=nesterov, "
                "or strategy.replicate.delay=0."
            )
        if self.delay >= self.every:
            raise ConfigError(
                f"strategy.replicate.delay={self.delay} is not over before the same part's next "
                f"turn, strategy.replicate.every={self.every} steps later. "
                f"Set strategy.replicate.delay={self.every - 1} or less."
            )
        if plan.cut is not None:
            raise ConfigError(
                "strategy.replicate=local_sgd is for whole models, and strategy.cut makes stages. "
                "Leave strategy.cut out, or use strategy.replicate=ddp."
            )
        if not plan.master_weights:
            raise ConfigError(
                "optim.master_weights=false keeps parameters in bf16 alone, and "
                "strategy.replicate=local_sgd averages them: sums would be rounded to 8 bits. Set "
                "optim.master_weights=true, or use strategy.replicate=ddp."
            )
        tiers = plan.offload_tiers
        if tiers.optimizer != "device" or tiers.parameters != "device":
            raise ConfigError(
                "strategy.replicate=local_sgd changes the parameters beside the optimizer, and "
                f"strategy.offload.optimizer={tiers.optimizer} keeps copies of them elsewhere. Set "
                "strategy.offload=null, or use strategy.replicate=ddp."
            )

    @property
    def _settings(self) -> OuterSettings:
        nesterov = self.outer == "nesterov"
        return OuterSettings(
            every=self.every,
            learning_rate=self.outer_learning_rate if nesterov else None,
            momentum=self.outer_momentum,
            fragments=self.fragments,
            delay=self.delay,
            mixing=self.mixing if self.delay else 0.0,
        )

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """The outer state, and the fragments that are on their way at once."""
        if plan.dp == 1 or self.outer == "average":
            return forecast
        largest = max(map(math.prod, parameter_shapes(profile)), default=0)
        number_bytes = profile.gradient_bytes / max(1, profile.trained_elements)
        part = profile.gradient_bytes / self.fragments
        if self.fragments > 1:  # whole parameters: the largest may make one of them larger
            part = max(part, largest * number_bytes)
        under_way = min(self.fragments, math.ceil(self.delay * self.fragments / self.every))
        states = forecast.states
        states = replace(
            states,
            optimizer=states.optimizer + 2 * profile.gradient_bytes,
            buffers=states.buffers + round(part) * under_way,
        )
        return replace(forecast, states=states)

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """What goes in `every` steps, as much of it as falls to one."""
        if plan.dp == 1:
            return ()
        nbytes = round(profile.gradient_bytes / self.every)
        calls = max(1, round(self.fragments / self.every))
        behind: Literal["backward", "nothing"] = "backward" if self.delay else "nothing"
        return (Traffic("all_reduce", nbytes, calls, "step", behind, plan.dp, plan.pp * plan.tp),)

    def apply(self, assembly: Assembly) -> None:
        """Exchange with the other replicas after each step of the plain loop."""
        if assembly.plan.dp > 1:
            outer = Outer(assembly.trained(), assembly.context, self._settings)
            assembly.after_update.append(outer.after_step)
            assembly.runner = lambda finished: Replica(finished, outer)
