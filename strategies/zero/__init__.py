"""ZeRO: optimizer state, gradients and parameters sharded over the replicas, by stages.

Memory: of the bytes for P parameters on N ranks in fp32 (bf16), stage 1 holds 8P/N (12P/N) of
optimizer state and the rest whole, stage 2 shards the gradients too, stage 3 everything: 16P/N.
Activations are not touched; layers in use are whole for that time.
Communication: stages 1 and 2 as DDP, each parameter's bytes twice per rank and step; stage 3
gathers the parameters for the forward and again for the backward pass: half as much more, and so
does stage 1 on torch and fairscale, where DDP averages whole gradients. Accumulating, stages 2 and
3 reduce after every micro-batch, on torch they gather for each as well.
Constraints: pays from two ranks on. Which options and precisions there are, the engine says.
Example: deepspeed --num_accelerators 2 bigtrain/train.py --strategy zero2

Source: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), sections 3, 5 and 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from bigtrain.core.strategy import Assembly, Given, Plan
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import Traffic
from bigtrain.errors import ConfigError
from bigtrain.job.import_path import load_object
from bigtrain.strategies.zero.options import ZeroEngine, ZeroOptions

ENGINES: dict[str, dict[int, str]] = {
    "deepspeed": dict.fromkeys((1, 2, 3), "bigtrain.strategies.zero.on_deepspeed.engine:DeepSpeed"),
    "torch": {
        1: "bigtrain.strategies.zero.on_torch.stage1:ShardedOptimizer",
        2: "bigtrain.strategies.zero.on_torch.fully_shard:FullySharded",
        3: "bigtrain.strategies.zero.on_torch.fully_shard:FullySharded",
    },
    "fairscale": {
        1: "bigtrain.strategies.zero.on_fairscale.engine:FairscaleOSS",
        2: "bigtrain.strategies.zero.on_fairscale.engine:FairscaleShardedDDP",
        3: "bigtrain.strategies.zero.on_fairscale.fsdp:FairscaleFSDP",
    },
}
"""What does a stage, by engine; a module is imported when it is chosen."""


class Zero(ZeroOptions):
    """Sharded data parallel: the stage and who does it."""

    name: ClassVar[str] = "zero"
    summary: ClassVar[str] = "optimizer state, gradients, parameters sharded over the replicas"

    @cached_property
    def _engine(self) -> ZeroEngine:
        stages = ENGINES[self.engine]
        if self.stage not in stages:
            raise ConfigError(
                f"strategy.replicate.stage=0 shards nothing, and engine={self.engine} has it not. "
                "Use --strategy ddp."
            )
        engine: ZeroEngine = load_object(stages[self.stage], "strategy.replicate.engine")()
        return engine

    @property
    def owns_step(self) -> bool:
        """See `Strategy.owns_step`."""
        return self._engine.owns_step

    @property
    def needs_group(self) -> bool:
        """See `Strategy.needs_group`."""
        return self._engine.needs_group

    @property
    def materializes(self) -> bool:
        """See `Strategy.materializes`."""
        return self._engine.materializes

    @property
    def replaces_products(self) -> bool:
        """See `Strategy.replaces_products`: DeepSpeed's stage 3 has a linear layer of its own."""
        return self.engine == "deepspeed" and self.stage == 3

    @property
    def bf16_parameters(self) -> bool:
        """See `Strategy.bf16_parameters`."""
        return self._engine.bf16_parameters

    @property
    def optimizer_gets(self) -> Given:
        """See `Strategy.optimizer_gets`."""
        return self._engine.optimizer_gets

    @property
    def final_gradients(self) -> bool:
        """See `Strategy.final_gradients`."""
        return self._engine.final_gradients

    @property
    def whole_backward(self) -> bool:
        """See `Strategy.whole_backward`."""
        return self._engine.whole_backward

    @property
    def own_offload(self) -> bool:
        """See `Strategy.own_offload`."""
        return self._engine.own_offload

    @property
    def moves_parameters(self) -> bool:
        """See `Strategy.moves_parameters`."""
        return self._engine.moves_parameters

    def check(self, plan: Plan) -> None:
        """Refuse what the engine cannot do, before any process group exists."""
        if self.engine == "torch" and self.config is not None:
            raise ConfigError(
                f"strategy.replicate.config={self.config} is for engine=deepspeed, and engine is "
                "torch. Leave it out, or set strategy.replicate.engine=deepspeed."
            )
        if self.engine == "torch" and self.stage == 1 and self.shard_ranks is not None:
            raise ConfigError(
                f"strategy.replicate.shard_ranks={self.shard_ranks} is for stages 2 and 3, and "
                "stage is 1. Leave it out, or set strategy.replicate.stage=3."
            )
        self._engine.check(self, plan)

    def check_shared(self, names: Sequence[str]) -> None:
        """See `Strategy.check_shared`."""
        self._engine.check_shared(names)

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str | None:
        """Say where sharding cannot help."""
        return self._engine.advise(self, forecast, profile, plan)

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Shard the states, and add the engine's own buffers."""
        return self._engine.estimate(self, forecast, profile, plan)

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """What the engine exchanges and moves."""
        return self._engine.traffic(self, profile, plan)

    def apply(self, assembly: Assembly) -> None:
        """Let the engine take the model over."""
        self._engine.apply(self, assembly)
