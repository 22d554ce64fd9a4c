"""A user's own model, named by its import path: `package.module:Class`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.job.import_path import first_line, load_object


def make_from_path(path: str, args: Mapping[str, Any]) -> nn.Module:
    """Import and construct it.

    Raises:
        ConfigError: it cannot be imported, does not take these arguments, or is no module.
    """
    constructor = load_object(path, "model.name")
    check_arguments(path, constructor, args)
    try:
        model = constructor(**args)
    except TypeError as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in args.items())
        raise ConfigError(
            f"model.args: {path}({shown}) raised TypeError: {first_line(error)}. "
            "Correct these arguments, or the constructor."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name={path} made a {type(model).__name__}, not a torch.nn.Module. "
            "Name a class of modules, or a function that returns one."
        )
    return model


def check_arguments(name: str, constructor: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Compare arguments with a constructor's signature, without calling it.

    Raises:
        ConfigError: one is unknown, or a required one is missing.
    """
    try:
        parameters = inspect.signature(constructor).parameters.values()
    except (TypeError, ValueError):
        return  # written in C, without a signature: the call will tell
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if all(p.kind is not p.VAR_KEYWORD for p in parameters):
        for key in args:
            if key not in known:
                raise ConfigError(
                    f"model.args.{key}: {name} has no argument {key!r}{did_you_mean(key, known)} "
                    f"Known: {', '.join(known) or 'none'}."
                )
    for parameter in parameters:
        required = parameter.name in known and parameter.default is parameter.empty
        if required and parameter.name not in args:
            raise ConfigError(
                f"model.args.{parameter.name}: {name} needs it, and it is not given. "
                f"Set model.args.{parameter.name}=VALUE."
            )
