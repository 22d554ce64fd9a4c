"""A replica on every rank; gradients are averaged in buckets during the backward pass.

Memory: that of one process with gradients that are never freed: they are views of the buckets.
Communication: one all-reduce of the gradients in a step, whatever the number of micro-batches. Each
rank sends and receives 2 (n-1)/n of their bytes (ring).
Constraints: a parameter is used by the loss of every step, or by no loss; a parameter that no loss
uses is not trained. If only some steps use a parameter, set `find_unused_parameters: true`.
Example: torchrun --nproc-per-node 2 bigtrain/train.py --strategy ddp

Source: Li et al. 2020, PyTorch Distributed (arXiv 2006.15704), sections 3.2 and 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field

from bigtrain.core.replicas import (
    BUCKET_SIZE,
    Exchange,
    average_gradients,
    with_averaged_gradients,
)
from bigtrain.core.strategy import Assembly, Plan, Strategy
from bigtrain.core.traits import Traits
from bigtrain.core.variants import Shape, Variant
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import Traffic, gradient_average_traffic, parameter_shapes
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Bytes, Role
from bigtrain.tracing.routes import Routes


class DDP(Strategy):
    """torch's DistributedDataParallel, with settings that save memory."""

    name: ClassVar[str] = "ddp"
    role: ClassVar[Role] = "replicate"
    summary: ClassVar[str] = "replicas; gradients averaged in buckets during the backward pass"

    bucket_size: Bytes = Field(BUCKET_SIZE, gt=0)
    """Gradients are averaged in buckets of about this many bytes."""
    gradient_as_bucket_view: bool = True
    """Whether gradients are views of the buckets; otherwise the buckets are a second copy."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way."""
    find_unused_parameters: bool = False
    """Find the parameters that a step's loss does not depend on, by a walk over its graph."""
    broadcast_buffers: bool = True
    """Send rank 0's buffers (BatchNorm statistics) to all ranks at each forward pass."""
    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """The form in which gradients are sent. All forms but `none` change the results."""
    powersgd_rank: int = Field(1, ge=1)
    """The rank of PowerSGD's approximation of a gradient (Vogels et al. 2019, arXiv 1905.13727)."""
    powersgd_start: int = Field(1000, ge=2)
    """Steps with exact averages before PowerSGD begins."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(
            averaging_bucket=self.bucket_size,
            finds_unused=self.find_unused_parameters,
            # DDP expects a sparse gradient only from a module that declares it (sparse=True).
            cannot_hold=frozenset({"sparse_calls", "sparse_and_dense"}),
        )

    def variants(self, shape: Shape) -> Iterable[Variant]:
        """See `Strategy.variants`."""
        if shape.dp > 1:
            yield Variant(self.name, {"name": self.name})

    def check(self, plan: Plan) -> None:
        """Refuse options that contradict each other, the precision or a pipeline."""
        if self.static_graph and self.find_unused_parameters:
            raise ConfigError(
                "strategy.replicate.static_graph=true and find_unused_parameters=true exclude "
                "each other. Set strategy.replicate.find_unused_parameters=false."
            )
        if self.compress != "none" and plan.precision == "fp64":
            raise ConfigError(
                f"strategy.replicate.compress={self.compress} rounds gradients, and "
                "train.precision=fp64 is set. Set strategy.replicate.compress=none."
            )

        if plan.pp > 1:
            self._check_pipeline(plan)

    def _check_pipeline(self, plan: Plan) -> None:
        """Refuse options of DistributedDataParallel, which a pipeline does not use."""
        options_set = {
            "static_graph": self.static_graph,
            "find_unused_parameters": self.find_unused_parameters,
            "compress": self.compress != "none",
        }
        for option in (name for name, is_set in options_set.items() if is_set):
            value, neutral = getattr(self, option), type(self).model_fields[option].default
            raise ConfigError(
                f"strategy.replicate.{option}={_word(value)} is DistributedDataParallel's, and in "
                f"a pipeline (mesh.pp={plan.pp}) gradients are averaged without it. "
                f"Set strategy.replicate.{option}={_word(neutral)}."
            )

    def meet_routes(self, routes: Routes, plan: Plan) -> tuple[Strategy, str | None]:
        """See `Strategy.meet_routes`: set `find_unused_parameters`."""
        if self.find_unused_parameters or plan.pp > 1:
            return self, None
        if self.static_graph:
            raise ConfigError(
                f"strategy.replicate.static_graph=true promises that all steps are alike, and not "
                f"every pass calls {routes.names}. Set strategy.replicate.static_graph=false."
            )
        line = (
            f"not every pass uses {routes.names} ({routes.cause or 'it changes between steps'}): "
            "strategy.replicate.find_unused_parameters=true"
        )
        return self.model_copy(update={"find_unused_parameters": True}), line

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Add buckets, which hold the gradients from the first step on, and PowerSGD's error."""
        if plan.dp == 1 or plan.pp > 1:
            return forecast
        forecast = with_averaged_gradients(forecast, profile)
        states = forecast.states
        if not self.gradient_as_bucket_view:
            states = replace(states, buffers=states.buffers + profile.gradient_bytes)
        if not self.gradient_as_bucket_view or self.find_unused_parameters:
            # DDP then frees the old buckets before it makes new ones, or makes no new ones.
            forecast = replace(forecast, moved_gradients=0)
        if self.compress == "powersgd":  # the error feedback: one more copy of the gradients
            states = replace(states, buffers=states.buffers + profile.gradient_bytes)
        return replace(forecast, states=states)

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """Return the all-reduce of the gradients, which overlaps with the last backward pass.

        A pipeline averages after all backward passes.
        """
        if plan.dp == 1:
            return ()
        messages = gradient_average_traffic(
            profile,
            plan.dp,
            plan.pp * plan.tp,
            bucket=self.bucket_size,
            overlaps=plan.pp == 1,
            buffers=self.broadcast_buffers,
        )
        return tuple(
            replace(t, nbytes=self._compressed(profile)) if t.kind == "all_reduce" else t
            for t in messages
        )

    def _compressed(self, profile: Profile) -> int:
        """Return the bytes of all gradients in the form in which they are sent."""
        if self.compress == "none":
            return profile.gradient_bytes
        if self.compress != "powersgd":
            return 2 * profile.trained_elements
        size = profile.gradient_bytes / max(1, profile.trained_elements)
        return round(size * sum(self._low_rank(shape) for shape in parameter_shapes(profile)))

    def _low_rank(self, shape: tuple[int, ...]) -> int:
        """Return the number of elements that PowerSGD sends for a gradient of this shape.

        They are two thin matrices of rank `powersgd_rank`, or the whole gradient.
        """
        numbers = math.prod(shape)
        rows = shape[0] if shape else 1
        thin = self.powersgd_rank * (rows + numbers // max(1, rows))
        # torch's PowerSGDState compresses only gradients that become less than half as large.
        return thin if len(shape) > 1 and 2 * thin < numbers else numbers

    def apply(self, assembly: Assembly) -> None:
        """Wrap the module without a broadcast of the weights, which are equal on all ranks."""
        average_gradients(
            assembly,
            self.bucket_size,
            broadcast_buffers=self.broadcast_buffers,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            exchange=self._exchange(assembly.context.dp_group),
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused_parameters,
        )

    def _exchange(self, group: Any) -> Exchange | None:
        """Return torch's hook that compresses and averages a bucket; None without compression."""
        if self.compress == "none":
            return None
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self.compress == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=group,
                matrix_approximation_rank=self.powersgd_rank,
                start_powerSGD_iter=self.powersgd_start,
            )
            return partial(powerSGD_hook.powerSGD_hook, state)
        if self.compress == "fp16":
            return partial(default_hooks.fp16_compress_hook, group)
        return partial(default_hooks.bf16_compress_hook, group)


def _word(value: object) -> str:
    """Return a value as it is written in a job."""
    return str(value).lower() if isinstance(value, bool) else str(value)
