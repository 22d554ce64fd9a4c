"""Shorten a model that has many equal blocks to a model that has few of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bigtrain.data.loader import MicroBatch
from bigtrain.losses.loss import Loss
from bigtrain.models.blocks import find_blocks, independent_blocks
from bigtrain.tracing.parameter_uses import ParameterUses, parameter_uses


def shorten_model(model: nn.Module, most: int = 3) -> tuple[nn.Module, tuple[int, ...]] | None:
    """Copy a model without some of its equal blocks.

    Args:
        model: a model on the meta device; it is not changed.
        most: the most blocks that remain of each sequence of equal blocks.

    Returns:
        The copy; and for each block of the model, the index of the block of the copy that
        represents it. None if no block can be left out.
    """
    named = independent_blocks(model)
    groups: dict[str, list[str]] = {}
    for name, _ in named:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    drop = {n for parent, names in groups.items() for n in _spare(model, parent, names, most)}
    if not drop:
        return None
    # Blocks that are left out are not copied, because a large model has many of them.
    memo: dict[int, Any] = {id(model.get_submodule(name)): nn.Module() for name in drop}
    copied = copy.deepcopy(model, memo)
    new_names: dict[str, str] = {}
    for parent, names in groups.items():
        remaining = [name for name in names if name not in drop]
        if len(remaining) < len(names):
            prefix = f"{parent}." if parent else ""
            new_names |= {name: f"{prefix}{number}" for number, name in enumerate(remaining)}
            container = copied.get_submodule(parent)
            blocks = [copied.get_submodule(name) for name in remaining]
            for name in [n for n, _ in container.named_children()]:
                delattr(container, name)
            for number, block in enumerate(blocks):
                container.add_module(str(number), block)
    # Blocks are found by repetition in a list, which a list of one block does not have.
    kept = [name for name, _ in find_blocks(model) if name not in drop]
    copied.own_blocks = tuple(new_names.get(name, name) for name in kept)  # type: ignore[assignment]
    order, index = [], -1
    for name, _ in named:
        if name not in drop:
            index += 1
            order.append(index)
        else:
            order.append(index)  # the last remaining block before it
    return copied, tuple(order)


def uses_by_block(model: nn.Module, example: MicroBatch, loss: Loss | None) -> ParameterUses | None:
    """Return how a forward pass uses the parameters of a model, from a pass of a shortened copy.

    Args:
        model: a model on the meta device.
        example: one micro-batch; only its shapes matter.
        loss: the loss of the model's output; None to leave the loss out.

    Returns:
        The uses, under the names of the whole model. None if no block can be left out, or if the
        shortened copy does not run on fake tensors.
    """
    shortened = shorten_model(model)
    if shortened is None:
        return None
    short, order = shortened
    uses = parameter_uses(short, example, loss)
    if uses is None:
        return None
    remaining = [name for name, _ in independent_blocks(short)]
    wholes: dict[str, list[str]] = {}
    for (name, _), index in zip(independent_blocks(model), order, strict=True):
        wholes.setdefault(remaining[index], []).append(name)

    def names_of(name: str) -> list[str]:
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            block = ".".join(parts[:end])
            if block in wholes:
                return [whole + name[len(block) :] for whole in wholes[block]]
        return [name]

    return uses.renamed(names_of)


def _spare(model: nn.Module, parent: str, names: Sequence[str], most: int) -> list[str]:
    """Return which children of a module list can be left out: their neighbours are equal."""
    container = model.get_submodule(parent)
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return []
    if [f"{parent}.{n}".lstrip(".") for n, _ in container.named_children()] != list(names):
        return []
    equal_runs = _runs([block_signature(model.get_submodule(name)) for name in names])
    last = -1 if most > 1 else None
    return [names[index] for run in equal_runs for index in list(run)[max(1, most - 1) : last]]


def _runs(signatures: Sequence[str]) -> list[range]:
    """Return the index ranges of consecutive equal signatures."""
    runs, start = [], 0
    for index in range(1, len(signatures) + 1):
        if index == len(signatures) or signatures[index] != signatures[start]:
            runs.append(range(start, index))
            start = index
    return runs


def block_signature(block: nn.Module) -> str:
    """Return a text of a block's modules, options and shapes; equal blocks have equal texts."""
    shapes = [
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for tensors in (block.named_parameters(), block.named_buffers())
        for name, t in tensors
    ]
    return f"{type(block).__module__}.{type(block).__qualname__}{block!r}{shapes}"


def untie_parameters(model: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """Copy a model, and make tied parameters separate, as they are in stages on several ranks.

    Args:
        model: a model on the meta device; it is not changed.

    Returns:
        The copy; and for the name of each new parameter, the name of the parameter to which it was
        tied.
    """
    copied = copy.deepcopy(model)
    first_name: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in list(copied.named_parameters(remove_duplicate=False)):
        if id(parameter) in first_name:
            module, _, key = name.rpartition(".")
            own_parameter = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
            setattr(copied.get_submodule(module), key, own_parameter)
            aliases[name] = first_name[id(parameter)]
        else:
            first_name[id(parameter)] = name
    return copied, aliases
