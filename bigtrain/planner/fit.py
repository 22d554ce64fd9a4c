"""How a candidate's stages are cut and what their blocks keep, so that every rank stays inside.

Memory is the forecast of a run: sections are put together to the profile of each stage, the
techniques turn it, the schedule is replayed. Of ranks whose stages are alike those are looked at
that may hold most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from bigtrain.activations.policy import BlockPolicy
from bigtrain.checkpoint.forecast_save import estimate_save
from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.cutting.partition import LayerCosts, partition
from bigtrain.job.schema import CheckpointConfig
from bigtrain.memory.timeline import Breakdown, Peak, highest_peak
from bigtrain.planner.held_micro_batches import HeldMicroBatches, with_fewer_micro_batches
from bigtrain.planner.recompute_levels import RecomputeLevels, SectionRange
from bigtrain.planner.space import Candidate
from bigtrain.prediction.compose import (
    compose_profile,
    count_parameters,
    section_states,
    stage_ends,
    wire_bytes,
    with_split_backward,
)
from bigtrain.prediction.predict import forecast_rank_step, forecast_stages, forecast_step
from bigtrain.prediction.sections import PassPair, Section
from bigtrain.timing.step_time import StepTimer

SIMILARITY = 0.02
"""The share by which what blocks save may differ, so that any of them can stand for all."""


class StageFitter:
    """One candidate's stages.

    Args:
        plan: of the candidate.
        candidate: how many stages, on which ranks.
        levels: the model's sections.
        clock: how long sections take.
        composed: profiles that were put together before, for all candidates.
        cuts: where models were cut for speed before, likewise.
        state_factors: bytes of states on a rank for each byte of a parameter, at least: before
            there are gradients, and with them.
        split_passes: of the sections, where a schedule takes their backward pass apart.
        checkpoint: how the state is saved, where that takes memory of the device: on a CPU.
    """

    def __init__(
        self,
        plan: Plan,
        candidate: Candidate,
        levels: RecomputeLevels,
        clock: StepTimer,
        composed: dict[object, Profile],
        cuts: dict[object, list[int]],
        state_factors: tuple[float, float],
        split_passes: Callable[[], Mapping[str, PassPair] | None] | None = None,
        checkpoint: CheckpointConfig | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self.levels = levels
        self._plan, self._candidate = plan, candidate
        self._clock, self._composed, self._cuts = clock, composed, cuts
        self._all = levels["keep"].sections
        self._factors, self._split_passes = state_factors, split_passes
        self._forecasts: dict[int, Forecast] = {}  # of profiles that are kept with `composed`
        self._held = HeldMicroBatches(plan, candidate)
        self._ranks = self._held.ranks

    def edges(self, limit: int | None) -> list[int]:
        """The section that each stage begins with, and the end.

        Args:
            limit: bytes of a rank, where the cut is to follow them; the blocks keep least then.

        Raises:
            ConfigError: nothing fits.
        """
        if self._candidate.stages == 1:
            return [0, len(self._all)]
        key: tuple[object, ...] = (limit, id(self._all), self._plan.tp, self._candidate.stages)
        if limit is not None:
            key = (*key, self._factors[1], self._held.by_stage, self.levels.least)
        if key in self._cuts:
            return self._cuts[key]
        smallest_sections = self.levels["keep" if limit is None else self.levels.least]
        # A rank's stages have as much each: dealing its memory out to them would take seconds.
        stage_limit = None if limit is None else limit // self._candidate.stages_per_rank
        partitioned = partition(
            self._pieces(smallest_sections.sections),
            self._candidate.stages,
            bandwidth=self._clock.cluster.inside.rate,
            state_factor=self._factors[1],
            in_flight=self._held.by_stage,
            memory=None if stage_limit is None else [stage_limit] * self._candidate.stages,
        )
        self._cuts[key] = [0, *partitioned.cuts, len(self._all)]
        return self._cuts[key]

    def alike(self, edges: Sequence[int], choice: BlockPolicy = "keep") -> list[SectionRange]:
        """The stages between edges, all of whose blocks keep everything, or as much as is said."""
        picks: list[BlockPolicy] = [choice if section.name else "keep" for section in self._all]
        leaves = [a != b for a, b in pairwise(self._ranks)]
        sides = zip([True, *leaves], [*leaves, True], strict=True)
        ranges = zip(pairwise(edges), sides, strict=True)
        return [SectionRange(a, b, tuple(picks[a:b]), between) for (a, b), between in ranges]

    def even_stage(self) -> Profile:
        """The profile of a stage with its even share of the blocks, or of the whole model."""
        count = len(self._all)
        if self._candidate.stages == 1:
            return self.profile(SectionRange(0, count, _keeping(count)))
        share = max(1, (count - 2) // self._candidate.stages)
        return self.profile(self._middle(share, _keeping(share)))

    def _middle(self, blocks: int, choices: tuple[BlockPolicy, ...]) -> SectionRange:
        """A stage of so many blocks, with nothing of what is before or after all of them."""
        first = max(1, (len(self._all) - blocks) // 2)
        return SectionRange(first, first + blocks, choices)

    @property
    def ranks(self) -> int:
        """Ranks that the stages lie on."""
        return self._candidate.pp

    @property
    def shared(self) -> list[str]:
        """Parameters that several stages of one rank use: before the blocks, and after them."""
        if self._candidate.stages == 1 or self._ranks[0] != self._ranks[-1]:
            return []
        first, last = ({t.name for t in self._all[k].tensors if not t.is_buffer} for k in (0, -1))
        return sorted(first & last)

    def _pieces(self, kept: Sequence[Section]) -> LayerCosts:
        """A piece for what is before the blocks, one for each block, the last with what follows."""
        last = len(self._all) - 2
        tp = self._plan.tp
        paces = [self._clock.pass_seconds([section], tp).total for section in self._all]
        seconds = [*paces[:last], paces[last] + paces[last + 1]]
        params: dict[str, tuple[int, set[int]]] = {}
        for place, section in enumerate(self._all):
            for tensor in section.tensors:
                key = tensor.name if not section.name else f"{place} {tensor.name}"
                size, uses = params.get(key, (tensor.nbytes, set()))
                params[key] = size, uses | {min(place, last)}
        saved = [(s.passes[0].saved, [min(place, last)]) for place, s in enumerate(kept)]
        crossing = [wire_bytes(section, tp)[0] for section in self._all[: last + 1]]
        return LayerCosts(seconds, crossing, [(s, sorted(u)) for s, u in params.values()], saved)

    def fitted(
        self, edges: Sequence[int], limit: int
    ) -> tuple[tuple[SectionRange, ...], dict[int, Peak]] | Peak:
        """Stages whose blocks keep as much as fits, and the peaks of the ranks looked at.

        Args:
            edges: of `edges`.
            limit: bytes that a rank may hold.

        Returns:
            The lowest peak of the first rank that does not fit; with a limit of 0, where none
            does, the highest of all ranks' lowest.
        """
        stages = self.alike(edges)
        peaks: dict[int, Peak] = {}
        over_limit: list[Peak] = []
        for rank, representative in enumerate(self._alike(stages)):
            own_stages = self._stages_of(rank)
            if representative != rank:
                for place, other in zip(own_stages, self._stages_of(representative), strict=True):
                    stages[place] = replace(stages[place], choices=stages[other].choices)
                continue
            peak = self._rank(stages, own_stages, rank, limit)
            if peak.bytes <= limit:
                peaks[rank] = peak
                continue
            over_limit.append(peak)
            if limit > 0:
                break
        self._forecasts.clear()  # they are large
        return highest_peak(over_limit) if over_limit else (tuple(stages), peaks)

    def _alike(self, stages: Sequence[SectionRange]) -> list[int]:
        """For each rank itself, where it is to be looked at, or one that holds no less.

        That is one before it with stages of the same kinds, if it has as much in flight of each.
        In a V one stage of a rank has the more in flight the less the other has: where blocks have
        no choice, ranks between the first and the last of a kind hold no more than one of the two.
        """
        own_stages = [self._stages_of(rank) for rank in range(self.ranks)]
        kinds = [tuple(self._kind(stages[place]) for place in places) for places in own_stages]
        last = {kind: rank for rank, kind in enumerate(kinds)}
        moments = (*self._held.fullest, self._held.by_stage)
        examined: dict[object, list[int]] = {}
        representatives = []
        for rank, kind in enumerate(kinds):
            others = examined.setdefault(kind, [])
            counts = [[held[place] for place in own_stages[rank]] for held in moments]
            representative = next(
                (o for o in others if _no_less(moments, own_stages[o], counts)), None
            )
            if representative is None and others and self.levels.is_single and rank != last[kind]:
                representative = others[0]
            if representative is None:
                others.append(rank)
            representatives.append(rank if representative is None else representative)
        return representatives

    def _stages_of(self, rank: int) -> list[int]:
        return self._by_rank[rank]

    @cached_property
    def _by_rank(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for place, rank in enumerate(self._ranks):
            found.setdefault(rank, []).append(place)
        return found

    def _rank(
        self, stages: list[SectionRange], own_stages: Sequence[int], rank: int, limit: int
    ) -> Peak:
        """Let the blocks of one rank keep as much as fits; in place. The peak that comes of it."""
        blocks = sum(
            bool(section.name)
            for place in own_stages
            for section in self._all[stages[place].first : stages[place].stop]
        )

        def assign(smaller_policy: BlockPolicy, larger_policy: BlockPolicy, count: int) -> None:
            self._assign(stages, own_stages, (smaller_policy, larger_policy), count)

        def peak_with(smaller_policy: BlockPolicy, larger_policy: BlockPolicy, count: int) -> Peak:
            assign(smaller_policy, larger_policy, count)
            return self._peak(stages, own_stages, rank)

        assign("keep", "keep", 0)
        at_least = self._roughly(stages, own_stages)
        if self.levels.is_single:  # runs of backward passes in two parts are dear
            is_over = 0 < limit < at_least.total
            return Peak("forward", at_least) if is_over else self._peak(stages, own_stages, rank)
        excess = at_least.total
        if excess <= limit:
            lowest = self._peak(stages, own_stages, rank)
            if lowest.bytes <= limit:
                return lowest
            excess = lowest.bytes
        smallest = peak_with(self.levels.least, self.levels.least, blocks)
        if smallest.bytes > limit:
            return smallest
        for larger_policy, smaller_policy in pairwise(self.levels.choices):
            peak = (
                smallest
                if smaller_policy == self.levels.least
                else peak_with(smaller_policy, larger_policy, blocks)
            )
            if peak.bytes > limit:
                excess = peak.bytes
                continue
            low, high, best = 0, blocks, peak
            while high - low > 1:  # so few of the first blocks as are enough
                # Each block takes about as much off as another: guess, and guess again.
                share = (excess - limit) / max(1, excess - best.bytes)
                middle = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
                peak = peak_with(smaller_policy, larger_policy, middle)
                if peak.bytes <= limit:
                    high, best = middle, peak
                else:
                    low, excess = middle, peak.bytes
            assign(smaller_policy, larger_policy, high)
            return best
        return smallest

    def _assign(
        self,
        stages: list[SectionRange],
        own_stages: Sequence[int],
        policies: tuple[BlockPolicy, BlockPolicy],
        count: int,
    ) -> None:
        """The first blocks of a rank, as many as are counted, keep as the first policy has it."""
        left = count
        for place in own_stages:
            picks: list[BlockPolicy] = []
            for section in self._all[stages[place].first : stages[place].stop]:
                picks.append("keep" if not section.name else policies[left <= 0])
                left -= bool(section.name)
            stages[place] = replace(stages[place], choices=tuple(picks))

    def _roughly(self, stages: Sequence[SectionRange], own_stages: Sequence[int]) -> Breakdown:
        """No rank with these stages holds less: its states and what micro-batches keep."""
        sections_of = {place: self.sections(stages[place]) for place in own_stages}
        parameters = sum(section_states(sections).parameters for sections in sections_of.values())
        saved = {place: sum(s.passes[0].saved for s in part) for place, part in sections_of.items()}
        bounds = [
            Breakdown(
                parameters=int(factor * parameters),
                activations=sum(in_flight[place] * saved[place] for place in own_stages),
            )
            for factor, in_flight in zip(self._factors, self._held.fullest, strict=True)
        ]
        return max(bounds, key=lambda bound: bound.total)

    def floor(self) -> int:
        """No cut into these stages holds less on its fullest rank, whatever its blocks keep.

        A block that keeps least costs its states and what every micro-batch in flight has saved of
        it, w bytes on a rank; one block is computed again meanwhile. N blocks on ranks that hold M
        bytes beside that: N is at most the sum of M / w, so M is at least N over the sum of 1 / w.
        """
        blocks, least = (
            [section for section in self.levels[choice].sections if section.name]
            for choice in ("keep", self.levels.least)
        )
        if not blocks:
            return 0
        states = {id(block.tensors): section_states([block]).parameters for block in blocks}
        parameters = min(states.values())
        saved = [section.passes[0].saved for section in least]
        pairs = zip(blocks, saved, strict=True)
        again = max(0, min(block.passes[0].saved - size for block, size in pairs))
        bound = 0
        for factor, in_flight in zip(self._factors, self._held.fullest, strict=True):
            own_stages = [self._stages_of(rank) for rank in range(self.ranks)]
            fewest = [min(in_flight[place] for place in places) for places in own_stages]
            rank_bytes = [factor * parameters + count * min(saved) for count in fewest]
            if min(rank_bytes) > 0:
                extra = again if min(fewest) else 0
                bound = max(bound, extra + int(len(blocks) / sum(1 / size for size in rank_bytes)))
        is_alike = max(saved) <= (1 + SIMILARITY) * min(saved)
        is_alike = is_alike and set(states.values()) == {parameters}
        return max(bound, self._fullest_stage(len(blocks)) if is_alike else 0)

    def _fullest_stage(self, blocks: int) -> int:
        """One stage at least has its share of the blocks, which are alike: with one micro-batch."""
        if self._candidate.stages == 1:
            return 0  # its forecast says it, at the same price
        share = -(-blocks // self._candidate.stages)
        choices: list[BlockPolicy] = [self.levels.least] * share
        profile = self.profile(self._middle(share, tuple(choices)))
        sent: int = sum(vars(profile.boundary).values())  # the first stage is sent nothing
        return int(forecast_step(profile, self._plan).peak().bytes / (1 + SIMILARITY)) - sent

    def _peak(self, stages: Sequence[SectionRange], own_stages: Sequence[int], rank: int) -> Peak:
        profiles = {place: self._with_split_backward(stages[place]) for place in own_stages}
        forecasts = forecast_stages(profiles, self._plan, self._forecasts)
        sections = [section for place in own_stages for section in self.sections(stages[place])]
        if len(own_stages) > 1:  # stages that are alike have one profile, and tensors of their own
            forecasts = {place: _own_names(one, place) for place, one in forecasts.items()}
        forecast = forecast_rank_step(forecasts, with_fewer_micro_batches(self._plan), rank)
        return self._or_save(forecast, sections)

    def _or_save(self, forecast: Forecast, sections: Sequence[Section]) -> Peak:
        """The peak of a rank's step, or of a save where that is higher."""
        step, plan = forecast.peak(), self._plan
        if self._checkpoint is None:
            return step
        states, numbers = section_states(sections), count_parameters(sections)
        widened = plan.bf16_parameters and plan.master_weights
        parts = [4 * numbers if widened else states.parameters, states.optimizer]
        largest = max((t.nbytes for section in sections for t in section.tensors), default=0)
        shards = plan.state_ranks if plan.replicate.sharded_states == 3 else 1
        given = (parts, largest, self._checkpoint)
        added = estimate_save(*given, ranks=plan.dp, shards=shards)
        batch = self.levels["keep"].base.batch_bytes * plan.batch.accumulation_steps
        here = replace(forecast.states, activations=batch, temporary=added.waiting)
        whole = step.breakdown
        beside = replace(whole, temporary=whole.temporary + added.beside)
        return highest_peak([step, Peak("save", here), Peak("save", beside)])

    def _with_split_backward(self, stage: SectionRange) -> Profile:
        """The profile of a stage that may go back in two parts; the first one has no inputs'."""
        split_passes = self._split_passes() if self._split_passes and stage.first else None
        if split_passes is None:
            return self.profile(stage)
        key = ("split", self._key(stage))
        if key not in self._composed:
            section_passes = [split_passes[section.name] for section in self.sections(stage)]
            given = (self._all[stage.first], self._after(stage), stage.dealt(self._plan.tp))
            parts = stage_ends(*given)
            self._composed[key] = with_split_backward(self.profile(stage), section_passes, parts)
        return self._composed[key]

    def sections(self, stage: SectionRange) -> list[Section]:
        """The sections of a stage, each with what it keeps."""
        places = range(stage.first, stage.stop)
        picks = zip(places, stage.choices, strict=True)
        return [self.levels[choice].sections[place] for place, choice in picks]

    def _after(self, stage: SectionRange) -> Section | None:
        return self._all[stage.stop] if stage.stop < len(self._all) else None

    def _kind(self, stage: SectionRange) -> object:
        """What stages that are alike have in common."""
        passes = [id(section.passes) for section in self.sections(stage)]
        return (*passes, stage.stop < len(self._all), stage.dealt(self._plan.tp))

    def _key(self, stage: SectionRange) -> object:
        """What the profile of a stage follows from."""
        return (self._kind(stage), id(self.levels["keep"].base), self._plan.release_gradients)

    def profile(self, stage: SectionRange) -> Profile:
        """The profile of a stage, or of a whole model."""
        key = self._key(stage)
        if key not in self._composed:
            sections = self.sections(stage)
            picks = zip(sections, stage.choices, strict=True)
            self._composed[key] = compose_profile(
                self.levels["keep"].base,
                sections,
                after=self._after(stage),
                recomputed=[section.name for section, choice in picks if choice != "keep"],
                released=self._plan.release_gradients,
                dealt=stage.dealt(self._plan.tp),
            )
        return self._composed[key]


def _no_less(
    counts_by_moment: Sequence[Sequence[int]],
    places: Sequence[int],
    required: Sequence[Sequence[int]],
) -> bool:
    pairs = zip(counts_by_moment, required, strict=True)
    return all(held[p] >= n for held, ns in pairs for p, n in zip(places, ns, strict=True))


def _keeping(count: int) -> tuple[BlockPolicy, ...]:
    keeping: list[BlockPolicy] = ["keep"] * count
    return tuple(keeping)


def _own_names(found: Forecast, stage: int) -> Forecast:
    """With the stage in the names of what is in blocks; others may be tied to another stage's."""
    named = tuple(
        (f"{stage} {name}" if " " in name else name, nbytes, kind)
        for name, nbytes, kind in found.tensors
    )
    return replace(found, tensors=named)
