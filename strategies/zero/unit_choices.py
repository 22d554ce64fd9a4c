"""The choices of torch's stages 2 and 3: what stays gathered, and when gradients are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from bigtrain.errors import ConfigError, as_word, did_you_mean

KEEP_KEY, REDUCE_KEY = "strategy.replicate.keep_gathered", "strategy.replicate.reduce"
EXCHANGE_KEY = "strategy.replicate.exchange"
PREFETCH_KEY, OUTSIDE_KEY = "strategy.replicate.prefetch", "strategy.replicate.outside_blocks"

Reduce = Literal["micro_batch", "step", "step_between_groups"]
"""When gradients are reduced over the replicas; see `Zero.reduce`."""


def _number_word_or_patterns(value: object) -> object:
    """Return a number of units, the words all and none, or a tuple of patterns."""
    if value is None or value in ("all", "none") or isinstance(value, str):
        return (value,) if value not in (None, "all", "none") else value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    is_list = isinstance(value, (list, tuple))
    if is_list and value and all(isinstance(item, str) and item for item in value):  # type: ignore[attr-defined]
        return tuple(value)  # type: ignore[arg-type]
    raise ValueError(
        f"{value!r} is neither a number of units, at least 0, nor all, none, or patterns of names; "
        "write it like 4, all, none or [blocks.2*]"
    )


KeepGathered = Annotated[
    int | Literal["all", "none"] | tuple[str, ...], BeforeValidator(_number_word_or_patterns)
]
"""A number of units, a word, or patterns of the names of units."""


def kept_units(choice: Any, names: Sequence[str]) -> list[bool]:
    """Return for each unit whether it stays gathered from its forward to its backward pass.

    Args:
        choice: the last so many units, `all`, `none`, or patterns of names; `*` matches any
            characters, dots included.
        names: the names of the units of a model or of a stage, in the order of its modules.
    """
    if isinstance(choice, int):
        first = len(names) - choice
        return [number >= first for number in range(len(names))]
    if isinstance(choice, str):
        return [choice == "all"] * len(names)
    return [any(fnmatchcase(name, pattern) for pattern in choice) for name in names]


def check_kept(choice: Any, names_by_stage: Sequence[Sequence[str]]) -> None:
    """Refuse patterns that match no unit, and a number that no stage has.

    Args:
        choice: see `kept_units`.
        names_by_stage: the names of the units of each stage; of the model, if it is not cut.

    Raises:
        ConfigError: with the key, the names and the fix.
    """
    if isinstance(choice, int):
        check_number(KEEP_KEY, choice, names_by_stage, f", or {KEEP_KEY}=all")
    elif not isinstance(choice, str):
        names = [name for stage in names_by_stage for name in stage]
        for pattern in choice:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"{as_word(KEEP_KEY, list(choice))}: {pattern!r} fits none of the "
                    f"{len(names)} units that are gathered for each pass"
                    f"{did_you_mean(pattern, names)} They are {_listed(names)}."
                )


def check_number(
    key: str, number: int, names_by_stage: Sequence[Sequence[str]], otherwise: str = ""
) -> None:
    """Refuse a number of units that no stage has.

    Args:
        key: the key that has the number.
        number: the number.
        names_by_stage: see `check_kept`.
        otherwise: another fix, as the end of a sentence.

    Raises:
        ConfigError: with the key, both numbers and the fix.
    """
    most = max(map(len, names_by_stage), default=0)
    if number > most:
        of = "the model has" if len(names_by_stage) == 1 else "no stage has more than"
        raise ConfigError(
            f"{key}={number}, and {of} {most} units that are gathered for each pass. Use "
            f"{key}={most} or less{otherwise}."
        )


def _listed(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names) or "none"
    return f"{names[0]}, {names[1]}, ... {names[-1]}"
