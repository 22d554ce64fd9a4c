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
"""The shortage that a technique relieves.

"nothing" is for plans that fit on one device. "optimizer" is memory for the optimizer's state,
"gradients" for its state and the gradients, "parameters" for these two and the parameters. Memory
may also be short for "activations", for one "layer" or for the whole "model". "slow links" is for
techniques that send less. "learning" is for classic techniques that other techniques outperform;
they serve study."""

StorageTier = Literal["device", "cpu", "disk"]
"""The memory of the device that computes, host memory, or files."""

OptimizerInput = Literal["parameters", "owned", "pieces", "shards", "copies"]
"""The tensors that an optimizer updates.

"parameters": whole parameters, on every rank. "owned": whole parameters, each on one rank.
"pieces": flat slices of parameters. "shards": DTensors. "copies": fp32 copies that belong to an
engine."""

OptimizerSees = Literal["all", "parameters", "shards", "elements"]
"""The tensors that an optimizer's step may read on one rank.

"all": all parameters, whole. "parameters": some parameters, whole. "shards": all parameters, as
DTensors. "elements": flat slices of parameters."""

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
"""A property of a model that not every engine supports; `assembly.inspection` finds them."""

SPARSE: frozenset[Oddity] = frozenset({"sparse", "sparse_calls", "sparse_shared"})
"""Sparse gradients: of a module that declares them (`sparse=True`), of a functional call, or of a
parameter that several modules share."""

SECOND_BACKWARD: frozenset[Oddity] = frozenset({"graph_in_forward", "graph_in_loss"})
"""Gradients that a model or a loss computes itself, with `create_graph=True`, as a gradient penalty
does. The backward pass of the step differentiates that first backward pass too, and so reads the
parameters again."""

StageRecompute = Literal["never", "except_last", "always"]
"""The micro-batches whose forward pass a stage recomputes."""


@dataclass(frozen=True)
class OffloadTiers:
    """Where state, parameters and activations are stored between their uses."""

    optimizer: StorageTier = "device"
    parameters: StorageTier = "device"
    activations: StorageTier = "device"
    path: str | None = None
    """The folder of the tensors on disk; None for the default folder, or if none are on disk."""

    @property
    def state_word(self) -> str | None:
        """The key and value that move optimizer state or parameters; None if neither is moved."""
        for name in ("optimizer", "parameters"):
            if getattr(self, name) != "device":
                return f"strategy.offload.{name}={getattr(self, name)}"
        return None


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The facts about a technique with its options; the defaults are those of plain training."""

    engine: str = "torch"
    """The library that implements the technique; forecast errors are recorded by engine."""
    owns_step: bool = False
    """Whether the technique replaces the loop over micro-batches, the backward pass or the update
    of parameters. A job has at most one such technique, except where `takes_over_from` is true."""
    needs_group: bool = False
    """Whether the technique needs a process group even for one rank."""
    materializes: bool = False
    """Whether `Strategy.apply` gives the model's parameters their values, a part at a time."""
    casts_inputs: bool = False
    """Whether floating-point inputs of the model and of each block are cast to bf16 if the
    parameters are in bf16."""
    replaces_products: bool = False
    """Whether the engine's own code computes linear layers, and changes their results in place."""
    bf16_parameters: bool = False
    """Whether layers compute with bf16 parameters in bf16 runs, with fp32 values stored separately.
    Otherwise the parameters are fp32, and autocast converts them at each use."""
    optimizer_gets: OptimizerInput = "parameters"
    optimizer_sees: OptimizerSees = "all"
    """The tensors that the optimizer's step may read on one rank, with several replicas."""
    cannot_hold: frozenset[Oddity] = frozenset()
    """Properties of a model that the technique does not support. Models with one are refused before
    anything is built."""
    final_gradients: bool = False
    """Whether the backward pass leaves each gradient ready for the optimizer."""
    whole_backward: bool = False
    """Whether the technique needs whole backward passes; schedules then do not split them."""
    state_ranks: int | None = 1
    """The number of ranks over which the optimizer's state is sharded; None for all replicas."""
    sharded_states: int = 0
    """The states that no rank holds whole at its memory peak: none (0), the optimizer's state (1),
    also the gradients (2), also the parameters (3).

    The planner computes a lower bound of a rank's memory: these states divided by `state_ranks`,
    and the other states whole. It skips plans whose lower bound exceeds the memory."""
    gathers_whole: bool = False
    """Whether sharded parameters exist whole, in addition to the shards, at the end of a forward
    pass."""
    gathers_outside: bool = False
    """Whether modules outside of blocks are gathered one by one (`blocks.modules_outside`). They
    are then among the blocks of profiles."""
    num_servers: int = 0
    """The number of parameter servers: the first ranks of the dp axis, which hold state and compute
    no loss. The other ranks, the workers, share the global batch."""
    notice_every: int = 1
    """Steps between two exchanges of a stop signal among the ranks; more than 1 if ranks do not
    wait for each other in a step."""
    inexact_reason: str | None = None
    """Why the losses differ by design from those of one process; None if they are the same.

    With a reason, `bigtrain verify` and `train.check_first_steps` print it and compare nothing.
    Techniques that need equal replicas (`tensor`, `bigtrain.ema`) refuse this technique."""
    averaging_bucket: int | None = None
    """Bytes of gradients that the replicas of a stage average at once, after its backward passes
    (see `replicas.GradientAverager`). None if the technique does not average them so."""
    sends_messages: bool = False
    """Whether ranks send point-to-point messages with device tensors, and not only collectives."""
    copies_modules: bool = False
    """Whether passes run on copies of the modules, one thread for each copy."""
    finds_unused: bool = False
    """Whether the parameters without a gradient are found anew in every step. The parameters that
    the loss does not reach are then not frozen before the run."""
    offload_tiers: OffloadTiers = OffloadTiers()
    """The tiers to which the technique moves state, parameters and activations."""
    own_offload: bool = False
    """Whether the technique's engine does the work of the offload role itself."""
    moves_parameters: bool = False
    """Whether the technique stores the parameters on the tier of the offload role."""

    @property
    def on_torch(self) -> bool:
        """Whether torch implements the technique, and not another library."""
        return self.engine == "torch"


@dataclass(frozen=True, kw_only=True)
class CutTraits(Traits):
    """The traits of a technique that places a model on ranks or devices in stages."""

    schedule: str = "naive"
    """The name of the order of a rank's passes, one of `orders.SCHEDULES`."""
    stages_per_rank: int = 1
    is_distributed: bool = True
    """Whether the stages are on the ranks of the pp axis; otherwise each process has all stages."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are computed in separate passes."""
    recompute: StageRecompute = "never"
    shares_engine: bool = False
    """Whether the engine also does the work of a replicate technique of the same engine."""

    def takes_over_from(self, replicate: Traits) -> bool:
        """Whether the engine of this technique does the work of the replicate technique too."""
        return self.shares_engine and replicate.engine == self.engine and replicate.owns_step
