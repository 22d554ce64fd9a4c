"""Hooks that a user registered on parameters, run once a step on the averaged gradient.

In one process with the whole batch, autograd calls a hook with the gradient of the whole batch. On
several ranks, autograd would call the hook with the gradient of one micro-batch of one rank, in
bf16 or before averaging. If an engine replaced the parameter, autograd would never call the hook.
So the hooks are removed from the parameters before a strategy is applied to the model, and run on
the complete gradient.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

_Hooks = dict[int, Callable[[Tensor], Any]]


def unpredicted_hooks(model: nn.Module) -> list[str]:
    """Return a line on memory that hooks allocate and no forecast contains; [] without hooks.

    A hook may return a new tensor. Where gradients are sharded, hooks run on a whole gradient,
    which is gathered for them.

    Args:
        model: a model whose parameters still have their hooks.
    """
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"the forecast of memory leaves out the hooks on the gradients of {names[0]}{more}: they "
        "get whole gradients, one at a time, and may make new ones"
    ]


class GradientHooks:
    """The hooks of a model's parameters, by name, in the order of the model."""

    def __init__(self) -> None:
        self._before: dict[str, _Hooks] = {}
        """Hooks of `Tensor.register_hook`, in the dicts of torch, so that a user's handle of a hook
        can still remove it."""
        self._after: dict[str, _Hooks] = {}
        """Hooks of `Tensor.register_post_accumulate_grad_hook`, in the dicts of torch."""

    @classmethod
    def take(cls, model: nn.Module) -> GradientHooks:
        """Remove the hooks from the parameters of a model, and return them."""
        taken = cls()
        for name, parameter in model.named_parameters():
            if parameter._backward_hooks:
                taken._before[name] = parameter._backward_hooks
                parameter._backward_hooks = None
            if parameter._post_accumulate_grad_hooks:
                taken._after[name] = parameter._post_accumulate_grad_hooks
                parameter._post_accumulate_grad_hooks = OrderedDict()
        return taken

    def put_back(self, model: nn.Module) -> None:
        """Register the hooks with autograd again, for the parameters that the model still has.

        This object has no hooks afterwards.
        """
        for name in self.names:
            with suppress(AttributeError):
                parameter = model.get_parameter(name)
                if name in self._before:
                    parameter._backward_hooks = self._before[name]
                if name in self._after:
                    parameter._post_accumulate_grad_hooks = self._after[name]
        self._before, self._after = {}, {}

    @property
    def names(self) -> list[str]:
        """Names of the parameters that have hooks."""
        return list(dict.fromkeys([*self._before, *self._after]))

    @torch.no_grad()
    def run(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Run the hooks of these parameters, whose gradients are averaged over the replicas.

        Collective if a gradient is sharded: each rank runs the hook on the whole gradient.
        """
        for name in self.names:
            parameter = parameters.get(name)
            gradient = None if parameter is None else parameter.grad
            if parameter is None or gradient is None:
                continue
            if isinstance(gradient, DTensor):
                changed = self.changed(name, gradient.full_tensor())
                mesh, placements = gradient.device_mesh, gradient.placements
                # All ranks have the same result, so nothing is sent.
                sharded = distribute_tensor(changed, mesh, placements, src_data_rank=None)
                gradient.to_local().copy_(sharded.to_local())
                if name in self._after:
                    self._run_on_whole(name, parameter, changed)
                continue
            changed = self.changed(name, gradient)
            if changed is not gradient:
                gradient.copy_(changed)
            for hook in _in_order(self._after.get(name)):
                hook(parameter)

    def _run_on_whole(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Run post-accumulate hooks of a sharded parameter on a gathered copy of it.

        If the hooks change the values or the gradient of the copy, the changes are copied into the
        shards. Unchanged tensors are not copied, because a hook may have changed the parameter of
        the model directly.
        """
        shards: Any = parameter.data
        full_parameter: Any = nn.Parameter(
            shards.full_tensor(), requires_grad=parameter.requires_grad
        )
        full_parameter.grad = gradient
        originals = [(shards.to_local(), shards.to_local().clone())]
        if isinstance(parameter.grad, DTensor):
            shard = parameter.grad.to_local()
            originals.append((shard, shard.clone()))
        for hook in _in_order(self._after[name]):
            hook(full_parameter)
        if full_parameter.grad is None:
            parameter.grad = None
        for (target, before), tensor in zip(
            originals, (full_parameter.data, full_parameter.grad), strict=False
        ):
            if tensor is None:
                continue
            mesh, placements = shards.device_mesh, shards.placements
            expected = distribute_tensor(tensor, mesh, placements, src_data_rank=None).to_local()
            if not torch.equal(expected, before):
                target.copy_(expected)

    def changed(self, name: str, gradient: Tensor) -> Tensor:
        """Return a whole gradient after the `Tensor.register_hook` hooks of its parameter.

        Args:
            name: the name of the parameter.
            gradient: the whole gradient, which hooks may change in place.
        """
        for hook in _in_order(self._before.get(name)):
            result = hook(gradient)
            gradient = gradient if result is None else result
        return gradient


def _in_order(hooks: _Hooks | None) -> Iterable[Callable[[Tensor], Any]]:
    return list((hooks or {}).values())  # a hook may remove itself
