"""Switch off key-value caches, which serve text generation and only hinder training.

Models of transformers and similar libraries return the keys and values of every layer if
`use_cache` of their configuration is true, which is the default. One object collects the keys and
values of all layers, so a pipeline could not cut the model between two layers. They also stay in
memory until the step ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

NOTE = "use_cache=False for this run: keys and values for generating text are not kept in training"
"""The line that a run prints if it has switched off a cache."""


def switch_off_caches(model: nn.Module) -> list[Any]:
    """Set `use_cache` to False in the configurations of a model's modules.

    Returns:
        The configurations that were changed.
    """
    changed: list[Any] = []
    for config in _configurations(model):
        if getattr(config, "use_cache", None) is not True:
            continue
        with suppress(Exception):  # another library's configuration may be frozen
            config.use_cache = False
            changed.append(config)
    return changed


def switch_on_caches(configurations: Sequence[Any]) -> None:
    """Undo `switch_off_caches`.

    Args:
        configurations: the result of `switch_off_caches`.
    """
    for config in configurations:
        config.use_cache = True


def _configurations(model: nn.Module) -> Iterator[Any]:
    """Yield the `config` of every module, and the objects in the config's attributes, each once."""
    seen: set[int] = set()
    for module in model.modules():
        config = vars(module).get("config")
        inner = vars(config).values() if hasattr(config, "__dict__") else ()
        for candidate in (config, *inner):
            if hasattr(candidate, "__dict__") and id(candidate) not in seen:
                seen.add(id(candidate))
                yield candidate
