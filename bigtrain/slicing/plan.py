"""A plan of slices: which parameter lies how, which stays whole and why; as text and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from bigtrain.slicing.analysis.classes import SliceClass
from bigtrain.slicing.analysis.singles import SingleForm
from bigtrain.slicing.slices import Slices

GATHER = "gather"
"""Word of a line: what comes out of the weight's product is gathered at once."""


@dataclass(frozen=True)
class SlicingPlan:
    """How the parameters and buffers of a model lie on the ranks of the tp axis."""

    ranks: int
    slices: Mapping[str, Slices]
    """By plain names, tied ones by each of them."""
    gathered: frozenset[str] = frozenset()
    """Sliced weights whose product is gathered at once, so that what follows has it whole."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """Parameters that stay whole, and why."""
    classes: tuple[SliceClass, ...] = ()
    """The classes that were chosen."""
    singles: tuple[SingleForm, ...] = ()
    """The weights that are sliced by themselves."""

    def sliced_share(self, model: nn.Module) -> float:
        """The share of a model's parameters, by their number, that is sliced."""
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        return sum(sizes[name] for name in sizes if name in self.slices) / sum(sizes.values())

    def lines(self) -> list[str]:
        """`PATTERN: DIM/SECTIONS`, lines of blocks that are alike as one."""
        texts = {
            name: spec_text(slices, gathered=name in self.gathered)
            for name, slices in self.slices.items()
        }
        return [f"{pattern}: {text}" for pattern, text in _merged(texts, {*texts, *self.kept})]


def spec_text(slices: Slices, *, gathered: bool = False) -> str:
    """`0/3x256:64`: dim 0, three sections of 256 in units of 64."""
    parts: list[str] = []
    sections = list(slices.sections)
    while sections:
        first = sections[0]
        times = next((n for n, s in enumerate(sections) if s != first), len(sections))
        del sections[:times]
        unit = f":{first.unit}" if first.unit > 1 else ""
        parts.append(f"{f'{times}x' if times > 1 else ''}{first.length}{unit}")
    return f"{slices.dim}/{','.join(parts)}{f' {GATHER}' if gathered else ''}"


def pattern_expression(pattern: str) -> re.Pattern[str]:
    """A name pattern as a regular expression: `*` is one word of a name."""
    return re.compile(
        r"\.".join(r"[^.]+" if w == "*" else re.escape(w) for w in pattern.split("."))
    )


def _merged(texts: Mapping[str, str], names: Iterable[str]) -> list[tuple[str, str]]:
    """One line for all names that differ in numbers alone, where all of them have one text."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    found: list[tuple[str, str]] = []
    done: set[str] = set()
    for name, text in texts.items():
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        if kind in done:
            continue
        if all(texts.get(other) == text for other in kinds[kind]):
            done.add(kind)
            found.append((kind if len(kinds[kind]) > 1 else name, text))
        else:
            found.append((name, text))
    return found
