"""How a plan slices the model that is run for another one, and which slices need no run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from bigtrain.core.strategy import Plan
from bigtrain.data.loader import MicroBatch
from bigtrain.slicing.slices import Slices
from bigtrain.slicing.state import ModelSlices
from bigtrain.tensors.tree import tree_tensors

SLICED_RANKS = (2, 4)
"""Numbers of ranks with slices that larger ones are read off."""


def coarser(plan: Plan) -> tuple[Plan, Plan] | None:
    """Plans with coarser slices, off which the finer ones of this plan are read; None for few."""
    few, many = SLICED_RANKS
    if plan.tp <= many or plan.tp % many:
        return None
    return replace(plan, tp=few), replace(plan, tp=many)


def are_even(laid: Sequence[ModelSlices | None], example: MicroBatch) -> bool:
    """Whether the same is sliced in all of these, so that all of it divides: finer ones by both.

    Args:
        laid: of plans that differ in ranks alone, that with most of them last.
        example: whose sequence may be sliced, too.
    """
    last = laid[-1]
    if last is None or any(one is None or one.by_name != last.by_name for one in laid):
        return False
    sections = [one for slices in last.by_name.values() for one in slices.sections]
    if any(section.length // section.unit % last.size for section in sections):
        return False
    dim = last.sequence_dim
    if dim is None:
        return True
    return all(t.dim() <= dim or not t.shape[dim] % last.size for t in tree_tensors(example.inputs))


def finer_share(ranks: int, few: int, many: int) -> float:
    """How far a part of so many is from that of few, on the way to that of many."""
    return (1 / ranks - 1 / few) / (1 / many - 1 / few)


def slicing_key(plan: Plan) -> str:
    """Tells plans apart that slice layers otherwise."""
    technique = plan.techniques.get("slice")
    if technique is None or plan.tp == 1:
        return ""
    return f"{plan.tp} {technique.name} {technique.model_dump_json()}"


def without_slices(plan: Plan) -> Plan:
    """The same plan with whole layers, in one process for each group of ranks that slices them."""
    techniques = dict(plan.techniques)
    techniques.pop("slice", None)
    return replace(plan, techniques=techniques, tp=1)


def slices_within(whole: ModelSlices, model: nn.Module) -> ModelSlices:
    """The slices of what a shorter model has, by the same names."""
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    by_name = {name: slices for name, slices in whole.by_name.items() if name in own}
    return replace(whole, by_name=by_name, gathered=whole.gathered & own)


def of_shortened(whole: ModelSlices, stands_for: Mapping[str, str]) -> ModelSlices | None:
    """The slices of a model by the names of a shortened one.

    Args:
        whole: by the model's own names.
        stands_for: for each of the model's blocks the one that is run for it.

    Returns:
        None where two blocks that one stands for are not sliced alike.
    """
    outside: dict[str, tuple[Slices, bool]] = {}
    inside: dict[str, dict[str, tuple[Slices, bool]]] = {block: {} for block in stands_for}
    for name, slices in whole.by_name.items():
        block = next((own for own in stands_for if name.startswith(f"{own}.")), "")
        own = inside[block] if block else outside
        own[name.removeprefix(block)] = slices, name in whole.gathered
    found: dict[str, dict[str, tuple[Slices, bool]]] = {}
    for block, short in stands_for.items():
        if found.setdefault(short, inside[block]) != inside[block]:
            return None
    named = [(f"{short}{name}", one) for short, own in found.items() for name, one in own.items()]
    every = {**outside, **dict(named)}
    gathered = frozenset(name for name, (_, is_gathered) in every.items() if is_gathered)
    return replace(
        whole, by_name={n: slices for n, (slices, _) in every.items()}, gathered=gathered
    )
