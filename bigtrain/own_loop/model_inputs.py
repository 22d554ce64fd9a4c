"""Call a model with the inputs of a batch as one value, as keywords, or by the user's function.

In wrappers, traces and forecasts, bigtrain calls a model with the inputs of a batch as the only
argument. So a model that takes its inputs by name gets a `forward` that unpacks them.
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
"""(model, inputs) -> outputs. In the function, a call of `model` runs the model's own `forward`."""
_USERS, _FUNCTION = "_forward_of_the_user", "_forward_function"


def goes_by_name(forward: Callable[..., Any], inputs: Any) -> bool:
    """Whether a model's forward takes the items of a mapping as keyword arguments.

    It does under two conditions. First, it accepts all keys as names of arguments. Second, it has a
    parameter with the name of at least one key, or has only `**kwargs`. Otherwise the mapping is
    passed as the first argument.

    Args:
        forward: the model's bound `forward`.
        inputs: the inputs of a batch. If they are no mapping with text keys, the result is False.
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
    """Change the `forward` of a model so that it takes the inputs of a batch as one argument.

    Without a function `forward`, nothing changes if the inputs of the example are not a mapping.

    Args:
        blueprint: the blueprint of the model. Models that it makes later are changed as well.
        forward: calls the model on the inputs of a batch. None to pass the items of a mapping by
            name where `goes_by_name` is true.
        inputs: the inputs of an example; None if there is none.

    Returns:
        A context manager that restores the model on exit.

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
    """Call the user's `forward`, or the user's function, with the inputs of a batch.

    This function replaces the `forward` of the model.
    """
    users = vars(self).get(_USERS) or type(self).forward.__get__(self)
    if len(args) == 1 and not kwargs:
        function: ForwardFunction | None = vars(self).get(_FUNCTION)
        if function is not None:
            return function(_AsWritten(self, users), args[0])
        if goes_by_name(users, args[0]):
            return users(**args[0])
    return users(*args, **kwargs)


_forward.__name__ = "forward"  # unpickling a model looks the method up by this name


class _AsWritten:
    """A model for the user's function; its call runs the model's own forward, without hooks."""

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
