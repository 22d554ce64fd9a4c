"""Units of fully_shard when ranks do not call the same modules or use the same parameters.

All ranks gather a unit together, so all of them have to call it. If only some ranks call a module,
the unit is the nearest enclosing module that all of them call. The same holds for a block that no
rank calls, because only its methods or inner modules are used. All ranks also reduce a unit's
gradients together: a rank without a gradient gives zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bigtrain.core.participation import GradientUse
from bigtrain.models.blocks import independent_blocks
from bigtrain.tracing.routes import Routes


def units_of(root: nn.Module, routes: Routes) -> list[tuple[str, nn.Module]]:
    """Return the modules that are units, by name, inner ones first, without the root."""
    blocks = independent_blocks(root)
    called = {name: block for name, block in blocks if routes.calls(name)}
    enclosing: dict[str, nn.Module] = {}
    for name, _ in blocks:
        if name not in called:
            enclosing.update(_nearest_called(root, name, routes))
    inner_first = sorted(enclosing.items(), key=lambda pair: -pair[0].count("."))
    return [*called.items(), *((n, m) for n, m in inner_first if n not in called)]


def _nearest_called(root: nn.Module, name: str, routes: Routes) -> Iterator[tuple[str, nn.Module]]:
    while "." in name:
        name = name.rpartition(".")[0]
        module = root.get_submodule(name)
        if name in routes.called and routes.calls(name) and _is_independent(root, module):
            yield name, module
            return


def _is_independent(root: nn.Module, module: nn.Module) -> bool:
    """Whether no module outside of it has any of its parameters."""
    inside = {id(inner) for inner in module.modules()}
    parameters = {id(p) for p in module.parameters()}
    outside = (outer_module for outer_module in root.modules() if id(outer_module) not in inside)
    return all(
        id(p) not in parameters
        for outer_module in outside
        for p in outer_module.parameters(recurse=False)
    )


def stand_in_for_missing(unit: nn.Module, use: GradientUse) -> None:
    """Reduce zeros for each gradient that this rank lacks, once for each pass through the unit.

    Args:
        unit: a unit of fully_shard.
        use: notes which parameters had a gradient.
    """
    planned = {id(p) for p in unit.parameters() if p.requires_grad}
    passes = 0

    def count(_module: nn.Module, _inputs: Any) -> None:
        nonlocal passes
        passes += torch.is_grad_enabled()

    def complete(group: Any) -> None:
        nonlocal passes
        fills, passes = passes > 0, max(0, passes - 1)
        for fsdp_param in group.fsdp_params:
            unsharded = getattr(fsdp_param, "_unsharded_param", None)
            if unsharded is None:
                continue
            if id(fsdp_param.sharded_param) not in planned:
                if unsharded.grad is not None:  # not reduced: no other rank may have one
                    use.surprise, unsharded.grad = fsdp_param.sharded_param, None
                continue
            if unsharded.grad is not None or fsdp_param.unsharded_accumulated_grad is not None:
                use.note(fsdp_param.sharded_param)
            elif fills:  # no rank does if no pass went through the unit
                unsharded.grad = torch.zeros_like(unsharded)
                use.stand_ins = True

    for group in _groups(unit):
        plain = group.post_backward

        def post_backward(*args: Any, group: Any = group, plain: Any = plain) -> None:
            complete(group)
            plain(*args)

        group.post_backward = post_backward
    unit.register_forward_pre_hook(count)


def _groups(unit: Any) -> list[Any]:
    """Return the parameter groups of a unit; fully_shard reduces one at a time."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older versions of torch have a single group
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
