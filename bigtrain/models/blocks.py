"""The blocks of a model: repeated modules that are sharded, recomputed or cut as a unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.models.parameters import whole_shape

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LISTS = (nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of any module tree, with their names, in the order of the tree.

    A container (ModuleList, ModuleDict, Sequential) is repeated if at least two of its children are
    of one class and each has parameters and children of its own. The children of a repeated
    container that have parameters and children are blocks. If a child is a stage of a vision model,
    its blocks take its place. A stage is a repeated container, or a module around a chain of blocks
    (see `_chains_of_stages`), as in Swin and ConvNeXt of timm and transformers.

    In a model without repeated containers, the blocks are its direct children with parameters. In
    place of a child without a forward pass (a list, a dict, a plain `nn.Module()`), its own
    children are blocks. A stage of a cut model lists the blocks of the whole model that it computes
    in `own_blocks`.
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
    """Return the blocks that share no parameter with any other module."""
    named = find_blocks(model)
    uses: dict[int, set[int]] = {}
    inside: set[int] = set()
    parameters: list[set[int]] = []
    for index, (_, block) in enumerate(named):
        modules = list(block.modules())
        inside.update(map(id, modules))
        parameters.append(_own_parameters(modules))
        for parameter in parameters[-1]:
            uses.setdefault(parameter, set()).add(index)
    for parameter in _own_parameters(m for m in model.modules() if id(m) not in inside):
        uses.setdefault(parameter, set()).add(-1)
    return [
        block
        for block, mine in zip(named, parameters, strict=True)
        if all(len(uses[parameter]) == 1 for parameter in mine)
    ]


def _own_parameters(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters that modules hold themselves."""
    held = (parameter for module in modules for parameter in module._parameters.values())
    return {id(parameter) for parameter in held if parameter is not None}


def modules_outside(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules outside of blocks that can be gathered alone, in the order of the tree.

    They are the outermost modules that contain no block, have a parameter of two or more dims, and
    share no parameter with another module: an embedding and a head that are not tied. Norms are
    left out because they are small. So are modules that a cut goes through.
    """
    inside = {id(module) for _, block in find_blocks(model) for module in block.modules()}
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    through = getattr(model, "cut_through", ())

    def is_alone(module: nn.Module) -> bool:
        own = {id(inner) for inner in module.modules()}
        return all(owners[id(p)] <= own for p in module.parameters())

    return [
        (name, module)
        for name, module in _outside("", model, inside)
        if name not in through
        and is_alone(module)
        and any(p.dim() > 1 for p in module.parameters())
    ]


def _outside(path: str, module: nn.Module, inside: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that contain no module of a block, except containers."""
    for name, child in module.named_children():
        if id(child) in inside:
            continue
        is_container = isinstance(child, _LISTS) or _is_namespace(child)
        if is_container or any(id(inner) in inside for inner in child.modules()):
            yield from _outside(f"{path}{name}.", child, inside)
        else:
            yield f"{path}{name}", child


def matching_modules(model: nn.Module, patterns: Sequence[str], key: str) -> list[str]:
    """Return the names of the modules that match patterns, in the order of the tree.

    Args:
        model: the whole model.
        patterns: names as in `named_modules`; `*` matches within one dotted part.
        key: the job's key that has the patterns, for messages.

    Raises:
        ConfigError: a pattern matches no module, or matches a list or dict of modules; or a matched
            module is inside another matched module.
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
        outer = next((enclosing for enclosing in matched if name.startswith(f"{enclosing}.")), None)
        if outer is not None:
            raise ConfigError(
                f"{key}: {name} is inside {outer}, which is named as well. Leave one out."
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
    if isinstance(module, _CONTAINERS) and _is_repeated(module):
        yield from _blocks_in(path, module)
        return
    for name, child in _named_children(path, module):
        yield from _repeated(name, child)


def _blocks_in(path: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a container of blocks, of stages, or of both."""
    children = _named_children(path, container)
    chains = _chains_of_stages(children)
    for name, child in children:
        inside: list[tuple[str, nn.Module]] = []
        if name in chains:
            inside = list(_blocks_in(*chains[name]))
        elif isinstance(child, _CONTAINERS):
            inside = list(_repeated(name, child))
        if inside:
            yield from inside
        elif _is_composite(child):
            yield name, child


def _named_children(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]


def _chains_of_stages(
    children: Sequence[tuple[str, nn.Module]],
) -> dict[str, tuple[str, nn.Module]]:
    """Return the chain of blocks inside each stage, as (name, container), by the stage's name.

    Layers with a list of experts look like stages. But stages differ in width, so that no block of
    one has the parameter shapes of a block of another; experts of different layers have the same.
    """
    chains = {name: chain for name, child in children if (chain := _chain_inside(name, child))}
    if len(chains) < 2:
        return {}
    by_stage = [
        {tuple(map(whole_shape, block.parameters())) for block in chain.children()}
        for _, chain in chains.values()
    ]
    return chains if len(set.union(*by_stage)) == sum(map(len, by_stage)) else {}


def _chain_inside(path: str, stage: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the chain of blocks in a stage with its own forward pass, and the chain's name.

    The chain is the only ModuleList or Sequential in the stage that has composite modules, and it
    holds more than half of the stage's parameters. Each of its modules has at least two matrices:
    a module with one is a layer with its norm.
    """
    if isinstance(stage, _CONTAINERS):
        return None
    lists = [
        (f"{path}.{name}", child)
        for name, child in stage.named_children()
        if isinstance(child, nn.ModuleList | nn.Sequential)
        and any(_is_composite(inner) for inner in child.children())
    ]
    if len(lists) != 1:
        return None
    ((name, chain),) = lists
    is_most = 2 * _num_elements(chain) > _num_elements(stage)
    matrices = (
        sum(len(whole_shape(p)) > 1 for p in block.parameters()) for block in chain.children()
    )
    return (name, chain) if is_most and min(matrices) > 1 else None


def _num_elements(module: nn.Module) -> int:
    return sum(whole_shape(parameter).numel() for parameter in module.parameters())


def _called(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children with weights; in place of a child that is never called, its children."""
    for name, child in module.named_children():
        if isinstance(child, _LISTS) or _is_namespace(child):
            yield from _called(f"{path}{name}.", child)
        elif _has_weights(child):
            yield f"{path}{name}", child


def _once(named: Iterator[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return blocks without repetition; a block that occurs twice has its first name."""
    seen: set[int] = set()
    blocks = []
    for name, block in named:
        if id(block) not in seen:
            seen.add(id(block))
            blocks.append((name, block))
    return blocks


def _is_repeated(module: nn.Module) -> bool:
    """Whether at least two children of one class have weights and contain modules."""
    kinds = Counter(type(child) for child in module.children() if _is_composite(child))
    return bool(kinds) and max(kinds.values()) >= 2


def _is_composite(module: nn.Module) -> bool:
    inside = next(module.children(), None) is not None
    return _has_weights(module) and inside and not _is_namespace(module)


def _is_namespace(module: nn.Module) -> bool:
    """Whether a module has no forward pass and only contains other modules."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
