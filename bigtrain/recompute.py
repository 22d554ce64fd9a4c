"""Activation checkpointing: computing a forward pass again instead of keeping what it made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from bigtrain.chunked_loss import given_again, now_given
from bigtrain.errors import ConfigError
from bigtrain.operations import changed_by

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def recomputed(
    module: nn.Module,
    compute: Callable[..., Any],
    *args: Any,
    selective: bool = False,
    **kwargs: Any,
) -> Any:
    """Compute now, keep what goes in, and compute again when the backward pass wants the rest.

    Random numbers are the same the second time, and running statistics do not move again.

    Args:
        module: whose statistics must not follow the second pass.
        compute: the forward pass, called with `args` and `kwargs`; all that it is given is kept.
        args: its arguments.
        selective: keep the results of products and of attention, too, and compute only what is
            between them again.
        kwargs: its named arguments.

    Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174);
    Korthikanti et al. 2022, Reducing Activation Recomputation (arXiv 2205.05198), section 5, for
    keeping what is dear.
    """
    before = now_given()

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        same = (lambda: statistics_kept(module), lambda: given_again(before))
        if not selective:
            return nullcontext(), _Again(*same)
        first, again = create_selective_checkpoint_contexts(_Policy())  # type: ignore[no-untyped-call]
        return first, _Again(lambda: again, *same)

    return checkpoint(compute, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def is_dear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `selective` keeps the result of an operation: it does most of a model's work.

    Attention that draws random numbers is not kept: leaving it out the second time would move
    the numbers that come after it.
    """
    name = func._overloadpacket.__name__
    if name in _PRODUCTS:
        return True
    return name in _ATTENTION and _drops_nothing(func, args, kwargs)


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            share = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return float(share) == 0.0
    return True


class _Policy:
    """Says of each operation of a block whether its result is kept.

    Raises:
        ConfigError: a kept result is changed in place. torch sees that itself, but not where it
            happens inside of an autograd function, and would then compute with wrong numbers.
    """

    def __init__(self) -> None:
        self._kept: set[int] = set()

    def __call__(
        self, context: SelectiveCheckpointContext, func: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if not isinstance(func, torch._ops.OpOverload):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if any(_storage(tensor) in self._kept for tensor in changed_by(func, args, kwargs)):
            raise ConfigError(CHANGED_IN_PLACE)
        if is_dear(func, args, kwargs):
            made = tree_leaves(context.op_output)
            self._kept.update(_storage(t) for t in made if isinstance(t, Tensor))
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


CHANGED_IN_PLACE = (
    "strategy.recompute: selective keeps the results of products, and a block of this model "
    "changes one in place (as nn.ReLU(inplace=True) behind a convolution does). "
    "Use strategy.recompute.mode=full, or inplace=False in the model."
)


def _storage(tensor: Tensor) -> int:
    # What is kept stays alive, so that no other storage can get its number.
    number: int = tensor.untyped_storage()._cdata
    return number


class _Again(AbstractContextManager[None]):
    """Contexts that are made anew at each entry.

    Where the backward pass is split into one for inputs and one for weights, a block is computed
    again for each of them.
    """

    def __init__(self, *makes: Callable[[], AbstractContextManager[Any]]) -> None:
        self._makes = makes
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self._makes:
                stack.enter_context(make())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """BatchNorm and its like normalise as before, and their running statistics stay."""
    norms = [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    before = [(norm.momentum, norm._buffers.get("num_batches_tracked")) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm._buffers["num_batches_tracked"] = None
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm._buffers["num_batches_tracked"] = tracked
