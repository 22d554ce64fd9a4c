"""Stages 1 and 2 on fairscale: OSS inside DDP, and ShardedDataParallel with OSS.

Whole parameters are assigned to ranks, the largest first, each to the rank with the fewest elements
so far. A rank has the optimizer state of its parameters only.
Memory: the parameters of a rank become views of one buffer, which is broadcast in place after
the step, so there is no second copy. Stage 1 has DDP's whole gradients on every rank. Stage 2
sends each new gradient to the rank that updates its parameter, and frees it on the other ranks.
bf16 is autocast on fp32 parameters: 8P + 8P/N bytes for stage 1, 4P + 12P/N for stage 2.
Communication: stage 2 reduces after every micro-batch, so no rank accumulates whole gradients.
Constraints: trained parameters of one type; a model that is not cut; non-reentrant recomputation.

Source: fairscale 0.4.13, optim/oss.py and nn/data_parallel/sharded_ddp.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.core.loop import LoopRunner
from bigtrain.core.participation import GatheredUnits
from bigtrain.core.replicas import average_gradients, with_averaged_gradients
from bigtrain.core.strategy import Assembly, Plan, Strategy
from bigtrain.core.traits import SPARSE, Traits
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import Traffic
from bigtrain.errors import ConfigError
from bigtrain.memory.timeline import scale_timeline
from bigtrain.optim.partition import Slice
from bigtrain.optim.partitioned import ReplicaGroup
from bigtrain.optim.update import MakeOptimizer, is_elementwise, optimizer_tensors, steps_on_device
from bigtrain.optim.whole import WholeOptimizer
from bigtrain.strategies.fairscale_adapter import (
    FAIRSCALE,
    finish_oldest,
    require_fairscale,
    take_over_waiting,
)
from bigtrain.strategies.zero import Zero
from bigtrain.strategies.zero.on_fairscale.memory import (
    RankShare,
    assign_parameters,
    assign_to_least,
    in_flight_bytes,
)
from bigtrain.strategies.zero.on_fairscale.traffic import fairscale_traffic
from bigtrain.tensors.norms import local_norm
from bigtrain.tensors.shards import SavedTensor, StateTensor, read_whole
from bigtrain.tracing.routes import Routes
from bigtrain.units import format_bytes

FAIRSCALE_ALTERNATIVES = {1: "zero1_torch", 2: "fsdp_zero2", 3: "fsdp"}
"""The preset with the same stage on the torch engine, by stage."""


def refuse_common(options: Zero, plan: Plan) -> None:
    """Refuse plans that no stage of fairscale supports.

    Raises:
        ConfigError: fairscale is not installed, cannot be imported or lacks a name that is used,
            the model is cut, states are offloaded, or an option is for another engine.
    """
    instead = FAIRSCALE_ALTERNATIVES[options.stage]
    require_fairscale("strategy.replicate.engine=fairscale", f"use --strategy {instead}")
    if "cut" in plan.techniques or plan.pp * plan.tp > 1:
        raise ConfigError(
            "strategy.replicate.engine=fairscale takes a whole model, and strategy.cut "
            f"(mesh.pp={plan.pp} mesh.tp={plan.tp}) gives each rank only a part. "
            "Set strategy.replicate.engine=torch, or mesh.pp=1 mesh.tp=1."
        )
    away = plan.offload_tiers
    if (away.optimizer, away.parameters) != ("device", "device"):
        raise ConfigError(
            f"strategy.replicate.engine=fairscale keeps all its states on the device, and "
            f"strategy.offload has optimizer={away.optimizer} parameters={away.parameters}. "
            f"Use --strategy {'zero1_torch' if options.stage == 1 else 'fsdp'}."
        )
    options.refuse_unit_choices()
    for key in ("shard_ranks", "config"):
        value = getattr(options, key)
        if value is not None:
            owner = "torch" if key == "shard_ranks" else "deepspeed"
            raise ConfigError(
                f"strategy.replicate.{key}={value} is for strategy.replicate.engine={owner}, "
                f"not for fairscale. Leave it out, or set strategy.replicate.engine={owner}."
            )


class FairscaleEngine(Zero):
    """The part that all stages on fairscale share."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(
            engine="fairscale",
            optimizer_gets="owned" if self.stage < 3 else "copies",
            optimizer_sees="parameters",
            cannot_hold=SPARSE | {"mixed", "packed"},
            state_ranks=None,
            sharded_states=self.stage,
        )

    def meet_routes(self, routes: Routes, plan: Plan) -> tuple[Strategy, str | None]:
        """See `Strategy.meet_routes`: only DDP, in stage 1, finds parameters without a gradient."""
        if self.stage == 1:
            return self, None
        if not routes.differ and plan.batch.accumulation_steps > 1:
            return self, None  # the runner checks each step
        raise ConfigError(
            f"not every pass uses {routes.names} ({routes.cause or 'it changes between steps'}): "
            "fairscale's ranks would reduce gradients of different parameters together. "
            f"Use --strategy {FAIRSCALE_ALTERNATIVES[self.stage]}."
        )

    def warning(self) -> str | None:
        """See `Strategy.warning`."""
        return FAIRSCALE.warning()

    def check(self, plan: Plan) -> None:
        """See `Strategy.check`: refuse plans that no stage of fairscale supports."""
        refuse_common(self, plan)

    def updated_slices(
        self,
        sizes: Mapping[str, int],
        ranks: int,
        *,
        groups: Sequence[Sequence[str]],  # noqa: ARG002
        may_split: bool,  # noqa: ARG002
    ) -> list[Slice]:
        """See `Strategy.updated_slices`: OSS gives each parameter to one rank."""
        names = sorted(sizes, key=lambda name: -sizes[name])
        owners = assign_to_least([sizes[name] for name in names], ranks)
        return [Slice(n, rank, 0, sizes[n]) for n, rank in zip(names, owners, strict=True)]

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """See `fairscale_traffic`."""
        return fairscale_traffic(self, profile, plan)

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str | None:
        """Return one line if nothing is sharded, or sharding saves no memory; otherwise None."""
        if plan.dp == 1:
            return (
                "on one rank there is nothing to shard: strategy.replicate=zero runs as single. "
                "Start more ranks, or use --strategy single."
            )
        # DDP would need whole gradients that are never freed.
        before = with_averaged_gradients(forecast, profile).peak().bytes
        after = self.estimate(forecast, profile, plan).peak().bytes
        if after < before:
            return None
        return (
            f"stage {self.stage} on {plan.dp} ranks is predicted to need {format_bytes(after)} "
            f"on a rank, and DDP {format_bytes(before)}: there is too little state to shard. "
            "Use --strategy ddp."
        )


