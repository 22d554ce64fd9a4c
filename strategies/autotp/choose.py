"""What of our own choice of slices AutoTP can do: pairs of linear layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.slice_planning.axis_classes import SliceClass
from bigtrain.slice_planning.plan import SlicingPlan
from bigtrain.slicing.slices import Slices


def pairs_of(found: SlicingPlan, model: nn.Module, ranks: int) -> dict[str, Slices]:
    """The slices of those classes that are linear layers by columns and by rows, and no more.

    Raises:
        ConfigError: there are none.
    """
    once = _used_once(model)
    chosen: dict[str, Slices] = {}
    why = ""
    for own in found.classes:
        reason = _why_not(own, once, ranks)
        if reason:
            why = why or f"{own.name}: {reason}"
        else:
            chosen |= own.slices
    if not chosen:
        raise ConfigError(
            f"strategy autotp finds no linear layers to slice by columns and rows over mesh.tp="
            f"{ranks} in {type(model).__name__}{f' ({why})' if why else ''}. "
            "Use --strategy tensor, which slices any model."
        )
    return chosen


def _used_once(model: nn.Module) -> dict[str, nn.Linear]:
    """Plain linear layers that stand in one place, with weights that nothing else has."""
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {
        name: m
        for name, m in model.named_modules()
        if type(m) is nn.Linear
        and places[id(m)] == 1
        and all(owners[id(p)] == 1 for p in m.parameters())
        and not (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks)
    }


def _why_not(own: SliceClass, linears: Mapping[str, nn.Linear], ranks: int) -> str:
    """Why AutoTP cannot slice a class; '' where it can."""
    columns: set[str] = set()
    rows: set[str] = set()
    for name, slices in own.slices.items():
        module, _, kind = name.rpartition(".")
        if module not in linears:
            return f"{name} is not of a plain linear layer that stands in one place"
        if any(section.length // section.unit % ranks for section in slices.sections):
            return f"{name} does not divide evenly"
        if len({section.length for section in slices.sections}) > 1:
            return f"{name} has sections of different lengths"
        if slices.dim == 1 and len(slices.sections) > 1:
            return f"{name} has sections along what is summed over"
        (rows if slices.dim == 1 else columns).add(module)
        if kind == "weight" and slices.dim == 0 and linears[module].bias is not None:
            bias = own.slices.get(f"{module}.bias")
            if bias is None or not bias.same(slices, ranks):
                return f"{module}.bias is sliced otherwise than its weight"
    if not rows or not columns or rows & columns:
        return "it is no pair of columns and rows"
    for sent in own.exchanged:
        expected = columns if sent.backward else rows
        if sent.kind != "all_reduce" or sent.where not in expected:
            return f"{sent.where} exchanges more than a pair of linear layers does"
    return ""


def layer_specs(slices: Mapping[str, Slices]) -> list[dict[str, Any]]:
    """AutoTP's `layer_specs` of these slices: a line for each weight."""
    specs: list[dict[str, Any]] = []
    for name, own in slices.items():
        if not name.endswith(".weight"):
            continue
        spec: dict[str, Any] = {"patterns": [f"^{re.escape(name)}$"]}
        spec["partition_type"] = "row" if own.dim == 1 else "column"
        if len(own.sections) > 1:
            spec |= {"shape": [len(own.sections), -1], "partition_dim": 0}
        specs.append(spec)
    return specs


def whole_shapes(
    model: nn.Module, slices: Mapping[str, Slices], held: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """The shapes of whole parameters, of a model that holds slices of them."""
    shapes = {}
    for name in held:
        own = slices[name]
        shape = model.get_parameter(name).shape
        shapes[name] = tuple(own.total if dim == own.dim else n for dim, n in enumerate(shape))
    return shapes
