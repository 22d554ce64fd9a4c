"""Stages of a candidate: ranges of the model's sections, their policies, their profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Profile
from bigtrain.errors import ConfigError
from bigtrain.prediction.compose import compose_profile, stage_ends, with_split_backward
from bigtrain.prediction.section_library import ModelSections
from bigtrain.prediction.sections import PassPair, Section

RECOMPUTE_LEVELS: tuple[BlockPolicy, ...] = ("keep", "selective", "full")
"""The policies that the planner assigns to blocks, from the fastest to the one that saves least."""

SplitPasses = Callable[[], Mapping[str, PassPair] | None]
"""Returns, by name of the section, its passes with a split backward pass; None if the model does
not run with split backward passes."""


@dataclass(frozen=True)
class SectionRange:
    """A stage: consecutive sections of the model, each with its policy."""

    first: int
    """The index of the stage's first section in the model."""
    stop: int
    """The index of the section after the stage's last one."""
    choices: tuple[BlockPolicy, ...]
    """The policy of each section; it is "keep" for sections outside of blocks."""
    between_ranks: tuple[bool, bool] = (True, True)
    """Whether the stage's input comes from another rank, and whether its output is sent to another
    rank. For the input and the output of the model the values are True."""

    def scatter_ranks(self, tp: int) -> tuple[int, int]:
        """The number of tp ranks over which the stage's input and its output are scattered.

        A number is 1 where the neighbouring stage is on the same rank.

        Args:
            tp: the size of the tp axis.
        """
        into, out = self.between_ranks
        return (tp if into else 1, tp if out else 1)


class RecomputeLevels:
    """The model's sections at each policy that blocks may have, made on first use.

    Args:
        allowed: the policies that the plan allows, from the fastest to the one that saves least.
        sections_for: returns the sections where all blocks have a given policy.
    """

    def __init__(
        self, allowed: Sequence[BlockPolicy], sections_for: Callable[[BlockPolicy], ModelSections]
    ) -> None:
        self._allowed, self._sections_for = allowed, sections_for
        self._cached: dict[BlockPolicy, ModelSections] = {}

    @property
    def is_single(self) -> bool:
        """Whether the plan allows only one policy."""
        return len(self._allowed) == 1

    def __getitem__(self, choice: BlockPolicy) -> ModelSections:
        if choice not in self._cached:
            self._cached[choice] = self._sections_for(choice)
        return self._cached[choice]

    @cached_property
    def least(self) -> BlockPolicy:
        """The policy that saves least among those with which the model runs."""
        return next(choice for choice in reversed(self._allowed) if self._works(choice))

    @cached_property
    def choices(self) -> list[BlockPolicy]:
        """The policies with which the model runs, from the fastest to the one that saves least."""
        return [choice for choice in self._allowed if self._works(choice)]

    def _works(self, choice: BlockPolicy) -> bool:
        """Whether the model runs with this policy, and in the same sections as with "keep".

        Raises:
            ConfigError: the policy is "keep", and the model does not run with it.
        """
        try:
            recorded = self[choice]
        except ConfigError:
            if choice == "keep":
                raise
            return False
        return len(recorded.sections) == len(self["keep"].sections)


@dataclass
class StageCache:
    """Results that the candidates of one search share, because many have the same stages."""

    profiles: dict[object, Profile] = field(default_factory=dict)
    """Composed profiles of stages; see `StageProfiles`."""
    cuts: dict[object, list[int]] = field(default_factory=dict)
    """Cuts of the model; see `StageFitter.edges`."""


class StageProfiles:
    """Composes the profiles of stages from the model's sections.

    Args:
        plan: the plan of the candidate.
        levels: the model's sections at each policy.
        cache: shared by all candidates of a search.
        split_passes: makes the sections' split backward passes; None if the schedule splits none.
    """

    def __init__(
        self,
        plan: Plan,
        levels: RecomputeLevels,
        cache: StageCache,
        split_passes: SplitPasses | None = None,
    ) -> None:
        self._plan, self._levels, self._profiles = plan, levels, cache.profiles
        self._split_passes = split_passes
        self._all = levels["keep"].sections

    def sections(self, stage: SectionRange) -> list[Section]:
        """The sections of a stage, each at its policy."""
        places = range(stage.first, stage.stop)
        return [
            self._levels[choice].sections[index]
            for index, choice in zip(places, stage.choices, strict=True)
        ]

    def kind(self, stage: SectionRange) -> object:
        """Return a key that is equal for stages whose profiles differ only in names."""
        # Passes are compared by identity, because hashing one reads all its storages. An id stays
        # valid because the evaluator holds the levels of every candidate.
        passes = [id(section.passes) for section in self.sections(stage)]
        return (*passes, stage.stop < len(self._all), stage.scatter_ranks(self._plan.tp))

    def profile(self, stage: SectionRange) -> Profile:
        """The profile of a stage with whole backward passes. A stage may be the whole model."""
        key = self._key(stage)
        if key not in self._profiles:
            sections = self.sections(stage)
            pairs = zip(sections, stage.choices, strict=True)
            self._profiles[key] = compose_profile(
                self._levels["keep"].base,
                sections,
                after=self._after(stage),
                recomputed=[section.name for section, choice in pairs if choice != "keep"],
                released=self._plan.release_gradients,
                scatter_ranks=stage.scatter_ranks(self._plan.tp),
            )
        return self._profiles[key]

    def with_split_backward(self, stage: SectionRange) -> Profile:
        """The profile of a stage as the schedule runs it, with a split or a whole backward pass.

        The backward pass of the first stage is never split: it has no input gradients.
        """
        split_passes = self._split_passes() if self._split_passes and stage.first else None
        if split_passes is None:
            return self.profile(stage)
        key = ("split", self._key(stage))
        if key not in self._profiles:
            self._profiles[key] = with_split_backward(
                self.profile(stage),
                [split_passes[section.name] for section in self.sections(stage)],
                stage_ends(
                    self._all[stage.first], self._after(stage), stage.scatter_ranks(self._plan.tp)
                ),
            )
        return self._profiles[key]

    def middle(self, choices: tuple[BlockPolicy, ...]) -> SectionRange:
        """Return a stage of consecutive blocks from the middle of the model, without its ends.

        Args:
            choices: the policy of each block of the stage.
        """
        first = max(1, (len(self._all) - len(choices)) // 2)
        return SectionRange(first, first + len(choices), choices)

    def _after(self, stage: SectionRange) -> Section | None:
        return self._all[stage.stop] if stage.stop < len(self._all) else None

    def _key(self, stage: SectionRange) -> object:
        """Return a key of all that the profile of a stage depends on."""
        return (self.kind(stage), self._levels["keep"].base, self._plan.release_gradients)
