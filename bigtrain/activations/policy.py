"""What is kept of each block from its forward to its backward pass: all, less, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch import nn

from bigtrain.activations.recompute import checkpoint_block
from bigtrain.errors import ConfigError
from bigtrain.models.compiled import compile_blocks, remove_compiled

BlockPolicy = Literal["keep", "selective", "full", "offload", "full_offload"]
"""All stays; products stay and the rest is computed again; the inputs stay; all is moved away;
the inputs are moved away."""
BLOCK_POLICIES: tuple[BlockPolicy, ...] = get_args(BlockPolicy)


def recomputed_names(choices: Mapping[str, BlockPolicy]) -> frozenset[str]:
    """The modules that are computed again, whatever else becomes of what they keep."""
    again = ("selective", "full", "full_offload")
    return frozenset(name for name, choice in choices.items() if choice in again)


class Offloader(Protocol):
    """Who takes saved tensors away and back; see `offload.ActivationOffloader`."""

    def offload(self, module: nn.Module, compute: Callable[[], Any]) -> Any:
        """Compute; what is saved meanwhile leaves the device until it is wanted."""

    def close(self) -> None:
        """Let go of files and threads."""


def apply_policies(
    root: nn.Module,
    choices: Mapping[str, BlockPolicy],
    mover: Offloader | None = None,
    *,
    compiles: bool = False,
) -> None:
    """Let the forward passes of modules keep what they are told to.

    In place, without a change of any name. A copy of the model made afterwards does the same.

    Args:
        root: a model, real or fake, or a stage of one.
        choices: by the modules' names in the whole model.
        mover: for what is moved.
        compiles: whether the blocks are compiled first, see `compile_blocks`.
    """
    if compiles:
        compile_blocks(root, choices)
    through: frozenset[str] = getattr(root, "cut_through", frozenset())
    for name, choice in choices.items():
        if choice == "keep":
            continue
        for module in _uncut(root, name, through):
            _apply_policy(module, choice, mover)


def _uncut(root: nn.Module, name: str, through: frozenset[str]) -> Iterator[nn.Module]:
    """The module, or, where a cut goes through it, what of it is whole."""
    try:
        module = root.get_submodule(name)
    except AttributeError:  # another stage's
        return
    if name not in through:
        yield module
        return
    for child, _ in module.named_children():
        yield from _uncut(root, f"{name}.{child}", through)


def _apply_policy(module: nn.Module, choice: BlockPolicy, mover: Offloader | None) -> None:
    if choice in ("offload", "full_offload") and mover is None:
        raise ValueError(f"{choice} needs a mover")
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            "strategy.recompute: a block that is compiled by torch.jit.script cannot be computed "
            "again. Leave it uncompiled, or name others in strategy.recompute.layers."
        )
    # The instance's own `forward` comes before the class's, and inside of all hooks: what wraps
    # the module later (sharding) has the parameters together in both passes.
    module.forward = partial(_forward, module, module.forward, choice, mover)


def remove_policies(root: nn.Module) -> None:
    """Undo `apply_policies` and `compile_blocks`, for all modules of a tree."""
    for module in root.modules():
        own = module.__dict__.get("forward")
        if isinstance(own, partial) and own.func is _forward:
            before = own.args[1]
            if getattr(before, "__func__", None) is type(module).forward:
                del module.__dict__["forward"]
            else:
                module.forward = before
    remove_compiled(root)


def _forward(
    module: nn.Module,
    compute: Callable[..., Any],
    choice: BlockPolicy,
    mover: Offloader | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return compute(*args, **kwargs)
    if choice in ("selective", "full"):
        only_between = choice == "selective"
        return checkpoint_block(module, compute, *args, selective=only_between, **kwargs)
    run = partial(compute, *args, **kwargs)
    if choice == "full_offload":
        run = partial(checkpoint_block, module, compute, *args, **kwargs)
    return run() if mover is None else mover.offload(module, run)
