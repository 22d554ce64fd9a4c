"""Activation checkpointing: recompute a forward pass instead of saving its activations."""

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
from bigtrain.versions.torch_versions import CHECKPOINT_OPTIONS, checkpoint_frame

SAVED_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm")
"""The matrix products whose results a selective recomputation saves."""
SAVED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""The kinds of attention whose results a selective recomputation saves."""


def checkpoint_block(
    module: nn.Module,
    compute: Callable[..., Any],
    *args: Any,
    selective: bool = False,
    **kwargs: Any,
) -> Any:
    """Run a forward pass that saves only its inputs and is recomputed in the backward pass.

    The recomputation draws the same random numbers and does not update running statistics.

    Args:
        module: its running statistics are frozen in the recomputation.
        compute: the forward pass, called with `args` and `kwargs`, which are saved.
        args: the arguments of `compute`.
        selective: whether to save the results of matrix products and attention in addition to the
            inputs, and to recompute only the operations between them. Results that the
            recomputation does not read, such as that of a block's last product, are not saved.
        kwargs: the named arguments of `compute`.

    Returns:
        The result of `compute`.

    Raises:
        ConfigError: the forward pass changes a buffer other than running statistics or, with
            `selective`, changes a saved result in place.

    Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174);
    Korthikanti et al. 2022, Reducing Activation Recomputation (arXiv 2205.05198), section 5, for
    saving the results that are expensive.
    """
    leaves, structure = tree_flatten((args, kwargs))
    scope, original = scope_state(), [(args, kwargs)]
    policy = _SelectivePolicy()
    sums = SavedSums(policy.keeps, policy.keep)
    del args, kwargs  # only the leaves are to be saved

    def run(*saved_leaves: Any) -> Any:
        # The first call gets the caller's objects, because the block may change one of them, such
        # as a list. torch saves the leaves: it checks that none is changed, and lets hooks offload
        # them.
        with sums.known() if selective else nullcontext():
            if original:
                args_now, kwargs_now = original.pop()
                with _moves_no_buffer(module):
                    return compute(*args_now, **kwargs_now)
            args_now, kwargs_now = tree_unflatten(saved_leaves, structure)
            return compute(*args_now, **kwargs_now)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        same = (lambda: freeze_running_statistics(module), lambda: restored_scope(scope))
        if not selective:
            return nullcontext(), _ReentrantContexts(*same)
        first, again = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        kinds: tuple[Any, Any] = (type(first), type(again))
        first.__class__, first.bigtrain_policy = _noting(kinds[0]), policy
        first.bigtrain_unread = _UnreadResults(lambda ids: policy.forget(ids | sums.forget(ids)))
        again.__class__ = _only_saved_ops(kinds[1])
        return first, _ReentrantContexts(lambda: again, *same)

    # Fake tensors draw nothing, and torch 2.11 would copy a GPU's real random state.
    keeps = not any(isinstance(leaf, FakeTensor) for leaf in leaves)
    options = {"use_reentrant": False, "preserve_rng_state": keeps, **CHECKPOINT_OPTIONS}
    return checkpoint(run, *leaves, context_fn=contexts, **options)


@functools.cache
def _noting(kind: type[Any]) -> type[Any]:
    """Return torch's mode that saves results, extended to report each result to the policy.

    torch 2.12 and later call the policy with the result; 2.11 calls it before the result exists.
    """

    class Noting(kind):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = super().__torch_dispatch__(func, types, args, kwargs)
            saved = self.bigtrain_policy.note(func, args, kwargs or {}, made)
            if saved:
                self.bigtrain_unread.note(self, func, saved)
            return made

        def __enter__(self) -> Any:
            self.bigtrain_unread.begin()
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            self.bigtrain_unread.free()

    return Noting


@functools.cache
def _only_saved_ops(kind: type[Any]) -> type[Any]:
    """Return torch's mode that returns saved results, restricted to operations that may be saved.

    Other operations may differ in the recomputation: autocast skips a cast that it has cached.
    """

    class OnlySavedOps(kind):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func._overloadpacket.__name__ not in (*SAVED_PRODUCTS, *SAVED_ATTENTION):
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    return OnlySavedOps


class _UnreadResults:
    """Frees the saved results that the recomputation will not read.

    torch ends a recomputation when it has the last tensor that the forward pass saved for the
    backward pass. The results of products after this tensor, such as that of a block's last linear
    layer, are not read.

    Args:
        forget: called with the ids of the storages that are freed, because others may get the ids.
    """

    def __init__(self, forget: Callable[[set[int]], None]) -> None:
        self._forget = forget
        self._frame: Any = None
        self._results: list[tuple[Any, int, set[int]]] = []
        self._num_saved = 0
        self._only_own = True

    def begin(self) -> None:
        """Find the checkpoint, at the beginning of its forward pass."""
        self._frame = checkpoint_frame()

    def note(self, mode: Any, func: Any, storages: set[int]) -> None:
        """Record the result that torch's mode has just saved.

        Args:
            mode: torch's mode, which has its saved results by operation: a dict by number, or in
                torch 2.11 a list.
            func: the operation.
            storages: the ids of the result's storages.
        """
        if self._frame is None or checkpoint_frame() is not self._frame:
            # The model's code has a checkpoint or hooks of its own, which save tensors elsewhere.
            self._only_own = False
            return
        num_saved = len(self._frame.weak_holders)
        if num_saved > self._num_saved:
            self._results, self._num_saved = [], num_saved
        results = mode.storage.get(func)
        if results:
            last = len(results) - 1 if isinstance(results, list) else next(reversed(results))
            self._results.append((results, last, storages))

    def free(self) -> None:
        """Free the results after the last tensor that the forward pass saved."""
        frame, found = self._frame, self._results
        self._frame, self._results = None, []
        if frame is None or not frame.early_stop or not self._only_own:
            return
        if len(frame.weak_holders) == self._num_saved:
            for results, number, storages in found:
                results[number] = None
                self._forget(storages)


@contextmanager
def _moves_no_buffer(module: nn.Module) -> Iterator[None]:
    """Refuse a forward pass that changes a buffer, in a `with` block.

    Running statistics of norms may change, because the recomputation freezes them.

    Raises:
        ConfigError: a buffer was changed, and the recomputation would change it again.
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
        now: Any = dict(table.items()).get(
            key
        )  # access by the attribute's name would return a sliced buffer whole
        if now is not tensor or tensor._version != version:
            raise ConfigError(
                f"strategy.recompute: the forward pass of a {type(module).__name__} changes its "
                f"buffer {name}, and would do so again when it is recomputed. Leave this block "
                "out: name the others in strategy.recompute.layers."
            )


