"""What a run is predicted to need: the states that stay, and the timelines of what passes.

A `Profile` is a model as the planner sees it, made by one process on fake tensors; a
`Forecast` begins as that profile and is turned by each technique into what one rank will hold.
All bytes are per rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bigtrain.memory.timeline import BlockTicks, Breakdown, Peak, Span, Timeline, highest_peak
from bigtrain.optim.step_memory import StepMemory
from bigtrain.slicing.exchange import TensorExchange

Passes = Mapping[str, Timeline]
"""One micro-batch of a model or of a stage, forward and backward, by how it goes:

`first`, whose backward pass makes the gradients (they are in it); `later`, that of any other, which
adds to them. A stage may have both of them again for other ways, `first_WAY` and `later_WAY`:

`split`: with the backward pass in two parts, for the inputs and for the weights.
`last`: the last micro-batch of a step, where it alone is not computed again.
`resumed`: of a stage that gathers its parameters, where passes of other micro-batches come in
between: a forward pass that follows another one finds what that has gathered, and a backward pass
that follows another one finds nothing.
`strayed`: the same where several forward passes came before the backward pass.
"""

GRADIENT_TICKS = 3
"""Ticks from when a layer has made a gradient until it is where it belongs."""


def _no_passes() -> Passes:
    empty = Timeline((), ((0, "forward"),))
    return {"first": empty, "later": empty}


@dataclass(frozen=True)
class BoundaryBytes:
    """What one micro-batch sends over the cuts of a stage, in bytes."""

    incoming: int = 0
    incoming_gradients: int = 0
    """Of the gradients that go back for those; several may be one storage."""
    outgoing: int = 0
    """Of those that are not kept for the backward pass anyhow."""
    outgoing_gradients: int = 0
    incoming_copied: int = 0
    """Of `incoming_gradients` those that autograd gives otherwise than contiguous: a copy of them
    is sent, and they themselves are kept as all others are."""
    gathered: int = 0
    """What comes in where a rank of the tp axis is sent its part of it: of all parts."""


@dataclass(frozen=True)
class CrossingBytes:
    """What a rank sends and receives for a stage of it, in bytes: none between its own stages."""

    sent: int = 0
    """Of one micro-batch: what goes on, and the gradients of what came."""
    received: int = 0
    tied: tuple[tuple[int, int], ...] = ()
    """Once a step, both ways: the gradients of parameters that stages of other ranks use, too, as
    rows and bytes of a row, one for each other rank."""


@dataclass(frozen=True)
class Profile:
    """One model with one micro-batch, on one process, before any technique."""

    parameter_bytes: int
    gradient_bytes: int
    """Of the parameters that are trained, in their own precision."""
    buffer_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    """One micro-batch with its targets."""
    trained_elements: int = 0
    """Numbers in the trained parameters."""
    state_slots: float = 0.0
    """Optimizer state that is cut as the parameters are, in numbers of the precision that is
    updated for each trained one: 2 for AdamW (1 with bf16 moments), 1 for SGD with momentum."""
    state_scalars: int = 0
    """Bytes of optimizer state beside those, as step counts, over all trained parameters."""
    passes: Passes = field(default_factory=_no_passes)
    step: Timeline = Timeline((), ((0, "forward"),))
    """Clipping and the optimizer step: what they need beside the states."""
    updated: tuple[tuple[tuple[int, ...], int], ...] = ()
    """Of each trained parameter, in the model's order, its shape and the number of its group in the
    optimizer; empty where it is not known."""
    step_memory: StepMemory | None = field(default=None, compare=False, repr=False)
    """What a step needs on other tensors than these parameters."""
    early_share: float = 0.0
    """How much of the optimizer's state is there before the first step."""
    blocks: tuple[tuple[BlockTicks, BlockTicks], ...] = ()
    """The blocks of the model in `first` and in `later`, in the order in which they run."""
    outside_blocks: BlockTicks | None = None
    """What is in no block, in `first`."""
    boundary: BoundaryBytes = BoundaryBytes()
    """Of a stage."""
    crossing: CrossingBytes = CrossingBytes()
    """Of a stage."""
    windows: tuple[tuple[str, BlockTicks, BlockTicks], ...] = ()
    """The modules of which something else than all is kept, or may be, in `first` and `later`."""
    recomputed: frozenset[str] = frozenset()
    """Those of them that are computed again in the backward pass."""
    tensors: tuple[tuple[str, int, str], ...] = ()
    """Of a stage: the trained parameters in their order, bytes and type of their gradients."""
    gradient_births: tuple[int, ...] = ()
    """In `first`, the tick at which the gradient of each trained parameter is made, in the order
    in which the model lists these; empty where it is not known."""
    viewed_births: tuple[tuple[int, int], ...] = ()
    """Those of them of whose parameters autograd keeps a view for the backward pass, which keeps
    the whole, each with the tick at which the last view goes. Noted where a technique replaces the
    products, see `Traits`."""
    module_births: tuple[tuple[int, ...], ...] = ()
    """The same of each module that has parameters itself."""
    module_begins: tuple[int | None, ...] = ()
    """Of each of them the last tick before, at which a gradient of its output was there."""
    module_passes: tuple[tuple[tuple[int, int], ...], ...] = ()
    """And the ticks at which its forward passes began and ended."""
    exchanges: tuple[TensorExchange, ...] = ()
    """What the ranks of the tp axis exchange for one micro-batch, in order."""
    not_compiled: str | None = None
    """Why blocks are as they are written, where the run compiles them."""
    way: str | None = None
    """What decides the way through the model, where passes may go several: the fullest was run."""
    untraceable: str | None = None
    """Why the timelines are empty, where the model could not run on fake tensors."""

    def copies_gradients(self) -> bool:
        """Whether some gradient comes in another layout than its parameter's, and is copied."""
        first, later = (
            sorted((span.birth, span.nbytes) for span in self.passes[way].spans)
            for way in ("first", "later")
        )
        return [nbytes for _, nbytes in first] != [nbytes for _, nbytes in later]

    def with_passing_gradients(self) -> Timeline:
        """One micro-batch whose gradients go as soon as they are there: none is added to."""
        if not self.copies_gradients():
            return self.passes["later"]
        first = self.passes["first"]
        return Timeline(tuple(_passing(span) for span in first.spans), first.phases)


