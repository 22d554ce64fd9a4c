"""The facts about a technique that other code needs, as one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Need = Literal[
    "nothing",
    "optimizer",
    "gradients",
    "parameters",
    "activations",
    "layer",
    "model",
    "slow links",
    "learning",
]
"""The shortage for which a user takes a technique: "nothing" if all fits on one device; memory for
the optimizer's state, also for gradients, also for parameters, for activations, for one layer, for
the whole model; fast links; or "learning", for a classic that other techniques outperform."""

StorageTier = Literal["device", "cpu", "disk"]
OptimizerInput = Literal["parameters", "owned", "pieces", "shards", "copies"]
"""The tensors that an optimizer updates: whole parameters on every rank ("parameters"), or each on
one rank ("owned"), flat slices of them, DTensors, or an engine's fp32 copies."""

OptimizerSees = Literal["all", "parameters", "shards", "elements"]
"""The tensors that an optimizer's step may read on one rank: all parameters, some whole parameters,
all parameters as DTensors, or flat slices of them."""

Oddity = Literal[
    "gradient_hooks",
    "accumulate_hooks",
    "sparse",
    "sparse_calls",
    "sparse_shared",
    "sparse_and_dense",
    "complex",
    "frozen_complex",
    "scalars",
    "strided",
    "empty",
    "integers",
    "packed",
    "not_fp32",
    "mixed",
    "mixed_block",
    "writes",
    "writes_trained",
    "writes_from_batch",
    "writes_gathered",
    "writes_in_block",
    "graph_in_forward",
    "graph_in_loss",
]
"""A property of a model that not every engine supports; see `assembly.inspection`."""

SPARSE: frozenset[Oddity] = frozenset({"sparse", "sparse_calls", "sparse_shared"})
"""Sparse gradients: of a module that declares them, of a call that nothing declares, or of a
parameter that several modules share."""

SECOND_BACKWARD: frozenset[Oddity] = frozenset({"graph_in_forward", "graph_in_loss"})
"""Gradients that a model or a loss takes itself, as a gradient penalty does: the backward pass
through that backward pass reads the parameters again."""

StageRecompute = Literal["never", "except_last", "always"]
"""The micro-batches whose forward pass a stage recomputes."""


@dataclass(frozen=True)
class OffloadTiers:
    """Where state, parameters and activations are stored between their uses."""

    optimizer: StorageTier = "device"
    parameters: StorageTier = "device"
    activations: StorageTier = "device"
    path: str | None = None
    """The folder of tensors on disk."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The facts about a technique with its options; the defaults are those of plain training."""

    engine: str = "torch"
    """The library that implements it; forecast errors are recorded by engine."""
    owns_step: bool = False
    """Whether it replaces the micro-batch loop; a job has at most one such technique."""
    needs_group: bool = False
    """Whether it needs a process group even for one rank."""
    materializes: bool = False
    """Whether `apply` materialises the model itself, a part at a time."""
    casts_inputs: bool = False
    """Whether floating-point inputs of the model and of each block are cast to bf16 if its
    parameters are in bf16."""
    replaces_products: bool = False
    """Whether its code computes linear layers, and changes their results in place."""
    bf16_parameters: bool = False
    """Whether layers see bf16 parameters in bf16 runs, with fp32 values stored separately.
    Otherwise the parameters are fp32, and autocast converts them at each use."""
    optimizer_gets: OptimizerInput = "parameters"
    optimizer_sees: OptimizerSees = "all"
    """The tensors that the optimizer's step may read, of those that a rank updates in it; see
    `OptimizerSees`."""
    cannot_hold: frozenset[Oddity] = frozenset()
    """Properties of a model that it does not support; refused before anything is built."""
    final_gradients: bool = False
    """Whether the backward pass leaves each gradient ready for the optimizer."""
    whole_backward: bool = False
    """Whether it needs whole backward passes; schedules then do not split them."""
    state_ranks: int | None = 1
    """The number of ranks over which it shards the optimizer's state; None for all replicas."""
    sharded_states: int = 0
    """The states that no rank holds whole at its peak: none (0), the optimizer's (1), also the
    gradients (2), also the parameters (3). A plan holds at least the other states whole and these
    divided by `state_ranks`; the planner skips plans whose lower bound exceeds the memory."""
    gathers_whole: bool = False
    """Whether, if it shards the parameters, whole ones exist in addition to the shards at the end
    of a forward pass."""
    num_servers: int = 0
    """The number of servers: the first ranks of the dp axis, which hold state and compute no loss.
    The other ranks, the workers, share the global batch."""
    notice_every: int = 1
    """Steps between two exchanges of a stop signal among the ranks; more than 1 if ranks do not
    wait for each other in a step."""
    inexact_reason: str | None = None
    """Why the losses differ by intent from those of one process; None where they are the same.

    With a reason, `bigtrain verify` and `train.check_first_steps` give it and compare nothing, and
    techniques that need equal replicas (`tensor`, `bigtrain.ema`) refuse this one."""
    averaging_bucket: int | None = None
    """Bytes of gradients that the replicas of a stage average at once after its backward passes
    (see `replicas.GradientAverager`); None if they do not."""
    sends_messages: bool = False
    """Whether ranks send point-to-point messages with device tensors, besides collectives."""
    copies_modules: bool = False
    """Whether passes run on copies of the modules, one thread for each copy."""
    finds_unused: bool = False
    """Whether it finds the parameters without a gradient in every step; none is frozen before."""
    offload_tiers: OffloadTiers = OffloadTiers()
    """The tiers to which it moves state, parameters and activations."""
    own_offload: bool = False
    """Whether it does the offload role's work itself."""
    moves_parameters: bool = False
    """Whether it stores the parameters where the offload role says."""

    @property
    def on_torch(self) -> bool:
        """Whether torch implements it, and not another library."""
        return self.engine == "torch"


@dataclass(frozen=True, kw_only=True)
class CutTraits(Traits):
    """The traits of a technique that places a model on ranks or devices in stages."""

    schedule: str = "naive"
    """The order of a rank's micro-batches, one of `orders.SCHEDULES`."""
    stages_per_rank: int = 1
    is_distributed: bool = True
    """Whether the stages are on the ranks of the pp axis; otherwise each process has all."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are computed in separate passes."""
    recompute: StageRecompute = "never"
    shares_engine: bool = False
    """Whether its engine also does the work of a replicate technique of the same engine."""

    def takes_over_from(self, replicate: Traits) -> bool:
        """Whether one engine does the work of this technique and of the replicate technique."""
        return self.shares_engine and replicate.engine == self.engine and replicate.owns_step
