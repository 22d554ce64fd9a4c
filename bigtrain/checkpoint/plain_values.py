"""State of users' objects, such as schedulers and counters, as JSON and back without loss.

JSON has no tuples, no infinities, and no keys other than strings, so such values are encoded.
Nothing is pickled: somebody else's checkpoint can be read without running their code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bigtrain.errors import CheckpointError, ConfigError

_MOST_NUMBERS = 10_000
"""Largest number of elements of a tensor in such a state; larger tensors belong in the model."""


def to_plain(value: Any, path: str) -> Any:
    """Encode a value as JSON values.

    Args:
        value: None, bool, number, string, small tensor, or a list, tuple or dict of these.
        path: the value's name, for the message.

    Raises:
        ConfigError: the value has or contains another type, or a tensor with too many elements.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        return {"tensor": _tensor(value, path)}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        pairs = ((key, item, f"{path}[{key!r}]") for key, item in value.items())
        return {kind: [[to_plain(key, at), to_plain(item, at)] for key, item, at in pairs]}
    if isinstance(value, (list, tuple)):
        items = [to_plain(item, f"{path}[{number}]") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy scalar
        return to_plain(value.item(), path)
    raise ConfigError(
        f"save: {path} is a {type(value).__name__}, which a checkpoint cannot store besides the "
        "model. Let its state_dict return None, bools, numbers, strings, small tensors, and "
        "lists, tuples and dicts of these."
    )


def _tensor(value: Tensor, path: str) -> dict[str, Any]:
    if value.numel() > _MOST_NUMBERS:
        raise ConfigError(
            f"save: {path} is a tensor of {value.numel():,} numbers, and state besides the model "
            f"keeps at most {_MOST_NUMBERS:,}. Make it a buffer of the model, which is saved with "
            "it."
        )
    numbers = value.detach().cpu().reshape(-1)
    shown = numbers.double() if numbers.is_floating_point() else numbers
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "values": [to_plain(number, path) for number in shown.tolist()],
    }


def from_plain(encoded: Any) -> Any:
    """Decode a value that `to_plain` encoded.

    Raises:
        CheckpointError: `to_plain` did not make this value.
    """
    try:
        return _value(encoded)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint keeps a state that cannot be read ({type(error).__name__}: {error}). "
            "Use another checkpoint."
        ) from None


def _value(encoded: Any) -> Any:
    if isinstance(encoded, list):
        return [_value(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((kind, inner),) = encoded.items()
    if kind == "float":
        return float(inner)
    if kind == "tuple":
        return tuple(_value(item) for item in inner)
    if kind in ("dict", "counter"):
        decoded = {_value(key): _value(item) for key, item in inner}
        return Counter(decoded) if kind == "counter" else decoded
    dtype = getattr(torch, {"tensor": inner}[kind]["dtype"])
    return torch.tensor([_value(nested) for nested in inner["values"]], dtype=dtype).view(
        inner["shape"]
    )