def _passing(span: Span) -> Span:
    """A gradient that goes as soon as it is there; all else as it is."""
    if span.kind != "gradients":
        return span
    return span._replace(death=min(span.death, span.birth + GRADIENT_TICKS))


@dataclass(frozen=True)
class Forecast:
    """One rank's memory over a step, as far as the techniques so far have shaped it."""

    states: Breakdown
    """Alive at every moment of the step."""
    passes: Passes
    step: Timeline
    gradients: int
    """Bytes of gradients after the backward pass."""
    micro_batches: int = 1
    """Of a step, one after the other."""
    boundary: BoundaryBytes = BoundaryBytes()
    """Of a stage of a cut model."""
    tensors: tuple[tuple[str, int, str], ...] = ()
    """See `Profile`."""
    step_gradients: int | None = None
    """Bytes of gradients in the optimizer's step, where they are not those after the backward
    pass of any micro-batch."""
    building: Breakdown = Breakdown()
    """The highest moment while the engine is made, of a model whose tensors get their values one by
    one; where nothing is said it is below those of a step."""
    beside_whole: int = 0
    """The most that is made beside a model that each rank builds whole, before that goes."""
    early_share: float = 0.0
    """See `Profile`."""
    moved_gradients: int = 0
    """Bytes of gradients that are there twice where the second micro-batch of the first step
    begins."""

    @classmethod
    def of(cls, profile: Profile) -> Forecast:
        """One process, one micro-batch: where every forecast begins."""
        states = Breakdown(
            parameters=profile.parameter_bytes,
            optimizer=profile.optimizer_bytes,
            buffers=profile.buffer_bytes,
            activations=profile.batch_bytes,
        )
        initial = (states, profile.passes, profile.step, profile.gradient_bytes)
        found = cls(*initial, boundary=profile.boundary, tensors=profile.tensors)
        return replace(found, early_share=profile.early_share)

    def with_passes(self, **passes: Timeline) -> Forecast:
        """With other timelines for some ways that a micro-batch goes."""
        return replace(self, passes={**self.passes, **passes})

    def peak(self) -> Peak:
        """The highest moment of a step."""
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
        """What is there while gradients are moved: no step has made the optimizer's state yet."""
        return replace(
            states,
            gradients=states.gradients + self.moved_gradients,
            optimizer=round(states.optimizer * self.early_share),
        )
