"""The predicted memory of a run: states that are always there, and timelines of everything else.

A `Profile` is the memory of a model, recorded by one process on fake tensors. A `Forecast` begins
as that profile, and each technique changes it to the memory of one rank. All bytes are per rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bigtrain.memory.timeline import BlockTicks, Breakdown, Peak, Span, Timeline, highest_peak
from bigtrain.optim.step_memory import StepMemory
from bigtrain.slicing.exchange import TensorExchange

Passes = Mapping[str, Timeline]
"""The timelines of one micro-batch of a model or a stage, forward and backward, by kind:

`first`: its backward pass makes the gradients, which are in the timeline. `later`: any other one,
whose backward pass adds to them. A stage may have variants of both, first_VARIANT and
later_VARIANT:

`split`: the backward pass is split in two, for the inputs and for the weights.
`last`: the last micro-batch of a step, if it alone is not recomputed.
`resumed`: for a stage that gathers its parameters, when passes of other micro-batches come in
between. A forward pass after another one finds them gathered; a backward pass after another one
does not.
`strayed`: the same when several forward passes came before the backward pass.
"""

GRADIENT_TICKS = 3
"""Ticks from the end of a layer's backward pass until its gradient is in its place."""


def _no_passes() -> Passes:
    empty = Timeline((), ((0, "forward"),))
    return {"first": empty, "later": empty}


@dataclass(frozen=True)
class BoundaryBytes:
    """The bytes of boundary tensors of a stage, for one micro-batch."""

    incoming: int = 0
    incoming_gradients: int = 0
    """Gradients of the inputs; several may share one storage."""
    outgoing: int = 0
    """Outputs that are not saved for the backward pass anyway."""
    outgoing_gradients: int = 0
    incoming_copied: int = 0
    """The part of `incoming_gradients` that autograd does not make contiguous: a copy of it is
    sent, and the original lives as long as other gradients."""
    gathered: int = 0
    """Inputs of which each tp rank is sent a part: the bytes of all parts together."""


