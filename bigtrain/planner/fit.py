"""Cut a candidate into stages and choose the policies of its blocks, so that every rank fits.

The memory of a rank is forecast as for a run: the profile of each stage is composed from its
sections, the techniques change the profile, and the schedule is replayed. Among ranks with equal
stages, only those that may hold the most memory are forecast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from bigtrain.activations.policy import BlockPolicy
from bigtrain.checkpoint.forecast_save import estimate_save
from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Forecast, Profile, TiedBytes
from bigtrain.cutting.partition import LayerCosts, partition
from bigtrain.job.schema import CheckpointConfig
from bigtrain.memory.timeline import Peak, highest_peak
from bigtrain.planner.held_micro_batches import with_fewer_micro_batches
from bigtrain.planner.memory_floor import MemoryFloor
from bigtrain.planner.space import Candidate
from bigtrain.planner.stages import (
    RecomputeLevels,
    SectionRange,
    SplitPasses,
    StageCache,
    StageProfiles,
)
from bigtrain.prediction.compose import boundary_bytes, count_parameters, section_states
from bigtrain.prediction.predict import forecast_rank_step, forecast_stages
from bigtrain.prediction.sections import Section
from bigtrain.timing.step_time import StepTimer


class StageFitter:
    """Cuts one candidate into stages and assigns policies to their blocks.

    Args:
        plan: the plan of the candidate.
        candidate: the candidate.
        levels: the model's sections at each policy.
        timer: predicts the seconds of sections.
        cache: shared by all candidates of a search.
        floor: lower bounds on the candidate's memory.
        split_passes: makes the sections' split backward passes; None if the schedule splits none.
        checkpoint: the checkpoint settings of the job, if saves take memory of the device, as on a
            CPU; None to leave saves out of the peaks.
    """

    def __init__(
        self,
        plan: Plan,
        candidate: Candidate,
        levels: RecomputeLevels,
        timer: StepTimer,
        cache: StageCache,
        floor: MemoryFloor,
        *,
        split_passes: SplitPasses | None = None,
        checkpoint: CheckpointConfig | None = None,
    ) -> None:
        self._plan, self._candidate, self._timer = plan, candidate, timer
        self._checkpoint, self._cuts, self._floor = checkpoint, cache.cuts, floor
        self._profiles = StageProfiles(plan, levels, cache, split_passes)
        self._all = levels["keep"].sections
        self._factors = floor.state_factors(levels["keep"])
        self._forecasts: dict[int, Forecast] = {}  # by id of profiles that the cache holds alive
        self._held_micro_batches = floor.held
        self._ranks = floor.held.ranks
        self.levels = levels

    @property
    def ranks(self) -> int:
        """The number of pp ranks."""
        return self._candidate.pp

    @property
    def shared(self) -> list[str]:
        """The parameters tied between the first and the last stage, if one rank has both stages."""
        if self._candidate.stages == 1 or self._ranks[0] != self._ranks[-1]:
            return []
        first, last = ({t.name for t in self._all[k].tensors if not t.is_buffer} for k in (0, -1))
        return sorted(first & last)

    def _tied_on(self, rank: int) -> list[TiedBytes]:
        """The gradients of tied parameters, if a rank has one end of the model; otherwise none.

        Tied parameters are on both of the ranks that have the first and the last stage.
        """
        ends = (self._ranks[0], self._ranks[-1])
        if rank not in ends or ends[0] == ends[1]:
            return []
        first, last = ({t.name: t for t in self._all[end].tensors if t.trained} for end in (0, -1))
        gradient_bytes = self._plan.gradient_bytes
        return [
            TiedBytes.of(tensor.shape, gradient_bytes(tensor.nbytes, tensor.numbers), 1)
            for name, tensor in first.items()
            if name in last
        ]

    def sections(self, stage: SectionRange) -> list[Section]:
        """The sections of a stage, each at its policy."""
        return self._profiles.sections(stage)

    def profile(self, stage: SectionRange) -> Profile:
        """The profile of a stage, or of the whole model."""
        return self._profiles.profile(stage)

    def edges(self, limit: int | None) -> list[int]:
        """Return the index of the first section of each stage, and the number of sections.

        Args:
            limit: bytes that a rank may hold. The cut is the fastest of those whose stages fit if
                all blocks have the policy with the least memory. None to cut for speed alone.

        Raises:
            ConfigError: no cut fits the limit.
        """
        if self._candidate.stages == 1:
            return [0, len(self._all)]
        smallest = self.levels["keep" if limit is None else self.levels.least]
        key: tuple[object, ...] = (
            limit,
            self.levels["keep"],
            self._plan.tp,
            self._candidate.stages,
        )
        if limit is not None:
            key = (*key, self._factors[1], self._held_micro_batches.by_stage, self.levels.least)
        if key in self._cuts:
            return self._cuts[key]
        # The stages of a rank get equal shares of its memory, because a search over the shares
        # takes seconds.
        stage_limit = None if limit is None else limit // self._candidate.stages_per_rank
        partitioned = partition(
            self._layer_costs(smallest.sections),
            self._candidate.stages,
            bandwidth=self._timer.cluster.inside.rate,
            state_factor=self._factors[1],
            in_flight=self._held_micro_batches.by_stage,
            memory=None if stage_limit is None else [stage_limit] * self._candidate.stages,
        )
        self._cuts[key] = [0, *partitioned.cuts, len(self._all)]
        return self._cuts[key]

    def uniform_stages(
        self, edges: Sequence[int], choice: BlockPolicy = "keep"
    ) -> list[SectionRange]:
        """Return the stages between these edges, with one policy for all blocks.

        Args:
            edges: the result of `edges`.
            choice: the policy.
        """
        choices: list[BlockPolicy] = [choice if section.name else "keep" for section in self._all]
        leaves = [a != b for a, b in pairwise(self._ranks)]
        sides = zip([True, *leaves], [*leaves, True], strict=True)
        return [
            SectionRange(first, stop, tuple(choices[first:stop]), between)
            for (first, stop), between in zip(pairwise(edges), sides, strict=True)
        ]

    def even_stage(self) -> Profile:
        """The profile of a stage with its share of the blocks, or of a model that is not cut.

        All blocks save all activations. The number of blocks is rounded down, and is at least one.
        """
        count = len(self._all)
        if self._candidate.stages == 1:
            return self.profile(SectionRange(0, count, _keep_all(count)))
        share = max(1, (count - 2) // self._candidate.stages)
        return self.profile(self._profiles.middle(_keep_all(share)))

    def floor_bytes(self, *, all_kept: bool = False) -> int:
        """A lower bound on the bytes of the fullest rank, for every cut into these stages.

        Args:
            all_kept: whether all blocks save all activations; by default the bound holds for all
                policies.
        """
        policy: BlockPolicy = "keep" if all_kept else self.levels.least

        def profile_of_blocks(count: int) -> Profile:
            return self.profile(self._profiles.middle((policy,) * count))

        return self._floor.any_cut(
            self.levels["keep"], self.levels[policy], self._factors, profile_of_blocks
        )

    def fitted(
        self, edges: Sequence[int], limit: int
    ) -> tuple[tuple[SectionRange, ...], dict[int, Peak]] | Peak:
        """Assign to the blocks of the stages between these edges the fastest policies that fit.

        Args:
            edges: the result of `edges`.
            limit: bytes that a rank may hold.

        Returns:
            The stages, and the peaks of the ranks that were forecast, by pp rank. If a rank does
            not fit, only its lowest peak is returned. With a limit of 0 no rank fits, and the
            result is the highest of the ranks' lowest peaks.
        """
        stages = self.uniform_stages(edges)
        peaks: dict[int, Peak] = {}
        over_limit: list[Peak] = []
        for rank, representative in enumerate(self._representatives(stages)):
            own_stages = self._stages_of[rank]
            if representative != rank:
                for stage, like in zip(own_stages, self._stages_of[representative], strict=True):
                    stages[stage] = replace(stages[stage], choices=stages[like].choices)
                continue
            peak = self._fit_rank(stages, rank, limit)
            if peak.bytes <= limit:
                peaks[rank] = peak
                continue
            over_limit.append(peak)
            if limit > 0:
                break
        self._forecasts.clear()  # forecasts are large
        return highest_peak(over_limit) if over_limit else (tuple(stages), peaks)

    @cached_property
    def _stages_of(self) -> dict[int, list[int]]:
        """The stages of each rank."""
        stages: dict[int, list[int]] = {}
        for stage, rank in enumerate(self._ranks):
            stages.setdefault(rank, []).append(stage)
        return stages

    def _layer_costs(self, smallest: Sequence[Section]) -> LayerCosts:
        """The costs of the layers between which the model may be cut.

        The last block and the part after the blocks form one layer. Each other section is a layer.

        Args:
            smallest: the sections whose saved tensors have to fit.
        """
        last = len(self._all) - 2
        tp = self._plan.tp
        section_seconds = [self._timer.pass_seconds([section], tp).total for section in self._all]
        seconds = [*section_seconds[:last], section_seconds[last] + section_seconds[last + 1]]
        params: dict[str, tuple[int, set[int]]] = {}
        for index, section in enumerate(self._all):
            for tensor in section.tensors:
                # Outside of the blocks, tensors of equal name are one tied parameter.
                is_outside = tensor.is_between or not section.name
                key = tensor.name if is_outside else f"{index} {tensor.name}"
                size, uses = params.get(key, (tensor.nbytes, set()))
                params[key] = size, uses | {min(index, last)}
        saved = [(s.passes[0].saved, [min(index, last)]) for index, s in enumerate(smallest)]
        crossing = [boundary_bytes(section, tp)[0] for section in self._all[: last + 1]]
        sizes = [(size, sorted(uses)) for size, uses in params.values()]
        return LayerCosts(seconds, crossing, sizes, saved)

    def _representatives(self, stages: Sequence[SectionRange]) -> list[int]:
        """Return for each rank its representative, the rank that is forecast in its place.

        No rank needs more memory than the representative that needs the most.
        The representative is the rank itself, or an earlier rank whose stages are of the same kinds
        and have at least as many micro-batches in flight. In a V-shaped schedule, a rank that has
        more micro-batches of its first stage in flight has fewer of its second stage. So if all
        blocks have one policy, the first or the last rank of a kind needs the most memory, and the
        first rank represents those between.
        """
        kinds = [
            tuple(self._profiles.kind(stages[stage]) for stage in self._stages_of[rank])
            for rank in range(self.ranks)
        ]
        last = {kind: rank for rank, kind in enumerate(kinds)}
        moments = (*self._held_micro_batches.fullest, self._held_micro_batches.by_stage)
        forecast_ranks: dict[object, list[int]] = {}
        representatives = []
        for rank, kind in enumerate(kinds):
            others = forecast_ranks.setdefault(kind, [])
            counts = [
                [in_flight[stage] for stage in self._stages_of[rank]] for in_flight in moments
            ]
            representative = next(
                (o for o in others if _holds_no_less(moments, self._stages_of[o], counts)), None
            )
            if representative is None and others and self.levels.is_single and rank != last[kind]:
                representative = others[0]
            if representative is None:
                others.append(rank)
            representatives.append(rank if representative is None else representative)
        return representatives

    def _fit_rank(self, stages: list[SectionRange], rank: int, limit: int) -> Peak:
        """Assign policies to the blocks of one rank in `stages`, and return its peak.

        A search finds the fewest blocks that need a policy with less memory. They are the first
        blocks of the rank.
        """
        own_stages = self._stages_of[rank]
        blocks = sum(
            bool(section.name)
            for stage in own_stages
            for section in self._all[stages[stage].first : stages[stage].stop]
        )

        def assign(smaller: BlockPolicy, larger: BlockPolicy, count: int) -> None:
            self._assign(stages, own_stages, smaller, larger, count)

        def peak_with(smaller: BlockPolicy, larger: BlockPolicy, count: int) -> Peak:
            assign(smaller, larger, count)
            return self._peak(stages, rank)

        assign("keep", "keep", 0)
        sections_of = {stage: self.sections(stages[stage]) for stage in own_stages}
        at_least = self._floor.rank(sections_of, self._factors)
        if self.levels.is_single:
            # Replaying split backward passes takes long, so a rank over the limit is not replayed.
            is_over = 0 < limit < at_least.total
            return Peak("forward", at_least) if is_over else self._peak(stages, rank)
        excess = at_least.total
        if excess <= limit:
            lowest = self._peak(stages, rank)
            if lowest.bytes <= limit:
                return lowest
            excess = lowest.bytes
        smallest = peak_with(self.levels.least, self.levels.least, blocks)
        if smallest.bytes > limit:
            return smallest
        for larger, smaller in pairwise(self.levels.choices):
            peak = smallest
            if smaller != self.levels.least:
                peak = peak_with(smaller, larger, blocks)
            if peak.bytes > limit:
                excess = peak.bytes
                continue
            low, high, best = 0, blocks, peak
            while high - low > 1:  # find the fewest blocks that are enough
                # All blocks save about as much memory: the number of blocks is interpolated.
                share = (excess - limit) / max(1, excess - best.bytes)
                middle = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
                peak = peak_with(smaller, larger, middle)
                if peak.bytes <= limit:
                    high, best = middle, peak
                else:
                    low, excess = middle, peak.bytes
            assign(smaller, larger, high)
            return best
        return smallest

    def _assign(
        self,
        stages: list[SectionRange],
        own_stages: Sequence[int],
        smaller: BlockPolicy,
        larger: BlockPolicy,
        count: int,
    ) -> None:
        """Give the first `count` blocks of a rank the policy `smaller`, and the rest `larger`.

        Blocks with the policy `smaller` take less memory.
        """
        remaining = count
        for stage in own_stages:
            choices: list[BlockPolicy] = []
            for section in self._all[stages[stage].first : stages[stage].stop]:
                policy = smaller if remaining > 0 else larger
                choices.append(policy if section.name else "keep")
                remaining -= bool(section.name)
            stages[stage] = replace(stages[stage], choices=tuple(choices))

    def forecast(self, stages: Sequence[SectionRange], rank: int) -> Forecast:
        """Forecast a rank's step.

        Args:
            stages: all stages, with the policies of their blocks.
            rank: the pp rank.
        """
        forecast = self._forecast(stages, rank)
        self._forecasts.clear()
        return forecast

    def _peak(self, stages: Sequence[SectionRange], rank: int) -> Peak:
        """The predicted peak of a rank, over its step and a save."""
        forecast = self._forecast(stages, rank)
        own_stages = self._stages_of[rank]
        sections = [section for stage in own_stages for section in self.sections(stages[stage])]
        return self._or_save(forecast, sections)

    def _forecast(self, stages: Sequence[SectionRange], rank: int) -> Forecast:
        """The forecast of a rank's step."""
        own_stages = self._stages_of[rank]
        profiles = {
            stage: self._profiles.with_split_backward(stages[stage]) for stage in own_stages
        }
        forecasts = forecast_stages(profiles, self._plan, self._forecasts)
        if len(own_stages) > 1:  # equal stages share one profile, but have different tensors
            forecasts = {
                stage: _with_stage(stage_forecast, stage)
                for stage, stage_forecast in forecasts.items()
            }
        plan = with_fewer_micro_batches(self._plan)
        return forecast_rank_step(forecasts, plan, rank, self._tied_on(rank))

    def _or_save(self, forecast: Forecast, sections: Sequence[Section]) -> Peak:
        """The peak of a rank's step, or the peak of a save if that is higher."""
        step, plan = forecast.peak(), self._plan
        if self._checkpoint is None:
            return step
        parts = [_saved_parameters(sections, plan), section_states(sections).optimizer]
        largest = max((t.nbytes for section in sections for t in section.tensors), default=0)
        added = estimate_save(
            parts,
            largest,
            self._checkpoint,
            ranks=plan.dp,
            shards=plan.state_ranks if plan.replicate.sharded_states == 3 else 1,
            one_host=plan.one_host,
        )
        batch = self.levels["keep"].base.batch_bytes * plan.batch.accumulation_steps
        waiting = replace(forecast.states, activations=batch, temporary=added.waiting)
        breakdown = step.breakdown
        during_steps = replace(breakdown, temporary=breakdown.temporary + added.beside)
        return highest_peak([step, Peak("save", waiting), Peak("save", during_steps)])


