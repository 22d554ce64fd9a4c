"""What a model is called with: one value, names from a dict, or whatever the user's function does.

All of bigtrain calls a model with the inputs of a batch as its one argument: wrappers, traces,
forecasts. So a model that takes its inputs by name gets a forward of its own that hands them on.
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
"""(model, inputs) -> outputs; `model` can be called as the user wrote it."""
_USERS, _FUNCTION = "_forward_of_the_user", "_forward_function"


def goes_by_name(forward: Callable[..., Any], inputs: Any) -> bool:
    """Whether inputs are a mapping whose items a forward takes by name.

    It has to take all of them so, and has to name one of them itself, or to take nothing but
    `**kwargs`: any other gets the mapping as its first argument.
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
        for name, one in signature.parameters.items()
        if one.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    ]
    return not named or any(name in inputs for name in named)


def set_model_inputs(
    blueprint: Blueprint, forward: ForwardFunction | None, inputs: Any = None
) -> ExitStack:
    """Let a model take its inputs by name, or by the user's own function.

    Args:
        blueprint: the model; those that it makes later are changed as well.
        forward: calls the model on the inputs of a batch; None: by name where that fits.
        inputs: of an example; where they are no mapping and there is no function, nothing is
            changed.

    Returns:
        Leaving it puts the model back.

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
    undo.callback(_put_back, model)
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
    """In place of the user's own forward, of which it hands on what that takes."""
    users = vars(self).get(_USERS) or type(self).forward.__get__(self)
    if len(args) == 1 and not kwargs:
        function: ForwardFunction | None = vars(self).get(_FUNCTION)
        if function is not None:
            return function(_AsWritten(self, users), args[0])
        if goes_by_name(users, args[0]):
            return users(**args[0])
    return users(*args, **kwargs)


_forward.__name__ = "forward"  # what a pickle of the model looks for


class _AsWritten:
    """A model inside of its own call: calling it computes, and enters no wrapper again."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self._model, self._forward = model, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _put_back(model: nn.Module) -> None:
    before = vars(model).pop(_USERS, None)
    vars(model).pop(_FUNCTION, None)
    vars(model).pop("forward", None)
    if before is not None:
        vars(model)["forward"] = before