class FairscaleOSS(FairscaleEngine):
    """Stage 1: DDP averages the gradients, and OSS updates each rank's share of parameters."""

    def estimate(
        self,
        forecast: Forecast,
        profile: Profile,
        plan: Plan,
    ) -> Forecast:
        """Add DDP's gradients, and the optimizer state of the fullest rank."""
        if plan.dp == 1:
            return forecast
        share = assign_parameters(profile, plan.dp)[0].share
        states = replace(forecast.states, optimizer=round(profile.optimizer_bytes * share))
        step = scale_timeline(forecast.step, share)
        return with_averaged_gradients(replace(forecast, states=states, step=step), profile)

    def apply(self, assembly: Assembly) -> None:
        """Make OSS, which moves the parameters into its buffers, and then wrap with DDP."""
        if assembly.plan.dp == 1:
            return  # nothing to shard: it runs as `single`
        assembly.update = OSSUpdate(assembly)
        average_gradients(assembly, self.bucket_size)


class FairscaleShardedDDP(FairscaleEngine):
    """Stage 2: each gradient is sent to the rank that updates its parameter, then freed."""

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Return the forecast of the fullest rank, with other ranks' gradients while in flight."""
        if plan.dp == 1:
            return forecast
        most_bytes = in_flight_bytes(self, profile.gradient_bytes)

        def of_share(rank: RankShare) -> Forecast:
            optimizer = round(profile.optimizer_bytes * rank.share)
            first = rank.first_pass(profile.passes["first"], most_bytes)
            return replace(
                forecast.with_passes(first=first),
                states=replace(forecast.states, optimizer=optimizer),
                step=scale_timeline(forecast.step, rank.share),
                gradients=round(profile.gradient_bytes * rank.share),
            )

        def peak(forecast: Forecast) -> int:
            return replace(forecast, micro_batches=plan.batch.accumulation_steps).peak().bytes

        return max((of_share(rank) for rank in assign_parameters(profile, plan.dp)), key=peak)

    def apply(self, assembly: Assembly) -> None:
        """Make OSS, then wrap the model with ShardedDataParallel by OSS's assignment."""
        if assembly.plan.dp == 1:
            return  # nothing to shard: it runs as `single`
        from fairscale.nn.data_parallel import ShardedDataParallel

        update = OSSUpdate(assembly)
        assembly.units = GatheredUnits()
        assembly.units.watch(update.parameters)
        wrapped = ShardedDataParallel(
            assembly.module,
            update.oss,
            process_group=assembly.context.group(),
            sync_models_at_startup=False,  # the weights are the same on all ranks already
            # Its buckets hold the gradients of all ranks, and lose accumulated gradients after
            # gradients have been set to None.
            reduce_buffer_size=0,
            # Otherwise it rebuilds its buffers at each change between training and evaluation.
            auto_refresh_trainable=False,
        )
        wrapped.refresh_trainable()  # otherwise it does so in the first forward pass
        sizes = sum(p.nbytes for p in update.parameters.values())
        _limit_in_flight(wrapped, update, in_flight_bytes(self, sizes))
        assembly.update = update
        assembly.module = wrapped
        _reaverage(update)
        assembly.runner = ShardedGradients


