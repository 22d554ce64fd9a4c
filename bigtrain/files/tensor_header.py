"""Read the header of a safetensors file, and check it before any byte of a tensor is read.

The first eight bytes of the file are the length of the header. The header is a JSON object. The
bytes of the tensors follow the header, without gaps or overlaps, to the end of the file. A header
that breaks these rules could present arbitrary bytes as weights, so it is refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.errors import UnreadableError, plain_text
from bigtrain.files.parse import as_object, parse_json
from bigtrain.files.regular import open_regular, unreadable

MOST_HEADER = 100_000_000
"""The most bytes of a header, which is a limit of the format."""
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_MOST_DIMS, _MOST_COUNT = 64, 1 << 63
"""torch's limits for a shape. They also keep the product of the sizes fast to compute."""


@dataclass(frozen=True)
class HeaderEntry:
    """The description of one tensor in a header."""

    code: str
    """The format's name of the element type, such as `BF16`."""
    shape: tuple[int, ...]
    begin: int
    """The offset of the tensor's first byte from the beginning of the file."""


def read_tensor_header(path: Path, itemsizes: Mapping[str, int]) -> dict[str, HeaderEntry]:
    """Return the descriptions of the tensors in a safetensors file, by name.

    Args:
        path: the path of the file.
        itemsizes: bytes per element, by the code of each known element type.

    Raises:
        UnreadableError: the file cannot be read, is not safetensors, or its header breaks the
            format.
    """
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_LENGTH_BYTES)
            length = int.from_bytes(head, "little")
            if len(head) < _LENGTH_BYTES:
                raise UnreadableError(path, f"it has {len(head)} bytes, its header begins with 8")
            if length > min(MOST_HEADER, size - _LENGTH_BYTES):
                raise UnreadableError(
                    path,
                    f"its header claims to be {length} bytes long; the file has {size}, and a "
                    f"header may have {MOST_HEADER}",
                )
            text = _read_exactly(file.fileno(), length)
        except OSError as error:
            raise unreadable(path, error) from None
    if len(text) < length:
        raise UnreadableError(path, "it was cut off in its header")
    if not text.startswith(b"{"):
        raise UnreadableError(path, "its header is no JSON object")
    header = as_object(parse_json(text, path), path)
    try:
        return _entries(header, itemsizes, _LENGTH_BYTES + length, size)
    except ValueError as error:
        raise UnreadableError(path, f"its header is none of safetensors': {error}") from None


def _read_exactly(descriptor: int, length: int) -> bytes:
    parts, position = [], _LENGTH_BYTES
    while length:
        part = os.pread(descriptor, min(length, 1 << 24), position)
        if not part:
            break
        parts.append(part)
        position, length = position + len(part), length - len(part)
    return b"".join(parts)


def _entries(
    header: Mapping[str, Any], itemsizes: Mapping[str, int], start: int, size: int
) -> dict[str, HeaderEntry]:
    """Return the entries of a header, after a check of each and of the gaps between tensors.

    Args:
        header: the JSON object of the header.
        itemsizes: see `read_tensor_header`.
        start: the offset of the first byte after the header.
        size: the bytes of the file.

    Raises:
        ValueError: an entry is wrong, or the tensors do not fill the file.
    """
    about = header.get(_METADATA, {})
    if not isinstance(about, dict) or not all(isinstance(v, str) for v in about.values()):
        raise ValueError(f"{_METADATA} is not an object of strings")
    entries: dict[str, HeaderEntry] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == _METADATA:
            continue
        shown = plain_text(ascii(name), 80)
        if not isinstance(entry, dict) or {*entry} != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{shown} must have exactly the keys dtype, shape and data_offsets")
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(code, str) or code not in itemsizes:
            raise ValueError(
                f"{shown} has the type {plain_text(ascii(code), 40)}, known are "
                f"{', '.join(itemsizes)}"
            )
        if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
            raise ValueError(f"{shown} has an invalid shape or invalid offsets")
        begin, end = offsets
        # Python's integers do not overflow, so the product of sizes cannot wrap around.
        if math.prod(shape) * itemsizes[code] != end - begin:
            raise ValueError(
                f"{shown} has a number of bytes that does not match its type and shape"
            )
        spans.append((begin, end, shown))
        entries[name] = HeaderEntry(code, tuple(shape), start + begin)
    position = 0
    for begin, end, shown in sorted(spans):
        if begin != position:
            kind = "overlaps the one before" if begin < position else "has a gap before it"
            raise ValueError(f"{shown} {kind}: it begins at byte {begin} instead of {position}")
        position = end
    if start + position != size:
        raise ValueError(f"its tensors end at byte {start + position}, and the file at {size}")
    return entries


def _is_counts(values: object) -> bool:
    if not isinstance(values, list) or len(values) > _MOST_DIMS:
        return False
    return all(type(v) is int and 0 <= v < _MOST_COUNT for v in values)
