"""Stages 2 and 3 on torch's fully_shard: parameters, gradients and optimizer state in shards.

The units are the blocks of the model, and the root: all layers outside of blocks. If some passes do
not call a block, its unit is the nearest enclosing module that every pass calls. Stage 3 gathers
each block for its forward pass and again for its backward pass, except those of `keep_gathered`.
Stage 2 gathers a block once and holds it from the forward to the backward pass. In both stages the
root is gathered once and held until its gradients are reduced. With `outside_blocks=apart`, modules
outside of blocks are units, too. In a pipeline the passes of other micro-batches may free a
gathered unit, which is then gathered again.

Gradients are reduced to shards after every micro-batch, so accumulation needs only a shard; or once
a step (`reduce`), so that whole gradients are added up in fp32. In bf16
the fp32 shards are the only copy of the trained parameters. They are gathered in bf16 (BatchNorms
in fp32). Gradients are summed over the ranks in fp32. 0-dim parameters are not sharded: each rank
has them whole.

A model on the meta device is never whole on a rank: a unit gets its values and is sharded before
the next unit gets its values. If the values of a unit are in files (pretrained weights), the unit
is sharded first, and each rank reads only its shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

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

from bigtrain.core.layer_strategies import RecomputeStrategy
from bigtrain.core.participation import GatheredUnits, GradientUse
from bigtrain.core.strategy import Assembly, ModelFacts, Plan, Strategy
from bigtrain.core.traits import SECOND_BACKWARD, SPARSE, Traits
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import Traffic, comm_units
from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError, as_word
from bigtrain.machine.rates import usable_cores
from bigtrain.models.blocks import modules_outside
from bigtrain.models.parameters import names_of
from bigtrain.optim.whole import WholeOptimizer
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.shared_buffers import can_share_memory
from bigtrain.strategies.zero import Zero
from bigtrain.strategies.zero.on_torch.exchanges import Exchanges
from bigtrain.strategies.zero.on_torch.fsdp_boundaries import unwrap_at_boundaries
from bigtrain.strategies.zero.on_torch.fully_shard_memory import forecast_fully_shard
from bigtrain.strategies.zero.on_torch.prefetching import gather_ahead
from bigtrain.strategies.zero.on_torch.reduction import reduce_later, sum_in_one_precision
from bigtrain.strategies.zero.on_torch.routed_units import stand_in_for_missing, units_of
from bigtrain.strategies.zero.on_torch.unit_passes import gathered_again
from bigtrain.strategies.zero.on_torch.unit_traffic import UnitTraffic
from bigtrain.strategies.zero.unit_choices import (
    EXCHANGE_KEY,
    KEEP_KEY,
    OUTSIDE_KEY,
    PREFETCH_KEY,
    REDUCE_KEY,
    check_kept,
    check_number,
    kept_units,
)
from bigtrain.tensors.shards import as_dtensor_like, extents_of, local_tensor
from bigtrain.tracing.routes import Routes
from bigtrain.versions.torch_versions import shard_integers


class FullySharded(Zero):
    """ZeRO stages 2 and 3 by `torch.distributed.fsdp.fully_shard`, unit by unit."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`: hooks gather and free parameters around whole passes only."""
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
            # Stage 2, too: it frees gathered parameters before the last gradients are made. So the
            # peak of a deep model with bf16 parameters can be below the bytes of the whole
            # parameters plus the shards of gradients and optimizer state.
            sharded_states=3,
            gathers_whole=self.kept_choice == "all",
            gathers_outside=self.outside_blocks == "apart",
            moves_parameters=True,
        )

    @property
    def kept_choice(self) -> int | str | tuple[str, ...]:
        """The units that stay gathered from the forward to the backward pass; see `kept_units`."""
        if self.keep_gathered is None:
            return "all" if self.stage == 2 else "none"
        return self.keep_gathered

    def kept_blocks(self, profile: Profile) -> list[bool]:
        """For each block of a profile, whether it stays gathered from forward to backward pass."""
        blocks = [first for first, _ in profile.blocks]
        order = sorted(range(len(blocks)), key=lambda number: blocks[number].place)
        kept = kept_units(self.kept_choice, [blocks[number].name for number in order])
        by_number = dict(zip(order, kept, strict=True))
        return [by_number[number] for number in range(len(blocks))]

    def check(self, plan: Plan) -> None:
        """Refuse options without effect, and a number of shards that does not divide the replicas.

        Raises:
            ConfigError: with the key and the fix.
        """
        self.refuse_config()
        if self.bucket_size is not None:
            raise ConfigError(
                f"strategy.replicate.bucket_size={self.bucket_size} has no effect: torch's "
                "fully_shard (engine=torch, stages 2 and 3) reduces the gradients of each block at "
                "once. Leave it out."
            )
        if self.stage == 2 and self.keep_gathered not in (None, "all"):
            raise ConfigError(
                f"{as_word(KEEP_KEY, self.keep_gathered)}: stage 2 keeps all blocks gathered from "
                "the forward to the backward pass. Set strategy.replicate.stage=3, or leave "
                f"{KEEP_KEY} out."
            )
        ranks = self.shard_ranks
        if ranks is not None and plan.dp % ranks:
            fitting = [n for n in range(1, plan.dp + 1) if plan.dp % n == 0]
            raise ConfigError(
                f"strategy.replicate.shard_ranks={ranks} does not divide the {plan.dp} ranks of "
                f"mesh.dp. Use one of {', '.join(map(str, fitting))}."
            )
        self._check_reduce(plan)
        self._check_prefetch(plan)
        self._check_outside(plan)
        if self.exchange == "shared_memory" and not plan.one_host:
            raise ConfigError(
                f"{EXCHANGE_KEY}=shared_memory: the {plan.world_size} ranks are on several hosts, "
                "and all have to be on one. Leave it out."
            )
        if self.exchange == "shared_memory" and plan.device_type != "cpu":
            raise ConfigError(
                f"{EXCHANGE_KEY}=shared_memory is for ranks on a CPU, and this run is on "
                f"{plan.device_type}. Leave it out."
            )

    def _check_outside(self, plan: Plan) -> None:
        """Refuse units outside of blocks where forecasts know only blocks."""
        if self.outside_blocks != "apart":
            return
        recompute = plan.techniques.get("recompute")
        if isinstance(recompute, RecomputeStrategy) and recompute.limit(plan) is not None:
            raise ConfigError(
                f"{OUTSIDE_KEY}=apart: strategy.recompute.budget chooses the policies of blocks by "
                "forecasts in which all other layers are held. Leave one of them out."
            )
        if plan.moves_activations:
            raise ConfigError(
                f"{OUTSIDE_KEY}=apart: the forecast of strategy.offload.activations counts what "
                "blocks save, and other layers are no blocks. Leave one of them out."
            )

    def _check_prefetch(self, plan: Plan) -> None:
        """Refuse a number of blocks gathered ahead where nothing is gathered."""
        if self.prefetch is not None and self.shard_ranks == 1:
            raise ConfigError(
                f"{PREFETCH_KEY}={self.prefetch} has no effect: with "
                "strategy.replicate.shard_ranks=1 each rank has all parameters. Leave one of them "
                "out."
            )
        if self.prefetch == 0 and self.kept_choice == "all" and "cut" not in plan.techniques:
            raise ConfigError(
                f"{PREFETCH_KEY}=0 has no effect: all blocks stay gathered, so the backward pass "
                f"gathers none. Leave it out, or set strategy.replicate.stage=3 {KEEP_KEY}=none."
            )

    def _check_reduce(self, plan: Plan) -> None:
        """Refuse reductions once a step where a step has one micro-batch, or no groups of ranks."""
        if self.reduce in (None, "micro_batch"):
            return
        if plan.batch.accumulation_steps == 1:
            raise ConfigError(
                f"{REDUCE_KEY}={self.reduce} has no effect: a step has one micro-batch, whose "
                "gradients are reduced once. Leave it out, or set train.accumulation_steps=2 or "
                "more."
            )
        groups = plan.dp // (self.shard_ranks or plan.dp)
        if self.reduce == "step_between_groups" and groups == 1:
            raise ConfigError(
                f"{REDUCE_KEY}=step_between_groups needs several groups of ranks, and all "
                f"{plan.dp} ranks of mesh.dp are one. Set strategy.replicate.shard_ranks to less "
                f"than {plan.dp}, or {REDUCE_KEY}=step."
            )

    def check_model(self, facts: ModelFacts, plan: Plan) -> None:  # noqa: ARG002
        """Refuse a parameter that two stages of a rank share, and choices of units that it lacks.

        Only one stage can shard a parameter.

        Raises:
            ConfigError: with the key, the names and the fix.
        """
        for name in facts.shared[:1]:
            raise ConfigError(
                f"strategy.replicate: {name} is used by two stages of one rank, and stages 2 and 3 "
                "of zero can shard it for one of them only. Set strategy.replicate.stage=1, or "
                "strategy.cut.schedule=1f1b, which has one stage on each rank."
            )
        if facts.model is not None:
            by_stage = _by_stage(self._unit_names(facts.model, facts.routes), facts.stages)
            check_kept(self.kept_choice, by_stage)
            check_number(PREFETCH_KEY, self.prefetch or 0, by_stage)
        if facts.profile is not None and self.outside_blocks == "apart":
            self._check_called(facts.profile)
        if facts.profile is not None and self.prefetch:
            places = [first.place for first, _ in facts.profile.blocks]
            if places != sorted(places):
                raise ConfigError(
                    f"{PREFETCH_KEY}={self.prefetch}: the blocks of this model do not run in the "
                    "order of its modules, so the next block is not known. Leave it out."
                )

    def _unit_names(self, model: nn.Module, routes: Routes) -> list[str]:
        """Return the names of the units of a whole model, in the order of its modules.

        Raises:
            ConfigError: modules outside of blocks are to be units, and there are none.
        """
        apart = self.outside_blocks == "apart"
        if apart and not modules_outside(model):
            raise ConfigError(
                f"{OUTSIDE_KEY}=apart has no effect: the model has no module outside of its blocks "
                "with a matrix that it shares with no other module (a head that is tied to the "
                "embedding shares it). Leave it out."
            )
        return _in_order(model, [name for name, _ in units_of(model, routes, outside=apart)])

    def _check_called(self, profile: Profile) -> None:
        """Refuse modules outside of blocks that are not called, although they are used.

        Raises:
            ConfigError: with the name of one of them.
        """
        for name in profile.uncalled:
            raise ConfigError(
                f"{OUTSIDE_KEY}=apart: {name} is not called, because its parameters are used in "
                "another way, such as by a loss in chunks. It could not be gathered alone. Leave "
                f"{OUTSIDE_KEY} out."
            )

    def meet_routes(self, routes: Routes, plan: Plan) -> tuple[Strategy, str | None]:
        """See `Strategy.meet_routes`: every pass has to call every unit."""
        del plan
        if not routes.differ or not routes.modules:
            return self, None
        return self, (
            f"not every pass calls {routes.names} ({routes.cause}): such modules are gathered "
            "with the nearest enclosing module that every pass calls"
        )

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Return the forecast with sharded states and the units that are gathered at each tick."""
        ranks = self.shard_ranks or plan.dp
        kept, once = self.kept_blocks(profile), self.reduce == "step"
        return forecast_fully_shard(
            forecast,
            profile,
            plan,
            kept=kept,
            ranks=ranks,
            once=once,
            prefetch=self.prefetch,
            shared_memory=self._may_share(plan),
        )

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """Return the all-gathers of units and the reductions of gradients; see `UnitTraffic`."""
        ranks = self.shard_ranks or plan.dp
        flow = UnitTraffic(comm_units(profile), plan, ranks, shared_memory=self._may_share(plan))
        blocks = [first for first, _ in profile.blocks]
        again = gathered_again(blocks, self.kept_blocks(profile), self.prefetch)
        again = [unit for unit in again if unit.shapes]
        messages = flow.gathered(flow.units, "forward") + flow.gathered(again, "backward")
        return tuple(messages + flow.reduced(self.reduce or "micro_batch"))

    def apply(self, assembly: Assembly) -> None:
        """Give each unit its values and shard it, one unit after the other, the root last."""
        plan, mesh = assembly.plan, shard_mesh(assembly.context, self.shard_ranks)
        _check_on_shards(assembly, mesh)
        settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": False}
        if plan.offload_tiers.parameters == "cpu":  # shards, gradients and state on the host
            on_gpu = is_accelerator(plan.device_type)
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
        exchanges = self._exchanges(assembly, mesh)
        assembly.units, assembly.use = GatheredUnits(), GradientUse()
        shard_integers()
        fp32_policy = MixedPrecisionPolicy()
        low = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            if plan.bf16_parameters
            else fp32_policy
        )

        def shard_norms(unit: nn.Module) -> None:
            """Shard BatchNorms in fp32: they take no bf16 weights with fp32 statistics."""
            norms = _norms(unit) if plan.bf16_parameters else []
            if norms:
                fully_shard(norms, mp_policy=fp32_policy, **settings)

        whole_params = _left_whole(assembly)
        settings["ignored_params"] = whole_params
        apart = self.outside_blocks == "apart"
        for root in assembly.roots:
            # If a cut divides a module, the module runs in several stages. No stage calls its
            # forward method, so hooks on the module would never run.
            through: Collection[str] = getattr(root, "cut_through", ())
            units = [
                pair
                for pair in units_of(root, assembly.routes, outside=apart)
                if pair[0] not in through
            ]
            in_order = _in_order(root, [name for name, _ in units])
            kept = {
                name
                for name, stays in zip(
                    in_order, kept_units(self.kept_choice, in_order), strict=True
                )
                if stays
            }
            for name, unit in units:
                settings["reshard_after_forward"] = name not in kept
                shards = _give_values(unit, f"{name}.", assembly, whole_params)
                if whole_params.issuperset(unit.parameters()):
                    continue
                _make_contiguous(unit)
                shard_norms(unit)
                policy = fp32_policy if isinstance(unit, _NormBase) else low
                fully_shard(unit, mp_policy=policy, **settings)
                _read_shards(unit, f"{name}.", assembly, shards)
                _finish(unit, name, assembly, exchanges, once=self.reduce == "step")
            shards = _give_values(root, "", assembly, whole_params)
            _make_contiguous(root)
            settings["reshard_after_forward"] = False
            shard_norms(root)
            fully_shard(root, mp_policy=low, **settings)
            # torch warns of in-place operations on outputs. Those of a stage are only sent.
            warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPStage\)")
            _read_shards(root, "", assembly, shards)
            _finish(root, "the model", assembly, exchanges, once=self.reduce == "step")
            if self.prefetch is not None:
                modules = dict(units)
                gather_ahead(root, [modules[name] for name in in_order], self.prefetch)
        if self.reduce not in (None, "micro_batch"):
            reduce_later(assembly, self.reduce)

    def _may_share(self, plan: Plan) -> bool:
        """Whether the ranks exchange in shared memory, if they can open each other's."""
        return plan.device_type == "cpu" and plan.one_host and self.exchange != "sockets"

    def _exchanges(self, assembly: Assembly, mesh: DeviceMesh) -> Exchanges:
        """Return what units exchange by on a CPU. Collective.

        Raises:
            ConfigError: shared memory is asked for, and the ranks cannot share memory.
        """
        group = mesh.get_group("shard") if mesh.ndim > 1 else mesh.get_group()
        counter = assembly.context.recorder.traffic
        shared = self._may_share(assembly.plan)
        with counter.aside():
            if shared and not can_share_memory(group):
                if self.exchange == "shared_memory":
                    raise ConfigError(
                        f"{EXCHANGE_KEY}=shared_memory: the ranks cannot open each other's memory, "
                        "for which they need Linux and one user. Leave it out."
                    )
                shared = False
        spins = assembly.context.local_world_size <= usable_cores()
        return Exchanges(assembly.meter, group, counter, shared_memory=shared, spins=spins)


