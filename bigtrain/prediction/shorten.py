"""A smaller model that stands for a large one: of blocks that are alike only a few are left."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from bigtrain.models.blocks import independent_blocks


def shorten_model(model: nn.Module, most: int = 3) -> tuple[nn.Module, tuple[int, ...]] | None:
    """A copy with fewer of the blocks that are alike, and for each original block that of the copy.

    Args:
        model: on the meta device; it is left as it is.
        most: blocks that are left of a run of equal ones.

    Returns:
        None where there is nothing to leave out.
    """
    named = independent_blocks(model)
    groups: dict[str, list[str]] = {}
    for name, _ in named:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    drop = {n for parent, names in groups.items() for n in _spare(model, parent, names, most)}
    if not drop:
        return None
    copied = copy.deepcopy(model)
    for parent, names in groups.items():
        remaining = [name for name in names if name not in drop]
        if len(remaining) < len(names):
            container = copied.get_submodule(parent)
            blocks = [copied.get_submodule(name) for name in remaining]
            for name in [n for n, _ in container.named_children()]:
                delattr(container, name)
            for number, block in enumerate(blocks):
                container.add_module(str(number), block)
    order, place = [], -1
    for name, _ in named:
        if name not in drop:
            place += 1
            order.append(place)
        else:
            order.append(place)  # as the last one that was kept before it
    return copied, tuple(order)


def _spare(model: nn.Module, parent: str, names: Sequence[str], most: int) -> list[str]:
    """The children of a list that can be left out: others beside them are alike."""
    container = model.get_submodule(parent)
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return []
    if [f"{parent}.{n}".lstrip(".") for n, _ in container.named_children()] != list(names):
        return []
    equal_runs = _runs([block_signature(model.get_submodule(name)) for name in names])
    last = -1 if most > 1 else None
    return [names[place] for run in equal_runs for place in list(run)[max(1, most - 1) : last]]


def _runs(signatures: Sequence[str]) -> list[range]:
    """Stretches of equal neighbours."""
    runs, start = [], 0
    for place in range(1, len(signatures) + 1):
        if place == len(signatures) or signatures[place] != signatures[start]:
            runs.append(range(start, place))
            start = place
    return runs


def block_signature(block: nn.Module) -> str:
    """What two blocks that compute alike have in common: modules, options, shapes."""
    shapes = [
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for tensors in (block.named_parameters(), block.named_buffers())
        for name, t in tensors
    ]
    return f"{type(block).__module__}.{type(block).__qualname__}{block!r}{shapes}"


def untie_parameters(model: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """A copy in which nothing is tied: as stages have it, each with a parameter of its own.

    Args:
        model: on the meta device.

    Returns:
        The copy, and for each new parameter the name of the one that it was tied to.
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
