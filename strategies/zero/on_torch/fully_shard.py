"""Stages 2 and 3 on PyTorch's own fully_shard: parameters, gradients and state in shards.

Stage 3 gathers each unit (a block of the model, or what is in no block) for its forward pass and
again for its backward pass; stage 2 keeps what it has gathered from the forward to the backward
pass. Gradients are reduced to shards after every micro-batch, so that accumulating costs a shard
only. In bf16 the shards are fp32, the one copy there is, and are gathered in bf16; gradients are
summed over the ranks in fp32.

The model is built sharded: a unit gets its values and is sharded before the next one does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from bigtrain.core.participation import GatheredUnits, GradientUse
from bigtrain.core.strategy import Assembly, ModelFacts, Plan, Strategy
from bigtrain.core.traits import SECOND_BACKWARD, SPARSE, Traits
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import OverlapPhase, Traffic, comm_units
from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.memory.meter import MemoryMeter
from bigtrain.memory.timeline import BlockTicks
from bigtrain.models.parameters import names_of
from bigtrain.optim.whole import WholeOptimizer
from bigtrain.ranks.context import RunContext
from bigtrain.strategies.zero import Zero
from bigtrain.strategies.zero.advice import advise
from bigtrain.strategies.zero.on_torch.fsdp_boundaries import take_apart_at_boundaries
from bigtrain.strategies.zero.on_torch.fully_shard_memory import forecast_fully_shard
from bigtrain.strategies.zero.on_torch.routed_units import stand_in_for_missing, units_of
from bigtrain.tracing.routes import Routes
from bigtrain.versions.torch_versions import reduce_scatter_single


class FullySharded(Zero):
    """torch.distributed.fsdp.fully_shard, unit by unit."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`: it frees and fills parameters around whole passes only."""
        return Traits(
            materializes=True,
            needs_group=True,
            bf16_parameters=True,
            casts_inputs=True,
            optimizer_gets="shards",
            optimizer_sees="shards",
            cannot_hold=SPARSE | SECOND_BACKWARD | {"writes_gathered", "mixed_block"},
            final_gradients=True,
            whole_backward=True,
            state_ranks=self.shard_ranks,
            # Stage 2 lets gathered parameters go before the last gradients are there: with bf16
            # parameters a deep model is then less at its highest than all of them and a shard.
            sharded_states=3,
            gathers_whole=self.stage == 2,
            moves_parameters=True,
        )

    def check(self, plan: Plan) -> None:
        """Refuse a hybrid mesh that does not divide."""
        self.refuse_config()
        ranks = self.shard_ranks
        if ranks is not None and plan.dp % ranks:
            fitting = [n for n in range(1, plan.dp + 1) if plan.dp % n == 0]
            raise ConfigError(
                f"strategy.replicate.shard_ranks={ranks} does not divide the {plan.dp} ranks of "
                f"mesh.dp. Use one of {', '.join(map(str, fitting))}."
            )

    def check_model(self, facts: ModelFacts, plan: Plan) -> None:  # noqa: ARG002
        """Refuse shared parameters: one can be in the shards of one stage of a rank only."""
        for name in facts.shared[:1]:
            raise ConfigError(
                f"strategy.replicate: {name} is used by two stages of one rank, and stage 2 and 3 "
                "of zero can shard it for one of them only. Set strategy.replicate.stage=1, or "
                "another strategy.cut.schedule: with one stage on each rank (1f1b) no two are on "
                "one."
            )

    def meet_routes(self, routes: Routes, plan: Plan) -> tuple[Strategy, str | None]:
        """See `Strategy.meet_routes`: a unit is what every pass calls."""
        del plan
        if not routes.differ or not routes.modules:
            return self, None
        return self, (
            f"not every pass calls {routes.names} ({routes.cause}): such modules are gathered "
            "with the nearest one around them that every pass calls"
        )

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """States in shards, and the units that are whole at each moment."""
        ranks = self.shard_ranks or plan.dp
        return forecast_fully_shard(forecast, profile, plan, stage=self.stage, ranks=ranks)

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """Each micro-batch gathers every unit and reduces its gradients; see `_UnitTraffic`."""
        ranks = self.shard_ranks or plan.dp
        flow = _UnitTraffic(comm_units(profile), plan, ranks)
        regathered = [unit for unit in flow.units if unit is not profile.outside_blocks]
        messages = flow.gathered(flow.units, "forward")
        if self.stage == 3:
            messages += flow.gathered(regathered, "backward")
        return tuple(messages + flow.reduced())

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str | None:
        """See `Strategy.advise`."""
        after = self.estimate(forecast, profile, plan)
        return advise(self, forecast, after, profile, plan)

    def apply(self, assembly: Assembly) -> None:
        """Build and shard one unit after the other, the root last."""
        plan, mesh = assembly.plan, shard_mesh(assembly.context, self.shard_ranks)
        _check_on_shards(assembly, mesh)
        settings: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self.stage == 3,
        }
        if plan.offload_tiers.parameters == "cpu":  # shards, gradients and state on the host
            on_gpu = is_accelerator(plan.device_type)
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
        assembly.units, assembly.use = GatheredUnits(), GradientUse()
        whole = MixedPrecisionPolicy()
        low = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if plan.bf16_parameters else whole

        def shard_norms(unit: nn.Module) -> None:
            """BatchNorm's kernels take no mixture of bf16 weights and fp32 statistics."""
            norms = _norms(unit) if plan.bf16_parameters else []
            if norms:
                fully_shard(norms, mp_policy=whole, **settings)

        whole_params = _left_whole(assembly)
        settings["ignored_params"] = whole_params
        for root in assembly.roots:
            # The code of a module that a cut goes through runs in several stages, and its forward
            # pass as such, to which hooks belong, in none.
            through: Collection[str] = getattr(root, "cut_through", ())
            for name, unit in units_of(root, assembly.routes):
                if name in through:
                    continue
                assembly.materialize([f"{name}.{inner}" for inner in names_of(unit)])
                if whole_params.issuperset(unit.parameters()):
                    continue
                _lay_in_rows(unit)
                shard_norms(unit)
                policy = whole if isinstance(unit, _NormBase) else low
                fully_shard(unit, mp_policy=policy, **settings)
                _finish(unit, name, assembly)
            assembly.materialize(names_of(root))
            _lay_in_rows(root)
            shard_norms(root)
            fully_shard(root, mp_policy=low, **{**settings, "reshard_after_forward": False})
            _finish(root, "the model", assembly)


