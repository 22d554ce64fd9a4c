"""When fully_shard reduces gradients: after every micro-batch, or once a step.

If it reduces once a step, whole gradients are added up in between: in the precision of the shards,
on the parameters that fully_shard gathers. With groups of ranks that are replicas of each other, it
may also add up shards, and reduce them between the groups once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bigtrain.core.strategy import Assembly
from bigtrain.memory.meter import MemoryMeter
from bigtrain.strategies.zero.on_torch.routed_units import before_reduction, groups_of
from bigtrain.strategies.zero.unit_choices import Reduce


def reduce_later(assembly: Assembly, choice: Reduce) -> None:
    """Let gradients be reduced in the last backward pass of a step, of each root.

    Args:
        assembly: the run, whose roots are sharded.
        choice: see `Zero.reduce`; not `micro_batch`.
    """
    assembly.before_step.append(partial(_forget, assembly.roots))
    assembly.before_backward.append(partial(_announce, assembly.meter, choice))


def sum_in_one_precision(unit: nn.Module) -> None:
    """Let all gradients of a unit have the precision of the sums when they are reduced.

    The first gradient of a parameter may be made in the last backward pass of a step. It is then in
    the precision of the computation, and fully_shard reduces no mixture.

    Args:
        unit: a module to which fully_shard was applied.
    """

    def convert(group: Any) -> None:
        parameters = group.fsdp_params
        if group.reduce_grads and any(p.unsharded_accumulated_grad is not None for p in parameters):
            for parameter in parameters:
                if parameter.unsharded_accumulated_grad is None:
                    parameter.to_accumulated_grad_if_needed()

    before_reduction(unit, convert)


def _announce(meter: MemoryMeter, choice: Reduce, root: nn.Module, last: bool) -> None:
    """Set whether the next backward pass of a root reduces gradients; label what is added up."""
    if meter.tracking:
        meter.label(_sums(root), "gradients")
    for module in root.modules():
        if isinstance(module, FSDPModule):
            if choice == "step":
                module.set_requires_gradient_sync(last, recurse=False)
            else:
                module.set_requires_all_reduce(last, recurse=False)


def _sums(root: nn.Module) -> Iterator[Tensor]:
    """Yield the gradients that earlier backward passes of a step have left."""
    for group in _groups(root):
        if group._partial_reduce_output is not None:
            yield group._partial_reduce_output
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            held = (parameter.unsharded_accumulated_grad, getattr(unsharded, "grad", None))
            yield from (gradient for gradient in held if gradient is not None)


def _forget(roots: Sequence[nn.Module]) -> None:
    """Drop the sums of a step that failed before its last backward pass."""
    for root in roots:
        for group in _groups(root):
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None


def _groups(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield from groups_of(module)
