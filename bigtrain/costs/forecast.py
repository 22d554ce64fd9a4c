"""What a run is predicted to need: the states that stay, and the timelines of what passes.

A `Profile` is a model as the planner sees it, made by one process on fake tensors; a
`Forecast` begins as that profile and is turned by each technique into what one rank will hold.
All bytes are per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bigtrain.memory.timeline import BlockTicks, Breakdown, Peak, Timeline, highest_peak

EMPTY_TIMELINE = Timeline((), ((0, "forward"),))


@dataclass(frozen=True)
class BoundaryBytes:
    """What one micro-batch sends over the cuts of a stage, in bytes."""

    incoming: int = 0
    incoming_gradients: int = 0
    """Of those that a gradient goes back to."""
    outgoing: int = 0
    """Of those that are not kept for the backward pass anyhow."""
    outgoing_gradients: int = 0


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
    first: Timeline = EMPTY_TIMELINE
    """Forward and backward when no gradients exist yet; the gradients made are in it."""
    next: Timeline = EMPTY_TIMELINE
    """Forward and backward when gradients are added to existing ones."""
    step: Timeline = EMPTY_TIMELINE
    """Clipping and the optimizer step: what they need beside the states."""
    blocks: tuple[tuple[BlockTicks, BlockTicks], ...] = ()
    """The blocks of the model in `first` and in `next`, in the order in which they run."""
    outside_blocks: BlockTicks | None = None
    """What is in no block, in `first`."""
    boundary: BoundaryBytes = BoundaryBytes()
    """Of a stage."""
    windows: tuple[tuple[str, BlockTicks, BlockTicks], ...] = ()
    """The modules of which something else than all is kept, or may be, in `first` and `next`."""
    recomputed: frozenset[str] = frozenset()
    """Those of them that are computed again in the backward pass."""
    tensors: tuple[tuple[str, int, str], ...] = ()
    """Of a stage: the trained parameters in their order, bytes and type of their gradients."""
    last: tuple[Timeline, Timeline] | None = None
    """Of a stage: `first` and `next` of a step's last micro-batch, where it alone is not computed
    again."""
    untraceable: str | None = None
    """Why the timelines are empty, where the model could not run on fake tensors."""


@dataclass(frozen=True)
class Forecast:
    """One rank's memory over a step, as far as the techniques so far have shaped it."""

    states: Breakdown
    """Alive at every moment of the step."""
    first: Timeline
    """The first micro-batch."""
    step: Timeline
    gradients: int
    """Bytes of gradients after the backward pass."""
    next: Timeline | None = None
    """Every further micro-batch, where gradients are accumulated."""
    boundary: BoundaryBytes = BoundaryBytes()
    """Of a stage of a cut model."""
    resumed: tuple[Timeline, Timeline] | None = None
    """Of a stage that gathers its parameters: `first` and `next` where the passes of other
    micro-batches come in between; see `replay_actions.StageRecord`."""
    strayed: tuple[Timeline, Timeline] | None = None
    """The same where several forward passes came before the backward pass."""
    tensors: tuple[tuple[str, int, str], ...] = ()
    """See `Profile`."""
    last: tuple[Timeline, Timeline] | None = None
    """See `Profile`."""

    @classmethod
    def of(cls, profile: Profile) -> Forecast:
        """One process, one micro-batch: where every forecast begins."""
        states = Breakdown(
            parameters=profile.parameter_bytes,
            optimizer=profile.optimizer_bytes,
            buffers=profile.buffer_bytes,
            activations=profile.batch_bytes,
        )
        initial = (states, profile.first, profile.step, profile.gradient_bytes)
        return cls(*initial, boundary=profile.boundary, tensors=profile.tensors, last=profile.last)

    def peak(self) -> Peak:
        """The highest moment of a step."""
        states = self.states
        if states.gradients == 0:
            states = replace(states, gradients=self.gradients)
        peaks = [self.first.peak(self.states), self.step.peak(states)]
        if self.next is not None:
            peaks.append(self.next.peak(states))
        return highest_peak(peaks)
