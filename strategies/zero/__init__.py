"""ZeRO: optimizer state, gradients and parameters sharded over the replicas, by stages.

Memory: for P parameters on N ranks in fp32 (bf16), stage 1 has 8P/N (12P/N) bytes of optimizer
state on a rank, and whole parameters and gradients. Stage 2 also shards the gradients. Stage 3
shards all three, 16P/N bytes, and a layer's parameters are whole only while the layer computes.
Activations are not sharded.
Communication: stages 1 and 2 send as much as DDP: each rank sends the bytes of the parameters twice
in a step. Stage 3 gathers the parameters for the forward pass and again for the backward pass, and
sends 1.5 times as much. So does stage 1 on torch and fairscale, where DDP averages whole gradients
and the updated parameters are broadcast. With accumulation, stages 2 and 3 reduce gradients after
every micro-batch; on torch they also gather parameters for every micro-batch.
Constraints: memory is saved on two ranks or more. Options and precisions depend on the engine.
Example: deepspeed --num_accelerators 2 bigtrain/train.py --strategy zero2

Source: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), sections 3, 5 and 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import Field

from bigtrain.core.replicas import with_averaged_gradients
from bigtrain.core.strategy import Plan, Strategy
from bigtrain.core.traits import Need
from bigtrain.core.variants import Shape, Variant, preset_options
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.errors import ConfigError, as_word
from bigtrain.job.schema import Bytes, Role
from bigtrain.strategies.zero.unit_choices import KeepGathered, Reduce
from bigtrain.units import format_bytes

ACTIVATION_DOMINANCE = 0.6
"""The share of activations in the peak above which a smaller micro-batch is advised."""

UNIT_CHOICES = ("keep_gathered", "reduce", "prefetch", "outside_blocks", "exchange")
"""The options that only torch's stages 2 and 3 have."""
NOTHING_INSTEAD: Mapping[str, str] = MappingProxyType({})

_ON_TORCH = ("zero1_torch", "fsdp_zero2", "fsdp")
_UNIT_BY_UNIT = ("fsdp_zero2", "fsdp")
"""The presets on fully_shard."""
_ON_OTHERS = ("zero1", "zero2", "zero3", "oss", "sharded_ddp")
"""The presets on DeepSpeed and fairscale that the planner chooses from, in addition."""


