"""The interface of a technique: the plans that it refuses, its costs, and its application.

A `Strategy` is stateless: `check` runs before anything else, `estimate` changes a forecast, `apply`
changes an `Assembly`. A `Runner` is made from the finished assembly; it takes optimizer steps, each
over the micro-batches of one global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from torch import Tensor, nn

from bigtrain.activations.policy import BlockPolicy, Offloader, apply_policies
from bigtrain.core.gradient_hooks import GradientHooks
from bigtrain.core.participation import GatheredUnits, GradientUse
from bigtrain.core.runner import Runner
from bigtrain.core.traits import CutTraits, Need, OffloadTiers, Traits
from bigtrain.core.variants import Shape, Variant
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.rank_replay import RankActions
from bigtrain.costs.traffic import Traffic
from bigtrain.cutting.cut import copy_modules
from bigtrain.cutting.layout import Layout
from bigtrain.cutting.stage import Stage
from bigtrain.job.batch import Batch
from bigtrain.job.schema import Precision, Role, StrategyConfig
from bigtrain.job.sections import refuse_truth
from bigtrain.losses.loss import Loss
from bigtrain.memory.meter import MemoryMeter
from bigtrain.models.saved_parts import SavedParts
from bigtrain.optim.partition import Slice, partition_evenly
from bigtrain.optim.state_store import StateStore
from bigtrain.optim.update import MakeOptimizer, Update
from bigtrain.ranks.context import RunContext
from bigtrain.slicing.state import SlicedState
from bigtrain.tracing.routes import Routes


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model that are known when `Strategy.check_model` is called."""

    profile: Profile | None = None
    """The profile of the model, or of one rank's stage; None if it is not known."""
    untraceable: str | None = None
    """Why there is no profile: the model does not run on fake tensors. A technique may be the
    cause. None if the model runs, or if that has not been tried."""
    shared: Sequence[str] = ()
    """Names of the parameters that several stages of one rank use."""
    untrained: Sequence[int] = ()
    """Indices of the stages that have no trained parameter."""
    model: nn.Module | None = None
    """The whole model, on any device; None if only another fact is new."""
    routes: Routes = field(default_factory=Routes)
    """The modules that some passes of `model` call and others do not."""
    stages: Sequence[Collection[str]] = ()
    """By stage, the names of the parameters and buffers of `model`; empty without a cut."""


_ORDER: tuple[Role, ...] = ("cut", "slice", "recompute", "offload", "replicate", "accumulate")
"""The order in which techniques are applied; `assembly.build` gives the reasons."""


