"""Read YAML files with the line of every key: bigtrain's presets and users' files."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from bigtrain.errors import ConfigError, did_you_mean, plain_text
from bigtrain.files.parse import MOST_YAML, parse_yaml
from bigtrain.files.regular import check_name, is_there, read_text
from bigtrain.job.optim_keys import keys_without_use

KeyPath = tuple[str, ...]
COMMAND_LINE = "command line"
"""The beginning of the origin of a key that was set on the command line."""
_LISTED = 20
"""The largest number of names that a message lists."""


@dataclass
class ConfigTree:
    """The values of a job's keys, and where each key was written."""

    values: dict[str, Any] = field(default_factory=dict)
    """Nested mappings, by section and key."""
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """By key, FILE:LINE or a text that begins with `COMMAND_LINE`."""
    strategy: str | None = None
    """The words of `strategy=WORDS`; `strategy.KEY=...` may be given in addition."""

    def origin(self, path: KeyPath) -> str | None:
        """Return where a key, or the nearest enclosing key, was written; None if it is unknown."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path[:-1]
        return None

    def put(self, path: KeyPath, value: Any, origin: str, *, adds: bool = False) -> None:
        """Set one key, and create its enclosing mappings.

        Args:
            path: the parts of the dotted key.
            value: the value of the key.
            origin: where the key was written.
            adds: whether the key adds to other keys of the same layer. If false, the key overrides
                a lower layer, and keys that depend on the old value are dropped.

        Raises:
            ConfigError: an enclosing key is set as a whole in the same layer.
        """
        node = self.values
        for depth, key in enumerate(path[:-1], start=1):
            child = node.get(key)
            if isinstance(child, str) and depth > 1:  # `replicate: ddp` is short for {name: ddp}
                child = {"name": child}
            if adds and key in node and not isinstance(child, dict):
                whole_key, part = ".".join(path[:depth]), ".".join(path)
                raise ConfigError(
                    f"{whole_key} is set as a whole, and {part} in addition. Leave one of the two "
                    "out."
                )
            if not isinstance(child, dict):
                child = {}
            node[key] = child
            node = child
        if not adds:
            _forget_arguments(node, path[:-1], {path[-1]: value})
        if adds:
            value = self._with_nested_keys(path, value, node.get(path[-1]))
        node[path[-1]] = value
        self.origins[path] = origin

    def _with_nested_keys(self, path: KeyPath, value: Any, existing: Any) -> Any:
        """Return a value with the keys below it that other overrides have set.

        Raises:
            ConfigError: the value is not a mapping, or sets one of these keys to another value.
        """
        kept_keys = {}
        for known_path, origin in self.origins.items():
            is_below = len(known_path) > len(path) and known_path[: len(path)] == path
            if (
                not is_below
                or not origin.startswith(COMMAND_LINE)
                or not isinstance(existing, dict)
            ):
                continue
            key = known_path[len(path)]
            if not isinstance(value, dict) or (key in value and value[key] != existing.get(key)):
                raise ConfigError(
                    f"{'.'.join(path)} is set as a whole, and {'.'.join(known_path)} in addition. "
                    "Leave one of the two out."
                )
            kept_keys[key] = existing[key]
        return {**kept_keys, **value} if kept_keys else value

    def merge(self, other: ConfigTree) -> None:
        """Override keys by those of another tree; a strategy there replaces the whole strategy."""
        if "strategy" in other.values:
            self.values.pop("strategy", None)
        self.lay(other)

    def lay(self, other: ConfigTree) -> None:
        """Override keys by those of another tree; mappings are merged key by key."""
        _merge(self.values, other.values, ())
        self.origins.update(other.origins)


def _merge(base: dict[str, Any], over: dict[str, Any], path: KeyPath) -> None:
    _forget_arguments(base, path, over)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value, (*path, key))
        else:
            base[key] = value


_INSTEAD: dict[KeyPath, tuple[tuple[str, str], ...]] = {
    ("train",): (("steps", "epochs"), ("epochs", "steps")),
    ("optim",): (("warmup_steps", "warmup_epochs"), ("warmup_epochs", "warmup_steps")),
}
"""By section, pairs (key, other key) for one quantity in different units.

