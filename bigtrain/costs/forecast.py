"""The predicted memory of a run: states that exist all the time, and timelines of the rest.

A `Profile` is the memory of a model, recorded by one process on fake tensors. A `Forecast` is
first made from the profile alone. Each technique then changes it to the memory of one rank with
this technique. All bytes are per rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bigtrain.memory.timeline import BlockTicks, Breakdown, Peak, Span, Timeline, highest_peak
from bigtrain.optim.step_memory import StepMemory
from bigtrain.slicing.exchange import TensorExchange

Passes = Mapping[str, Timeline]
"""The timelines of one micro-batch of a model or a stage, forward and backward, by kind.

The kind `first` is the first micro-batch of a step. Its backward pass allocates the gradients,
which are in the timeline. The kind `later` is every other micro-batch. Its backward pass adds to
the gradients. A stage may have variants of both kinds, named first_VARIANT and later_VARIANT:

`split`: the backward pass is split in two, for the inputs and for the weights.
`last`: the last micro-batch of a step, if it is the only one that is not recomputed, or the only
one whose gradients are reduced. The latter may be combined with the two kinds below:
last_resumed and last_strayed.
`resumed`: a stage gathers its parameters, and passes of other micro-batches come in between. A
forward pass that follows another forward pass finds the parameters gathered. A backward pass that
follows another backward pass has to gather them again.
`strayed`: a stage gathers its parameters, and the backward pass follows several forward passes.
"""

GRADIENT_TICKS = 3
"""The most clock ticks that a gradient lives if it is freed as soon as it has been used."""


def _no_passes() -> Passes:
    empty = Timeline((), ((0, "forward"),))
    return {"first": empty, "later": empty}


@dataclass(frozen=True)
class BoundaryBytes:
    """The bytes of a stage's boundary tensors, its inputs and outputs, for one micro-batch."""

    incoming: int = 0
    incoming_gradients: int = 0
    """Gradients of the inputs. A storage that several of them share counts once."""
    outgoing: int = 0
    """Outputs, except those that the stage saves for its backward pass."""
    outgoing_gradients: int = 0
    incoming_copied: int = 0
    """The part of `incoming_gradients` that autograd does not make contiguous. A contiguous copy
    is sent, and the original lives as long as the other gradients of the inputs."""
    gathered: int = 0
    """Inputs of which each tp rank receives a part, and which are then gathered: the bytes of all
    parts together."""


