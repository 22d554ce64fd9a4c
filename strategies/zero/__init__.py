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

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from bigtrain.core.strategy import Plan, Strategy
from bigtrain.core.traits import Need
from bigtrain.core.variants import Shape, Variant, preset_options
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Bytes, Role

_ON_TORCH = ("zero1_torch", "fsdp_zero2", "fsdp")
_ON_OTHERS = ("zero1", "zero2", "zero3", "oss", "sharded_ddp")
"""The presets that the planner chooses from."""


class Zero(Strategy):
    """Sharded data parallel: the stage and who does it.

    These are the keys; a subclass for each engine and stage does the work (`registry.TECHNIQUES`).
    """

    name: ClassVar[str] = "zero"
    role: ClassVar[Role] = "replicate"
    summary: ClassVar[str] = "optimizer state, gradients, parameters sharded over the replicas"

    stage: int = Field(2, ge=0, le=3)
    """1 shards the optimizer state, 2 the gradients too, 3 the parameters too; 0 nothing."""
    engine: Literal["deepspeed", "torch", "fairscale"] = "deepspeed"
    """Whose implementation: DeepSpeed's, the one on PyTorch's own parts, or fairscale's."""
    bucket_size: Bytes | None = Field(None, gt=0)
    """Bytes that are communicated at once; left out, derived from the model's size."""
    shard_ranks: int | None = Field(None, ge=1)
    """Hybrid sharding (torch, stages 2 and 3): the states are sharded over so many neighbouring
    ranks, and replicated over the groups of them."""
    config: str | None = None
    """A DeepSpeed configuration file, taken as it is (`strategy.deepspeed` is the short form)."""

    @property
    def need(self) -> Need:
        """See `Strategy.need`: by the stage."""
        by_stage: tuple[Need, ...] = ("nothing", "optimizer", "gradients", "parameters")
        return by_stage[self.stage]

    def variants(self, shape: Shape) -> Iterable[Variant]:
        """See `Strategy.variants`: on torch's own parts beside a cut, by every engine without."""
        if shape.dp == 1:
            return
        for preset in (*_ON_TORCH, *(_ON_OTHERS if shape.pp == 1 else ())):
            options = {"engine": self.engine, **preset_options(self.role, preset)}
            yield Variant(preset, options, str(options["engine"]))
        node = shape.devices_per_node
        if shape.pp == 1 and node < shape.dp and shape.dp % node == 0:
            options = {"engine": self.engine, **preset_options(self.role, "fsdp")}
            options["shard_ranks"] = node
            yield Variant(f"hybrid_{node}", options)  # gathered inside of a node

    def remedies(self, plan: Plan, limit: int) -> Sequence[Sequence[str]]:  # noqa: ARG002
        """See `Strategy.remedies`: the states of whole replicas can be shared."""
        is_whole = "cut" not in plan.techniques and plan.replicate.sharded_states == 0
        if plan.dp == 1 or not is_whole:
            return ()
        return [[f"strategy={preset}"] for preset in _ON_TORCH]

    def check(self, plan: Plan) -> None:  # noqa: ARG002
        """Refuse a stage that no engine has."""
        if self.stage == 0:
            raise ConfigError(
                f"strategy.replicate.stage=0 shards nothing, and engine={self.engine} has it not. "
                "Use --strategy ddp."
            )

    def refuse_config(self) -> None:
        """Refuse a DeepSpeed file where another engine does the work.

        Raises:
            ConfigError: `config` is given.
        """
        if self.config is not None:
            raise ConfigError(
                f"strategy.replicate.config={self.config} is for engine=deepspeed, and engine is "
                f"{self.engine}. Leave it out, or set strategy.replicate.engine=deepspeed."
            )
