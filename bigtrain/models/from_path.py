"""Make models by import path: `package.module:Class`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.job.import_path import first_line, load_object


def make_from_path(path: str, args: Mapping[str, Any]) -> nn.Module:
    """Import and construct a model.

    Args:
        path: the import path of a class, or of a function that returns a module.
        args: arguments of the constructor. A mapping `config` becomes a configuration object if
            the class has a `config_class`, as models of transformers do.

    Raises:
        ConfigError: the path cannot be imported, the constructor does not take these arguments, or
            its result is no module.
    """
    constructor = load_object(path, "model.name")
    check_arguments(path, constructor, args)
    try:
        model = constructor(**_with_configuration(path, constructor, args))
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

    Args:
        name: the name of the model, for messages.
        constructor: the class or function.
        args: the arguments.

    Raises:
        ConfigError: an argument is unknown or missing, or the class has a `config_class` and a
            field of the mapping `config` is unknown.
    """
    try:
        parameters = inspect.signature(constructor).parameters.values()
    except (TypeError, ValueError):
        return  # a constructor in C without a signature: the call checks the arguments
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
            example = f"{parameter.name}=VALUE"
            if parameter.name == "config" and _config_class(constructor) is not None:
                example = "config={} for the defaults, or model.args.config.KEY=VALUE"
            raise ConfigError(
                f"model.args.{parameter.name}: {name} needs it, and it is not given. "
                f"Set model.args.{example}."
            )
    _check_configuration(name, constructor, args)


def _config_class(constructor: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the `config_class` of a model's class, as in transformers; None without one."""
    config_class = getattr(constructor, "config_class", None)
    return config_class if isinstance(config_class, type) else None


def _check_configuration(
    name: str, constructor: Callable[..., Any], args: Mapping[str, Any]
) -> None:
    """Compare the mapping `config` with the fields of the model's configuration.

    Raises:
        ConfigError: a key is no field of the configuration.
    """
    kind, fields = _config_class(constructor), args.get("config")
    if kind is None or not isinstance(fields, Mapping):
        return
    parameters = inspect.signature(kind).parameters.values()
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    # Aliases of fields. Properties such as num_labels are found by `hasattr` below.
    known += getattr(kind, "attribute_map", {})
    for key in fields:
        if known and key not in known and not hasattr(kind, key):
            raise ConfigError(
                f"model.args.config.{key}: {kind.__name__}, which {name} is made from, has no "
                f"{key!r}{did_you_mean(key, known) or '.'} Use a field of {kind.__name__}."
            )


def _with_configuration(
    path: str, constructor: Callable[..., Any], args: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments with the mapping `config` replaced by a configuration object.

    Raises:
        ConfigError: the configuration class refuses a value.
    """
    kind, fields = _config_class(constructor), args.get("config")
    if kind is None or not isinstance(fields, Mapping):
        return dict(args)
    try:
        return {**args, "config": kind(**fields)}
    except Exception as error:
        reasons = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ConfigError(
            f"model.args.config: {kind.__name__}, which {path} is made from, does not take these "
            f"values: {type(error).__name__}: {reasons}. Correct them."
        ) from error
