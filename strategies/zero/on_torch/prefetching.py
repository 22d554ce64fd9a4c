"""Gather units of fully_shard ahead of the unit that computes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule


def gather_ahead(root: nn.Module, units: Sequence[nn.Module], number: int) -> None:
    """Let each unit of a root gather the next units of the forward and of the backward pass.

    The root gathers the first ones of either pass. A unit whose list is empty would gather the unit
    before it in the order of the last forward passes; so its list has the unit itself, which is
    gathered already.

    Args:
        root: the model, or a stage of it.
        units: the units below the root, in the order of the forward pass; some may be no units,
            because they have no parameter to shard.
        number: the number of units that are gathered ahead.
    """
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for module in root.modules():  # norms are sharded apart from their units
        if isinstance(module, FSDPModule):
            module.set_modules_to_backward_prefetch([module])
    for index, unit in enumerate(sharded):
        unit.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + number])
        before = sharded[max(0, index - number) : index]
        unit.set_modules_to_backward_prefetch(before[::-1] or [unit])
    if isinstance(root, FSDPModule) and sharded and number:
        root.set_modules_to_forward_prefetch(sharded[:number])
        root.set_modules_to_backward_prefetch(sharded[-number:][::-1])