class Zero(Strategy):
    """Sharded data parallelism by ZeRO.

    This class has the options. A subclass for each engine and stage does the work; the table
    `registry.TECHNIQUES` has the subclasses.
    """

    name: ClassVar[str] = "zero"
    role: ClassVar[Role] = "replicate"
    summary: ClassVar[str] = "optimizer state, gradients, parameters sharded over the replicas"

    stage: int = Field(2, ge=0, le=3)
    """1 shards the optimizer state, 2 also the gradients, 3 also the parameters; 0 nothing."""
    engine: Literal["deepspeed", "torch", "fairscale"] = "deepspeed"
    """The library that implements the stage."""
    bucket_size: Bytes | None = Field(None, gt=0)
    """Bytes of gradients that are reduced at once; the default depends on engine and model.

    It has no effect, and is refused, with torch's stages 2 and 3, which reduce block by block.
    """
    shard_ranks: int | None = Field(None, ge=1)
    """Hybrid sharding (torch, stages 2 and 3): the states are sharded over so many adjacent ranks.

    The groups of so many ranks are replicas of each other.
    """
    keep_gathered: KeepGathered | None = None
    """The blocks whose parameters stay gathered from the forward to the backward pass (torch,
    stage 3): the last N, `all`, `none`, or patterns of names; `*` matches any characters.

    Each of them saves an all-gather, and its parameters exist whole in between. The default is none
    in stage 3; stage 2 keeps all of them.
    """
    reduce: Reduce | None = None
    """When gradients are reduced over the replicas (torch, stages 2 and 3).

    `micro_batch`, the default: after every micro-batch, so that only shards are added up. `step`:
    once a step; whole gradients are added up in between, in the precision of the shards.
    `step_between_groups`, with `shard_ranks`: to shards after every micro-batch, and between the
    groups of ranks once a step.
    """
    prefetch: int | None = Field(None, ge=0)
    """The number of blocks that are gathered ahead of the block that computes (torch, stages 2 and
    3), in the forward and in the backward pass; 0 for none.

    Each of them has its buffer meanwhile. By default fully_shard decides: one block in the backward
    pass; in the forward pass as many as a GPU has queued, and none on a CPU.
    """
    outside_blocks: Literal["held", "apart"] | None = None
    """How layers outside of blocks are gathered (torch, stages 2 and 3).

    `held`, the default: together, and held until their gradients are reduced. `apart`: each module
    with a matrix that it shares with no other module, such as an embedding and a head that are not
    tied, is gathered and freed like a block; `keep_gathered` counts and names it, too.
    """
    exchange: Literal["sockets", "shared_memory"] | None = None
    """How the ranks of one host exchange parameters and gradients on a CPU (torch, stages 2 and 3).

    `shared_memory`: they read and write the same memory. `sockets`: by gloo. By default they share
    memory if they can.
    """
    config: str | None = None
    """The path of a DeepSpeed configuration file (`strategy.deepspeed` is the short form)."""

    @property
    def need(self) -> Need:
        """See `Strategy.need`: by the stage."""
        by_stage: tuple[Need, ...] = ("nothing", "optimizer", "gradients", "parameters")
        return by_stage[self.stage]

    @property
    def effective_stage(self) -> int:
        """The stage of the run; a DeepSpeed file may set another one than the option."""
        return self.stage

    def variants(self, shape: Shape) -> Iterable[Variant]:
        """See `Strategy.variants`: the torch engine with a cut, every engine without a cut."""
        if shape.dp == 1:
            return
        for preset in (*_ON_TORCH, *(_ON_OTHERS if shape.pp == 1 else ())):
            options = {"engine": self.engine, **preset_options(self.role, preset)}
            yield Variant(preset, options, str(options["engine"]))
            if preset in _UNIT_BY_UNIT and shape.micro_batches > 1:
                once = {**options, "reduce": "step"}
                yield Variant(f"{preset}, reduced once", once, is_word=False)
        node = shape.devices_per_node
        if shape.pp == 1 and node < shape.dp and shape.dp % node == 0:
            options = {"engine": self.engine, **preset_options(self.role, "fsdp")}
            options["shard_ranks"] = node
            yield Variant(f"hybrid_{node}", options)  # parameters are gathered inside a node

    def finer_variants(self, shape: Shape) -> Iterable[Variant]:
        """See `Strategy.finer_variants`: more and more blocks stay gathered, up to all of them.

        Stage 3 on torch has such forms, unless the states are sharded within groups of ranks.
        """
        if (self.engine, self.stage) != ("torch", 3) or shape.dp == 1 or self.shard_ranks:
            return
        options = {"name": self.name, **self.model_dump(mode="json", exclude_defaults=True)}
        most, once = -(-shape.num_blocks // shape.pp), self.reduce == "step"
        for number in range(1, most + (shape.micro_batches == 1)):
            label = f"fsdp_{number}{', reduced once' if once else ''}"
            yield Variant(label, {**options, "keep_gathered": number}, is_word=not once)
        if shape.micro_batches > 1:
            last = {**options, "keep_gathered": "all", "reduce": "step"}
            yield Variant("fsdp, all kept and reduced once", last, is_word=False)

    def remedies(self, plan: Plan, limit: int) -> Sequence[Sequence[str]]:  # noqa: ARG002
        """See `Strategy.remedies`: shard the states, if every replica has a copy of them."""
        is_whole = "cut" not in plan.techniques and plan.replicate.sharded_states == 0
        if plan.dp == 1 or not is_whole:
            return ()
        return [[f"strategy={preset}"] for preset in _ON_TORCH]

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str | None:
        """See `Strategy.advise`: if sharding saves nothing, or activations dominate the peak."""
        name = f"ZeRO stage {self.effective_stage}"
        if plan.dp == 1:
            return f"{name} has nothing to shard on one rank. Use --strategy single, or more ranks."
        if profile.untraceable is not None:
            return None
        before = _replicated(forecast, profile, plan).peak().bytes
        after = self.estimate(forecast, profile, plan).peak()
        if after.bytes >= before:
            return (
                f"{name} on {plan.dp} ranks is predicted to need {format_bytes(after.bytes)}, "
                f"plain DDP {format_bytes(before)}: its buffers exceed what it saves. "
                "Use --strategy ddp."
            )
        share = after.breakdown.activations / after.bytes
        if share > ACTIVATION_DOMINANCE:
            return (
                f"{share:.0%} of the predicted peak of {format_bytes(after.bytes)} are "
                f"activations, which {name} does not touch. Use a smaller train.micro_batch_size "
                f"(now {plan.batch.micro_size})."
            )
        return None

    def check(self, plan: Plan) -> None:  # noqa: ARG002
        """Refuse stage 0, which shards nothing."""
        if self.stage == 0:
            raise ConfigError(
                "strategy.replicate.stage=0 shards nothing, and "
                f"strategy.replicate.engine={self.engine} does not support it. "
                "Use --strategy ddp."
            )

    def refuse_unit_choices(self, instead: Mapping[str, str] = NOTHING_INSTEAD) -> None:
        """Refuse the choices of torch's stages 2 and 3, for other engines and stages.

        Args:
            instead: for some of the options, a sentence about the engine's own settings.

        Raises:
            ConfigError: one of them is set.
        """
        for key in UNIT_CHOICES:
            value = getattr(self, key)
            if value is not None:
                raise ConfigError(
                    f"{as_word(f'strategy.replicate.{key}', value)} is for torch's stages 2 and 3, "
                    f"and engine is {self.engine}, stage {self.stage}. Leave it out, or set "
                    "strategy.replicate.engine=torch strategy.replicate.stage=3."
                    + "".join(f" {sentence}" for sentence in (instead.get(key),) if sentence)
                )

    def refuse_config(self) -> None:
        """Refuse a DeepSpeed file for another engine.

        Raises:
            ConfigError: `config` is set.
        """
        if self.config is not None:
            raise ConfigError(
                f"strategy.replicate.config={self.config} is for engine=deepspeed, and engine is "
                f"{self.engine}. Leave it out, or set strategy.replicate.engine=deepspeed."
            )


def _replicated(forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
    """Return the forecast under plain DDP: all states on every rank, in fp32."""
    factor = 2 if plan.bf16_parameters else 1
    forecast = with_averaged_gradients(forecast, profile)
    states = forecast.states
    states = replace(
        states,
        parameters=states.parameters * factor,
        frozen=states.frozen * factor,
        optimizer=states.optimizer * factor,
        gradients=states.gradients * factor,
    )
    return replace(forecast, states=states)
