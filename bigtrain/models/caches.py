"""Keys and values that a model keeps for generating text: of no use in training, and in the way.

The models of transformers, and those written like them, answer a forward pass with the keys and
values of every layer where `config.use_cache` is true, which is their default. One object collects
them on the way through the layers, so that no pipeline could be cut between two of them; and they
live until the step ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

NOTE = "use_cache=False for this run: keys and values for generating text are not kept in training"
"""What is said where it was switched off."""


def switch_off_caches(model: nn.Module) -> list[Any]:
    """Set `use_cache` to False in the configurations of a model's modules; those it was set in."""
    changed: list[Any] = []
    for config in _configurations(model):
        if getattr(config, "use_cache", None) is not True:
            continue
        with suppress(Exception):  # a configuration of another kind may be frozen
            config.use_cache = False
            changed.append(config)
    return changed


def switch_on_caches(configurations: Sequence[Any]) -> None:
    """Undo `switch_off_caches`."""
    for config in configurations:
        config.use_cache = True


def _configurations(model: nn.Module) -> Iterator[Any]:
    """The `config` of every module, and the configurations of parts that these hold."""
    seen: set[int] = set()
    for module in model.modules():
        config = vars(module).get("config")
        inner = vars(config).values() if hasattr(config, "__dict__") else ()
        for one in (config, *inner):
            if hasattr(one, "__dict__") and id(one) not in seen:
                seen.add(id(one))
                yield one
