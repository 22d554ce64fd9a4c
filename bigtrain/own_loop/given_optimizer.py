"""Check the optimizer argument of `prepare`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bigtrain.errors import ConfigError

_EXAMPLE = "functools.partial(torch.optim.AdamW, lr=1e-3)"
_WHY = (
    "sharding and cutting change the parameters first, so bigtrain makes the optimizer, from a "
    "class or a function of the parameters"
)


def check_optimizer_maker(given: Any) -> None:
    """Refuse an argument that does not make an optimizer from parameters.

    Raises:
        ConfigError: with the code to write instead.
    """
    if isinstance(given, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: got an {type(given).__name__} that is made already; {_WHY}. "
            f"Give {_maker_of(given)}."
        )
    if isinstance(given, str):
        raise ConfigError(f"optimizer: got the text {given!r}; {_WHY}. Give {_EXAMPLE}.")
    if isinstance(given, type) and not issubclass(given, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: the class {given.__name__} is no torch.optim.Optimizer. Give {_EXAMPLE}."
        )
    if not callable(given):
        raise ConfigError(f"optimizer: got {_kind(given)}; {_WHY}. Give {_EXAMPLE}.")


def _kind(given: Any) -> str:
    if isinstance(given, Iterable):
        items = list(given)
        if items and all(isinstance(item, Tensor) for item in items):
            return f"{len(items)} parameters"
    return f"a {type(given).__name__}"


def _maker_of(optimizer: torch.optim.Optimizer) -> str:
    """Code to paste that makes such an optimizer."""
    kind = type(optimizer)
    module = "torch.optim" if kind.__module__.startswith("torch.optim.") else kind.__module__
    name = f"{module}.{kind.__name__}"
    groups = optimizer.param_groups
    if len(groups) == 1:
        settings = _settings(kind, {**optimizer.defaults, **groups[0]})
        return f"functools.partial({', '.join([name, *settings])})"
    rows = []
    for number, group in enumerate(groups):
        chosen = f"'params': [p for p in parameters if BELONGS_TO_{number}(p)]"
        own = [f"{k!r}: {group[k]!r}" for k, v in optimizer.defaults.items() if group.get(k) != v]
        rows.append(f"{{{', '.join([chosen, *own])}}}")
    settings = _settings(kind, optimizer.defaults)
    inner = ", ".join([f"[{', '.join(rows)}]", *settings])
    return (
        f"a function that makes its {len(groups)} groups: lambda parameters: {name}({inner}). A "
        "group is chosen by what parameters are, as p.dim() > 1"
    )


def _settings(kind: type, given: dict[str, Any]) -> list[str]:
    """`lr=...` and the arguments that differ from the defaults of the class."""
    arguments = []
    for name, parameter in inspect.signature(kind).parameters.items():
        if (
            name != "params"
            and name in given
            and (name == "lr" or given[name] != parameter.default)
        ):
            value = given[name]
            shown = repr(value.item() if isinstance(value, Tensor) else value)
            arguments.append(f"{name}={shown}")
    return arguments
