"""The libraries of the extra `hub`, imported when a model or a tokenizer of the Hub is named."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from bigtrain.errors import ConfigError

EXTRA = "pip install 'bigtrain[hub]'"
"""The command that installs every library that this package imports."""


def import_library(name: str, key: str) -> Any:
    """Import a library of the extra `hub`.

    Args:
        name: transformers, timm, huggingface_hub, or a module in one of them.
        key: the job's key and value that need it, for the message.

    Raises:
        ConfigError: the library is not installed, or its import fails.
    """
    # transformers imports torchao if it is installed, and torch warns of torchao's enumerations.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        library = name.partition(".")[0]
        if error.name != library:
            raise _broken(name, key, error) from error
        raise ConfigError(f"{key} needs {library}, which is not installed. Run: {EXTRA}") from None
    except (ImportError, OSError, RuntimeError) as error:
        raise _broken(name, key, error) from error


def _broken(name: str, key: str, error: Exception) -> ConfigError:
    reason = (str(error).splitlines() or [""])[0]
    return ConfigError(
        f"{key}: importing {name} failed: {type(error).__name__}: {reason}. See: "
        f"python -c 'import {name}'"
    )
