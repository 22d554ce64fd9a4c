"""Units of fully_shard when ranks do not call the same modules or use the same parameters.

All ranks gather a unit together, so all ranks have to call it. If only some ranks call a block, the
unit is the nearest enclosing module that all ranks call. The same holds for a block that no rank
calls, because only its methods or inner modules are used. All ranks also reduce a unit's gradients
together: a rank without a gradient contributes zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bigtrain.core.participation import GradientUse
from bigtrain.models.blocks import independent_blocks, modules_outside
from bigtrain.tracing.routes import Routes


def units_of(root: nn.Module, routes: Routes, *, outside: bool) -> list[tuple[str, nn.Module]]:
    """Return the units of fully_shard below the root, as (name, module), inner modules first.

    Args:
        root: the model, or a stage of it.
        routes: the modules that every pass of the model calls.
        outside: whether modules outside of blocks are units, too.
    """
    blocks = independent_blocks(root)
    called = {name: block for name, block in blocks if routes.calls(name)}
    enclosing: dict[str, nn.Module] = {}
    for name, _ in blocks:
        if name not in called:
            enclosing.update(_nearest_called(root, name, routes))
    if outside:
        called |= {name: m for name, m in modules_outside(root) if routes.calls(name)}
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
    """Return whether no module outside of `module` has a parameter of `module`."""
    inside = {id(inner) for inner in module.modules()}
    parameters = {id(p) for p in module.parameters()}
    outside = (outer_module for outer_module in root.modules() if id(outer_module) not in inside)
    return all(
        id(p) not in parameters
        for outer_module in outside
        for p in outer_module.parameters(recurse=False)
    )


def stand_in_for_missing(unit: nn.Module, use: GradientUse) -> None:
    """Let zeros be reduced for each gradient that this rank lacks, once for each forward pass.

    If gradients are added up over several backward passes before they are reduced, zeros are
    reduced for those that none of these passes made.

    Args:
        unit: a module to which fully_shard was applied.
        use: notes each parameter that had a gradient, whether zeros stood in for any gradient, and
            a parameter that had a gradient although it was not trained when this was called.
    """
    planned = {id(p) for p in unit.parameters() if p.requires_grad}
    passes = 0
    waits = False

    def count(_module: nn.Module, _inputs: Any) -> None:
        nonlocal passes
        passes += torch.is_grad_enabled()

    def complete(group: Any) -> None:
        nonlocal passes, waits
        fills, passes = passes > 0 or waits, max(0, passes - 1)
        waits = fills and not group.reduce_grads
        fills = fills and group.reduce_grads
        for fsdp_param in group.fsdp_params:
            unsharded = getattr(fsdp_param, "_unsharded_param", None)
            if unsharded is None:
                continue
            if id(fsdp_param.sharded_param) not in planned:
                if unsharded.grad is not None:  # other ranks may lack it: not reduced
                    use.surprise, unsharded.grad = fsdp_param.sharded_param, None
                continue
            if unsharded.grad is not None or fsdp_param.unsharded_accumulated_grad is not None:
                use.note(fsdp_param.sharded_param)
            elif fills:  # without a pass through the unit, no rank fills
                unsharded.grad = torch.zeros_like(unsharded)
                use.stand_ins = True

    before_reduction(unit, complete)
    unit.register_forward_pre_hook(count)


def before_reduction(unit: Any, prepare: Callable[[Any], None]) -> None:
    """Call a function at the end of each backward pass of a unit, before it may reduce gradients.

    Args:
        unit: a module to which fully_shard was applied.
        prepare: the function; it gets a parameter group of the unit.
    """
    for group in groups_of(unit):
        plain = group.post_backward

        def post_backward(*args: Any, group: Any = group, plain: Any = plain) -> None:
            prepare(group)
            plain(*args)

        group.post_backward = post_backward


def groups_of(unit: Any) -> list[Any]:
    """Return fully_shard's parameter groups of a unit, each of which is reduced at once."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older versions of torch have a single group
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
