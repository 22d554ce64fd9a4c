"""What others have to know of a technique, as data: one record in place of a method each."""

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
"""What a user lacks who takes a technique: nothing, where all fits on one device; the memory for
the optimizer's state, the gradients or the parameters as well, for activations, for one layer, for
the model as a whole; fast links; or an understanding, of what others do better."""

StorageTier = Literal["device", "cpu", "disk"]
OptimizerInput = Literal["parameters", "pieces", "shards", "copies"]
"""What an optimizer updates: whole parameters, stretches of them, DTensors, or an engine's own
fp32 copies."""

OptimizerSees = Literal["all", "parameters", "shards", "elements"]
"""What an optimizer's step may look at on one rank: all parameters, some of them whole, all of them
as DTensors, or stretches and slices of them."""

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
"""What a model may have that not every engine holds; see `assembly.inspection`."""

SPARSE: frozenset[Oddity] = frozenset({"sparse", "sparse_calls", "sparse_shared"})
"""Sparse gradients: of a module that says so, of a call that nothing says beforehand, or of a
parameter that other modules have, too."""

SECOND_BACKWARD: frozenset[Oddity] = frozenset({"graph_in_forward", "graph_in_loss"})
"""Gradients that a model or loss asks for itself, as a gradient penalty does: a backward pass
through a backward pass needs the parameters once more."""

StageRecompute = Literal["never", "except_last", "always"]
"""Which micro-batches a stage computes again for their backward pass."""


@dataclass(frozen=True)
class OffloadTiers:
    """What lives elsewhere than on the device between its uses."""

    optimizer: StorageTier = "device"
    parameters: StorageTier = "device"
    activations: StorageTier = "device"
    path: str | None = None
    """The folder of what is on disk."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a technique is, with the options that it was given; the neutral answers stand here."""

    engine: str = "torch"
    """Whose implementation it is: forecasts are compared with measurements by engine."""
    owns_step: bool = False
    """It replaces the micro-batch loop; a job has at most one such technique."""
    needs_group: bool = False
    """It wants a process group even for one rank."""
    materializes: bool = False
    """`apply` gives the model its values itself, a piece at a time."""
    casts_inputs: bool = False
    """Whether the model, and each of its blocks, is handed numbers in bf16 where its parameters are
    in bf16, whatever the numbers were."""
    replaces_products: bool = False
    """Its own code computes linear layers, and changes their products in place."""
    bf16_parameters: bool = False
    """Layers see bf16 parameters in bf16 runs, the fp32 values being kept apart. Otherwise the
    parameters are fp32 and autocast converts them at each use."""
    optimizer_gets: OptimizerInput = "parameters"
    optimizer_sees: OptimizerSees = "all"
    """On one rank, of what it updates in a step; whatever `optimizer_gets` makes of it."""
    cannot_hold: frozenset[Oddity] = frozenset()
    """What a model may not have under it: refused by name before anything is built."""
    final_gradients: bool = False
    """The backward pass leaves each gradient as the optimizer wants it."""
    whole_backward: bool = False
    """It acts around whole backward passes: schedules that split them do not, then."""
    state_ranks: int | None = 1
    """Over how many ranks it shards the optimizer's state; None for all replicas."""
    sharded_states: int = 0
    """Of the states, what no rank has whole at its highest moment: nothing (0), the optimizer's
    (1), the gradients too (2), the parameters too (3). No plan of it holds less than the rest whole
    and these by `state_ranks`: what is then above the memory is not looked at."""
    gathers_whole: bool = False
    """Where it shards the parameters, they are whole beside the shards, as layers see them, when a
    forward pass has ended."""
    num_servers: int = 0
    """The first ranks of the dp axis that hold state and compute no loss: the others, the workers,
    share the global batch."""
    notice_every: int = 1
    """Steps after which the ranks ask each other for a signal to stop: several, where they do not
    wait for each other in a step."""
    inexact_reason: str | None = None
    """Why the losses differ by intent from those of one process; None where they are the same.

    With a reason, `bigtrain verify` and `train.check_first_steps` give it and compare nothing, and
    techniques that need equal replicas (`tensor`, `bigtrain.ema`) refuse this one."""
    averaging_bucket: int | None = None
    """Bytes of gradients that the replicas of a stage average at once when its backward passes
    are over (see `replicas.GradientAverager`); None where they do not."""
    sends_messages: bool = False
    """Ranks send tensors of the device to one another, beside what all of a group exchange."""
    copies_modules: bool = False
    """Each pass runs on copies of the modules, in threads of their own."""
    finds_unused: bool = False
    """It looks in every step which parameters get a gradient: none is left out beforehand."""
    offload_tiers: OffloadTiers = OffloadTiers()
    """What it moves off the device."""
    own_offload: bool = False
    """It does the offload role's work itself."""
    moves_parameters: bool = False
    """It keeps the parameters where the offload role says."""

    @property
    def on_torch(self) -> bool:
        """Whether it runs on torch's own parts, and not in the engine of another library."""
        return self.engine == "torch"


@dataclass(frozen=True, kw_only=True)
class CutTraits(Traits):
    """The same of a technique that lays a model over ranks or devices in stages."""

    schedule: str = "naive"
    """One of `orders.SCHEDULES`: in which order a rank takes its micro-batches."""
    stages_per_rank: int = 1
    is_distributed: bool = True
    """The stages are on the ranks of the pp axis; otherwise all are in each process."""
    splits_backward: bool = False
    """Gradients of inputs and of weights are computed apart."""
    recompute: StageRecompute = "never"
    shares_engine: bool = False
    """Its engine does the work of a replicate technique of the same engine, too, and the step."""

    def takes_over_from(self, replicate: Traits) -> bool:
        """Whether one engine does this technique's work and the replicate one's."""
        return self.shares_engine and replicate.engine == self.engine and replicate.owns_step
