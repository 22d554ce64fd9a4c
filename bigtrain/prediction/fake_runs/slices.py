"""The slices of a shortened model, and the plans from which finer slices are extrapolated."""

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
"""The numbers of ranks of the two runs from which slices over more ranks are extrapolated."""


def coarser(plan: Plan) -> tuple[Plan, Plan] | None:
    """Return two plans with coarser slices, from which this plan's run can be extrapolated.

    None if the tp size of the plan is at most the larger of `SLICED_RANKS`, or no multiple of it.
    """
    few, many = SLICED_RANKS
    if plan.tp <= many or plan.tp % many:
        return None
    return replace(plan, tp=few), replace(plan, tp=many)


def are_even(by_plan: Sequence[ModelSlices | None], example: MicroBatch) -> bool:
    """Whether several plans slice the same tensors, and all slices have the same size.

    Args:
        by_plan: the slices of plans that differ only in the number of ranks, the largest last;
            None for a plan without slices.
        example: a micro-batch. If the sequence dim is sliced, the slices of the inputs have to have
            the same size as well.
    """
    last = by_plan[-1]
    if last is None or any(
        slices_of_plan is None or slices_of_plan.by_name != last.by_name
        for slices_of_plan in by_plan
    ):
        return False
    sections = [section for slices in last.by_name.values() for section in slices.sections]
    if any(section.length // section.unit % last.size for section in sections):
        return False
    dim = last.sequence_dim
    if dim is None:
        return True
    return all(t.dim() <= dim or not t.shape[dim] % last.size for t in tree_tensors(example.inputs))


def finer_share(ranks: int, few: int, many: int) -> float:
    """Return the `share` of `interpolate_sections` for slices over `ranks` ranks.

    Sizes grow with 1 / ranks.

    Args:
        ranks: the number of ranks of the result.
        few: the number of ranks of the run `small`.
        many: the number of ranks of the run `large`.
    """
    return (1 / ranks - 1 / few) / (1 / many - 1 / few)


def slicing_key(plan: Plan) -> str:
    """Return a text that is equal for plans that slice layers equally; empty for whole layers."""
    technique = plan.techniques.get("slice")
    if technique is None or plan.tp == 1:
        return ""
    return f"{plan.tp} {technique.name} {technique.model_dump_json()}"


def without_slices(plan: Plan) -> Plan:
    """Return a copy of the plan with whole layers, in which one process replaces each tp group."""
    techniques = dict(plan.techniques)
    techniques.pop("slice", None)
    return replace(plan, techniques=techniques, tp=1)


def slices_within(model_slices: ModelSlices, model: nn.Module) -> ModelSlices:
    """Return the slices of those tensors that a shortened model has under the same names."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    by_name = {name: slices for name, slices in model_slices.by_name.items() if name in names}
    return replace(model_slices, by_name=by_name, gathered=model_slices.gathered & names)


def of_shortened(model_slices: ModelSlices, stands_for: Mapping[str, str]) -> ModelSlices | None:
    """Return a model's slices under the names of a shortened model.

    Args:
        model_slices: the slices of the whole model.
        stands_for: for the name of each block of the whole model, the name of the block of the
            shortened model that represents it.

    Returns:
        None if blocks with the same representative are sliced differently.
    """
    outside: dict[str, tuple[Slices, bool]] = {}
    inside: dict[str, dict[str, tuple[Slices, bool]]] = {block: {} for block in stands_for}
    for name, slices in model_slices.by_name.items():
        block = next(
            (known_block for known_block in stands_for if name.startswith(f"{known_block}.")), ""
        )
        block_slices = inside[block] if block else outside
        block_slices[name.removeprefix(block)] = slices, name in model_slices.gathered
    by_short_name: dict[str, dict[str, tuple[Slices, bool]]] = {}
    for block, short in stands_for.items():
        if by_short_name.setdefault(short, inside[block]) != inside[block]:
            return None
    named = [
        (f"{short}{name}", entry)
        for short, block_slices in by_short_name.items()
        for name, entry in block_slices.items()
    ]
    every = {**outside, **dict(named)}
    gathered = frozenset(name for name, (_, is_gathered) in every.items() if is_gathered)
    return replace(
        model_slices, by_name={n: slices for n, (slices, _) in every.items()}, gathered=gathered
    )