@dataclass(frozen=True)
class Plan:
    """The plan of a run: the mesh, one technique per role, the batch, the precision."""

    strategy: StrategyConfig
    techniques: dict[Role, Strategy]
    pp: int
    dp: int
    tp: int
    batch: Batch
    precision: Precision
    device_type: str
    clip_norm: float | None = None
    checks_finite: bool = True
    sync_batchnorm: bool = False
    master_weights: bool = True
    release_gradients: bool = False
    compiles_blocks: bool = False
    channels_last: bool = False
    one_host: bool = True
    """Whether all ranks are on one host."""
    dp_rank: int | None = None
    """The dp rank that is forecast; None for the replica that needs the most memory."""
    tp_rank: int = 0
    """The tp rank that is forecast. Rank 0 has the longest slices."""

    @cached_property
    def replicate(self) -> Traits:
        """The traits of the technique that shares gradients and state among the replicas."""
        return self.techniques["replicate"].traits

    @cached_property
    def cut(self) -> CutTraits | None:
        """The traits of the technique that cuts the model into stages; None without one."""
        technique = self.techniques.get("cut")
        return technique.traits if isinstance(technique, CutStrategy) else None

    @cached_property
    def bf16_parameters(self) -> bool:
        """Whether the layers compute with bf16 parameters, so that autocast converts none."""
        replicate_has_bf16 = self.replicate.bf16_parameters and not self.shares_engine
        return self.precision == "bf16" and (replicate_has_bf16 or not self.master_weights)

    @cached_property
    def frozen_in_bf16(self) -> bool:
        """Whether frozen parameters have no fp32 values: in bf16 runs, if torch is the only engine.

        Parameters that layers use in fp32 are an exception; see `parameters.low_names`.
        """
        on_torch = all(technique.traits.on_torch for technique in self.techniques.values())
        return self.precision == "bf16" and on_torch

    @property
    def casts_when_gathered(self) -> bool:
        """Whether the shards of parameters are fp32, and are converted to bf16 when gathered."""
        return self.bf16_parameters and self.master_weights and self.replicate.sharded_states == 3

    def gradient_bytes(self, nbytes: int, numbers: int) -> int:
        """Return the bytes of the gradient with which a parameter is updated.

        Args:
            nbytes: the bytes of the parameter as the layers use it.
            numbers: its number of elements.
        """
        fp32_shards = self.replicate.optimizer_gets == "shards" and self.master_weights
        return max(nbytes, 4 * numbers) if fp32_shards and self.bf16_parameters else nbytes

    @property
    def uses_channels_last(self) -> bool:
        """Whether weights are in the channels-last format; sharded weights stay contiguous."""
        return self.channels_last and not self.replicate.sharded_states

    @cached_property
    def shares_engine(self) -> bool:
        """Whether the engine of the cut also does the work of the replicate technique."""
        cut = self.cut
        return cut is not None and cut.takes_over_from(self.replicate)

    @cached_property
    def offload_tiers(self) -> OffloadTiers:
        """Where the optimizer's state, the parameters and the activations are stored."""
        technique = self.techniques.get("offload")
        return technique.traits.offload_tiers if technique is not None else OffloadTiers()

    @property
    def state_ranks(self) -> int:
        """The number of ranks that share the optimizer's state of a stage."""
        return self.replicate.state_ranks or self.dp

    @property
    def trains_late(self) -> bool:
        """Whether a parameter may get its first gradient in any step.

        Only in plain training: replicas, stages, slices, shards and the engines of other libraries
        need to know the trained parameters before the first step.
        """
        plain = self.replicate.on_torch and not self.replicate.sharded_states
        return plain and self.dp == 1 and not {"cut", "slice"} & self.techniques.keys()

    @property
    def gradient_shard(self) -> tuple[int, int]:
        """The number of shards of each gradient, and the index of the shard of this replica.

        It is (1, 0) unless the optimizer updates DTensors.
        """
        if self.replicate.optimizer_gets != "shards":
            return 1, 0
        return self.state_ranks, (self.dp_rank or 0) % self.state_ranks

    @property
    def averaging_bucket(self) -> int | None:
        """Bytes of gradients that the replicas of a stage average at once; see `GradientAverager`.

        None unless the stages are on several ranks and have several replicas. Also None if an
        engine or a wrapper averages the gradients itself.
        """
        on_ranks = self.cut is not None and self.cut.is_distributed
        averages = on_ranks and self.dp > 1 and not self.shares_engine
        return self.replicate.averaging_bucket if averages else None

    def data_rank(self, dp_rank: int) -> int | None:
        """The index of a dp rank among the `batch.dp_size` ranks that share the samples.

        None for a server (see `Traits.num_servers`), which computes no loss.
        """
        servers = self.dp - self.batch.dp_size
        return dp_rank - servers if dp_rank >= servers else None

    @property
    def in_order(self) -> list[Strategy]:
        """The techniques, in the order in which they change a run and its forecast."""
        return [self.techniques[role] for role in _ORDER if role in self.techniques]

    @property
    def warnings(self) -> Sequence[str]:
        """The warnings of the techniques without duplicates, printed before the ranks connect."""
        lines = (technique.warning() for technique in self.in_order)
        return list(dict.fromkeys(line for line in lines if line is not None))

    def check_model(self, facts: ModelFacts) -> None:
        """Let each technique refuse a model: see `Strategy.check_model`.

        Raises:
            ConfigError: a technique refuses the model; every rank raises the same error.
        """
        for technique in self.in_order:
            technique.check_model(facts, self)

    @property
    def world_size(self) -> int:
        """The number of ranks of the mesh."""
        return self.pp * self.dp * self.tp

    def block_policies(self, model: nn.Module) -> dict[str, BlockPolicy]:
        """The policies of modules for their saved activations, by name in the whole model.

        Modules that are not named save their activations as they are. If two techniques choose a
        policy for a module, recomputation has precedence over offloading.

        Raises:
            ConfigError: the model has no module of a name in a technique's options.
        """
        policies: dict[str, BlockPolicy] = {}
        for role in ("recompute", "offload"):
            technique = self.techniques.get(role)
            for name, choice in (
                technique.block_policies(model, self) if technique else {}
            ).items():
                policies.setdefault(name, choice)
        return policies

    @property
    def keeps_products(self) -> bool:
        """Whether results of matrix products can be saved for the backward pass.

        They cannot if a technique changes them in place, or if a split backward pass would read
        them twice.
        """
        return not self.splits_backward and not self.replicate.replaces_products

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule splits backward passes, and the replicate technique allows it.

        The gradients of inputs and of weights are then computed in separate passes.
        """
        cut = self.cut
        return cut is not None and cut.splits_backward and not self.replicate.whole_backward

    @property
    def moves_activations(self) -> bool:
        """Whether saved activations leave the device; on a CPU, only the tier 'disk' moves them."""
        tier = self.offload_tiers.activations
        return tier == "disk" or (tier == "cpu" and self.device_type != "cpu")

    def make_offloader(self, device: torch.device, *, fake: bool = False) -> Offloader | None:
        """Return the mover of saved activations; None if the plan leaves them on the device.

        Args:
            device: the device on which activations are computed.
            fake: whether the mover is for a run on fake tensors.
        """
        offloads = self.offload_tiers
        if offloads.activations == "device" or not self.moves_activations:
            return None
        from bigtrain.activations.offload import ActivationOffloader

        return ActivationOffloader(offloads.activations, device, offloads.path, fake=fake)


class MakeShardedUpdate(Protocol):
    """Shards a stage's parameters and states over its replicas, inside the engine of the cut."""

    def __call__(self, assembly: Assembly, start: Callable[..., Any]) -> Update:
        """Materialise the model, make the engine, and return it as an update.

        Args:
            assembly: the finished assembly; its `model` has this rank's parameters.
            start: makes the engine from the optimizer and further settings; called once.
        """