If a higher layer sets the key, the other key is dropped.
"""


def _forget_arguments(base: dict[str, Any], path: KeyPath, over: dict[str, Any]) -> None:
    """Drop keys that a higher layer replaces by another model, data source, optimizer or unit."""
    for replacing, displaced in _INSTEAD.get(path, ()):
        if over.get(replacing) and displaced not in over:
            base.pop(displaced, None)
    if path == ("optim",) and over.get("name", base.get("name")) != base.get("name"):
        for key in keys_without_use(over["name"]):
            base.pop(key, None)
    if path in (("model",), ("data",)) and over.get("name", base.get("name")) != base.get("name"):
        for key in ("args", "path", "pretrained", "pretrained_except"):
            base.pop(key, None)


def read_yaml(path: Path, shown: str | None = None) -> ConfigTree:
    """Read one YAML mapping with the line of every key.

    Args:
        path: the path of the file.
        shown: the name of the file in messages; None is `path`.

    Raises:
        ConfigError: there is no such file, it is not a YAML mapping, or a key is written twice.
    """
    shown = shown or str(path)
    text = read_text(path, "Give the path of a YAML file.", MOST_YAML)
    try:
        root, values = parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if "block" not in (getattr(error, "context", None) or "block"):
            # A bracket or quote was opened there and not closed, which the parser notices later.
            mark = getattr(error, "context_mark", None) or mark
        where = f"{shown}:{mark.line + 1}" if mark else shown
        raise ConfigError(
            f"{where}: not valid YAML: {plain_text(getattr(error, 'problem', None) or error)}. "
            "Look at the indentation and the quotes there."
        ) from None
    if values is None:
        return ConfigTree()
    if not isinstance(values, dict):
        raise ConfigError(f"{shown}: a job is a mapping like 'train: {{steps: 100}}'.")
    return ConfigTree(values, dict(_lines(root, (), shown)))


def _lines(node: yaml.Node | None, path: KeyPath, shown: str) -> Iterator[tuple[KeyPath, str]]:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = str(key_node.value)
        where = f"{shown}:{key_node.start_mark.line + 1}"
        if not key_node.tag.endswith((":str", ":merge")):
            kind = key_node.tag.rpartition(":")[2]
            raise ConfigError(
                f"{where}: the key {plain_text(key, 60)} is a {kind}, and keys are words. Put "
                "quotes around it."
            )
        if key in seen:
            raise ConfigError(f"{where}: the key {key!r} is written twice. Keep one of them.")
        seen.add(key)
        yield (*path, key), where
        yield from _lines(value_node, (*path, key), shown)


def preset_names(kind: str) -> list[str]:
    """Return the names of the YAML presets of a kind: 'jobs', 'strategies' or 'clusters'."""
    folder = resources.files("bigtrain.configs").joinpath(kind)
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))


def preset_line(kind: str, name: str) -> str:
    """Return the description of a preset: the comment at the beginning of its file."""
    source = resources.files("bigtrain.configs").joinpath(kind, f"{name}.yaml")
    with resources.as_file(source) as file:
        text = read_text(file, "", MOST_YAML)
    words = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        words.append(line.lstrip("# "))
    return " ".join(words)


def read_preset(kind: str, name: str, asked: str) -> ConfigTree:
    """Read a preset by name, or a YAML file by path.

    Args:
        kind: 'jobs', 'strategies' or 'clusters'.
        name: a preset's name, or a path: it ends in .yaml or .yml, or contains a separator.
        asked: the argument or key that named it, for the message.

    Raises:
        ConfigError: there is no such preset or file; the message suggests names.
    """
    names = preset_names(kind)
    if is_file(name):
        check_name(name, asked)
        if not is_there(name):
            listed = f"one of {', '.join(names)}"
            known = listed if len(names) <= _LISTED else f"a name that `bigtrain {kind}` lists"
            raise ConfigError(
                f"{asked}: there is no file {name!r} (looked from {_current_folder()}). Give the "
                f"path of a file, or {known}."
            )
        return read_yaml(Path(name))
    if name not in names:
        close = did_you_mean(name.lower(), names)
        if len(names) <= _LISTED:
            raise ConfigError(f"{asked}: unknown {name!r}{close} Known: {', '.join(names)}.")
        near = difflib.get_close_matches(name.lower(), names, n=4, cutoff=0.4) or names[:4]
        raise ConfigError(
            f"{asked}: unknown {name!r}{close} Similar names: {', '.join(near)}; "
            f"`bigtrain {kind}` lists all {len(names)}."
        )
    source = resources.files("bigtrain.configs").joinpath(kind, f"{name}.yaml")
    with resources.as_file(source) as file:
        return read_yaml(file, shown=f"{kind}/{name}.yaml")


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "a folder that was removed"


def is_file(name: str) -> bool:
    """Whether a name is the path of a YAML file, and not the name of a preset."""
    return name.endswith((".yaml", ".yml")) or "/" in name
