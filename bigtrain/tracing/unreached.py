"""Parameters that the loss does not reach: they are left out of a run before it is planned."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from bigtrain.data.loader import MicroBatch
from bigtrain.errors import BigtrainError
from bigtrain.losses.loss import Loss
from bigtrain.models.blueprint import kept_random_state
from bigtrain.tensors.fake import fake_model, run_without_numbers
from bigtrain.tracing.watch import CallLog, log_calls

MORE_PASSES = 8
"""In training, before a parameter is said to be out of reach: a model may leave a layer out by
chance, or every other time."""


def freeze_unreached(
    model: nn.Module,
    example: MicroBatch,
    loss: Loss,
    reached: frozenset[str] | None = None,
) -> tuple[str, ...]:
    """Stop training what gets no gradient: one process would not update it either.

    A parameter is frozen if the graph of the loss misses it in every pass, in training and in
    evaluation. Of a model that does not run without its numbers nothing is known.

    Args:
        model: on any device; a copy without numbers runs.
        example: one micro-batch; only shapes matter.
        loss: of its output.
        reached: parameters that one pass in training is known to reach (`ParameterUses.reached`);
            the model is not run where these are all that are trained.

    Returns:
        The names that were frozen, each module of them guarded: where none of the passes has
        called it, a call in training raises BigtrainError.
    """
    if reached is not None:
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        if trained <= reached:
            return ()
    try:
        with kept_random_state():
            found = partial(_unreached, model, example, loss)
            names, called = run_without_numbers(found)
    except Exception:  # noqa: BLE001 - user code of any kind runs here
        return ()
    for name in names:
        model.get_parameter(name).requires_grad_(False)
        owner = name.rpartition(".")[0]
        if owner and owner not in called:
            model.get_submodule(owner).register_forward_pre_hook(_Guard(name))
    return tuple(names)


def freeze_empty(model: nn.Module) -> tuple[str, ...]:
    """Stop training parameters without elements, of which no engine makes pieces; their names."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and not p.numel()]
    for _, parameter in named:
        parameter.requires_grad_(False)
    return tuple(name for name, _ in named)


def unfreeze(model: nn.Module, names: Collection[str]) -> None:
    """Train these parameters again, as far as they are still there by their names."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(True)
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Guard)]:
            del hooks[key]


def _unreached(
    model: nn.Module, example: MicroBatch, loss: Loss, device: torch.device
) -> tuple[list[str], frozenset[str]]:
    """Names of trained parameters, and of the modules that were called."""
    twin, batch = fake_model(model, device, double=False), example.fake(device)
    log = CallLog()
    pairs = {  # a loss may know the parameters of the model itself
        name: (own, copy)
        for (name, own), copy in zip(model.named_parameters(), twin.parameters(), strict=True)
        if own.requires_grad
    }
    trained = len(pairs)
    for mode in chain([True, False], repeat(True, MORE_PASSES)):
        # Without targets for a head: its logits are whole, which costs nothing here.
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
    # Where nothing at all is reached the loss is at fault, and its own backward pass says so.
    return [*pairs] if len(pairs) < trained else [], frozenset(log.calls)


def graph_leaves(loss: Tensor) -> tuple[set[int], bool]:
    """The ids of the leaves of a graph, and whether it shows all of them.

    A function of one's own may hold parameters that are seen in its backward pass only, as
    `torch.utils.checkpoint` with use_reentrant=True does.
    """
    if not loss.requires_grad:
        return set(), True
    pending: list[Any] = [torch.autograd.graph.get_gradient_edge(loss).node]
    visited, leaves, is_whole = set(pending), set[int](), True
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        is_whole = is_whole and not isinstance(node, BackwardCFunction)
        new = {following for following, _ in node.next_functions if following} - visited
        visited |= new
        pending += new
    return leaves, is_whole


class _Guard:
    """Refuses a call of a module whose parameters were left out because nothing called it.

    An object and no closure: it is copied with the model.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, _inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            raise BigtrainError(
                f"{self._name} is used in this step, and was left out of training: no pass over "
                "the first micro-batch came by it. Use --strategy ddp with "
                "strategy.replicate.find_unused_parameters=true, or first samples (example=...) "
                "by which every layer is used."
            )
