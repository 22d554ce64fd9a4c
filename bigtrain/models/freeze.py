"""Freeze the parameters of a model whose names fit patterns (`model.freeze`)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from bigtrain.errors import ConfigError, as_word, did_you_mean

NOT = "!"
"""The prefix of a pattern whose parameters are trained."""


def freeze(model: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """Set `requires_grad` to False for the parameters that patterns match.

    A pattern is compared with the name of each parameter and of each module that contains the
    parameter; `*` matches any characters, dots included. The last pattern that matches decides. If
    it begins with `!`, the parameter is trained.

    Args:
        model: the model, on any device; it is changed.
        patterns: the patterns of the key `model.freeze`.

    Returns:
        `model`.

    Raises:
        ConfigError: a pattern matches nothing, only one of two names of a tied parameter is frozen,
            or no parameter is left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    forms = {name: _forms(name) for name, _ in named}
    _check_patterns(patterns, forms)
    frozen = {name for name, own in forms.items() if _is_frozen(own, patterns)}
    names_of: dict[int, list[str]] = {}
    for name, parameter in named:
        names_of.setdefault(id(parameter), []).append(name)
    for names in names_of.values():
        held = [name for name in names if name in frozen]
        if held and len(held) < len(names):
            trained = next(name for name in names if name not in frozen)
            raise ConfigError(
                f"{as_word('model.freeze', patterns)} freezes {held[0]} and trains {trained}, "
                f"which are one tensor. Add {trained} to freeze it, or !{held[0]} to train it."
            )
    for name, parameter in named:
        if name in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(
            f"{as_word('model.freeze', patterns)} freezes all {len(names_of)} parameters of the "
            f"model, and nothing is left to train. Add a pattern such as "
            f"!{named[-1][0].rpartition('.')[0] or named[-1][0]}."
        )
    return model


def _forms(name: str) -> list[str]:
    """Return a parameter's name and the names of the modules that contain it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _is_frozen(forms: Sequence[str], patterns: Sequence[str]) -> bool:
    frozen = False
    for pattern in patterns:
        if any(fnmatchcase(form, pattern.removeprefix(NOT)) for form in forms):
            frozen = not pattern.startswith(NOT)
    return frozen


def _check_patterns(patterns: Sequence[str], forms: dict[str, list[str]]) -> None:
    known = list(dict.fromkeys(form for own in forms.values() for form in own))
    for pattern in patterns:
        plain = pattern.removeprefix(NOT)
        if not any(fnmatchcase(form, plain) for form in known):
            raise ConfigError(
                f"model.freeze: no parameter or module of the model fits {pattern!r}"
                f"{did_you_mean(plain, known)} The model has "
                f"{', '.join(dict.fromkeys(name.partition('.')[0] for name in forms))}."
            )
