"""Replicas that train independently and synchronize their parameters every so many steps.

`outer: average` replaces the parameters by their average over the replicas. `outer: nesterov`
(DiLoCo) uses the average change of the replicas since the last synchronization as a gradient, the
outer gradient, for a step of SGD with Nesterov momentum. Every replica has its own state of the
inner optimizer, which is neither averaged nor reset. The learning rate's schedule counts inner
steps.

Memory: that of one process. `nesterov` adds two copies of the trained parameters: their values at
the last synchronization, and a momentum. `delay` adds the messages in flight.
Communication: an all-reduce of the parameters once in `every` steps, for which each rank sends and
receives 2 (n-1)/n of their bytes; in each step three numbers (targets, loss, a signal to stop).
With `fragments` the same bytes are sent a fragment at a time. With `delay` a fragment is sent while
that many steps are computed.
Constraints: the results are not those of one process, except for `every: 1` with SGD, no clipping
and `average`, which is `ddp`. Gradients are clipped by the norm of each replica. The model is not
cut into stages. BatchNorm statistics, and weights in a validation, differ between the replicas. A
checkpoint has the first replica's model and optimizer state under the usual names, and those of the
other replicas in addition, so a resumed run continues bit for bit.
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
from bigtrain.strategies.local_sgd.outer import Outer, OuterSettings, Replica


class LocalSGD(Strategy):
    """Independent replicas that average their parameters every k steps, or DiLoCo."""

    name: ClassVar[str] = "local_sgd"
    role: ClassVar[Role] = "replicate"
    summary: ClassVar[str] = "replicas train independently and synchronize every so many steps"

    every: int = Field(8, ge=1)
    """Steps from one synchronization of a parameter to the next."""
    outer: Literal["average", "nesterov"] = "average"
    """How replicas synchronize: by their average, or by a step of DiLoCo's outer optimizer."""
    outer_learning_rate: float = Field(0.7, gt=0)
    """The learning rate of the outer optimizer."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """The Nesterov momentum of the outer optimizer."""
    fragments: int = Field(1, ge=1)
    """The number of parts of the parameters; each is synchronized once in `every` steps."""
    delay: int = Field(0, ge=0)
    """Steps that are computed while a fragment is sent; the fragment is applied after them."""
    mixing: float = Field(0.5, ge=0, le=1)
    """With `delay`: the weight of the replica's own parameters when a fragment is applied."""

    @property
    def need(self) -> Need:
        """See `Strategy.need`: replicas communicate once in many steps."""
        return "slow links"

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(
            inexact_reason=f"replicas train independently and synchronize every {self.every} "
            "steps: by intent the losses are not those of one process"
        )

    def variants(self, shape: Shape) -> Iterable[Variant]:
        """Return no variant: only the user chooses a technique that changes the results."""
        del shape
        return ()

    def warning(self) -> str | None:
        """See `Strategy.warning`."""
        return f"local_sgd: {self.traits.inexact_reason}"

    def check(self, plan: Plan) -> None:
        """Refuse fragments or delays that do not fit into `every`, cut models, offloaded state."""
        if self.fragments > self.every:
            raise ConfigError(
                f"strategy.replicate.fragments={self.fragments} are more than "
                f"strategy.replicate.every={self.every} steps: each fragment is synchronized once "
                "in these steps, at most one in a step. "
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
                f"strategy.replicate.delay={self.delay} steps are not over before the same "
                f"fragment is sent again, strategy.replicate.every={self.every} steps later. "
                f"Set strategy.replicate.delay={self.every - 1} or less."
            )
        if plan.cut is not None:
            raise ConfigError(
                "strategy.replicate=local_sgd is for whole models, and strategy.cut makes stages. "
                "Leave strategy.cut out, or use strategy.replicate=ddp."
            )
        if not plan.master_weights:
            raise ConfigError(
                "optim.master_weights=false keeps parameters only in bf16, and "
                "strategy.replicate=local_sgd averages them: sums would be rounded to 8 bits. Set "
                "optim.master_weights=true, or use strategy.replicate=ddp."
            )
        offload = plan.offload_tiers.state_word
        if offload is not None:
            raise ConfigError(
                "strategy.replicate=local_sgd changes the parameters after the optimizer's step, "
                f"and {offload} keeps copies of them, which "
                "would be out of date. Set strategy.offload=null, or use strategy.replicate=ddp."
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
        """Add the outer state, and the fragments that are in flight at once."""
        if plan.dp == 1 or self.outer == "average":
            return forecast
        largest = max(map(math.prod, parameter_shapes(profile)), default=0)
        number_bytes = profile.gradient_bytes / max(1, profile.trained_elements)
        fragment = profile.gradient_bytes / self.fragments
        if self.fragments > 1:  # a fragment has whole parameters, at least the largest
            fragment = max(fragment, largest * number_bytes)
        in_flight = min(self.fragments, math.ceil(self.delay * self.fragments / self.every))
        states = forecast.states
        states = replace(
            states,
            optimizer=states.optimizer + 2 * profile.gradient_bytes,
            buffers=states.buffers + round(fragment) * in_flight,
        )
        return replace(forecast, states=states)

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """Return the all-reduce of the parameters, with its bytes divided by `every`."""
        if plan.dp == 1:
            return ()
        nbytes = round(profile.gradient_bytes / self.every)
        calls = max(1, round(self.fragments / self.every))
        overlaps: Literal["backward", "nothing"] = "backward" if self.delay else "nothing"
        stride = plan.pp * plan.tp
        return (Traffic("all_reduce", nbytes, calls, "step", overlaps, plan.dp, stride),)

    def apply(self, assembly: Assembly) -> None:
        """Let the replicas synchronize after the steps of the plain loop."""
        if assembly.plan.dp > 1:
            outer = Outer(assembly.trained(), assembly.context, self._settings)
            assembly.after_update.append(outer.after_step)
            assembly.runner = lambda finished: Replica(finished, outer)