def _holds_no_less(
    moments: Sequence[Sequence[int]],
    stages: Sequence[int],
    required: Sequence[Sequence[int]],
) -> bool:
    """Whether these stages have at least the required micro-batches in flight at every moment.

    Args:
        moments: for each moment, the micro-batches in flight by stage.
        stages: the stages to look at.
        required: for each moment, the required number for each of these stages.
    """
    return all(
        in_flight[stage] >= count
        for in_flight, counts in zip(moments, required, strict=True)
        for stage, count in zip(stages, counts, strict=True)
    )


def _saved_parameters(sections: Sequence[Section], plan: Plan) -> int:
    """Bytes of the parameters in a checkpoint; a parameter with an fp32 value is saved in fp32."""
    nbytes = section_states(sections).parameters
    if not (plan.bf16_parameters and plan.master_weights):
        return nbytes
    trained = count_parameters(sections, trained=True)
    if plan.frozen_in_bf16:
        frozen = nbytes - section_states(sections).gradients
    else:
        frozen = 4 * (count_parameters(sections) - trained)
    return 4 * trained + frozen


def _keep_all(count: int) -> tuple[BlockPolicy, ...]:
    choices: list[BlockPolicy] = ["keep"] * count
    return tuple(choices)


def _with_stage(forecast: Forecast, stage: int) -> Forecast:
    """Put the stage into the names of a forecast's block tensors.

    Tensors outside of the blocks may be tied to those of another stage, and are not renamed.
    """

    def named(name: str) -> str:
        return f"{stage} {name}" if " " in name else name

    return replace(
        forecast,
        tensors=tuple((named(name), nbytes, kind) for name, nbytes, kind in forecast.tensors),
        frozen_tensors=tuple((named(name), nbytes) for name, nbytes in forecast.frozen_tensors),
    )