class OwnedUpdate:
    """An `Update` in which each rank has gradients and state of a share of the parameters."""

    optimizer: torch.optim.Optimizer

    def gradients(self) -> dict[str, StateTensor]:
        """Return this rank's gradients, by plain names."""
        raise NotImplementedError

    def resident_tensors(self) -> Iterable[Tensor]:
        """See `Update.resident_tensors`."""
        return optimizer_tensors(self.optimizer)

    def masters(self) -> dict[str, StateTensor]:
        """See `Update.masters`: there are none, the parameters are fp32."""
        return {}

    def load_master(self, name: str, saved: SavedTensor) -> None:
        """See `Update.load_master`."""

    def close(self) -> None:
        """See `Update.close`."""


class OSSUpdate(OwnedUpdate):
    """An `Update` by OSS, fairscale's sharded optimizer, around the job's optimizer.

    Args:
        assembly: its model has values. The trained parameters become views of OSS's buffers.

    Raises:
        ConfigError: no parameter is trained, or they have several dtypes.
    """

    def __init__(self, assembly: Assembly) -> None:
        from fairscale.optim import OSS

        named = assembly.model.named_parameters()
        self.parameters: Mapping[str, nn.Parameter] = {n: p for n, p in named if p.requires_grad}
        kinds = {p.dtype for p in self.parameters.values()}
        if len(kinds) != 1:
            names = ", ".join(sorted(map(str, kinds))) or "nothing to train"
            raise ConfigError(
                "strategy.replicate.engine=fairscale needs trained parameters of one type, and "
                f"the model has {names}. Use --strategy zero1_torch."
            )
        context = assembly.context
        self._replicas = ReplicaGroup(context.rank, context.world_size, context.group())
        # Assigning the largest first gives the most equal shares.
        ordered = sorted(self.parameters.values(), key=lambda p: p.numel(), reverse=True)
        make = _in_groups(assembly.make_optimizer, self.parameters)
        self.oss = OSS(ordered, optim=make, group=context.group())
        self.optimizer: torch.optim.Optimizer = self.oss.optim
        self.hooks: list[Any] = []
        """Pairs (autograd node, hook); a hook lives only while its node is referenced."""
        shares = enumerate(self.oss.partition_parameters())
        rank_of = {id(p): rank for rank, groups in shares for g in groups for p in g["params"]}
        self.owners = {name: rank_of[id(p)] for name, p in self.parameters.items()}

    @property
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank updates, by name."""
        rank = self._replicas.rank
        return {n: p for n, p in self.parameters.items() if self.owners[n] == rank}

    def step(self) -> None:
        """See `Update.step`."""
        # Schedules set options, such as the learning rate, in the groups of the inner optimizer.
        # OSS's step overwrites these by the options of its own groups. So they are copied to OSS
        # first.
        for source, target in zip(self.optimizer.param_groups, self.oss.param_groups, strict=False):
            target.update({key: value for key, value in source.items() if key != "params"})
        self.oss.step()

    def gradients(self) -> dict[str, StateTensor]:
        """See `OwnedUpdate.gradients`."""
        return {
            n: StateTensor.of(p.grad) for n, p in self.own_parameters.items() if p.grad is not None
        }

    def state(self) -> dict[str, StateTensor]:
        """See `Update.state`."""
        return {
            f"{name}.{key}": StateTensor.of(value)
            for name, parameter in self.own_parameters.items()
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if isinstance(value, Tensor)
        }

    def load_state(self, name: str, key: str, saved: SavedTensor) -> None:
        """See `Update.load_state`."""
        parameter = self.own_parameters.get(name)
        if parameter is not None:
            on_device = is_elementwise(key, saved, parameter.shape)
            on_device = on_device or steps_on_device(self.optimizer)
            device = parameter.device if on_device else "cpu"
            self.optimizer.state[parameter][key] = read_whole(saved).to(device)


def _in_groups(
    make_optimizer: MakeOptimizer, parameters: Mapping[str, nn.Parameter]
) -> Callable[..., torch.optim.Optimizer]:
    """Return a factory of the job's optimizer, which OSS calls with the groups of its share."""
    name_of = {id(p): n for n, p in parameters.items()}
    whole_optimizer = WholeOptimizer.of(make_optimizer, parameters)

    def make(groups: list[dict[str, Any]], **_: Any) -> torch.optim.Optimizer:
        share = [parameter for group in groups for parameter in group["params"]]
        return whole_optimizer.put_on({name_of[id(parameter)]: [parameter] for parameter in share})

    return make


