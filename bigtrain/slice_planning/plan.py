"""A plan of slices: how each parameter is sliced, which parameters stay whole, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from bigtrain.slice_planning.axis_classes import SliceClass, SliceExchange
from bigtrain.slice_planning.single_layers import SingleLayer
from bigtrain.slice_planning.slice_specs import merged_lines, spec_text
from bigtrain.slicing.slices import Slices


@dataclass(frozen=True)
class SlicingPlan:
    """How the parameters and buffers of a model are sliced over the ranks of the tp axis."""

    ranks: int
    slices: Mapping[str, Slices]
    """The slices by plain name; a tied tensor is listed under each of its names."""
    gathered: frozenset[str] = frozenset()
    """Sliced weights whose product is gathered immediately, so that it is whole afterwards."""
    whole_reasons: Mapping[str, str] = field(default_factory=dict)
    """Parameters that stay whole, with the reason."""
    classes: tuple[SliceClass, ...] = ()
    """Tensors that are sliced together."""
    single_layers: tuple[SingleLayer, ...] = ()
    """Weights that are sliced alone."""
    flops: int = 0
    """FLOPs of the whole model's forward pass, including operations that no slice divides."""
    failed: str = ""
    """Why the traced forward pass ended early; '' if it did not."""
    guessed: str = ""
    """Where the values of tensors decide which operations run, so that only one branch was traced;
    '' if they decide nothing."""

    def exchanges(self) -> list[SliceExchange]:
        """Return the exchanges of a micro-batch, except those of the loss.

        If several classes sum the gradient of one tensor, the exchange is listed once.
        """
        every = [sent for slice_class in self.classes for sent in slice_class.exchanged]
        every += [sent for form in self.single_layers for sent in form.exchanged]
        distinct: list[SliceExchange] = []
        added: set[int] = set()
        for sent in every:
            if not sent.of or sent.of not in added:
                distinct.append(sent)
                added.add(sent.of)
        return distinct

    def lines(self) -> dict[str, str]:
        """Return the slices as specifications by name pattern; equal blocks share a pattern."""
        texts = {
            name: spec_text(slices, gathered=name in self.gathered)
            for name, slices in self.slices.items()
        }
        return merged_lines(texts, self.whole_reasons)

    def sliced_share(self, model: nn.Module) -> float:
        """Return the fraction of a model's parameters, by number of elements, that is sliced."""
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        return sum(sizes[name] for name in sizes if name in self.slices) / sum(sizes.values())
