"""Stage 1 on torch: DDP averages the gradients, and each rank updates its share of the parameters.

The shares are equal flat slices of all parameters one after the other. They are updated in place
and broadcast in place (see `optim.partitioned`), so nothing is copied. P parameters on N ranks need
8P + 8P/N bytes on a rank in fp32. In bf16 they need 4P + 12P/N bytes, because only the rank that
updates a parameter has its fp32 copy. torch's ZeroRedundancyOptimizer assigns whole parameters to
ranks, so its shares are never more equal.
The ranks exchange DDP's average of the gradients, and each parameter once after the step. Together
that is 1.5 times the bytes of DDP alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from bigtrain.core.replicas import BUCKET_SIZE, average_gradients, with_averaged_gradients
from bigtrain.core.strategy import Assembly, Plan
from bigtrain.core.traits import SPARSE, Traits
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import Traffic, gradient_average_traffic, parameter_shapes
from bigtrain.errors import ConfigError
from bigtrain.memory.timeline import Span, Timeline, scale_timeline
from bigtrain.models.parameters import bf16_parameter_names
from bigtrain.optim.kinds import ELEMENTWISE_OPTIMIZERS
from bigtrain.optim.partition import chunk_elements, partition_evenly, split_into_chunks
from bigtrain.optim.partitioned import PartitionedUpdate, ReplicaGroup
from bigtrain.optim.step_memory import StepMemory
from bigtrain.strategies.zero import Zero


class ShardedOptimizer(Zero):
    """Optimizer state and fp32 copies are sharded; parameters and gradients are on every rank."""

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(
            bf16_parameters=True,
            optimizer_gets="pieces",
            optimizer_sees="parameters",
            cannot_hold=SPARSE,
            state_ranks=None,
            sharded_states=1,
            averaging_bucket=self._bucket,
        )

    @property
    def _bucket(self) -> int:
        return self.bucket_size or BUCKET_SIZE

    def check(self, plan: Plan) -> None:  # noqa: ARG002
        """Refuse options of other engines or stages."""
        self.refuse_config()
        self.refuse_unit_choices()
        if self.shard_ranks is not None:
            raise ConfigError(
                f"strategy.replicate.shard_ranks={self.shard_ranks} is for stages 2 and 3, and "
                "stage is 1. Leave it out, or set strategy.replicate.stage=3."
            )

    def estimate(
        self,
        forecast: Forecast,
        profile: Profile,
        plan: Plan,
    ) -> Forecast:
        """Return the forecast with this rank's share of the optimizer state only.

        With several replicas and no pipeline, the gradients are in DDP's buckets.
        """
        size = 8 if plan.precision == "fp64" else 4
        share = math.ceil(profile.trained_elements / plan.dp)
        # fp32 values for each element of the share: the state, and in bf16 the parameter itself.
        state_slots = profile.state_slots + (1 if plan.bf16_parameters else 0)
        kept_fraction = float(plan.offload_tiers.optimizer == "device")
        if profile.optimizer_bytes:  # plain SGD has none, and yet each rank has fp32 values
            kept_fraction = forecast.states.optimizer / profile.optimizer_bytes
        optimizer = size * share * state_slots + profile.state_scalars / plan.dp
        states = replace(forecast.states, optimizer=round(optimizer * min(1.0, kept_fraction)))
        step = forecast.step
        if plan.bf16_parameters:
            step = _on_chunks(profile, plan, step)
        elif plan.offload_tiers.optimizer == "device":
            step = _on_pieces(profile, plan) or scale_timeline(step, 1 / plan.dp)
        # The fp32 values of a share exist before the first step, unlike most optimizers' state.
        held = size * share if plan.bf16_parameters else 0
        early = held + (optimizer - held) * profile.early_share
        forecast = replace(
            forecast, states=states, step=step, early_share=early / max(1, optimizer)
        )
        if plan.dp == 1 or plan.pp > 1:  # no buckets
            return forecast
        return with_averaged_gradients(forecast, profile)

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """Return DDP's average of gradients, and the broadcasts of all ranks' updated slices."""
        if plan.dp == 1:
            return ()
        stride = plan.pp * plan.tp
        # A flat slice ends with its parameter, or where the next rank's share begins.
        calls = len(parameter_shapes(profile)) + plan.dp - 1
        spread = profile.gradient_bytes  # the trained parameters, in the precision of their use
        return (
            *gradient_average_traffic(
                profile, plan.dp, stride, bucket=self._bucket, overlaps=plan.pp == 1
            ),
            Traffic("broadcast", spread, calls, "step", "nothing", plan.dp, stride),
        )

    def apply(self, assembly: Assembly) -> None:
        """Partition the optimizer's update over the replicas, and let DDP average gradients."""
        context = assembly.context
        trained = assembly.trained()
        roots = assembly.roots if assembly.plan.bf16_parameters else []
        low = {name for root in roots for name in bf16_parameter_names(root)}
        # Before DDP wraps the model: this takes the fp32 values, and leaves bf16 values for DDP.
        assembly.update = PartitionedUpdate(
            trained,
            assembly.make_optimizer,
            replicas=ReplicaGroup(context.dp_rank, context.dp_size, context.dp_group),
            state_store=assembly.state_store,
            low_names=[name for name in low if name in trained],
        )
        average_gradients(assembly, self.bucket_size)


