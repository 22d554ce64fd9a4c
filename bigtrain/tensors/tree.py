"""Tensors in the inputs and outputs of modules: tuples, mappings, dataclasses, any objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy of a structure with a function applied to every tensor, in a fixed order.

    Tuples, named tuples, lists, mappings of any class, dataclasses and plain objects are traversed.
    An object without tensors is not copied.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (str, bytes, int, float, bool, type, nn.Module)) or value is None:
        return value
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, Mapping):
        return _refilled(value, {k: map_tensors(v, change) for k, v in value.items()})
    return _map_object(value, change)


def tree_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a structure, in the order of `map_tensors`."""
    leaves: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        leaves.append(tensor)
        return tensor

    map_tensors(value, collect)
    return leaves


def matching_tensors(template: Any, value: Any) -> list[Tensor]:
    """Return the tensors of a structure where a template has tensors, in the template's order.

    Raises:
        ValueError: the structures differ, or a tensor has another shape than in the template.
    """
    if isinstance(template, Tensor):
        if not isinstance(value, Tensor) or value.shape != template.shape:
            raise ValueError("another tensor, or none")
        return [value]
    if template is None or isinstance(template, (str, bytes, int, float, type, nn.Module)):
        return []
    if type(template) is not type(value):
        raise ValueError("another type")
    if isinstance(template, (tuple, list)):
        pairs = list(zip(template, value, strict=True))
    elif isinstance(template, Mapping):
        if not template.keys() <= value.keys():
            raise ValueError("other keys")
        pairs = [(item, value[key]) for key, item in template.items()]
    else:
        fields = {} if callable(template) else getattr(template, "__dict__", {})
        pairs = [
            (item, getattr(value, name, None))
            for name, item in fields.items()
            if isinstance(item, (Tensor, tuple, list, Mapping))
        ]
    return [leaf for expected, actual in pairs for leaf in matching_tensors(expected, actual)]


def nested_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a structure and in all attributes of its objects, at any depth."""
    leaves: list[Tensor] = []
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, (nn.Module, type)):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            leaves.append(item)
            continue
        if isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, (tuple, list, set, frozenset)):
            pending += item
        fields = getattr(item, "__dict__", None)
        if isinstance(fields, dict) and not callable(item):
            pending += fields.values()
    return leaves


def _refilled(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with new values, or `items` for a plain dict.

    For a mapping that cannot be changed the result is `items`, too. In a copy, the values are set
    one by one, because the class may override `__setitem__`.
    """
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return items
    copied: Any = copy.copy(mapping)
    for name, inner in getattr(copied, "__dict__", {}).items():
        if isinstance(inner, MutableMapping):  # the mapping in which the class stores its items
            setattr(copied, name, copy.copy(inner))
    for key, item in items.items():
        copied[key] = item
    return copied


def _map_object(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy of an object with changed tensors, or the object itself if it has none."""
    fields = getattr(value, "__dict__", None)
    if not isinstance(fields, dict) or callable(value):
        return value
    changed = {
        name: map_tensors(item, change)
        for name, item in fields.items()
        if isinstance(item, (Tensor, tuple, list, Mapping))
    }
    if all(changed[name] is fields[name] for name in changed) or not any(
        isinstance(t, Tensor) for item in changed.values() for t in _leaves(item)
    ):
        return value
    copied = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(copied, name, item)
    return copied


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]
