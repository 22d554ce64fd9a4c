"""Import objects that a user names as `package.module:name`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bigtrain.errors import ConfigError, did_you_mean


def load_object(path: str, key: str) -> Callable[..., Any]:
    """Import the class or function of an import path; the current directory is searched last.

    Args:
        path: `package.module:name`.
        key: the key of the job that named it, for the messages.

    Raises:
        ConfigError: it cannot be imported or called; the message contains the reason.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(
            f"{key}={path!r} is not an import path. Write it like {key}=package.module:name."
        )
    try:
        with _current_directory_importable():
            target: Any = importlib.import_module(module_name)
    except Exception as error:
        raise _import_failure(path, key, module_name, error) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            known = [name for name in dir(target) if not name.startswith("_")]
            raise ConfigError(
                f"{key}={path}: {module_name} has no {part!r}{did_you_mean(part, known)} "
                "Name a class or function that the module defines."
            )
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(
            f"{key}={path} is a {type(target).__name__}, which cannot be called. "
            "Name a class or a function."
        )
    called: Callable[..., Any] = target
    return called


def _import_failure(path: str, key: str, module_name: str, error: Exception) -> ConfigError:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module_name}.".startswith(f"{missing}."):
        return ConfigError(
            f"{key}={path}: no module named {missing!r} in the current directory or among the "
            "installed packages. Start in the folder that contains it, or install it."
        )
    return ConfigError(
        f"{key}={path}: importing {module_name} failed: {type(error).__name__}: "
        f"{first_line(error)}. See: python -c 'import {module_name}'"
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; empty if it has no message."""
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
