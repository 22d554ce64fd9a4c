"""What is not the same in all versions of torch that bigtrain takes: asked for here alone.

Before 2.15

* the schedules of `torch.distributed.pipelining` wait for sends at the end of a step only, and
  place a few receives otherwise: `schedules.events` places them as torch 2.15 does;
* the backward pass for inputs does not begin at edges, so they are dressed up as outputs;
* the arithmetic of attention on a CPU is not counted.

2.14 alone warns of `all_gather_into_tensor` and `reduce_scatter_tensor`. Before it

* process groups have no hooks: a run does not count what it exchanges, and says so; where a rank
  waits for a message, the backend ends the run;
* there is no public name to set how long a collective may take;
* checkpoints of torch have no say in the hooks around them.

Before 2.13

* the backward pass for weights counts some gradients twice, so it is not taken apart;
* DDP's option `forward_sync_buffers` is called `broadcast_buffers`, and collectives of one tensor
  have other names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

_NUMBERS = re.match(r"(\d+)\.(\d+)", torch.__version__)
TORCH = (int(_NUMBERS[1]), int(_NUMBERS[2])) if _NUMBERS else (0, 0)
"""The installed version, as far as it matters."""
SCHEDULES_LET_GO = TORCH >= (2, 15)
"""Whether torch's tables of pipeline schedules place messages and waits as they are run here."""
COUNTS_EXCHANGES = hasattr(dist.ProcessGroup, "register_pre_hook")
"""Whether process groups say what they exchange."""
SPLITS_BACKWARD = TORCH >= (2, 13)
"""Whether the backward pass in two parts gives the gradients of the whole one."""


def _has_option(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


FORWARD_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if _has_option(DistributedDataParallel, "forward_sync_buffers")
    else "broadcast_buffers"
)
"""DDP's option whether buffers follow the first replica's."""
CHECKPOINT_OPTIONS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": True}
    if _has_option(checkpoint, "respect_saved_tensors_hooks")
    else {}
)
"""Options of torch's checkpoint, by which hooks around a block see what `selective` keeps."""
all_gather_single: Callable[..., dist.Work | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
"""One tensor from all ranks: (output, input, group, async_op)."""
reduce_scatter_single: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""A share of a sum to each rank: (output, input, op, group, async_op)."""
_COUNTED_AS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        torch.ops.aten._scaled_dot_product_flash_attention
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


def flop_formula(operation: Any) -> Callable[..., Any] | None:
    """Torch's formula for the arithmetic of an operation, for all overloads; None of most."""
    return flop_registry.get(operation) or flop_registry.get(_COUNTED_AS.get(operation))


def set_timeouts(groups: Sequence[dist.ProcessGroup | None], timeout: float) -> None:
    """Set how long a collective of these groups may take, in seconds."""
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in groups:
        change(timedelta(seconds=timeout), group)


def backward_for_inputs(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    parameters: Iterator[nn.Parameter],
) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
    """Torch's backward pass of a stage for its inputs alone, as its schedules split it.

    Args:
        roots: outputs, which are detached, or their edges.
        gradients: one for each; None for a loss.
        inputs: their gradients go to `grad`.
        parameters: of the stage.

    Returns:
        The gradients of the inputs, and what `backward_for_weights` wants.
    """
    from torch.distributed.pipelining import _backward

    if not SCHEDULES_LET_GO:
        roots = [_EdgeRoot(*root) if isinstance(root, GradientEdge) else root for root in roots]
    split: Any = _backward.stage_backward_input
    found: tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]
    found = split(roots, gradients, inputs, parameters)
    return found


def backward_for_weights(
    parameters: Iterator[nn.Parameter], groups: Sequence[dict[str, Any]]
) -> None:
    """What `backward_for_inputs` has left."""
    from torch.distributed.pipelining import _backward

    split: Any = _backward.stage_backward_weight
    split(parameters, groups)


class _EdgeRoot(GradientEdge):
    """An edge that torch before 2.15 takes for an output."""

    __slots__ = ()
    requires_grad = True

    @property
    def grad_fn(self) -> Node:
        return self.node

    def detach_(self) -> None:
        """An output is detached when it is through; here is none any more."""
