"""The blocks of a model: the repeated pieces that are sharded, recomputed or cut as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from bigtrain.errors import ConfigError, did_you_mean

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LISTS = (nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated pieces of any module tree, by name, in the order of the tree.

    A container (ModuleList, ModuleDict, Sequential) counts as repeated where at least two of its
    children are of one class and themselves made of modules; its children are then blocks, or,
    where a child is such a container again (the stages of a vision model), what is in it. A
    model without any has its own children as blocks, of a list of modules what is in it, and of a
    plain `nn.Module()` that only holds others, which has no forward pass. A
    stage of a cut model says itself which of the whole model's blocks it computes
    (`own_blocks`).
    """
    named_blocks = getattr(model, "own_blocks", None)
    if named_blocks is not None:
        named = ((name, model.get_submodule(name)) for name in named_blocks)
        return [(name, block) for name, block in named if _has_weights(block)]
    blocks = _once(_repeated("", model))
    if not blocks:
        blocks = list(_called("", model))
    return blocks


def independent_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks that can be handled by themselves: they share no parameter with anything else."""
    named = find_blocks(model)
    blocks = [block for _, block in named]
    uses: dict[int, set[int]] = {}
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            uses.setdefault(id(parameter), set()).add(index)
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                uses.setdefault(id(parameter), set()).add(-1)
    return [
        (name, block)
        for name, block in named
        if all(len(uses[id(p)]) == 1 for p in block.parameters())
    ]


def matching_modules(model: nn.Module, patterns: Sequence[str], key: str) -> list[str]:
    """The modules of these names, in the order of the tree; `*` stands for one part of a name.

    Args:
        model: the whole model.
        patterns: names as `named_modules` has them.
        key: of the job, for messages.

    Raises:
        ConfigError: one matches nothing or a mere list of modules, or one is inside of another.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    matched: set[str] = set()
    for pattern in patterns:
        matches = [name for name in modules if _matches(name, pattern)]
        if not matches:
            raise ConfigError(
                f"{key}: the model has no module {pattern!r}{did_you_mean(pattern, modules)} "
                f"Its blocks are {_listed([name for name, _ in find_blocks(model)])}."
            )
        lists = [name for name in matches if isinstance(modules[name], _LISTS)]
        if lists:
            raise ConfigError(
                f"{key}: {lists[0]} is a {type(modules[lists[0]]).__name__}, which computes "
                f"nothing itself. Use {lists[0]}.*"
            )
        matched.update(matches)
    for name in matched:
        outer = next((other for other in matched if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ConfigError(
                f"{key}: {name} is inside of {outer}, which is named, too. Leave one out."
            )
    return [name for name in modules if name in matched]


def _matches(name: str, pattern: str) -> bool:
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatchcase, parts, pattern_parts))


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names) or "none"
    return f"{names[0]}, {names[1]}, ... {names[-1]}"


def _repeated(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    children = [(f"{path}.{name}".lstrip("."), c) for name, c in module.named_children()]
    if isinstance(module, _CONTAINERS) and _is_repeated(module):
        for name, child in children:
            inside = list(_repeated(name, child)) if isinstance(child, _CONTAINERS) else []
            if inside:  # a stage of several blocks
                yield from inside
            elif _is_composite(child):
                yield name, child
        return
    for name, child in children:
        yield from _repeated(name, child)


def _called(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children with weights; a list is never called itself, those in it are."""
    for name, child in module.named_children():
        if isinstance(child, _LISTS) or _is_namespace(child):
            yield from _called(f"{path}{name}.", child)
        elif _has_weights(child):
            yield f"{path}{name}", child


def _once(named: Iterator[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """A block that stands in two places under its first name."""
    seen: set[int] = set()
    blocks = []
    for name, block in named:
        if id(block) not in seen:
            seen.add(id(block))
            blocks.append((name, block))
    return blocks


def _is_repeated(module: nn.Module) -> bool:
    """At least two children of one class that are modules of modules, not single layers."""
    kinds = Counter(type(child) for child in module.children() if _is_composite(child))
    return bool(kinds) and max(kinds.values()) >= 2


def _is_composite(module: nn.Module) -> bool:
    inside = next(module.children(), None) is not None
    return _has_weights(module) and inside and not _is_namespace(module)


def _is_namespace(module: nn.Module) -> bool:
    """Whether a module has no forward pass: it only holds others."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
