"""Read a configuration file of another tool, and find the line of each of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bigtrain.errors import ConfigError, UnreadableError, plain_text
from bigtrain.files.parse import MOST_YAML, parse_json, parse_yaml
from bigtrain.files.regular import check_name, read_text

KINDS_TEXT = "a DeepSpeed JSON, or a YAML of Accelerate, axolotl or TRL"
"""The kinds of files that can be read, for messages."""


@dataclass(frozen=True)
class ConfigFile:
    """The values of a file and the lines of its keys."""

    path: str
    """The path as it was given."""
    values: Mapping[str, Any]
    """The content of the file."""
    lines: Mapping[str, int]
    """By dotted key, the line, from 1. Keys that were not written in the file are left out."""

    def line_of(self, key: str) -> int | None:
        """Return the line of a dotted key, or of the nearest enclosing key; None if unknown."""
        while key:
            if key in self.lines:
                return self.lines[key]
            key = key.rpartition(".")[0]
        return None


def read_config_file(path: str, named_by: str = "FILE") -> ConfigFile:
    """Read a JSON or YAML file with the line of each key.

    Args:
        path: the path of the file.
        named_by: the argument or key that named the file, for messages.

    Raises:
        ConfigError: there is no such file, it cannot be read, it is neither JSON nor YAML, or it
            has no keys.
    """
    fix = f"Give the path of {KINDS_TEXT}."
    check_name(path, named_by)
    try:
        text = read_text(path, fix, MOST_YAML)
    except UnreadableError as error:
        if error.missing:
            raise ConfigError(f"{named_by}: there is no file {path}. {fix}") from None
        raise ConfigError(f"{named_by}: {error}") from None
    is_json = path.endswith(".json") or text.lstrip().startswith("{")
    values, lines = _json(path, text, named_by) if is_json else _yaml(path, text, named_by)
    if not isinstance(values, dict) or not values:
        found = "nothing" if values in (None, {}) else f"a {type(values).__name__} without keys"
        raise ConfigError(f"{named_by}: {path} has {found}. {fix}")
    return ConfigFile(path, {str(key): value for key, value in values.items()}, lines)


def find_referenced(path: str, named_in: ConfigFile, key: str) -> str:
    """Return the path of a file that another file names.

    The path is relative to the current folder or, if it does not exist there, to the folder of the
    file that names it.

    Args:
        path: the path as it is written.
        named_in: the file that names it.
        key: the dotted key that names it.

    Raises:
        ConfigError: the file is in neither folder.
    """
    beside = Path(named_in.path).parent / path
    for candidate in (Path(path).expanduser(), beside):
        if candidate.is_file():
            return str(candidate)
    line = named_in.line_of(key)
    where = named_in.path if line is None else f"{named_in.path}:{line}"
    raise ConfigError(
        f"{where}: {key}={plain_text(path, 120)}: there is no such file, neither in the current "
        f"folder nor at {beside}. Write the path of the file, or leave {key} out."
    )


def dotted_leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf. Lists and empty mappings are leaves."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from dotted_leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _json(path: str, text: str, named_by: str) -> tuple[Any, dict[str, int]]:
    try:
        values = parse_json(text, Path(path), "Correct it.")
    except UnreadableError as error:
        raise ConfigError(f"{named_by}: {error}") from None
    try:
        # YAML contains JSON, except for tabs. The YAML parser is used only for the lines.
        root, _ = parse_yaml(text.replace("\t", " "))
    except yaml.YAMLError:
        return values, {}
    return values, dict(_lines(root))


def _yaml(path: str, text: str, named_by: str) -> tuple[Any, dict[str, int]]:
    try:
        root, values = parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = path if mark is None else f"{path}:{mark.line + 1}"
        problem = plain_text(getattr(error, "problem", None) or error)
        raise ConfigError(f"{named_by}: {where}: it is not YAML ({problem}). Correct it.") from None
    return values, dict(_lines(root))


def _lines(node: yaml.Node | None, above: str = "") -> Iterator[tuple[str, int]]:
    """Yield each dotted key with the line on which it is written, from 1."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{above}{key.value}"
            yield name, key.start_mark.line + 1
            yield from _lines(value, f"{name}.")