class _UnitTraffic:
    """What the units of a rank send and move for one micro-batch.

    Gathered is in the precision of the computation (BatchNorm, which is gathered in fp32, is not
    told apart), reduced in that of the shards. What is in no block is gathered once in stage 3,
    too. Blocks that are computed again are whole already.

    Args:
        units: with their parameters.
        plan: mesh, precision, offload.
        ranks: over how many the states are sharded.
    """

    def __init__(self, units: Sequence[BlockTicks], plan: Plan, ranks: int) -> None:
        self.units = units
        self._plan, self._ranks = plan, ranks
        self._kept = 8 if plan.precision == "fp64" else 4
        self._used = 2 if plan.bf16_parameters else self._kept
        self._away = plan.offload_tiers.parameters == "cpu" and is_accelerator(plan.device_type)

    def gathered(self, units: Sequence[BlockTicks], behind: OverlapPhase) -> list[Traffic]:
        """Parameters come together; from the host first, where the shards live there."""
        elements, messages = sum(self._padded(unit) for unit in units), []
        if self._away and units:
            nbytes, calls = self._kept * elements // self._ranks, sum(len(u.shapes) for u in units)
            messages.append(Traffic("from_host", nbytes, calls, "micro_batch", behind))
        if self._ranks > 1 and units:
            nbytes = self._used * elements
            messages.append(self._exchange("all_gather", nbytes, len(units), behind))
            messages.append(self._copied(nbytes // self._ranks + nbytes, behind))
        return messages

    def reduced(self) -> list[Traffic]:
        """Gradients go to shards, over the groups that replicate them, and to the host."""
        units = [unit for unit in self.units if any(unit.trained)]
        nbytes = self._kept * sum(self._padded(unit, trained=True) for unit in units)
        shard, messages = nbytes // self._ranks, []
        if self._ranks > 1 and units:
            messages.append(self._exchange("reduce_scatter", nbytes, len(units), "backward"))
            messages.append(self._copied(nbytes, "backward"))
        groups = self._plan.dp // self._ranks
        if groups > 1 and units:
            stride = self._ranks * self._plan.pp * self._plan.tp
            calls = len(units)
            messages.append(
                Traffic("all_reduce", shard, calls, "micro_batch", "backward", groups, stride)
            )
        if self._away and units:
            calls = sum(sum(unit.trained) for unit in units)
            messages.append(Traffic("to_host", shard, calls, "micro_batch", "backward"))
        return messages

    def _exchange(
        self,
        kind: Literal["all_gather", "reduce_scatter"],
        nbytes: int,
        calls: int,
        behind: OverlapPhase,
    ) -> Traffic:
        stride = self._plan.pp * self._plan.tp
        group = (self._ranks, stride)
        return Traffic(kind, nbytes, calls, "micro_batch", behind, *group, in_hooks=True)

    def _copied(self, nbytes: int, behind: OverlapPhase) -> Traffic:
        """Shards into one buffer, what was gathered out of one, and gradients into one."""
        return Traffic("copy", nbytes, 0, "micro_batch", behind)

    def _padded(self, unit: BlockTicks, *, trained: bool = False) -> int:
        """Numbers of a unit: rows are dealt out evenly, the last ranks' padded to the same."""
        return self._ranks * sum(
            math.ceil(shape[0] / self._ranks) * math.prod(shape[1:]) if shape else 1
            for shape, wanted in zip(unit.shapes, unit.trained, strict=True)
            if wanted or not trained
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


def _left_whole(assembly: Assembly) -> set[nn.Parameter]:
    """Parameters that stay whole on every rank: one number without dims cannot be dealt out.

    Their gradients are averaged when all micro-batches are through, as replicas do.
    """
    context = assembly.context
    found = {p for root in assembly.roots for p in root.parameters() if p.dim() == 0}

    def average(gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            if not isinstance(gradient, DTensor):
                dist.all_reduce(gradient, group=context.dp_group)
                gradient /= context.dp_size

    if assembly.plan.dp > 1 and any(parameter.requires_grad for parameter in found):
        assembly.average = average
    return found


def _lay_in_rows(unit: nn.Module) -> None:
    """fully_shard takes no parameter whose dims lie in another order, or with gaps between."""
    for parameter in unit.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _check_on_shards(assembly: Assembly, mesh: DeviceMesh) -> None:
    """Refuse an optimizer that does other things to DTensors than to whole tensors. Collective.

    What multiplies matrices or looks at norms may be right on DTensors, and is tried.
    """
    whole = WholeOptimizer.of(assembly.make_optimizer, assembly.trained())
    cut_anywhere = whole.kind.elementwise and whole.kind.separable
    if not cut_anywhere and mesh.size() > 1 and not whole.same_on_shards(mesh):
        raise ConfigError(
            f"optimizer: {whole.kind_name} does not do to shards of a parameter (DTensors) what it "
            "does to a whole one, as a trial on a few numbers shows. Use --strategy zero1_torch."
        )


def _norms(unit: nn.Module) -> list[nn.Module]:
    """The BatchNorms inside a unit that are in no unit of their own yet."""
    return [
        m
        for m in unit.modules()
        if isinstance(m, _NormBase) and m.affine and m is not unit and not isinstance(m, FSDPModule)
    ]


class _ReduceScatter:
    """fully_shard's reduce-scatter on a CPU: the copy that gloo makes is gone when it is over."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer, as fully_shard makes it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce, then scatter."""
        with self._meter.exchange():
            return reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


def _finish(unit: nn.Module, name: str, assembly: Assembly) -> None:
    """What a unit needs once it is sharded."""
    if assembly.units is not None and assembly.use is not None and assembly.plan.dp > 1:
        units, number = assembly.units, assembly.units.add(name)
        unit.register_forward_pre_hook(lambda _module, _inputs: units.note(number))
        stand_in_for_missing(unit, assembly.use)
    if assembly.slices is not None:
        take_apart_at_boundaries(unit)
    _tell_owner(unit, assembly)


def _tell_owner(unit: nn.Module, assembly: Assembly) -> None:
    """Unsharded parameters are parameters, too; they are there from the pre-forward hook on."""

    def own(module: nn.Module, _inputs: Iterable[Any]) -> None:
        assembly.meter.label(module.parameters(), "parameters")

    if isinstance(unit, FSDPModule):
        unit.register_forward_pre_hook(own)
        if assembly.plan.device_type == "cpu":
            reduce: Any = _ReduceScatter(assembly.meter)
            unit.set_custom_reduce_scatter(reduce)
