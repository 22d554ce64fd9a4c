"""What the blocks of a stage may keep for the backward pass, and the model's sections for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from bigtrain.activations.policy import Choice
from bigtrain.errors import ConfigError
from bigtrain.prediction.section_library import Body

LADDER: tuple[Choice, ...] = ("keep", "selective", "full")
"""What blocks may keep, from the fastest to the smallest."""


@dataclass(frozen=True)
class Stage:
    """Some of the model's sections, and what each of them keeps."""

    first: int
    """The first section."""
    stop: int
    choices: tuple[Choice, ...]
    """Of the sections; those that are no block keep everything."""


class Ladder:
    """The sections of a model by what its blocks keep, made when they are asked for.

    Args:
        usual: what a plan allows, from the fastest to the smallest.
        body: gives the sections.
    """

    def __init__(self, usual: Sequence[Choice], body: Callable[[Choice], Body]) -> None:
        self._usual, self._body = usual, body
        self._found: dict[Choice, Body] = {}

    @property
    def is_single(self) -> bool:
        """Whether there is nothing to choose."""
        return len(self._usual) == 1

    def __getitem__(self, choice: Choice) -> Body:
        if choice not in self._found:
            self._found[choice] = self._body(choice)
        return self._found[choice]

    @cached_property
    def least(self) -> Choice:
        """The last of those that work with this model, too."""
        return next(choice for choice in reversed(self._usual) if self._works(choice))

    @cached_property
    def choices(self) -> list[Choice]:
        """All of those."""
        return [choice for choice in self._usual if self._works(choice)]

    def _works(self, choice: Choice) -> bool:
        """Not every choice works with every model, or leaves its blocks one after the other."""
        try:
            found = self[choice]
        except ConfigError:
            if choice == "keep":
                raise
            return False
        return len(found.sections) == len(self["keep"].sections)
