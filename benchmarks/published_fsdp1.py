"""The memory of a rank under FSDP1, which published runs used and bigtrain does not have.

The passes are bigtrain's forecast of one process. The memory that FSDP1 itself allocates is added
(`torch/distributed/fsdp`, torch 2.4):

* Each block is a flat parameter, which is gathered for its passes.
* The next block of the backward pass is gathered while a block computes (BACKWARD_PRE).
* The root holds the embedding, the last norm and the head. It stays whole from the forward pass to
  the end of the backward pass.
* A block's whole gradients live until those of the next block are reduced.

One more cost occurs only with frozen blocks under reentrant checkpoints. FSDP1 then waits for the
gradients of a block's inputs, with a hook that holds their `AccumulateGrad`. So each block's input
and its gradient live until the backward pass ends. A run of two processes on a CPU shows this: with
FSDP1 the inputs of all eight blocks are alive in the last backward pass, without FSDP1 none is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bigtrain.costs.forecast import Profile
from bigtrain.memory.timeline import (
    BlockTicks,
    Breakdown,
    Peak,
    Span,
    Timeline,
    highest_peak,
    scale_timeline,
)


@dataclass(frozen=True)
class Sharded:
    """The sizes of a model under FSDP1, in bytes unless a field says otherwise."""

    gpus: int
    trained: int
    """The number of trained parameters."""
    width: int
    """Bytes of an element of a trained shard, of its gradient and of each moment."""
    frozen: int
    """Bytes of all frozen parameters."""
    block: int
    """Bytes of a gathered block."""
    rest: int
    """Bytes of the gathered root."""
    block_trained: int
    """The number of trained parameters of a block."""
    held_input: int
    """Bytes of a block's input, if it is held; else 0."""
    late: bool
    """Whether a block is gathered for its backward pass only when the block after it is done. FSDP1
    prefetches one unit, and an adapter is a unit of its own."""
    moments: int = 2

    @property
    def states(self) -> Breakdown:
        """The memory that a rank holds all the time. Gradients are not in it."""
        share = self.trained * self.width // self.gpus
        return Breakdown(
            parameters=share, frozen=self.frozen // self.gpus, optimizer=self.moments * share
        )


def sharded_peak(profile: Profile, sizes: Sharded, own_width: int) -> Peak:
    """Return the peak of a step on one rank, in bytes.

    Args:
        profile: the profile of one process.
        sizes: the sizes of the model.
        own_width: the bytes of an element of a trained parameter in the profile.
    """
    whole = profile.passes["first"]
    persistent = sizes.states.plus(
        Breakdown(buffers=profile.buffer_bytes, activations=profile.batch_bytes)
    )
    during = Timeline(tuple(_spans(profile, whole, sizes)), whole.phases)
    gradients = Breakdown(gradients=sizes.trained * sizes.width // sizes.gpus)
    step = scale_timeline(profile.step, sizes.width / own_width / sizes.gpus)
    return highest_peak([during.peak(persistent), step.peak(persistent.plus(gradients))])


def _spans(profile: Profile, whole: Timeline, sizes: Sharded) -> Iterator[Span]:
    end = max(span.death for span in whole.spans)
    blocks = [first for first, _ in profile.blocks]
    yield from (_reduced(span, blocks, end) for span in whole.spans)
    yield Span(sizes.rest, "parameters", whole.phases[0][0], end)
    for place, block in enumerate(blocks):
        done = block.backward[1]
        before = blocks[place - 1].backward[1] if place else end
        after = blocks[place + 1] if place + 1 < len(blocks) else None
        free = after.forward[1] if after else block.forward[1]
        yield Span(sizes.block, "parameters", block.forward[0], free)
        gathered = block.backward[0]
        if after:
            gathered = after.backward[1 if sizes.late else 0]
        yield Span(sizes.block, "parameters", gathered, done)
        shard = sizes.block_trained * sizes.width // sizes.gpus
        yield Span(shard, "gradients", done, end)
        yield Span(sizes.held_input, "activations", done, end)
        yield Span(sizes.held_input, "activations", before if place else done, end)


def _reduced(span: Span, blocks: Sequence[BlockTicks], end: int) -> Span:
    """End the span of a whole gradient when the next block's are reduced; keep other spans."""
    if span.kind != "gradients":
        return span
    death = end
    for place, block in enumerate(blocks):
        if block.backward[0] < span.birth <= block.backward[1]:
            death = max(blocks[place - 1].backward[1] if place else end, block.backward[1])
    return span._replace(kind="temporary", death=max(span.birth + 1, min(death, end)))