BeforeBackward = Callable[[nn.Module, bool], None]
"""A function of one of `Assembly.roots`, and whether its next backward pass is the last of the
step."""


@dataclass
class Assembly:
    """A run that is being built; the `apply` methods of techniques change its fields.

    A technique may replace the field `module` and the fields after it.
    """

    context: RunContext
    plan: Plan
    loss: Loss
    meter: MemoryMeter
    model: nn.Module
    """The user's model, with the parameter names that the user gave. Its parameters have values,
    unless a technique gives them their values itself (`Traits.materializes`)."""
    materialize: Callable[[Collection[str]], None]
    """Gives the named parameters and buffers their values on the device (in fp64 if planned)."""
    make_optimizer: MakeOptimizer
    module: nn.Module
    """The module that the forward pass calls: the model, or its wrapper."""
    sync: Callable[[bool], AbstractContextManager[object]] | None = None
    """Returns the context of one micro-batch in the plain loop; called with whether the micro-batch
    is the last of the step. For wrappers that exchange gradients in the backward pass. A pipeline
    refuses an assembly that has it."""
    keep_gradients: bool = False
    """Whether gradients are set to zero instead of None, because their memory stays allocated."""
    state_store: StateStore | None = None
    """Stores the optimizer's state between steps; None if it stays on the parameters' device."""
    layout: Layout | None = None
    """How the model is cut; None if it is not. With a cut, `model` has only this rank's stages."""
    before_step: list[Callable[[], None]] = field(default_factory=list)
    """Called at the beginning of each step, also after a step that ended without an update."""
    before_backward: list[BeforeBackward] = field(default_factory=list)
    """Called before each backward pass, of the plain loop and of pipelines."""
    before_update: list[Callable[[], None]] = field(default_factory=list)
    """Called after all micro-batches of a step, before clipping and the optimizer's step."""
    after_update: list[Callable[[], None]] = field(default_factory=list)
    """Called on every rank at the end of each step, after the optimizer has updated the parameters
    and the gradients are cleared. Techniques that average parameters over replicas do it here."""
    update: Update | None = None
    """Set by a technique that applies the optimizer to the parameters itself; None for the update
    that the runner makes."""
    runner: Callable[[Assembly], Runner] | None = None
    """Makes the runner from the finished assembly; None for the plain loop. At most one technique
    sets it."""
    roots: list[nn.Module] = field(default_factory=list)
    """The modules whose forward passes run on this rank: the model, or the rank's stages. The
    parameters of a stage have their names in the model."""
    average: Callable[[Sequence[Tensor]], None] | None = None
    """Averages gradients over the replicas, in place. The plain loop and pipelines call it after
    all micro-batches of a step. None without replicas, or if a wrapper averages gradients."""
    shard: MakeShardedUpdate | None = None
    """Set by a replicate technique that runs in the engine of the cut; see `Plan.shares_engine`."""
    block_policies: Mapping[str, BlockPolicy] = field(default_factory=dict)
    """The policies of modules for their saved activations, by name."""
    slices: SlicedState | None = None
    """How the model's layers are sliced over the tp axis; None if they are not."""
    offloader: Offloader | None = None
    """Moves activations off the device; None if the plan leaves them there."""
    routes: Routes = field(default_factory=Routes)
    """The modules that some passes of the model call and others do not."""
    unreached: Collection[str] = ()
    """Names of parameters that are not trained, because the loss does not depend on them."""
    units: GatheredUnits | None = None
    """Set by a technique that gathers modules; records each module before it is gathered."""
    use: GradientUse | None = None
    """Set by a technique that may leave a gradient of zeros on a parameter that a step does not
    use; records the parameters that get a gradient."""
    gradient_hooks: GradientHooks = field(default_factory=GradientHooks)
    """The hooks that users have registered on parameters; runners call them on averaged
    gradients."""
    saved_parts: SavedParts | None = None
    """Reads parts of saved values, for a technique that shards parameters before they have values.
    None if ranks hold slices, or in fp64 runs, where saved values are not read in parts."""

    def __post_init__(self) -> None:
        self.roots = self.roots or [self.model]

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters of all roots, by name in the model.

        A tied parameter has one name in each root.
        """
        parameters = {}
        for root in self.roots:
            parameters.update({n: p for n, p in root.named_parameters() if p.requires_grad})
        return parameters

    def make_stages(self, indices: Sequence[int]) -> list[Stage]:
        """Make stages of the model, and set them as `roots`.

        Several stages of a rank have separate copies of the module objects, with the same
        parameters.

        Args:
            indices: indices of the rank's stages.

        Raises:
            ValueError: the model is not cut.
        """
        if self.layout is None:
            raise ValueError("the model is not cut")
        cut, device = self.layout.chosen.cut, self.context.device
        stages = []
        for index in indices:
            tree = self.model if len(indices) == 1 else copy_modules(self.model)
            cut.strip(tree, [index], device)
            stages.append(cut.stage(tree, index, self.loss, device))
            group = None if self.slices is None else self.slices.group
            stages[-1].crossings = self.layout.crossings(index, group)
            compiles = self.plan.compiles_blocks
            apply_policies(stages[-1], self.block_policies, self.offloader, compiles=compiles)
        self.roots = list(stages)
        return stages

    def collect_parameters(self) -> None:
        """Replace the model's parameters by the parameters of the stages, which may be sharded.

        This matters if a rank has several stages, which have separate module objects. Otherwise
        the modules of the model would keep the whole parameters alive.
        """
        for root in self.roots if len(self.roots) > 1 else ():
            for path, module in root.named_modules():
                own_parameters = self.model.get_submodule(path)._parameters
                own_parameters.update(
                    (k, p) for k, p in module._parameters.items() if k in own_parameters
                )


_NEEDS: Mapping[Role, Need] = {
    "cut": "model",
    "slice": "layer",
    "recompute": "activations",
    "accumulate": "activations",
}


class Strategy(BaseModel):
    """One technique. Its fields are its options, typed and checked like the keys of a job.

    Subclasses set `name`, `role` and `summary`, and override the methods that concern them. The
    defaults describe a technique that changes neither the run nor its forecast.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[str(info.field_name)]
        return refuse_truth(field.annotation, value, field.metadata)

    name: ClassVar[str]
    role: ClassVar[Role]
    summary: ClassVar[str]
    """One line for lists: the tensors that are sharded, recomputed or moved, and the cost."""

    @property
    def need(self) -> Need:
        """The shortage that this technique relieves, with its options.

        Lists of strategies are grouped by the shortage.
        """
        return _NEEDS.get(self.role, "nothing")

    @property
    def traits(self) -> Traits:
        """The facts about this technique that other code needs."""
        return Traits()

    def block_policies(self, model: nn.Module, plan: Plan) -> Mapping[str, BlockPolicy]:  # noqa: ARG002
        """The policies of modules for their saved activations, by name in the model.

        Args:
            model: the whole model, on any device.
            plan: the plan of the run.

        Raises:
            ConfigError: the model has no module of a name in the options.
        """
        return {}

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str | None:  # noqa: ARG002
        """One line, printed before training, if this technique cannot help; None if it can.

        Args:
            forecast: the forecast with the techniques that are applied before this one.
            profile: the profile of the model, or of one rank's stage.
            plan: the plan of the run.
        """
        return None

    def replaced_functions(self) -> AbstractContextManager[object]:
        """A context for fake tensors, which replaces the torch functions that a run replaces."""
        return nullcontext()

    def warning(self) -> str | None:
        """A line to print before the ranks connect, as about a version; None for no line."""
        return None

    def check(self, plan: Plan) -> None:
        """Refuse a plan that cannot work, before any process group exists.

        Raises:
            ConfigError: the plan cannot work; the message has the key, the numbers and the fix.
        """

    def check_model(self, facts: ModelFacts, plan: Plan) -> None:
        """Refuse a model that this technique cannot train; called whenever new facts are known.

        Raises:
            ConfigError: it cannot train the model; the message has the key, the numbers and the
                fix.
        """

    def meet_routes(self, routes: Routes, plan: Plan) -> tuple[Strategy, str | None]:  # noqa: ARG002
        """Adapt the technique to a model whose passes do not all call the same modules.

        Called if there are several replicas and the passes differ.

        Args:
            routes: the modules that some passes call and others do not.
            plan: the plan of the run.

        Returns:
            The technique or a copy with other options, and a line about the choice, or None.

        Raises:
            ConfigError: the technique requires that all ranks, or all steps, call the same
                modules; the message has the modules and a strategy that works.
        """
        return self, None

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:  # noqa: ARG002
        """Return the forecast of a step with this technique.

        Args:
            forecast: the forecast with the techniques that are applied before this one.
            profile: the profile of the model, or of one rank's stage.
            plan: the plan of the run.
        """
        return forecast

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:  # noqa: ARG002
        """Return the messages of this technique, and its transfers to and from host and disk.

        A message is sent between ranks, or between the devices of one process.

        Args:
            profile: the profile of the model, or of one rank's stage; its `untraceable` is None.
            plan: the plan of the run.
        """
        return ()

    def variants(self, shape: Shape) -> Iterable[Variant]:
        """The forms of this technique that the planner may choose for this mesh and these batches.

        `check` refuses the forms that cannot run. The default is for a user's technique that the
        job names. It has one form, with the job's options, if the technique's axis of the mesh has
        several ranks, and otherwise no form.

        Args:
            shape: the part of a plan that is fixed: the mesh, the micro-batches, the blocks.
        """
        wanted = {"replicate": shape.dp > 1, "cut": shape.pp > 1, "slice": shape.tp > 1}
        if wanted.get(self.role, False):
            options = self.model_dump(mode="json", exclude_defaults=True)
            import_path = f"{type(self).__module__}:{type(self).__qualname__}"
            yield Variant(self.name, {"name": import_path, **options}, self.traits.engine)

    def finer_variants(self, shape: Shape) -> Iterable[Variant]:  # noqa: ARG002
        """The forms between this one and faster ones, from the least memory to the most.

        Each form sends less than the one before it and needs at least as much memory. They differ
        only in options of this technique, so that one profile serves all their forecasts.

        Args:
            shape: see `variants`.
        """
        return ()

    def remedies(self, plan: Plan, limit: int) -> Sequence[Sequence[str]]:  # noqa: ARG002
        """Changes of this technique's options after which a job may fit into memory.

        Args:
            plan: the plan that did not fit.
            limit: the most bytes that the forecast of a rank may have.

        Returns:
            The changes, each as command-line words; the change that costs the least time first.
        """
        return ()

    def updated_slices(
        self,
        sizes: Mapping[str, int],
        ranks: int,
        *,
        groups: Sequence[Sequence[str]],  # noqa: ARG002
        may_split: bool,
    ) -> list[Slice]:
        """Return the elements of trained parameters that each rank updates, if ranks share them.

        The forecasts of a save and of a resume need the slices. By default the parameters, one
        after the other, are divided into equal shares.

        Args:
            sizes: the number of elements of each trained parameter of a stage, in the model's
                order.
            ranks: the number of ranks that share the optimizer's state, see `Plan.state_ranks`.
            groups: the names of the stage's parameters in each group of the optimizer.
            may_split: whether the optimizer can update a part of a parameter.
        """
        return [Slice(*cut) for cut in partition_evenly(sizes, ranks, may_split)]

    def apply(self, assembly: Assembly) -> None:
        """Change the assembly: wrap its module, shard its parameters, or set other fields.

        Args:
            assembly: the run so far, changed by the techniques before this one (`Plan.in_order`).
        """