def _on_pieces(profile: Profile, plan: Plan) -> Timeline | None:
    """Return the memory of the step on the rank that needs the most; None if it is not known."""
    if profile.step_memory is None or not profile.updated:
        return None
    dtype = torch.float64 if plan.precision == "fp64" else torch.float32
    timelines = [
        profile.step_memory.timeline(_shapes_by_group(pieces), dtype)
        for pieces in _pieces_by_rank(profile, plan, profile.step_memory)
    ]
    known = [timeline for timeline in timelines if timeline is not None]
    return max(known, key=lambda timeline: timeline.peak().bytes, default=None)


def _on_chunks(profile: Profile, plan: Plan, step: Timeline) -> Timeline:
    """Return the memory of a step that updates fp32 values chunk by chunk.

    The step first computes the norm. Then it has the fp32 gradients of a chunk and the temporaries
    of the optimizer. Two chunks are tried: the one with the most elements, and the one with the
    largest piece. The result is for the chunk that needs more memory.
    """
    share = math.ceil(profile.trained_elements / plan.dp)
    chunk_size = chunk_elements(profile.trained_elements, plan.dp)
    begin = step.phases[0][0]
    of_gradients = Span(4 * min(share, chunk_size), "temporary", begin, begin + 1)
    gradients_alone = Timeline((of_gradients,), step.phases)
    memory = profile.step_memory
    if memory is None or not profile.updated or plan.offload_tiers.optimizer != "device":
        return gradients_alone
    chunks = [
        [pieces[number] for number in numbers]
        for pieces in _pieces_by_rank(profile, plan, memory, chunk_size)
        for numbers in split_into_chunks([piece.elements for piece in pieces], chunk_size)
    ]
    elements = [[piece.elements for piece in chunk] for chunk in chunks]
    chosen = {elements.index(max(elements, key=measure)) for measure in (sum, max) if chunks}
    candidates = [chunks[number] for number in sorted(chosen)] or [[]]
    steps = []
    for chunk in candidates:
        added = memory.timeline(_shapes_by_group(chunk), torch.float32, normed=False)
        if added is not None:
            first = added.phases[0][0]
            last = max((span.death for span in added.spans), default=first + 1)
            size = 4 * sum(piece.elements for piece in chunk)
            steps.append(replace(added, spans=(Span(size, "temporary", first, last), *added.spans)))
    highest = max(steps, key=lambda timeline: timeline.peak().bytes, default=gradients_alone)
    norm = memory.norm_bytes([shape for shape, _ in profile.updated], torch.bfloat16)
    before = highest.phases[0][0] - 2
    spans = (Span(norm, "temporary", before, before + 1), *highest.spans)
    return Timeline(spans, ((before, "step"), *highest.phases[1:]))


class _Piece(NamedTuple):
    """A part of a parameter that one rank updates."""

    shape: tuple[int, ...]
    group: int
    """The number of the parameter's group in the optimizer."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def _pieces_by_rank(
    profile: Profile, plan: Plan, memory: StepMemory, chunk_size: int | None = None
) -> list[list[_Piece]]:
    """Return the pieces of each replica, in order; those of `plan.dp_rank` alone if it is set."""
    may_split = memory.kind in ELEMENTWISE_OPTIMIZERS
    sizes = {str(n): math.prod(shape) for n, (shape, _) in enumerate(profile.updated)}
    pieces: list[list[_Piece]] = [[] for _ in range(plan.dp)]
    for name, rank, start, stop in partition_evenly(sizes, plan.dp, may_split, chunk_size):
        shape, group = profile.updated[int(name)]
        if stop > start:
            pieces[rank].append(_Piece((stop - start,) if may_split else shape, group))
    return pieces if plan.dp_rank is None else [pieces[plan.dp_rank]]


def _shapes_by_group(pieces: Sequence[_Piece]) -> list[list[tuple[int, ...]]]:
    """Return the shapes of the pieces in each parameter group of the optimizer."""
    shapes: list[list[tuple[int, ...]]] = [
        [] for _ in range(max((piece.group for piece in pieces), default=0) + 1)
    ]
    for piece in pieces:
        shapes[piece.group].append(piece.shape)
    return shapes