class TiedBytes(NamedTuple):
    """The gradient of a parameter that other pp ranks share."""

    rows: int
    """Rows of the whole gradient."""
    row_bytes: int
    others: int
    """The number of other pp ranks that have the parameter."""

    def received(self, shards: int = 1, shard: int = 0) -> int:
        """Return the bytes that a rank receives in the exchange, which it holds at once.

        Args:
            shards: the number of replicas over which the rows are sharded.
            shard: this replica's shard; the first ones have the most rows.
        """
        share = -(-self.rows // shards)
        own_rows = max(0, min(share, self.rows - shard * share))
        return own_rows * self.row_bytes * self.others


@dataclass(frozen=True)
class CrossingBytes:
    """The bytes that a rank sends and receives for one of its stages.

    Between two stages of one rank nothing is sent.
    """

    sent: int = 0
    """For one micro-batch: outputs, and gradients of inputs."""
    received: int = 0
    tied: tuple[TiedBytes, ...] = ()
    """Gradients of parameters that stages of other ranks share, sent and received once a step."""


class GatheredUse(NamedTuple):
    """Parameters that one module gathers for its passes, and the ticks of these in `first`.

    They are frozen, or its code reads them from another module; see `ReplacedProducts`.
    """

    nbytes: tuple[int, ...]
    """The bytes of each."""
    viewed: tuple[int, ...]
    """For each the tick at which the last view that autograd saved is freed; 0 without a view."""
    forward: tuple[tuple[int, int], ...]
    """The ticks at which its forward passes began and ended."""
    backward: tuple[int | None, int | None] = (None, None)
    """The ticks at which a gradient of its output was first ready, and one of its input last; None
    if there was none."""
    births: tuple[int, ...] = ()
    """The births of the gradients of the trained ones."""


@dataclass(frozen=True)
class Profile:
    """The memory of a model with one micro-batch in one process, before any technique."""

    parameter_bytes: int
    """Bytes of all parameters, frozen ones included."""
    gradient_bytes: int
    """Bytes of the trained parameters' gradients, in the parameters' precision."""
    buffer_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    """One micro-batch with its targets."""
    trained_elements: int = 0
    """The number of trained elements."""
    state_slots: float = 0.0
    """Optimizer state that is sharded like the parameters: elements of the updated precision for
    each trained element. 2 for AdamW (1 with bf16 moments), 1 for SGD with momentum."""
    state_scalars: int = 0
    """Bytes of other optimizer state, such as step counts, over all trained parameters."""
    passes: Passes = field(default_factory=_no_passes)
    step: Timeline = Timeline((), ((0, "forward"),))
    """The memory of clipping and the optimizer's step, in addition to the states."""
    updated: tuple[tuple[tuple[int, ...], int], ...] = ()
    """By trained parameter, in the model's order: its shape and the number of its group in the
    optimizer. Empty if not known."""
    step_memory: StepMemory | None = field(default=None, compare=False, repr=False)
    """The memory of an optimizer's step over other tensors than these parameters."""
    early_share: float = 0.0
    """The share of the optimizer's state that exists before the first step."""
    blocks: tuple[tuple[BlockTicks, BlockTicks], ...] = ()
    """The blocks of the model in `first` and in `later`, in the order in which they run."""
    outside_blocks: BlockTicks | None = None
    """The modules outside the blocks, in `first`."""
    boundary: BoundaryBytes = BoundaryBytes()
    """Bytes of a stage's boundary tensors; zero for a whole model."""
    crossing: CrossingBytes = CrossingBytes()
    """Bytes of the tensors that cross a stage's boundaries; zero for a whole model."""
    windows: tuple[tuple[str, BlockTicks, BlockTicks], ...] = ()
    """Modules that save less than everything, or may, with their ticks in `first` and `later`."""
    recomputed: frozenset[str] = frozenset()
    """The names of those that are recomputed in the backward pass."""
    tensors: tuple[tuple[str, int, str], ...] = ()
    """The trained parameters of a stage in order, each with the bytes and the dtype of its
    gradient."""
    frozen_bytes: int = 0
    """The part of `parameter_bytes` that is never updated."""
    frozen_tensors: tuple[tuple[str, int], ...] = ()
    """The frozen parameters of a stage with their bytes."""
    gradient_births: tuple[int, ...] = ()
    """The tick in `first` at which each trained parameter's gradient is made, in the model's order.
    Empty if not known."""
    viewed_births: tuple[tuple[int, int], ...] = ()
    """The births of those gradients whose parameter autograd saves a view of, each with the tick at
    which the last view is freed: a view keeps the whole parameter alive. Recorded if a technique
    replaces the matrix products, see `Traits`."""
    module_births: tuple[tuple[int, ...], ...] = ()
    """For each module that has parameters itself, the ticks at which their gradients are made."""
    module_begins: tuple[int | None, ...] = ()
    """For each of these modules, the last earlier tick with a gradient of its output."""
    module_passes: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each of these modules the ticks at which its forward passes began and ended."""
    gathered_uses: tuple[GatheredUse, ...] = ()
    """The modules that have frozen parameters or read those of others; recorded like
    `viewed_births`."""
    exchanges: tuple[TensorExchange, ...] = ()
    """The exchanges over the tp axis for one micro-batch, in order."""
    not_compiled: str | None = None
    """Why the blocks were not compiled here, if the run compiles them."""
    branch_condition: str | None = None
    """The condition that selects one of several paths through the model. The path with the most
    memory was run. None if there is one path."""
    untraceable: str | None = None
    """Why the timelines are empty, if the model could not run on fake tensors."""

    def copies_gradients(self) -> bool:
        """Whether some gradient has another layout than its parameter, and is copied."""
        first, later = (
            sorted((span.birth, span.nbytes) for span in self.passes[kind].spans)
            for kind in ("first", "later")
        )
        return [nbytes for _, nbytes in first] != [nbytes for _, nbytes in later]

    def with_passing_gradients(self) -> Timeline:
        """The timeline of a micro-batch whose gradients are freed as soon as they are made."""
        if not self.copies_gradients():
            return self.passes["later"]
        first = self.passes["first"]
        return Timeline(tuple(_passing(span) for span in first.spans), first.phases)


def _passing(span: Span) -> Span:
    """A gradient's span ended as soon as it is made; other spans unchanged."""
    if span.kind != "gradients":
        return span
    return span._replace(death=min(span.death, span.birth + GRADIENT_TICKS))


@dataclass(frozen=True)
class Forecast:
    """One rank's memory over a step, as changed by the techniques so far."""

    states: Breakdown
    """Alive at every moment of the step."""
    passes: Passes
    step: Timeline
    gradients: int
    """Bytes of gradients after the backward pass."""
    micro_batches: int = 1
    """The number of micro-batches of a step, one after the other."""
    boundary: BoundaryBytes = BoundaryBytes()
    """Bytes of the boundary tensors, if this is a stage of a cut model."""
    tensors: tuple[tuple[str, int, str], ...] = ()
    """See `Profile`."""
    step_gradients: int | None = None
    """Bytes of gradients in the optimizer's step, if they differ from those after a backward
    pass."""
    building: Breakdown = Breakdown()
    """Bytes by kind at the peak while an engine is built, for a model whose tensors get their
    values one by one. Zero if it is below the peak of a step."""
    added_to_whole: int = 0
    """The most bytes added to a model that each rank builds whole, before that is freed."""
    early_share: float = 0.0
    """See `Profile`."""
    moved_gradients: int = 0
    """Bytes of gradients that exist twice when the second micro-batch of the first step begins."""
    frozen_tensors: tuple[tuple[str, int], ...] = ()
    """See `Profile`."""

    @classmethod
    def of(cls, profile: Profile) -> Forecast:
        """The forecast of one process with one micro-batch, which techniques then change."""
        states = Breakdown(
            parameters=profile.parameter_bytes - profile.frozen_bytes,
            frozen=profile.frozen_bytes,
            optimizer=profile.optimizer_bytes,
            buffers=profile.buffer_bytes,
            activations=profile.batch_bytes,
        )
        return cls(
            states=states,
            passes=profile.passes,
            step=profile.step,
            gradients=profile.gradient_bytes,
            boundary=profile.boundary,
            tensors=profile.tensors,
            frozen_tensors=profile.frozen_tensors,
            early_share=profile.early_share,
        )

    def with_passes(self, **passes: Timeline) -> Forecast:
        """The forecast with other timelines for some kinds of passes; see `Passes`."""
        return replace(self, passes={**self.passes, **passes})

    def peak(self) -> Peak:
        """Return the peak of a step: its phase, and the bytes of each kind at that moment."""
        states = self.states
        if states.gradients == 0:
            states = replace(states, gradients=self.gradients)
        in_step = states
        if self.step_gradients is not None:
            in_step = replace(states, gradients=self.step_gradients)
        peaks = [self.passes["first"].peak(self.states), self.step.peak(in_step)]
        if self.micro_batches > 1:
            peaks.append(self.passes["later"].peak(states))
            if self.moved_gradients:
                peaks.append(Peak("forward", self._moving(states)))
        return highest_peak(peaks)

    def _moving(self, states: Breakdown) -> Breakdown:
        """The states while gradients are moved: no step has made the optimizer's state yet."""
        return replace(
            states,
            gradients=states.gradients + self.moved_gradients,
            optimizer=round(states.optimizer * self.early_share),
        )
