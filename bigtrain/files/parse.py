"""Parse JSON and YAML that others wrote, with limits on nesting and repetition.

In both languages a few hundred bytes can describe a value that exhausts memory or the recursion
limit: by brackets within brackets, and in YAML by aliases that repeat values within each other.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from bigtrain.errors import UnreadableError, plain_text
from bigtrain.files.regular import MOST_TEXT, read_bytes

MOST_DEPTH = 64
"""The most levels of nested collections."""
MOST_REPEATED = 10_000
"""The most values that the aliases of a YAML file may add to the values that are written."""
MOST_YAML = 8 << 20
"""The most bytes of a YAML file."""


def parse_json(data: bytes | str, source: object, fix: str = "") -> Any:
    """Return the value of a JSON text.

    Args:
        data: the text, or its UTF-8 bytes.
        source: the file or variable that contains the text, for the message.
        fix: advice for the message, as a sentence.

    Raises:
        UnreadableError: the text is not JSON, has a key twice, is nested more than `MOST_DEPTH`
            deep, or has half of a surrogate pair.
    """
    try:
        value = json.loads(data, object_pairs_hook=_without_doubles)
    except json.JSONDecodeError as error:
        shown = f"{source}:{error.lineno}" if isinstance(source, os.PathLike) else source
        raise UnreadableError(shown, f"it is not JSON ({error.msg})", fix) from None
    except RecursionError:
        raise UnreadableError(source, _deep("its values are"), fix) from None
    except ValueError as error:  # a key twice, too many digits in a number, or no UTF-8
        raise UnreadableError(source, plain_text(error), fix) from None
    fault = _json_fault(value)
    if fault is not None:
        raise UnreadableError(source, fault, fix)
    return value


def read_json(path: str | os.PathLike[str], fix: str = "", most: int = MOST_TEXT) -> Any:
    """Return the value in a JSON file.

    Args:
        path: the path of the file.
        fix: advice for the message, as a sentence.
        most: limit in bytes; a larger file is refused.

    Raises:
        UnreadableError: see `read_bytes` and `parse_json`.
    """
    return parse_json(read_bytes(path, fix, most), Path(path), fix)


def read_json_object(
    path: str | os.PathLike[str], fix: str = "", most: int = MOST_TEXT
) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: see `read_json`.
        fix: see `read_json`.
        most: see `read_json`.

    Raises:
        UnreadableError: the file has another kind of value; see also `read_bytes` and `parse_json`.
    """
    return as_object(read_json(path, fix, most), path, fix)


def as_object(value: Any, source: object, fix: str = "") -> dict[str, Any]:
    """Return a JSON value that must be an object.

    Args:
        value: the value.
        source: see `parse_json`.
        fix: see `parse_json`.

    Raises:
        UnreadableError: the value is not an object.
    """
    if not isinstance(value, dict):
        raise UnreadableError(
            source, f"it holds {type(value).__name__}, and a JSON object is needed", fix
        )
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        double, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it has the key {plain_text(ascii(double), 80)} twice")
    return mapping


def _json_fault(root: Any) -> str | None:
    """Return the reason to refuse a JSON value, or None.

    The search does not recurse, because the value may be nested deeply.
    """
    level: list[Any] = [[root]]
    for _ in range(MOST_DEPTH + 1):
        inner: list[Any] = []
        for container in level:
            values = [*container, *container.values()] if isinstance(container, dict) else container
            if not all(_is_whole_text(value) for value in values if isinstance(value, str)):
                return "it has half of a character (a lone surrogate)"
            inner += [value for value in values if isinstance(value, dict | list)]
        if not inner:
            return None
        level = inner
    return _deep("its values are")


def _is_whole_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _deep(subject: str) -> str:
    return f"{subject} nested more than {MOST_DEPTH} deep"


class _Loader(yaml.SafeLoader):
    """A SafeLoader with a limit of depth, whose errors name the line of the wrong value."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=_deep("values are"), problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception:  # noqa: BLE001 - the exception depends on the kind of the wrong value
            kind = node.tag.rpartition(":")[2]
            shown = plain_text(ascii(node.value), 40) if isinstance(node.value, str) else "this"
            raise yaml.MarkedYAMLError(
                problem=f"{shown} is no {kind}", problem_mark=node.start_mark
            ) from None


def parse_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """Return the root node of a YAML text, and its value; (None, None) for an empty text.

    Nodes contain their lines, which a value does not.

    Raises:
        yaml.YAMLError: the text is not YAML; it is nested more than `MOST_DEPTH` deep; its aliases
            add more than `MOST_REPEATED` values; a value does not fit its tag; or a text contains a
            NUL or half of a surrogate pair.
    """
    loader = _Loader(text)
    try:
        root: yaml.Node | None = loader.get_single_node()
        if root is None:
            return None, None
        _check_nodes(root)
        return root, loader.construct_document(root)
    except RecursionError:
        raise yaml.YAMLError(_deep("values are")) from None
    finally:
        loader.dispose()


def _check_nodes(root: yaml.Node) -> None:
    """Refuse aliases that add too many values or contain themselves, and wrong characters."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()
    written = 0

    def size_of(node: yaml.Node) -> int:
        nonlocal written
        key = id(node)
        if key in open_nodes:
            raise _at(node, "a value is inside of itself")
        if key not in sizes:
            written += 1
            open_nodes.add(key)
            if isinstance(node.value, str) and not _is_plain(node.value):
                raise _at(node, "it has a NUL, or half of a character (a lone surrogate)")
            sizes[key] = 1 + sum(map(size_of, _inner(node)))
            open_nodes.remove(key)
        return sizes[key]

    total = size_of(root)
    if total - written > MOST_REPEATED:
        raise _at(root, f"its YAML aliases expand to more than {MOST_REPEATED:,} values")


def _inner(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _is_plain(text: str) -> bool:
    return "\0" not in text and _is_whole_text(text)


def _at(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