def is_saved_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `selective` saves the result of an operation: a product, or attention.

    Attention with dropout is recomputed, because skipping it would shift all later random numbers.
    """
    name = func._overloadpacket.__name__
    if name in SAVED_PRODUCTS:
        return True
    return name in SAVED_ATTENTION and _drops_nothing(func, args, kwargs)


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            dropout = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
            return float(dropout) == 0.0
    return True


class _SelectivePolicy:
    """Decides for each operation of a block whether its result is saved.

    Raises:
        ConfigError: a saved result is changed in place. torch itself detects such a change, except
            inside an autograd function, where it would compute with wrong numbers.
    """

    def __init__(self) -> None:
        self._kept: set[int] = set()

    def keeps(self, storage: int) -> bool:
        """Whether the storage with this id is that of a saved result."""
        return storage in self._kept

    def keep(self, storage: int) -> None:
        """Record the storage with this id as that of a saved result."""
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

    def forget(self, storages: set[int]) -> None:
        """Forget storages of saved results, by their ids, as the results are freed."""
        self._kept -= storages

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> set[int]:
        """Record and return the ids of a result's storages if `selective` saves the result."""
        if not isinstance(func, torch._ops.OpOverload) or not is_saved_op(func, args, kwargs):
            return set()
        storages = {_storage(leaf) for leaf in tree_leaves(made) if isinstance(leaf, Tensor)}
        self._kept |= storages
        return storages


CHANGED_IN_PLACE = (
    "strategy.recompute: selective saves the results of matrix products, and a block of this model "
    "changes one in place (as nn.ReLU(inplace=True) after a convolution does). "
    "Use strategy.recompute.mode=full, or inplace=False in the model."
)


def _storage(tensor: Tensor) -> int:
    # A saved result stays alive, so that no other storage can get its id.
    number: int = tensor.untyped_storage()._cdata
    return number


class _ReentrantContexts(AbstractContextManager[None]):
    """Contexts that are made anew at each entry.

    If the backward pass is split, a block is recomputed twice: for the gradients of its inputs, and
    for those of its weights.
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
    """Freeze running statistics inside a `with` block; norms still normalise as before."""
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
