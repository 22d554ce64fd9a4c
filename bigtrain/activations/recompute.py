"""Activation checkpointing: computing a forward pass again instead of keeping what it made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from bigtrain.errors import ConfigError
from bigtrain.losses.global_mean import restored_scope, scope_state
from bigtrain.slicing.saved_sums import SavedSums
from bigtrain.tensors.op_cost import mutated_tensors
from bigtrain.versions.torch_versions import CHECKPOINT_OPTIONS

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def checkpoint_block(
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
    leaves, structure = tree_flatten((args, kwargs))
    scope, original = scope_state(), [(args, kwargs)]
    policy = _SelectivePolicy()
    sums = SavedSums(policy.keeps, policy.keep)
    del args, kwargs  # what is kept is kept as leaves alone

    def run(*kept: Any) -> Any:
        # The first time with the very objects, of which the block may change a list, say. torch
        # keeps leaves: it checks that none is changed, and moves them if hooks want that.
        with sums.known() if selective else nullcontext():
            if original:
                args_now, kwargs_now = original.pop()
                with _moves_no_buffer(module):
                    return compute(*args_now, **kwargs_now)
            args_now, kwargs_now = tree_unflatten(kept, structure)
            return compute(*args_now, **kwargs_now)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        same = (lambda: freeze_running_statistics(module), lambda: restored_scope(scope))
        if not selective:
            return nullcontext(), _ReentrantContexts(*same)
        first, again = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        kinds: tuple[Any, Any] = (type(first), type(again))
        first.__class__, first.bigtrain_policy = _noting(kinds[0]), policy
        again.__class__ = _only_saved_ops(kinds[1])
        return first, _ReentrantContexts(lambda: again, *same)

    # Fakes draw nothing, and torch 2.11 copies a GPU's real state where all should be fake.
    keeps = not any(isinstance(leaf, FakeTensor) for leaf in leaves)
    options = {"use_reentrant": False, "preserve_rng_state": keeps, **CHECKPOINT_OPTIONS}
    return checkpoint(run, *leaves, context_fn=contexts, **options)


@functools.cache
def _noting(kind: type[Any]) -> type[Any]:
    """Torch's mode that keeps results, with the policy told what was kept.

    The policy itself is asked with the result from torch 2.12 on, and before it is there in 2.11.
    """

    class Noting(kind):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = super().__torch_dispatch__(func, types, args, kwargs)
            self.bigtrain_policy.note(func, args, kwargs or {}, made)
            return made

    return Noting


@functools.cache
def _only_saved_ops(kind: type[Any]) -> type[Any]:
    """Torch's mode that hands kept results out, asked only about operations that may be kept.

    Others need not be the same both times: autocast leaves out a cast that it has done before.
    """

    class OnlyDear(kind):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func._overloadpacket.__name__ not in (*_PRODUCTS, *_ATTENTION):
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    return OnlyDear


@contextmanager
def _moves_no_buffer(module: nn.Module) -> Iterator[None]:
    """See that a forward pass changes no buffer but statistics, which are seen to.

    Raises:
        ConfigError: one was changed, and would be again when the block is computed again.
    """
    norms = {id(m) for m in module.modules() if isinstance(m, _NormBase)}
    tables = [(n, m._buffers) for n, m in module.named_modules() if id(m) not in norms]
    versions = [
        (f"{name}.{key}".lstrip("."), table, key, tensor, tensor._version)
        for name, table in tables
        for key, tensor in table.items()
        if tensor is not None
    ]
    yield
    for name, table, key, tensor, version in versions:
        now: Any = dict(table.items()).get(key)  # by name a sliced one comes out as whole
        if now is not tensor or tensor._version != version:
            raise ConfigError(
                f"strategy.recompute: the forward pass of a {type(module).__name__} changes its "
                f"buffer {name}, and would do so again when it is computed again. Leave this "
                "block out: name the others in strategy.recompute.layers."
            )


def is_saved_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `selective` keeps the result of an operation: it does most of a model's work.

    Attention that draws random numbers is not kept: leaving it out the second time would move
    the numbers that come after it.
    """
    name = func._overloadpacket.__name__
    if name in _PRODUCTS:
        return True
    return name in _ATTENTION and _drops_nothing(func, args, kwargs)


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            dropout = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
            return float(dropout) == 0.0
    return True


class _SelectivePolicy:
    """Says of each operation of a block whether its result is kept.

    Raises:
        ConfigError: a kept result is changed in place. torch sees that itself, but not where it
            happens inside of an autograd function, and would then compute with wrong numbers.
    """

    def __init__(self) -> None:
        self._kept: set[int] = set()

    def keeps(self, storage: int) -> bool:
        """Whether the storage with this number is that of a result that is kept."""
        return storage in self._kept

    def keep(self, storage: int) -> None:
        """Take what has the storage with this number for a result that is kept."""
        self._kept.add(storage)

    def __call__(
        self, _context: SelectiveCheckpointContext, func: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if not isinstance(func, torch._ops.OpOverload):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if any(_storage(tensor) in self._kept for tensor in mutated_tensors(func, args, kwargs)):
            raise ConfigError(CHANGED_IN_PLACE)
        if is_saved_op(func, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """An operation has given this: its storages are kept where the operation is a saved one."""
        if isinstance(func, torch._ops.OpOverload) and is_saved_op(func, args, kwargs):
            leaves = tree_leaves(made)
            self._kept.update(_storage(leaf) for leaf in leaves if isinstance(leaf, Tensor))


CHANGED_IN_PLACE = (
    "strategy.recompute: selective keeps the results of products, and a block of this model "
    "changes one in place (as nn.ReLU(inplace=True) behind a convolution does). "
    "Use strategy.recompute.mode=full, or inplace=False in the model."
)


def _storage(tensor: Tensor) -> int:
    # What is kept stays alive, so that no other storage can get its number.
    number: int = tensor.untyped_storage()._cdata
    return number


class _ReentrantContexts(AbstractContextManager[None]):
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
def freeze_running_statistics(module: nn.Module) -> Iterator[None]:
    """BatchNorm and its like normalise as before, and their running statistics stay."""
    norms = [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    settings = [(norm.momentum, norm._buffers.get("num_batches_tracked")) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm._buffers["num_batches_tracked"] = None
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, settings, strict=True):
            norm.momentum = momentum
            norm._buffers["num_batches_tracked"] = tracked