class CutStrategy(Strategy):
    """A technique that places a model on ranks or devices in stages."""

    @property
    def traits(self) -> CutTraits:
        """The facts about this technique that other code needs."""
        return CutTraits()

    def predicts_by_stage(self, plan: Plan) -> bool:  # noqa: ARG002
        """Whether the memory of a rank is predicted from forecasts of its stages."""
        return self.traits.is_distributed

    def actions(self, plan: Plan, pp_rank: int) -> RankActions | None:  # noqa: ARG002
        """The passes that a rank runs on its stages in a step, in order.

        If memory is not predicted by stage, the whole model is stage 0. None for the order of the
        plain loop, which runs one micro-batch after the other.

        Args:
            plan: the plan of the run.
            pp_rank: the rank on the pp axis.
        """
        return None

    def in_flight(self, plan: Plan) -> tuple[int, ...]:  # noqa: ARG002
        """For each stage, the most micro-batches whose activations it holds; empty if 1 each."""
        return ()

    def micro_batches(self, pp: int) -> int:  # noqa: ARG002
        """The default number of micro-batches of a step, for a job that does not set it."""
        return 1

    def lay_out(self, workload: Workload, plan: Plan) -> Layout:
        """Choose the stages. Needs no process group, and returns the same layout on all ranks.

        Args:
            workload: a workload with an example; its optimizer determines the state of each
                parameter.
            plan: the plan of the run; its mesh, batch and precision are read.

        Raises:
            ConfigError: the model cannot be cut into so many stages.
        """
        raise NotImplementedError