class TiedBytes(NamedTuple):
    """The gradient of a parameter that other pp ranks share."""

    rows: int
    """Rows of the whole gradient."""
    row_bytes: int
    others: int
    """The number of other pp ranks that have the parameter."""

    @classmethod
    def of(cls, shape: Sequence[int], nbytes: int, others: int) -> TiedBytes:
        """Return the figures of a gradient of a shape; a scalar has one row."""
        rows = shape[0] if shape and shape[0] else 1
        return cls(rows, nbytes // rows, others)

    def received(self, shards: int = 1, shard: int = 0) -> int:
        """Return the bytes that a rank receives in the exchange; all of them exist at once.

        Args:
            shards: the number of replicas over which the rows are sharded.
            shard: the index of this replica's shard; the first shards have the most rows.
        """
        share = -(-self.rows // shards)
        own_rows = max(0, min(share, self.rows - shard * share))
        return own_rows * self.row_bytes * self.others


@dataclass(frozen=True)
class CrossingBytes:
    """The bytes that a rank sends and receives for one of its stages.

    Nothing is sent between two stages of the same rank.
    """

    sent: int = 0
    """Outputs, and gradients of inputs, of one micro-batch."""
    received: int = 0
    """Inputs, and gradients of outputs, of one micro-batch."""
    tied: tuple[TiedBytes, ...] = ()
    """Gradients of parameters that are shared with stages of other ranks. They are sent and
    received once a step."""


class GatheredUse(NamedTuple):
    """Parameters that one module gathers for its passes, and the ticks of its passes in `first`.

    The parameters are frozen, or belong to another module from which the module's code reads them;
    see `ReplacedProducts`.
    """

    nbytes: tuple[int, ...]
    """The bytes of each parameter."""
    viewed: tuple[int, ...]
    """For each parameter the tick at which the last view of it that autograd saved is freed; 0 if
    autograd saved no view."""
    forward: tuple[tuple[int, int], ...]
    """The ticks at which the module's forward passes began and ended."""
    backward: tuple[int | None, int | None] = (None, None)
    """The first tick at which a gradient of the module's output was ready, and the last tick at
    which a gradient of the module's input was; None where there was no such gradient."""
    births: tuple[int, ...] = ()
    """For the trained ones of these parameters, the ticks at which their gradients are made."""


@dataclass(frozen=True)
class Loading:
    """The sizes of what exists for a moment while parameters get their values."""

    whole_frozen: int
    """Elements of the largest frozen parameter that is made whole and in fp32, because its values
    are not read from files in parts."""
    piece_bytes: int
    """Bytes of the largest piece that is read from a file at a time; 0 if it is not on the device
    of the run."""


@dataclass(frozen=True)
class Profile:
    """The memory of a model with one micro-batch in one process, before any technique."""

    parameter_bytes: int
    """Bytes of all parameters, frozen ones included."""
    gradient_bytes: int
    """Bytes of the trained parameters' gradients, in the parameters' precision."""
    buffer_bytes: int
    """Bytes of all buffers."""
    optimizer_bytes: int
    """Bytes of the optimizer's state after its first step."""
    batch_bytes: int
    """Bytes of the inputs and targets of one micro-batch."""
    trained_elements: int = 0
    """The number of elements of all trained parameters."""
    state_slots: float = 0.0
    """The size of the optimizer state that has the shapes of the parameters, and so is sharded like
    them. The unit is elements, in the precision of the update, for each trained element: 2 for
    AdamW (1 with bf16 moments), 1 for SGD with momentum."""
    state_scalars: int = 0
    """Bytes of the other optimizer state, such as step counts, over all trained parameters."""
    passes: Passes = field(default_factory=_no_passes)
    step: Timeline = Timeline((), ((0, "forward"),))
    """The memory of gradient clipping and of the optimizer's step, in addition to the states."""
    updated: tuple[tuple[tuple[int, ...], int], ...] = ()
    """For each trained parameter, in the model's order: its shape, and the index of its group in
    the optimizer. Empty if not known."""
    step_memory: StepMemory | None = field(default=None, compare=False, repr=False)
    """Forecasts the memory of the optimizer's step on tensors of other shapes than these
    parameters."""
    early_share: float = 0.0
    """The share of the optimizer's state, from 0 to 1, that exists before the first step."""
    blocks: tuple[tuple[BlockTicks, BlockTicks], ...] = ()
    """For each block of the model its ticks in `first` and in `later`, in the order in which the
    blocks run."""
    outside_blocks: BlockTicks | None = None
    """The parameters outside of all blocks, with their ticks in `first`."""
    uncalled: tuple[str, ...] = ()
    """Names of those modules outside of blocks that are gathered alone (see
    `Traits.gathers_outside`), but are not called."""
    boundary: BoundaryBytes = BoundaryBytes()
    """Bytes of a stage's boundary tensors; zero for a whole model."""
    crossing: CrossingBytes = CrossingBytes()
    """Bytes of the tensors that cross a stage's boundaries; zero for a whole model."""
    windows: tuple[tuple[str, BlockTicks, BlockTicks], ...] = ()
    """The modules to which a `BlockPolicy` applies: name, ticks in `first`, ticks in `later`. In a
    composed profile, only the recomputed blocks."""
    recomputed: frozenset[str] = frozenset()
    """The names of the modules that are recomputed in the backward pass."""
    tensors: tuple[tuple[str, int, str], ...] = ()
    """The trained parameters of a stage in order: name, and the bytes and dtype of the gradient."""
    frozen_bytes: int = 0
    """The part of `parameter_bytes` that is never updated."""
    frozen_tensors: tuple[tuple[str, int], ...] = ()
    """The frozen parameters of a stage: name and bytes."""
    gradient_births: tuple[int, ...] = ()
    """The tick in `first` at which each trained parameter's gradient is made, in the model's order.
    Empty if not known."""
    viewed_births: tuple[tuple[int, int], ...] = ()
    """The parameters of which autograd saves a view: the tick at which the gradient is made, and
    the tick at which the last view is freed. A view keeps the whole parameter alive. Recorded only
    if a technique replaces the matrix products (`Traits.replaces_products`)."""
    module_births: tuple[tuple[int, ...], ...] = ()
    """For each module that has parameters of its own, the ticks at which their gradients are made.
    Recorded like `viewed_births`."""
    module_begins: tuple[int | None, ...] = ()
    """For each module of `module_births`, the last tick at which a gradient of the module's output
    was ready before the first gradient of its parameters was made; None if there was none."""
    module_passes: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each module of `module_births`, the ticks at which its forward passes began and ended."""
    gathered_uses: tuple[GatheredUse, ...] = ()
    """The modules that have frozen parameters, or read parameters of other modules. Recorded like
    `viewed_births`."""
    exchanges: tuple[TensorExchange, ...] = ()
    """The exchanges over the tp axis for one micro-batch, in order."""
    not_compiled: str | None = None
    """The reason why blocks that the run compiles were not compiled in this recording; None if
    there are none."""
    branch_condition: str | None = None
    """A description of the condition that selects one of several branches of the model. The branch
    with the most memory was recorded. None if the model has one branch."""
    untraceable: str | None = None
    """The reason why the model could not run on fake tensors, so that the timelines are empty; None
    if it could."""
    loading: Loading | None = None
    """How parameters get their values. If it is None, all may be whole and in fp32 for a moment."""

    def copies_gradients(self) -> bool:
        """Whether autograd copies a gradient because its layout differs from its parameter's."""
        first, later = (
            sorted((span.birth, span.nbytes) for span in self.passes[kind].spans)
            for kind in ("first", "later")
        )
        return [nbytes for _, nbytes in first] != [nbytes for _, nbytes in later]

    def with_passing_gradients(self) -> Timeline:
        """Return the timeline of a micro-batch whose gradients are freed once they are made."""
        if not self.copies_gradients():
            return self.passes["later"]
        first = self.passes["first"]
        return Timeline(tuple(_passing(span) for span in first.spans), first.phases)


def _passing(span: Span) -> Span:
    """Return a gradient's span, ended soon after its birth; other spans unchanged."""
    if span.kind != "gradients":
        return span
    return span._replace(death=min(span.death, span.birth + GRADIENT_TICKS))


@dataclass(frozen=True)
class Forecast:
    """The memory of one rank over a step, with the techniques that were applied so far."""

    states: Breakdown
    """Bytes that exist at every moment of the step."""
    passes: Passes
    step: Timeline
    """See `Profile`."""
    gradients: int
    """Bytes of gradients that exist after the backward pass."""
    micro_batches: int = 1
    """The number of micro-batches of a step that run one after the other."""
    boundary: BoundaryBytes = BoundaryBytes()
    """Bytes of the boundary tensors, if the forecast is of one stage of a cut model."""
    tensors: tuple[tuple[str, int, str], ...] = ()
    """See `Profile`."""
    step_gradients: int | None = None
    """Bytes of gradients in the optimizer's step; None if they are `gradients`."""
    building: Breakdown = Breakdown()
    """Bytes at the peak of building, by kind, if the technique's engine builds the model and gives
    the model's tensors their values one by one. Zero if building needs less than a step."""
    added_to_whole: int = 0
    """The most bytes that exist in addition to the whole model, if each rank builds the model whole
    and the technique then shards it."""
    early_share: float = 0.0
    """See `Profile`."""
    moved_gradients: int = 0
    """Bytes of gradients that exist twice when the second micro-batch of the first step begins,
    because they are moved from one set of buckets to another."""
    frozen_tensors: tuple[tuple[str, int], ...] = ()
    """See `Profile`."""

    @classmethod
    def of(cls, profile: Profile) -> Forecast:
        """Return the forecast of one process with one micro-batch, before any technique."""
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
        """Return a copy with other timelines for some kinds of passes; see `Passes`."""
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
        """Return the states while gradients are moved, before the first optimizer step."""
        return replace(
            states,
            gradients=states.gradients + self.moved_gradients,
            optimizer=round(states.optimizer * self.early_share),
        )