def _in_order(root: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the names of units in the order of the modules of a root."""
    wanted = set(names)
    in_order = [name for name, _ in root.named_modules() if name in wanted]
    return in_order + [name for name in names if name not in in_order]


def _by_stage(names: Sequence[str], stages: Sequence[Collection[str]]) -> list[list[str]]:
    """Return the names of the units of each stage, which are all names if there are no stages.

    Args:
        names: the names of the units.
        stages: by stage, the names of its parameters and buffers.
    """
    if not stages:
        return [list(names)]
    return [
        [name for name in names if any(own.startswith(f"{name}.") for own in tensors)]
        for tensors in stages
    ]


def shard_mesh(context: RunContext, shard_ranks: int | None) -> DeviceMesh:
    """Return the dp axis as a 1-dim mesh or, for hybrid sharding, as a mesh (replicate, shard).

    Args:
        context: the ranks and their mesh.
        shard_ranks: the number of ranks that share one copy of the states; None for all of dp.

    Raises:
        ConfigError: there is no process group.
    """
    mesh = context.mesh
    if mesh is None:
        raise ConfigError("fully_shard needs a process group. Use bigtrain.connect.")
    if shard_ranks is None or shard_ranks == context.dp_size:
        return mesh["dp"]
    # Made from the whole mesh, because all ranks must create the same groups in the same order.
    _dp, pp, tp = mesh.mesh.shape
    ranks = mesh.mesh.view(-1, shard_ranks, pp, tp)
    names = ("replicate", "shard", "pp", "tp")
    return DeviceMesh(context.device.type, ranks, mesh_dim_names=names)["replicate", "shard"]


def _left_whole(assembly: Assembly) -> set[nn.Parameter]:
    """Return the 0-dim parameters, which stay whole on every rank because they cannot be sharded.

    If any of them is trained, on several ranks, `Assembly.average` is set: it averages the
    gradients of these parameters over the replicas after the last micro-batch.
    """
    context = assembly.context
    scalars = {p for root in assembly.roots for p in root.parameters() if p.dim() == 0}

    def average(gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            if not isinstance(gradient, DTensor):
                dist.all_reduce(gradient, group=context.dp_group)
                gradient /= context.dp_size

    if assembly.plan.dp > 1 and any(parameter.requires_grad for parameter in scalars):
        assembly.average = average
    return scalars


def _give_values(
    unit: nn.Module, prefix: str, assembly: Assembly, whole_params: set[nn.Parameter]
) -> list[str]:
    """Give a unit its values, except for parameters whose shards can be read.

    Args:
        unit: a block, or the model.
        prefix: the prefix of the unit's names in the model.
        assembly: the run that is being built.
        whole_params: parameters that are not sharded.

    Returns:
        The parameters that have no values yet, by their names in the unit.
    """
    parts = assembly.saved_parts
    meta = [n for n, p in unit.named_parameters() if p.is_meta and p not in whole_params]
    meta = [n for n in meta if parts is not None and parts.cover([prefix + n])]
    later = set(meta)
    assembly.materialize([prefix + name for name in names_of(unit) if name not in later])
    return meta


def _read_shards(unit: nn.Module, prefix: str, assembly: Assembly, names: Sequence[str]) -> None:
    """Read this rank's shards of a unit that was sharded on the meta device."""
    parts = assembly.saved_parts
    if parts is None or not names:
        return
    on_host = assembly.plan.offload_tiers.parameters == "cpu"
    device = torch.device("cpu") if on_host else assembly.context.device
    sharded = dict(unit.named_parameters())
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in unit.modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                places.setdefault(id(parameter), []).append((module, own))
    for name in names:
        meta = sharded[name]
        local = torch.empty_like(local_tensor(meta), device=device)
        parts.copy(prefix + name, local, extents_of(meta))
        parameter = nn.Parameter(as_dtensor_like(local, meta), meta.requires_grad)
        for module, own in places[id(meta)]:  # a tied parameter is in several modules
            setattr(module, own, parameter)
    for module in (unit, *_norm_units(unit)):
        # `_apply` of an identity function makes fully_shard adopt the new parameters.
        if isinstance(module, FSDPModule):
            module._apply(lambda tensor: tensor, recurse=False)  # type: ignore[no-untyped-call]


def _norm_units(unit: nn.Module) -> list[nn.Module]:
    """Return the BatchNorms of a unit, which are sharded separately in bf16 runs."""
    return [module for module in unit.modules() if isinstance(module, _NormBase)]


def _make_contiguous(unit: nn.Module) -> None:
    """Make parameters contiguous, because fully_shard refuses others."""
    for parameter in unit.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _check_on_shards(assembly: Assembly, mesh: DeviceMesh) -> None:
    """Refuse an optimizer that does not update DTensors like whole tensors. Collective.

    An optimizer that multiplies matrices or uses norms may be right on DTensors, so it is tried on
    a small parameter.
    """
    whole_optimizer = WholeOptimizer.of(assembly.make_optimizer, assembly.trained())
    cut_anywhere = whole_optimizer.kind.elementwise and whole_optimizer.kind.separable
    if not cut_anywhere and mesh.size() > 1 and not whole_optimizer.same_on_shards(mesh):
        raise ConfigError(
            f"optimizer: {whole_optimizer.kind_name} does not update the shards of a parameter "
            "(DTensors) as it updates a whole one; a trial on a small parameter shows it. Use "
            "--strategy zero1_torch."
        )


def _norms(unit: nn.Module) -> list[nn.Module]:
    """Return the BatchNorms inside a unit that are not sharded yet."""
    return [
        m
        for m in unit.modules()
        if isinstance(m, _NormBase) and m.affine and m is not unit and not isinstance(m, FSDPModule)
    ]


def _finish(
    unit: nn.Module, name: str, assembly: Assembly, exchanges: Exchanges, *, once: bool
) -> None:
    """Add hooks to a sharded unit: for missing gradients, sliced tensors and labels of memory.

    Args:
        unit: the unit.
        name: its name, for messages.
        assembly: the run that is being built.
        exchanges: what units exchange by on a CPU.
        once: whether gradients are reduced once a step.
    """
    if once:
        sum_in_one_precision(unit)
    if assembly.units is not None and assembly.use is not None and assembly.plan.dp > 1:
        units, number = assembly.units, assembly.units.add(name)
        unit.register_forward_pre_hook(lambda _module, _inputs: units.note(number))
        stand_in_for_missing(unit, assembly.use)
    if assembly.slices is not None:
        unwrap_at_boundaries(unit)
    _label_gathered(unit, assembly)
    if isinstance(unit, FSDPModule) and assembly.plan.device_type == "cpu":
        for module in (unit, *_norm_units(unit)):
            if isinstance(module, FSDPModule):
                exchanges.attach(module)


def _label_gathered(unit: nn.Module, assembly: Assembly) -> None:
    """Label gathered parameters as parameters, before each forward pass of the unit."""

    def label(module: nn.Module, _inputs: Iterable[Any]) -> None:
        # The shards of inner units have labels already, as trained or frozen parameters.
        gathered = [p for p in module.parameters() if not isinstance(p, DTensor)]
        assembly.meter.label(gathered, "parameters")

    if isinstance(unit, FSDPModule):
        unit.register_forward_pre_hook(label)
