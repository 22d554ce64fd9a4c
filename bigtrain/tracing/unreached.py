"""Parameters that the loss does not reach: they are frozen before a run is planned."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.losses.loss import Loss
from bigtrain.models.blueprint import kept_random_state
from bigtrain.models.parameters import forget_left_out, leave_out
from bigtrain.tensors.fake import fake_model, run_without_numbers
from bigtrain.tracing.watch import CallLog, log_calls

MORE_PASSES = 8
"""Further passes in training before a parameter counts as not reached: a model may skip a layer at
random, or in every other pass."""


def freeze_unreached(
    model: nn.Module,
    example: MicroBatch,
    loss: Loss,
    reached: frozenset[str] | None = None,
) -> tuple[str, ...]:
    """Freeze parameters that get no gradient: a run on one process would not update them either.

    A parameter is frozen if the graph of the loss misses it in every pass, in training and in
    evaluation. If the model does not run without values, nothing is frozen.

    Args:
        model: a model on any device; a copy without values runs.
        example: one micro-batch; only shapes matter.
        loss: the loss, of the model's output.
        reached: parameters that one pass in training is known to reach (`ParameterUses.reached`);
            if they are all trained parameters, the model is not run.

    Returns:
        The names of the frozen parameters. If no pass has called the module of a frozen parameter,
        a later call of the module in training raises ConfigError.
    """
    if reached is not None:
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        if trained <= reached:
            return ()
    try:
        with kept_random_state():
            names, called = run_without_numbers(partial(_unreached, model, example, loss))
    except Exception:  # noqa: BLE001 - user code of any kind runs here
        return ()
    for name in names:
        leave_out(model, name)
        owner = name.rpartition(".")[0]
        if owner and owner not in called:
            model.get_submodule(owner).register_forward_pre_hook(_Guard(name))
    return tuple(names)


def freeze_empty(model: nn.Module) -> tuple[str, ...]:
    """Freeze parameters without elements, which engines cannot shard; return their names."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and not p.numel()]
    for _, parameter in named:
        parameter.requires_grad_(False)
    return tuple(name for name, _ in named)


def unfreeze(model: nn.Module, names: Collection[str]) -> None:
    """Train these parameters again; names that the model lacks are ignored.

    The hooks that `freeze_unreached` has added are removed from all modules.
    """
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(True)
    forget_left_out(model)
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Guard)]:
            del hooks[key]


def _unreached(
    model: nn.Module, example: MicroBatch, loss: Loss, device: torch.device
) -> tuple[list[str], frozenset[str]]:
    """Return the names of trained parameters that no pass reached, and of the modules called."""
    twin, batch = fake_model(model, device, double=False), example.fake(device)
    log = CallLog()
    pairs = {  # a loss may refer to the parameters of the model itself
        name: (parameter, copy)
        for (name, parameter), copy in zip(model.named_parameters(), twin.parameters(), strict=True)
        if parameter.requires_grad
    }
    trained = len(pairs)
    for mode in chain([True, False], repeat(True, MORE_PASSES)):
        # No targets are passed to a head: whole logits cost nothing without values.
        with log_calls(twin, log):
            output = twin.train(mode)(batch.inputs)
        total = loss(output, batch.targets, max(1, batch.count))
        leaves, is_whole = graph_leaves(total)
        pairs = {n: pair for n, pair in pairs.items() if leaves.isdisjoint(map(id, pair))}
        if pairs and not is_whole:
            total.backward()  # type: ignore[no-untyped-call]
            pairs = {n: pair for n, pair in pairs.items() if pair[1].grad is None}
        if not pairs:
            break
    # If no parameter is reached, the loss is wrong; its backward pass in the run will raise.
    return [*pairs] if len(pairs) < trained else [], frozenset(log.calls)


def graph_leaves(loss: Tensor) -> tuple[set[int], bool]:
    """Return the ids of the leaves in the graph of a loss, and whether the graph has all leaves.

    A `torch.autograd.Function` may use parameters that only its backward pass shows, as
    `torch.utils.checkpoint` with use_reentrant=True does. A function that hides no parameter has
    the class attribute `shows_its_leaves`, which is true.
    """
    if not loss.requires_grad:
        return set(), True
    pending: list[Any] = [torch.autograd.graph.get_gradient_edge(loss).node]
    visited, leaves, is_whole = set(pending), set[int](), True
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        if isinstance(node, BackwardCFunction):
            function = getattr(type(node), "_forward_cls", None)
            is_whole = is_whole and getattr(function, "shows_its_leaves", False)
        new = {following for following, _ in node.next_functions if following} - visited
        visited |= new
        pending += new
    return leaves, is_whole


class _Guard:
    """Refuses a call of a module whose parameter was frozen because no pass called the module.

    An object and not a closure, so that it is copied with the model.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, _inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            raise ConfigError(
                f"{self._name} is used in this step, and was left out of training: no pass over "
                "the first micro-batch used it. Use --strategy ddp with "
                "strategy.replicate.find_unused_parameters=true, or first samples (example=...) "
                "with which every layer is used."
            )
