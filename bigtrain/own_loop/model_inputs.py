"""The arguments of a model: one value, keywords from a dict, or those of the user's function.

bigtrain calls a model with the inputs of a batch as the only argument: in wrappers, traces and
forecasts. So a model that takes its inputs by name gets a `forward` that unpacks them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.models.blueprint import Blueprint

ForwardFunction = Callable[[Any, Any], Any]
"""(model, inputs) -> outputs; calling `model` runs the user's `forward`."""
_USERS, _FUNCTION = "_forward_of_the_user", "_forward_function"


def goes_by_name(forward: Callable[..., Any], inputs: Any) -> bool:
    """Whether a forward takes the items of a mapping by name.

    It must take all of them by name, and have a parameter with the name of one, or `**kwargs` only.
    Otherwise the mapping is its first argument.
    """
    if not isinstance(inputs, Mapping) or not all(isinstance(key, str) for key in inputs):
        return False
    try:
        signature = inspect.signature(forward)
        signature.bind(**inputs)
    except (TypeError, ValueError):
        return False
    kinds = inspect.Parameter
    named = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    ]
    return not named or any(name in inputs for name in named)


def set_model_inputs(
    blueprint: Blueprint, forward: ForwardFunction | None, inputs: Any = None
) -> ExitStack:
    """Change how a model takes the inputs of a batch: by name, or by the user's function.

    Args:
        blueprint: the model; models that it makes later are changed as well.
        forward: calls the model on the inputs of a batch; None: by name if the names fit.
        inputs: the inputs of an example; unless they are a mapping or there is a function, nothing
            changes.

    Returns:
        A context that restores the model on exit.

    Raises:
        ConfigError: `forward` cannot be called with two arguments.
    """
    undo = ExitStack()
    model = blueprint.model
    if forward is not None:
        _check_forward(forward)
    elif inputs is not None and not isinstance(inputs, Mapping):
        return undo
    if isinstance(model, torch.jit.ScriptModule) or (forward is None and _USERS in vars(model)):
        return undo

    def change(made: nn.Module) -> nn.Module:
        vars(made).setdefault(_USERS, vars(made).get("forward"))
        vars(made)[_FUNCTION] = forward
        vars(made)["forward"] = MethodType(_forward, made)
        return made

    blueprint.change(change)
    undo.callback(_restore, model)
    return undo


def _check_forward(forward: Any) -> None:
    try:
        inspect.signature(forward).bind(None, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"forward: it cannot be called with (model, inputs): {error}. Give a function such as "
            'lambda model, inputs: model(inputs["image"], mask=inputs["mask"]).'
        ) from None


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The `forward` that replaces the user's and passes the inputs on to it."""
    users = vars(self).get(_USERS) or type(self).forward.__get__(self)
    if len(args) == 1 and not kwargs:
        function: ForwardFunction | None = vars(self).get(_FUNCTION)
        if function is not None:
            return function(_AsWritten(self, users), args[0])
        if goes_by_name(users, args[0]):
            return users(**args[0])
    return users(*args, **kwargs)


_forward.__name__ = "forward"  # a pickle of the model looks for this name


class _AsWritten:
    """A model inside of its call: calling it runs the user's forward without wrappers."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self._model, self._forward = model, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _restore(model: nn.Module) -> None:
    before = vars(model).pop(_USERS, None)
    vars(model).pop(_FUNCTION, None)
    vars(model).pop("forward", None)
    if before is not None:
        vars(model)["forward"] = before
