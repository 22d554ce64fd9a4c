"""Read strategies that are named by words: presets and files joined by `+`, merged in order.

    --strategy 1f1b+fsdp+full          three presets of one role each
    strategy: zero2+my.yaml            in a job, a strategy file or a plan
    strategy: {name: fsdp, recompute: {every: 2}}

A preset or file may itself name its strategy by words; its other keys override them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.files.regular import check_name, is_regular
from bigtrain.job.presets import ConfigTree, KeyPath, is_file, preset_names, read_preset
from bigtrain.job.schema import ROLES, long_form

_MOST_LETTERS = 5000
"""The largest number of characters in the words of a strategy, including paths."""
KIND = "strategies"
"""The folder of the presets in configs/."""
PLAN_KEYS = ("mesh", "strategy", "train", "optim", "memory", "device")
"""The sections of a job that a strategy or plan file may have."""
REMOVED = {
    "autotp": "Use --strategy tensor (or zero1_torch+tensor, which shards optimizer state, too).",
}
"""Strategies of earlier versions, with the fix to show."""
_WHOLE = (("strategy", "cut"), ("strategy", "replicate"))
"""Roles that only one word may set; words may add options to the other roles."""
_SPELLED_OUT = frozenset({"cut", "replicate", "deepspeed"})
"""With one of these keys in `strategy`, `strategy.name` is only a label."""


def words_in(strategy: object, asked: str) -> tuple[str | None, dict[str, Any]]:
    """Split a `strategy:` section into the words that name the strategy, and its other keys.

    Args:
        strategy: the section as it is written.
        asked: the argument or key that contains it, for messages.

    Returns:
        The words, or None if the section spells out its roles; and the other keys.

    Raises:
        ConfigError: the section is neither words nor a mapping.
    """
    if isinstance(strategy, str):
        return strategy, {}
    if not isinstance(strategy, dict):
        raise ConfigError(f"{asked}: {strategy!r} names no strategy. Write words, as ddp+full.")
    name = strategy.get("name")
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"{asked}.name: {name!r} names no strategy. Write words, as ddp+full.")
    if _SPELLED_OUT & strategy.keys() or not isinstance(name, str):
        return None, strategy
    return name, {key: value for key, value in strategy.items() if key != "name"}


def split_words(text: str, asked: str) -> list[str]:
    """Split a strategy into its words.

    Args:
        text: the words, joined by `+`, or the path of a file.
        asked: the argument or key that named the strategy, for messages.

    Raises:
        ConfigError: a word is missing next to a `+`, words are joined by something else, the text
            is too long, or a word is `auto`.
    """
    if is_file(text) and is_regular(text):  # a path may contain a +
        return [text]
    words = [word.strip() for word in text.split("+")]
    if len(text) > _MOST_LETTERS:
        raise ConfigError(
            f"{asked}: a strategy of {len(text)} characters; at most {_MOST_LETTERS} are allowed. "
            "Write words like ddp+full."
        )
    if "" in words:
        fault = "has no word next to a +" if text.strip() else "names no strategy"
        raise ConfigError(f"{asked}: {text!r} {fault}. Write words like ddp+full.")
    for word in words:
        if not is_file(word) and re.search(r"[,;&|\s]", word):
            raise ConfigError(f"{asked}: {word!r}: join words by +, as in ddp+full.")
    if "auto" in words:
        raise ConfigError(
            f"{asked}: {text!r}: auto chooses the whole strategy, so it must be the only word, on "
            "the command line of a run. Use bigtrain train --strategy auto, or leave auto out."
        )
    return words


def strategy_label(text: str) -> str:
    """Return the label of a strategy in tables and folders; files are named by their stem.

    Raises:
        ConfigError: see `split_words`.
    """
    return "+".join(map(_label, split_words(text, "strategy")))


def _label(word: str) -> str:
    return Path(word).stem if is_file(word) else word


def whole_strategies() -> list[str]:
    """Return the presets that are complete strategies; other presets are added to one by `+`."""
    strategies = {name: read_strategy(name, "").values["strategy"] for name in preset_names(KIND)}
    needed = {*_SPELLED_OUT, "slice"}
    return [name for name, strategy in strategies.items() if needed & strategy.keys()]


def read_strategy(text: str, asked: str, within: tuple[str, ...] = ()) -> ConfigTree:
    """Read a strategy by its words.

    Args:
        text: names of presets and paths of YAML files, joined by `+`.
        asked: the argument or key that named it, for messages.
        within: the files and presets that name this strategy, to find cycles.

    Returns:
        The keys of a job that the words set, with every role in its long form. `strategy.name` is
        the label of the words.

    Raises:
        ConfigError: a word is unknown, a file does not exist, or two words set one key to
            different values.
    """
    words = split_words(text, asked)
    if len(words) > 1:
        asked = f"{asked}{' ' if asked.startswith('--') else '='}{'+'.join(words)}"
    merged, settings, names = ConfigTree(), dict[KeyPath, tuple[str, Any]](), []
    for word in words:
        tree = _read_word(word, asked, within)
        names.append(tree.values["strategy"].pop("name"))
        for path, value in _leaves(tree.values):
            shown = (tree.origin(path) or word) if is_file(word) else word
            before, first = settings.setdefault(path, (shown, value))
            if first != value:
                left, right = _sides(first, value)
                raise ConfigError(
                    f"{asked}: {before} and {shown} both set {'.'.join(path)} ({left}, {right}). "
                    "Keep one of them."
                )
        merged.lay(tree)
    merged.values["strategy"]["name"] = "+".join(names)
    return merged


def _read_word(word: str, asked: str, within: tuple[str, ...]) -> ConfigTree:
    """Read one preset or file, and the strategies that it names. Its own keys override theirs."""
    if is_file(word):
        check_name(word, asked)
    key = os.path.realpath(word) if is_file(word) else word  # finds cycles of links, too
    if key in within:
        raise ConfigError(f"{asked}: {word} names itself. Name another strategy there.")
    tree = read_preset(KIND, word, asked) if is_file(word) else _read_preset_word(word, asked)
    tree.values.pop("predicted", None)  # a plan file's forecast is for people
    for section in tree.values:
        if section not in PLAN_KEYS:
            raise ConfigError(
                f"{tree.origin((section,))}: a strategy file has no key {section!r}"
                f"{did_you_mean(section, PLAN_KEYS)} It may have {', '.join(PLAN_KEYS)}."
            )
    where = f"{tree.origin(('strategy',))}: strategy"
    inner, roles = words_in(tree.values.get("strategy", {}), where)
    roles = {
        role: long_form(role, value) if role in ROLES else value for role, value in roles.items()
    }
    tree.values["strategy"] = roles
    if inner is not None:
        base = read_strategy(inner, where, (*within, key))
        base.values["strategy"].pop("name")
        base.lay(tree)
        tree = base
    tree.values["strategy"].setdefault("name", _label(word))
    return tree


def _read_preset_word(word: str, asked: str) -> ConfigTree:
    """Read a preset by name. A word such as every_2 sets the key that the preset `takes`."""
    if ":" in word:
        raise ConfigError(
            f"{asked}: {word!r} is a class, and words are names of presets and files. "
            f"Use strategy.replicate={word} (or its role), or write it into a YAML file and "
            "use the path of that file as the word."
        )
    if word in REMOVED:
        raise ConfigError(f"{asked}: {word} was removed. {REMOVED[word]}")
    names = preset_names(KIND)
    base, _, value = word.rpartition("_")
    if word not in names and base in names and value[:1].isdigit():
        tree = read_preset(KIND, base, asked)
        takes = tree.values.pop("takes", None)
        if takes is not None:
            number = int(value) if value.isdigit() else value
            tree.put(tuple(takes.split(".")), number, f"{asked}: {word}")
            return tree
    tree = read_preset(KIND, word, asked)
    tree.values.pop("takes", None)
    return tree


def _leaves(values: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in values.items():
        path = (*above, key)
        if isinstance(value, dict) and path not in _WHOLE:
            yield from _leaves(value, path)
        else:
            yield path, value


def _sides(left: object, right: object) -> tuple[str, str]:
    """Return two techniques as text: their names, and their options if the names are equal."""
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return str(left), str(right)
    if left.get("name") != right.get("name"):
        return str(left.get("name")), str(right.get("name"))
    options = ([f"{k}={v}" for k, v in side.items() if k != "name"] for side in (left, right))
    first, second = (" ".join([str(left.get("name")), *words]) for words in options)
    return first, second