class ShardedGradients(LoopRunner):
    """The plain loop for ranks that have only the gradients of their share of the parameters."""

    def norm(self) -> Tensor:
        """See `LoopRunner.norm`: the norm of the gradients of all ranks. Collective."""
        own_norm = local_norm([p.grad for p in self._trained if p.grad is not None])
        return self.context.all_reduce_sum(own_norm.to(self.context.device).square()).sqrt()

    def gradients(self) -> dict[str, StateTensor]:
        """See `Runner.gradients`."""
        update = self._update
        return update.gradients() if isinstance(update, OwnedUpdate) else super().gradients()


def _reaverage(update: OSSUpdate) -> None:
    """Reduce gradients after every micro-batch, and count those of earlier micro-batches once.

    ShardedDataParallel divides a rank's accumulated gradient by the number of ranks in every
    micro-batch. So the gradient of earlier micro-batches is multiplied by that number first. This
    is done when a new gradient comes, because a micro-batch may not use the parameter. The
    alternative, ShardedDataParallel's `no_sync`, needs whole gradients on all ranks between the
    micro-batches.
    """
    ranks = update.oss.world_size

    def multiply(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(ranks)

    for parameter in update.own_parameters.values():
        node = _adder(parameter)
        hook = node.register_prehook(lambda *_, mine=parameter: multiply(mine))
        update.hooks.append((node, hook))


def _limit_in_flight(wrapped: Any, update: OSSUpdate, max_bytes: int) -> None:
    """Free other ranks' gradients as soon as they are sent; allow at most `max_bytes` of them.

    By itself ShardedDataParallel frees a gradient when it happens to find the reduction finished.
    If the network is slower than the computation, none is freed before the backward pass ends.
    """
    handles = take_over_waiting(wrapped)
    under_way: deque[nn.Parameter] = deque()
    own_ids = {id(p) for p in update.own_parameters.values()}

    def wait_oldest(sent: nn.Parameter) -> None:
        while under_way and len(under_way) >= len(handles):  # finished by an earlier pass
            under_way.popleft()
        under_way.append(sent)
        while sum(p.nbytes for p in under_way if id(p) not in own_ids) > max_bytes:
            parameter = under_way.popleft()
            gradient = parameter.grad
            finish_oldest(handles)
            if id(parameter) not in own_ids and gradient is not None:
                _free(gradient)

    for parameter in update.parameters.values():
        node = _adder(parameter)  # this hook runs after the one that sends
        hook = node.register_hook(lambda *_, sent=parameter: wait_oldest(sent))
        update.hooks.append((node, hook))


def _adder(parameter: nn.Parameter) -> Any:
    """Return the node that accumulates a parameter's gradient; its hooks live while it does."""
    expanded: Any = parameter.expand_as(parameter).grad_fn
    return expanded.next_functions[0][0]


def _free(gradient: Tensor) -> None:
    """Free a gradient's memory at once, even if a thread of the backend still has the tensor.

    A gradient that is a slice of a larger buffer is left unchanged.
    """
    storage = gradient.untyped_storage()
    if storage.nbytes() == gradient.nbytes:  # not a slice of a buffer with other gradients
        storage.resize_(0)
