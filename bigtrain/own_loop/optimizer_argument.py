"""Check the argument `optimizer` of `prepare`."""

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


def check_optimizer_maker(argument: Any) -> None:
    """Refuse an argument `optimizer` that cannot make an optimizer from parameters.

    Raises:
        ConfigError: `argument` is no class of optimizers and no function; the message has the code
            to write instead.
    """
    if isinstance(argument, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: got an {type(argument).__name__} that is made already; {_WHY}. "
            f"Give {_maker_of(argument)}."
        )
    if isinstance(argument, str):
        raise ConfigError(f"optimizer: got the text {argument!r}; {_WHY}. Give {_EXAMPLE}.")
    if isinstance(argument, type) and not issubclass(argument, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: the class {argument.__name__} is no torch.optim.Optimizer. "
            f"Give {_EXAMPLE}."
        )
    if not callable(argument):
        raise ConfigError(f"optimizer: got {_kind(argument)}; {_WHY}. Give {_EXAMPLE}.")


def _kind(argument: Any) -> str:
    if isinstance(argument, Iterable):
        items = list(argument)
        if items and all(isinstance(item, Tensor) for item in items):
            return f"{len(items)} parameters"
    return f"a {type(argument).__name__}"


def _maker_of(optimizer: torch.optim.Optimizer) -> str:
    """Return code that makes an optimizer with the class, groups and settings of this one."""
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
        changed = [
            f"{k!r}: {group[k]!r}" for k, v in optimizer.defaults.items() if group.get(k) != v
        ]
        rows.append(f"{{{', '.join([chosen, *changed])}}}")
    settings = _settings(kind, optimizer.defaults)
    inner = ", ".join([f"[{', '.join(rows)}]", *settings])
    return (
        f"a function that makes its {len(groups)} groups: lambda parameters: {name}({inner}). A "
        "group is chosen by what parameters are, as p.dim() > 1"
    )


def _settings(kind: type, argument: dict[str, Any]) -> list[str]:
    """Return `lr=...` and the arguments that differ from the defaults of the class, as code."""
    arguments = []
    for name, parameter in inspect.signature(kind).parameters.items():
        if (
            name != "params"
            and name in argument
            and (name == "lr" or argument[name] != parameter.default)
        ):
            value = argument[name]
            shown = repr(value.item() if isinstance(value, Tensor) else value)
            arguments.append(f"{name}={shown}")
    return arguments
