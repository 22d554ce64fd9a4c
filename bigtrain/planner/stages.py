"""What the blocks of a stage may keep for the backward pass, and the model's sections for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from bigtrain.activations.policy import BlockPolicy
from bigtrain.errors import ConfigError
from bigtrain.prediction.section_library import ModelSections

RECOMPUTE_LEVELS: tuple[BlockPolicy, ...] = ("keep", "selective", "full")
"""What blocks may keep, from the fastest to the smallest."""


@dataclass(frozen=True)
class SectionRange:
    """Some of the model's sections, and what each of them keeps."""

    first: int
    """The first section."""
    stop: int
    choices: tuple[BlockPolicy, ...]
    """Of the sections; those that are no block keep everything."""
    between_ranks: tuple[bool, bool] = (True, True)
    """Whether what comes in, and what goes out, if anything does, goes between ranks."""

    def dealt(self, tp: int) -> tuple[int, int]:
        """Over how many of the ranks that slice it what comes in, and what goes out, is dealt."""
        into, out = self.between_ranks
        return (tp if into else 1, tp if out else 1)


class RecomputeLevels:
    """The sections of a model by what its blocks keep, made when they are asked for.

    Args:
        usual: what a plan allows, from the fastest to the smallest.
        body: gives the sections.
    """

    def __init__(
        self, usual: Sequence[BlockPolicy], body: Callable[[BlockPolicy], ModelSections]
    ) -> None:
        self._usual, self._body = usual, body
        self._found: dict[BlockPolicy, ModelSections] = {}

    @property
    def is_single(self) -> bool:
        """Whether there is nothing to choose."""
        return len(self._usual) == 1

    def __getitem__(self, choice: BlockPolicy) -> ModelSections:
        if choice not in self._found:
            self._found[choice] = self._body(choice)
        return self._found[choice]

    @cached_property
    def least(self) -> BlockPolicy:
        """The last of those that work with this model, too."""
        return next(choice for choice in reversed(self._usual) if self._works(choice))

    @cached_property
    def choices(self) -> list[BlockPolicy]:
        """All of those."""
        return [choice for choice in self._usual if self._works(choice)]

    def _works(self, choice: BlockPolicy) -> bool:
        """Not every choice works with every model, or leaves its blocks one after the other."""
        try:
            recorded = self[choice]
        except ConfigError:
            if choice == "keep":
                raise
            return False
        return len(recorded.sections) == len(self["keep"].sections)
