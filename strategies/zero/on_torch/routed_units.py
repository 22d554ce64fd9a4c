"""Units of fully_shard where not every rank calls the same modules, or uses the same parameters.

A unit is gathered by all ranks together, so it has to be what all of them call: where only some
call a module, the nearest one around it that all of them call is the unit; and so where nobody
calls a block, whose methods or inner modules are used instead. A unit's gradients are reduced by
all ranks together, too: one that a rank does not have is zeros there.
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
    """The modules that are sharded by themselves, what lies inside others first; not the root."""
    blocks = independent_blocks(root)
    kept = {name: block for name, block in blocks if routes.calls(name)}
    around: dict[str, nn.Module] = {}
    for name, _ in blocks:
        if name not in kept:
            around.update(_nearest_called(root, name, routes))
    inner_first = sorted(around.items(), key=lambda pair: -pair[0].count("."))
    return [*kept.items(), *((n, m) for n, m in inner_first if n not in kept)]


def _nearest_called(root: nn.Module, name: str, routes: Routes) -> Iterator[tuple[str, nn.Module]]:
    while "." in name:
        name = name.rpartition(".")[0]
        module = root.get_submodule(name)
        if name in routes.called and routes.calls(name) and _is_independent(root, module):
            yield name, module
            return


def _is_independent(root: nn.Module, module: nn.Module) -> bool:
    """Whether nothing else has any of its parameters."""
    inside = {id(one) for one in module.modules()}
    own = {id(p) for p in module.parameters()}
    others = (one for one in root.modules() if id(one) not in inside)
    return all(id(p) not in own for one in others for p in one.parameters(recurse=False))


def stand_in_for_missing(unit: nn.Module, use: GradientUse) -> None:
    """Let a rank reduce zeros for what it has no gradient of, once for each pass through the unit.

    Args:
        unit: sharded by itself.
        use: told which parameters had a gradient.
    """
    planned = {id(p) for p in unit.parameters() if p.requires_grad}
    passes = 0

    def count(_module: nn.Module, _inputs: Any) -> None:
        nonlocal passes
        passes += torch.is_grad_enabled()

    def complete(group: Any) -> None:
        nonlocal passes
        fills, passes = passes > 0, max(0, passes - 1)
        for one in group.fsdp_params:
            whole = getattr(one, "_unsharded_param", None)
            if whole is None:
                continue
            if id(one.sharded_param) not in planned:
                if whole.grad is not None:  # not reduced: no other rank may have one
                    use.surprise, whole.grad = one.sharded_param, None
                continue
            if whole.grad is not None or one.unsharded_accumulated_grad is not None:
                use.note(one.sharded_param)
            elif fills:  # none of the ranks does where nobody came by the unit
                whole.grad = torch.zeros_like(whole)
                use.stand_ins = True

    for group in _groups(unit):
        plain = group.post_backward

        def post_backward(*args: Any, group: Any = group, plain: Any = plain) -> None:
            complete(group)
            plain(*args)

        group.post_backward = post_backward
    unit.register_forward_pre_hook(count)


def _groups(unit: Any) -> list[Any]:
    """What fully_shard reduces at once."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before there were several
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
