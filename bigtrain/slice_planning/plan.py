"""A plan of slices: which parameter lies how on the ranks, which stays whole, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from bigtrain.slice_planning.axis_classes import SliceClass, SliceExchange
from bigtrain.slice_planning.single_layers import SingleForm
from bigtrain.slice_planning.slice_specs import merged_lines, spec_text
from bigtrain.slicing.slices import Slices


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
    """What is sliced together; none where the plan was read."""
    singles: tuple[SingleForm, ...] = ()
    """The weights that are sliced by themselves."""
    flops: int = 0
    """Of a forward pass of the whole model: what `classes` and `singles` divide is a part of it."""
    failed: str = ""
    """Why the model could not be looked at to its end; '' where it could."""
    guessed: str = ""
    """Where values decide what the model does, and one way of several was looked at."""

    def exchanges(self) -> list[SliceExchange]:
        """What a micro-batch exchanges but for the loss, of a plan that was chosen.

        A gradient that classes would add up each for itself is added up once.
        """
        every = [sent for own in self.classes for sent in own.exchanged]
        every += [sent for form in self.singles for sent in form.exchanged]
        found: list[SliceExchange] = []
        added: set[int] = set()
        for sent in every:
            if not sent.of or sent.of not in added:
                found.append(sent)
                added.add(sent.of)
        return found

    def lines(self) -> dict[str, str]:
        """Specifications by name patterns, one for all blocks that are alike."""
        texts = {
            name: spec_text(slices, gathered=name in self.gathered)
            for name, slices in self.slices.items()
        }
        return merged_lines(texts, self.kept)

    def sliced_share(self, model: nn.Module) -> float:
        """The share of a model's parameters, by their number, that is sliced."""
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        return sum(sizes[name] for name in sizes if name in self.slices) / sum(sizes.values())
