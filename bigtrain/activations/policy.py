"""The policy of each block: which activations it saves for its backward pass, and where."""

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
"""`keep`: save everything. `selective`: save results of matrix products, recompute the rest.
`full`: save the inputs, recompute everything. `offload`: offload everything. `full_offload`:
offload the inputs, recompute everything."""
BLOCK_POLICIES: tuple[BlockPolicy, ...] = get_args(BlockPolicy)


def recomputed_names(choices: Mapping[str, BlockPolicy]) -> frozenset[str]:
    """Return the names of the modules that are recomputed."""
    again = ("selective", "full", "full_offload")
    return frozenset(name for name, choice in choices.items() if choice in again)


class Offloader(Protocol):
    """Moves saved tensors off the device and back; see `offload.ActivationOffloader`."""

    def offload(self, module: nn.Module, compute: Callable[[], Any]) -> Any:
        """Run a forward pass, and offload its saved tensors until the backward pass."""

    def close(self) -> None:
        """Release files and threads."""


def apply_policies(
    root: nn.Module,
    choices: Mapping[str, BlockPolicy],
    mover: Offloader | None = None,
    *,
    compiles: bool = False,
) -> None:
    """Apply policies to modules, in place.

    The names of modules and parameters do not change. A copy of the model that is made
    afterwards has the same policies.

    Args:
        root: a model, real or fake, or a stage of one.
        choices: policies, by the modules' names in the whole model.
        mover: the offloader, for policies that offload; None if there are none.
        compiles: whether the blocks are compiled first; see `compile_blocks`.

    Raises:
        ConfigError: a block is compiled by torch.jit.script.
        ValueError: a policy offloads, and `mover` is None.
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
    """Yield the module or, if a cut goes through it, its descendants that are whole."""
    try:
        module = root.get_submodule(name)
    except AttributeError:  # it is in another stage
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
            "strategy.recompute: a block that is compiled by torch.jit.script cannot be "
            "recomputed. Leave it uncompiled, or name others in strategy.recompute.layers."
        )
    # The instance's `forward` is found before the class's, and runs inside all hooks: a wrapper
    # that is applied later (sharding) gathers the parameters in both passes.
    module.forward = partial(_forward, module, module.forward, choice, mover)


def remove_policies(root: nn.Module) -> None:
    """Undo `apply_policies` and `compile_blocks` for all modules."""
    for module in root.modules():
        wrapped = module.__dict__.get("forward")
        if isinstance(wrapped, partial) and wrapped.func is _forward:
            original = wrapped.args[1]
            if getattr(original, "__func__", None) is type(module).forward:
                del module.__dict__["forward"]
            else:
                module.forward = original
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
