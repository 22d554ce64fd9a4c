"""Lower bounds on the bytes that a candidate's fullest rank holds; none of them replays a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Profile
from bigtrain.costs.state_bytes import StateWidths, min_state_bytes
from bigtrain.memory.timeline import Breakdown
from bigtrain.planner.held_micro_batches import HeldMicroBatches
from bigtrain.planner.space import Candidate
from bigtrain.prediction.compose import section_states
from bigtrain.prediction.predict import forecast_step
from bigtrain.prediction.section_library import ModelSections
from bigtrain.prediction.sections import Section

SIMILARITY = 0.02
"""Blocks whose saved bytes differ by at most this share count as equal."""


def state_widths(model: ModelSections) -> StateWidths:
    """The bytes of parameter, gradient and optimizer state for each trained element of a model.

    Args:
        model: the model's sections in one process.
    """
    states, numbers = model.states, max(1, model.numbers)
    return StateWidths(
        parameters=states.parameters / numbers,
        gradients=states.gradients / numbers,
        optimizer=states.optimizer / numbers,
    )


class MemoryFloor:
    """Lower bounds on the bytes of one candidate's fullest rank.

    There are three bounds, each closer than the one before:

    * `states_of_model`: the rank's share of the model's states;
    * `any_cut`: states and saved tensors, for every cut into the candidate's stages;
    * `rank`: states and saved tensors of a rank with given stages.

    Each bound is the larger of those at two moments of a step: before there are gradients, when
    most micro-batches are in flight, and later, when there are gradients.

    Args:
        plan: the plan of the candidate.
        candidate: the candidate.
        widths: the bytes of each trained element in one process; see `state_widths`.
    """

    def __init__(self, plan: Plan, candidate: Candidate, widths: StateWidths) -> None:
        self._plan, self._candidate, self._widths = plan, candidate, widths

    @cached_property
    def held(self) -> HeldMicroBatches:
        """The candidate's micro-batches in flight."""
        return HeldMicroBatches(self._plan, self._candidate)

    def states(self, numbers: int, *, gradients: bool) -> int:
        """A lower bound on the bytes of states that the fullest rank among replicas holds.

        Args:
            numbers: the trained elements of a replica's stages on this pp and tp rank, before they
                are sharded over replicas.
            gradients: whether gradients exist. If not, the bound is for the moment after the
                forward passes.
        """
        plan, plain = self._plan, self._widths
        with_master = plan.bf16_parameters and plan.master_weights
        # If the optimizer gets shards, the shards are fp32 values, and are gathered in bf16.
        keeps_fp32 = plan.replicate.optimizer_gets == "shards"
        optimizer = plain.optimizer + (4.0 if with_master and not keeps_fp32 else 0.0)
        parameters, gradient = plain.parameters, plain.gradients
        if with_master:
            parameters, gradient = (4.0 if keeps_fp32 else 2.0), 2.0
        if plan.release_gradients or not gradients:
            gradient = 0.0
        if plan.offload_tiers.optimizer != "device":
            optimizer = 0.0
        sharded = min_state_bytes(
            numbers,
            StateWidths(parameters, gradient, optimizer),
            plan.replicate.sharded_states,
            plan.state_ranks,
        )
        if gradients or not plan.replicate.gathers_whole:
            return sharded
        # Between forward and backward, these replicas hold whole parameters and their shards.
        return sharded + int(numbers * (2.0 if plan.bf16_parameters else plain.parameters))

    def states_of_model(self, numbers: int) -> int:
        """The bytes of a rank's share of the states of a model.

        Args:
            numbers: the trained elements of the whole model.
        """
        share = numbers // (self._candidate.pp * self._candidate.tp)
        return max(self.states(share, gradients=gradients) for gradients in (False, True))

    def state_factors(self, model: ModelSections) -> tuple[float, float]:
        """The bytes of states for each byte of parameters: without gradients, and with them.

        Args:
            model: the sections of one tp rank.
        """
        share = self._candidate.pp / max(1, model.states.parameters)
        numbers = model.numbers // self._candidate.pp
        return (
            self.states(numbers, gradients=False) * share,
            self.states(numbers, gradients=True) * share,
        )

    def rank(
        self, sections_of: Mapping[int, Sequence[Section]], factors: tuple[float, float]
    ) -> Breakdown:
        """A lower bound on the bytes of a rank: its states and the saved tensors of its stages.

        Args:
            sections_of: by stage, the sections of the rank's stages.
            factors: the result of `state_factors`.

        Returns:
            The bound; all states count as parameters, and the saved tensors as activations.
        """
        parameters = sum(section_states(sections).parameters for sections in sections_of.values())
        saved = {
            stage: sum(section.passes[0].saved for section in sections)
            for stage, sections in sections_of.items()
        }
        bounds = [
            Breakdown(
                parameters=int(factor * parameters),
                activations=sum(in_flight[stage] * saved[stage] for stage in sections_of),
            )
            for factor, in_flight in zip(factors, self.held.fullest, strict=True)
        ]
        return max(bounds, key=lambda bound: bound.total)

    def any_cut(
        self,
        kept: ModelSections,
        least: ModelSections,
        factors: tuple[float, float],
        profile_of_blocks: Callable[[int], Profile],
    ) -> int:
        """A lower bound on the bytes of the fullest rank, for every cut into these stages.

        With the policy that saves least, a block takes w bytes on a rank: its states, and its saved
        tensors for every micro-batch in flight. If each rank has M bytes for blocks, M / w blocks
        fit on it. So N blocks fit only if N is at most the sum of M / w over the ranks, and M is at
        least N divided by the sum of 1 / w. The recomputed tensors of one block are added.

        Args:
            kept: the model's sections where blocks save all activations.
            least: the model's sections where blocks have the policy that saves least.
            factors: the result of `state_factors`.
            profile_of_blocks: returns the profile of a stage with a number of blocks that have the
                policy that saves least.
        """
        blocks = [section for section in kept.sections if section.name]
        smallest = [section for section in least.sections if section.name]
        if not blocks:
            return 0
        # Many blocks share one tuple of tensors: the bytes of each tuple are added up once.
        states = {id(block.tensors): section_states([block]).parameters for block in blocks}
        parameters = min(states.values())
        saved = [section.passes[0].saved for section in smallest]
        pairs = zip(blocks, saved, strict=True)
        recomputed = max(0, min(block.passes[0].saved - size for block, size in pairs))
        bound = 0
        for factor, in_flight in zip(factors, self.held.fullest, strict=True):
            fewest = [
                min(
                    in_flight[stage] for stage, owner in enumerate(self.held.ranks) if owner == rank
                )
                for rank in range(self._candidate.pp)
            ]
            rank_bytes = [factor * parameters + count * min(saved) for count in fewest]
            if min(rank_bytes) > 0:
                extra = recomputed if min(fewest) else 0
                bound = max(bound, extra + int(len(blocks) / sum(1 / size for size in rank_bytes)))
        are_equal = max(saved) <= (1 + SIMILARITY) * min(saved)
        if are_equal and set(states.values()) == {parameters}:
            bound = max(bound, self._fullest_stage(len(blocks), profile_of_blocks))
        return bound

    def _fullest_stage(self, blocks: int, profile_of_blocks: Callable[[int], Profile]) -> int:
        """A lower bound from the forecast of one stage with its share of equal blocks.

        The share is rounded up, as at least one stage has that many blocks. One micro-batch is in
        flight.
        """
        if self._candidate.stages == 1:
            return 0  # forecasting the candidate itself takes no longer
        profile = profile_of_blocks(-(-blocks // self._candidate.stages))
        received: int = sum(vars(profile.boundary).values())  # the first stage receives nothing
        return int(forecast_step(profile, self._plan).peak().bytes / (1 + SIMILARITY)) - received
