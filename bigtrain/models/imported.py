"""A user's own model, named by its import path: `package.module:Class`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from bigtrain.errors import ConfigError, nearest


def make(path: str, args: Mapping[str, Any]) -> nn.Module:
    """Import and construct it.

    Raises:
        ConfigError: it cannot be imported, does not take these arguments, or is no module.
    """
    constructor = load(path)
    check_arguments(path, constructor, args)
    try:
        model = constructor(**args)
    except TypeError as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in args.items())
        raise ConfigError(
            f"model.args: {path}({shown}) raised TypeError: {_first_line(error)}. "
            "Correct these arguments, or the constructor."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name={path} made a {type(model).__name__}, not a torch.nn.Module. "
            "Name a class of modules, or a function that returns one."
        )
    return model


def load(path: str) -> Callable[..., Any]:
    """Find what an import path names; the current directory is searched last.

    Raises:
        ConfigError: with the import's own reason.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(
            f"model.name={path!r} is not an import path. "
            "Write it like model.name=package.module:Class."
        )
    try:
        with _current_directory_importable():
            found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise _import_failure(path, module_name, error) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [name for name in dir(found) if not name.startswith("_")]
            raise ConfigError(
                f"model.name={path}: {module_name} has no {part!r}{nearest(part, known) or '.'} "
                "Name a class or function that the module defines."
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"model.name={path} is a {type(found).__name__}, which cannot be called. "
            "Name the class, or a function that returns the model."
        )
    called: Callable[..., Any] = found
    return called


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
                    f"model.args.{key}: {name} has no argument {key!r}{nearest(key, known) or '.'} "
                    f"Known: {', '.join(known) or 'none'}."
                )
    for parameter in parameters:
        required = parameter.name in known and parameter.default is parameter.empty
        if required and parameter.name not in args:
            raise ConfigError(
                f"model.args.{parameter.name}: {name} needs it, and it is not given. "
                f"Set model.args.{parameter.name}=VALUE."
            )


def _import_failure(path: str, module_name: str, error: Exception) -> ConfigError:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module_name}.".startswith(f"{missing}."):
        return ConfigError(
            f"model.name={path}: no module named {missing!r} in the current directory or among the "
            "installed packages. Start from the folder that holds it, or install it."
        )
    return ConfigError(
        f"model.name={path}: importing {module_name} failed: {type(error).__name__}: "
        f"{_first_line(error)}. See: python -c 'import {module_name}'"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    folder = os.getcwd()
    if folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(folder)  # last, so that a user's folder hides no installed package
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
