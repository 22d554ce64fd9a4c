"""Stages 2 and 3 on PyTorch's own fully_shard: parameters, gradients and state in shards.

Stage 3 gathers each unit (a block of the model, or what is in no block) for its forward pass and
again for its backward pass; stage 2 keeps what it has gathered from the forward to the backward
pass. Gradients are reduced to shards after every micro-batch, so that accumulating costs a shard
only. In bf16 the shards are fp32, the one copy there is, and are gathered in bf16; gradients are
summed over the ranks in fp32.

The model is built sharded: a unit gets its values and is sharded before the next one does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.modules.batchnorm import _NormBase

from bigtrain.blocks import separate_blocks
from bigtrain.distributed import RunContext
from bigtrain.errors import ConfigError
from bigtrain.fill import names_of
from bigtrain.forecast import Forecast, Profile
from bigtrain.strategies.zero.advice import advise
from bigtrain.strategies.zero.fully_sharded_forecast import forecast_of
from bigtrain.strategies.zero.options import ZeroEngine, ZeroOptions
from bigtrain.strategy import Assembly, Plan


class FullySharded(ZeroEngine):
    """torch.distributed.fsdp.fully_shard, unit by unit."""

    materializes = True
    needs_group = True
    bf16_parameters = True
    optimizer_gets = "shards"
    final_gradients = True
    moves_parameters = True

    def check(self, options: ZeroOptions, plan: Plan) -> None:
        """Refuse a hybrid mesh that does not divide."""
        ranks = options.shard_ranks
        if ranks is not None and plan.dp % ranks:
            fitting = [n for n in range(1, plan.dp + 1) if plan.dp % n == 0]
            raise ConfigError(
                f"strategy.replicate.shard_ranks={ranks} does not divide the {plan.dp} ranks of "
                f"mesh.dp. Use one of {', '.join(map(str, fitting))}."
            )

    def estimate(
        self, options: ZeroOptions, forecast: Forecast, profile: Profile, plan: Plan
    ) -> Forecast:
        """States in shards, and the units that are whole at each moment."""
        ranks = options.shard_ranks or plan.dp
        return forecast_of(forecast, profile, plan, stage=options.stage, ranks=ranks)

    def advise(
        self, options: ZeroOptions, forecast: Forecast, profile: Profile, plan: Plan
    ) -> str | None:
        """See `Strategy.advise`."""
        after = self.estimate(options, forecast, profile, plan)
        return advise(options, forecast, after, profile, plan)

    def apply(self, options: ZeroOptions, assembly: Assembly) -> None:
        """Build and shard one unit after the other, the root last."""
        plan = assembly.plan
        settings: dict[str, Any] = {
            "mesh": shard_mesh(assembly.context, options.shard_ranks),
            "reshard_after_forward": options.stage == 3,
        }
        if plan.offloaded.parameters == "cpu":  # shards, gradients and state on the host
            on_gpu = plan.device_type == "cuda"
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
        whole = MixedPrecisionPolicy()
        low = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if plan.bf16_parameters else whole

        def shard_norms(unit: nn.Module) -> None:
            """BatchNorm's kernels take no mixture of bf16 weights and fp32 statistics."""
            norms = _norms(unit) if plan.bf16_parameters else []
            if norms:
                fully_shard(norms, mp_policy=whole, **settings)

        _refuse_shared(assembly)
        for root in assembly.roots:
            # The code of a module that a cut goes through runs in several stages, and its forward
            # pass as such, to which hooks belong, in none.
            through: Collection[str] = getattr(root, "cut_through", ())
            for name, unit in separate_blocks(root):
                if name in through:
                    continue
                assembly.materialize([f"{name}.{inner}" for inner in names_of(unit)])
                shard_norms(unit)
                policy = whole if isinstance(unit, _NormBase) else low
                fully_shard(unit, mp_policy=policy, **settings)
                _tell_owner(unit, assembly)
            assembly.materialize(names_of(root))
            shard_norms(root)
            fully_shard(root, mp_policy=low, **{**settings, "reshard_after_forward": False})
            _tell_owner(root, assembly)


def _refuse_shared(assembly: Assembly) -> None:
    """A parameter can be in the shards of one stage of a rank only."""
    seen: dict[int, nn.Module] = {}
    for root in assembly.roots:
        for name, parameter in root.named_parameters():
            if seen.setdefault(id(parameter), root) is not root:
                raise ConfigError(
                    f"strategy.replicate: {name} is used by two stages of one rank, and stage 2 "
                    "and 3 of zero can shard it for one of them only. Set "
                    "strategy.replicate.stage=1, or another strategy.cut.schedule: with one stage "
                    "on each rank (1f1b) no two are on one."
                )


def shard_mesh(context: RunContext, shard_ranks: int | None) -> DeviceMesh:
    """The dp axis, or, for hybrid sharding, its ranks as (groups that replicate, shards)."""
    mesh = context.mesh
    if mesh is None:
        raise ConfigError("fully_shard needs a process group. Use bigtrain.connect.")
    if shard_ranks is None or shard_ranks == context.dp_size:
        return mesh["dp"]
    # Of the whole mesh: all ranks make the same groups in the same order.
    _dp, pp, tp = mesh.mesh.shape
    ranks = mesh.mesh.view(-1, shard_ranks, pp, tp)
    names = ("replicate", "shard", "pp", "tp")
    return DeviceMesh(context.device.type, ranks, mesh_dim_names=names)["replicate", "shard"]


def _norms(unit: nn.Module) -> list[nn.Module]:
    """The BatchNorms inside a unit that are in no unit of their own yet."""
    return [
        m
        for m in unit.modules()
        if isinstance(m, _NormBase) and m.affine and m is not unit and not isinstance(m, FSDPModule)
    ]


def _tell_owner(unit: nn.Module, assembly: Assembly) -> None:
    """Unsharded parameters are parameters, too; they are there from the pre-forward hook on."""

    def own(module: nn.Module, _inputs: Iterable[Any]) -> None:
        assembly.meter.own(module.parameters(), "parameters")

    if isinstance(unit, FSDPModule):
        unit.register_forward_pre_hook(own)
