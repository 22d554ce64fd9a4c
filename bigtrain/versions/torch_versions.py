"""Differences between the supported versions of torch. No other module reads torch's version.

Before 2.15:

* The schedules of `torch.distributed.pipelining` wait for sends only at the end of a step and order
  a few receives differently. `schedules.events` follows the order of torch 2.15.
* The backward pass for inputs cannot start at gradient edges, so edges imitate outputs.
* torch's FLOP counter does not count attention on a CPU.

2.14 alone warns about calls of `all_gather_into_tensor` and `reduce_scatter_tensor`.

Before 2.14:

* Process groups have no hooks. So a run cannot count its traffic, and reports this. The backend
  ends a rank that waits too long for a message.
* The timeout of a collective has no public setter.
* torch's activation checkpoints ignore the saved-tensor hooks around them.

Before 2.13:

* The backward pass for weights counts some gradients twice, so the backward pass is not split.
* DDP's option `forward_sync_buffers` is called `broadcast_buffers`, and the single-tensor
  collectives have other names.
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
"""Major and minor number of the installed torch; (0, 0) if its version has another form."""
SCHEDULES_LET_GO = TORCH >= (2, 15)
"""Whether torch's pipeline schedules order messages and waits as torch 2.15 does."""
COUNTS_EXCHANGES = hasattr(dist.ProcessGroup, "register_pre_hook")
"""Whether process groups have hooks that report each collective."""
SPLITS_BACKWARD = TORCH >= (2, 13)
"""Whether a backward pass that is split into inputs and weights gives the right gradients."""


def _has_option(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


FORWARD_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if _has_option(DistributedDataParallel, "forward_sync_buffers")
    else "broadcast_buffers"
)
"""The name of DDP's option by which the first replica's buffers are broadcast."""
CHECKPOINT_OPTIONS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": True}
    if _has_option(checkpoint, "respect_saved_tensors_hooks")
    else {}
)
"""Arguments of `torch.utils.checkpoint.checkpoint` with which the saved-tensor hooks around it also
get the tensors that `selective` saves."""
all_gather_single: Callable[..., dist.Work | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
"""torch's all-gather into one tensor, with parameters (output, input, group, async_op)."""
reduce_scatter_single: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""torch's reduce-scatter of one tensor, with parameters (output, input, op, group, async_op)."""
_COUNTED_AS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        torch.ops.aten._scaled_dot_product_flash_attention
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


_ATTENTION = {
    f"_scaled_dot_product_{kernel}_attention{suffix}": query_at
    for kernel in ("flash", "efficient", "cudnn")
    for suffix, query_at in (("", 0), ("_backward", 1))
}
"""By name of an attention kernel, the position of the queries among its arguments. Keys and values
follow them. All three are of shape (batch, heads, tokens, head width)."""


def flop_formula(operation: Any) -> Callable[..., Any] | None:
    """Return torch's FLOP formula for all overloads of an operation; None if there is none."""
    counted_as = _COUNTED_AS.get(operation, operation)
    formula = flop_registry.get(operation) or flop_registry.get(counted_as)
    query_at = _ATTENTION.get(getattr(counted_as, "__name__", ""))
    return formula if formula is None or query_at is None else _grouped_heads(formula, query_at)


def _grouped_heads(formula: Callable[..., Any], query_at: int) -> Callable[..., Any]:
    """Return a formula of attention that accepts fewer heads of keys and values than of queries.

    The kernel broadcasts them (grouped-query attention). torch's formulas refused that at first:
    those of 2.11 do. Formulas read shapes only, so they get the shapes after the broadcast.

    Args:
        formula: torch's formula.
        query_at: the position of the queries among its arguments.
    """

    def flops(*args: Any, **kwargs: Any) -> Any:
        heads = args[query_at].shape[1]
        keys_and_values = args[query_at + 1 : query_at + 3]
        shapes = [torch.Size((t.shape[0], heads, *t.shape[2:])) for t in keys_and_values]
        return formula(*args[: query_at + 1], *shapes, *args[query_at + 3 :], **kwargs)

    return flops


class _LenientModule:
    """`torch.nn` with a `Parameter` that requires a gradient by default only if it can have one."""

    @staticmethod
    def Parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:  # noqa: N802
        differentiable = data.dtype.is_floating_point or data.dtype.is_complex
        return nn.Parameter(data, requires_grad=requires_grad and differentiable)

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)


def checkpoint_frame() -> Any:
    """Return torch's record of the activation checkpoint in whose forward pass this is called.

    The result is None if there is none, or if this version of torch keeps it elsewhere.
    """
    find = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if find is None else find(True)  # noqa: FBT003
    if hooks is None:
        return None
    code, cells = getattr(hooks[0], "__code__", None), getattr(hooks[0], "__closure__", None)
    if code is None or cells is None or "frame" not in code.co_freevars:
        return None
    frame = cells[code.co_freevars.index("frame")].cell_contents
    return frame if hasattr(frame, "weak_holders") and hasattr(frame, "early_stop") else None


def shard_integers() -> None:
    """Let `fully_shard` accept parameters of integers, such as weights in 4 bits.

    Older versions, such as torch 2.11, make each shard a parameter that requires a gradient, and
    take the requirement away afterwards; torch refuses the first step for integers.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    source = inspect.getsource(_fsdp_param.FSDPParam._init_sharded_param)
    if "requires_grad=param.requires_grad" not in source:
        vars(_fsdp_param)["nn"] = _LenientModule()


def set_timeouts(groups: Sequence[dist.ProcessGroup | None], timeout: float) -> None:
    """Set the timeout of the collectives of these groups, in seconds; None is the default group."""
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in groups:
        change(timedelta(seconds=timeout), group)


def backward_for_inputs(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    parameters: Iterator[nn.Parameter],
) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]:
    """Run the part of a stage's backward pass that computes the gradients of its inputs.

    Args:
        roots: the stage's outputs, which are detached in place, or their gradient edges.
        gradients: the gradient of each root; None if the root is a loss.
        inputs: the inputs of the stage; their gradients are written to `grad`.
        parameters: the parameters of the stage.

    Returns:
        The gradients of the inputs, and groups of parameters with intermediate results, which
        `backward_for_weights` needs.
    """
    from torch.distributed.pipelining import _backward

    if not SCHEDULES_LET_GO:
        roots = [_EdgeRoot(*root) if isinstance(root, GradientEdge) else root for root in roots]
    split: Any = _backward.stage_backward_input
    gradients_and_state: tuple[tuple[Tensor | None, ...], list[dict[str, Any]]]
    gradients_and_state = split(roots, gradients, inputs, parameters)
    return gradients_and_state


def backward_for_weights(
    parameters: Iterator[nn.Parameter], groups: Sequence[dict[str, Any]]
) -> None:
    """Add the gradients of the weights to `grad`, from the groups of `backward_for_inputs`."""
    from torch.distributed.pipelining import _backward

    split: Any = _backward.stage_backward_weight
    split(parameters, groups)


class _EdgeRoot(GradientEdge):
    """A gradient edge that torch before 2.15 accepts as an output."""

    __slots__ = ()
    requires_grad = True

    @property
    def grad_fn(self) -> Node:
        return self.node

    def detach_(self) -> None:
        """Do nothing: torch detaches an output here, and an edge has no tensor."""
