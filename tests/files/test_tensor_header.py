"""The header of a safetensors file, checked against the format and the safetensors library."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from support.damages import damages

from bigtrain.checkpoint.read import tensors_of_file
from bigtrain.errors import CheckpointError
from bigtrain.tensors.shards import read_whole

BODY = bytes(range(56))


def header() -> dict[str, Any]:
    return {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "I64", "shape": [4], "data_offsets": [24, 56]},
    }


def write_file(
    path: Path, text: str | bytes, body: bytes = BODY, length: int | None = None
) -> Path:
    """Write a safetensors file with this header and body."""
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(struct.pack("<Q", len(data) if length is None else length) + data + body)
    return path


def refusal_of(path: Path) -> str:
    """The message with which reading the file is refused."""
    with pytest.raises(CheckpointError) as caught:
        tensors_of_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path} is no safetensors file: ")
    assert "\n" not in message
    assert caught.value.exit_status == 2
    return message


def with_entry(**changes: Any) -> str:
    """The header as JSON, with changes to the entry of tensor 'b'."""
    entries = header()
    entries["b"].update(changes)
    return json.dumps(entries)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (with_entry(data_offsets=[-32, 0]), "'b' has an invalid shape or invalid offsets"),
        (
            with_entry(data_offsets=[20, 52]),
            "'b' overlaps the one before: it begins at byte 20 instead of 24",
        ),
        (with_entry(data_offsets=[0, 32]), "'b' overlaps the one before"),
        (
            with_entry(data_offsets=[32, 64]),
            "'b' has a gap before it: it begins at byte 32 instead of 24",
        ),
        (with_entry(data_offsets=[56, 24]), "'b' has a number of bytes that does not match"),
        (with_entry(data_offsets=[24, 48], shape=[3]), "its tensors end at byte"),
        (with_entry(data_offsets=[24.0, 56.0]), "'b' has an invalid shape or invalid offsets"),
        (with_entry(data_offsets=[24, 56, 56]), "'b' has an invalid shape or invalid offsets"),
        (with_entry(data_offsets=None), "'b' has an invalid shape or invalid offsets"),
        (with_entry(shape=[True, 4]), "'b' has an invalid shape or invalid offsets"),
        (with_entry(shape=[4.0]), "'b' has an invalid shape or invalid offsets"),
        (with_entry(shape=[-4]), "'b' has an invalid shape or invalid offsets"),
        (with_entry(shape=[1 << 62, 4, 4]), "'b' has a number of bytes that does not match"),
        (with_entry(shape=[1 << 64, 4]), "'b' has an invalid shape or invalid offsets"),
        (with_entry(shape=[1] * 100), "'b' has an invalid shape or invalid offsets"),
        (with_entry(dtype="F99"), "'b' has the type 'F99', known are C64, F64, F32"),
        (with_entry(dtype=["I64"]), "'b' has the type"),
        (with_entry(more=1), "'b' must have exactly the keys dtype, shape and data_offsets"),
        (json.dumps(header() | {"b": [1]}), "'b' must have exactly the keys dtype, shape"),
        (json.dumps(header() | {"__metadata__": {"a": 1}}), "is not an object of strings"),
        (json.dumps(header() | {"__metadata__": None}), "is not an object of strings"),
        (json.dumps(header())[:-1] + ', "a": {}}', "it has the key 'a' twice"),
        (json.dumps(header()).replace('"shape"', '"dtype": "F64", "shape"', 1), "'dtype' twice"),
        ("[]", "its header is no JSON object"),
        (" {}", "its header is no JSON object"),
        ("{", "it is not JSON"),
        (b'{"\xff": 1}', "decode"),
        ('{"a":' * 100_000, "nested more than 64 deep"),
        ("{}", "its tensors end at byte 10, and the file at 66"),
    ],
)
def test_a_header_that_breaks_the_format(tmp_path: Path, text: str | bytes, reason: str) -> None:
    assert reason in refusal_of(write_file(tmp_path / "odd.safetensors", text))


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (1 << 63, "its header claims to be 9223372036854775808 bytes long"),
        (100_000_001, "its header claims to be 100000001 bytes long"),
        (0, "its header is no JSON object"),
    ],
)
def test_a_length_that_is_none(tmp_path: Path, length: int, reason: str) -> None:
    path = write_file(tmp_path / "odd.safetensors", json.dumps(header()), length=length)
    assert reason in refusal_of(path)
    if length == 100_000_001:
        with path.open("r+b") as file:
            file.truncate(200_000_000)  # even if the file is long enough
        assert reason in refusal_of(path)


@pytest.mark.parametrize("size", [0, 3, 7, 8, 20])
def test_a_file_that_was_cut(tmp_path: Path, size: int) -> None:
    path = write_file(tmp_path / "odd.safetensors", json.dumps(header()))
    path.write_bytes(path.read_bytes()[:size])
    refusal_of(path)


def test_what_the_library_of_the_format_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.safetensors"
    tensors = {
        "a": torch.randn(3, 4),
        "empty": torch.empty(0, 7),
        "one": torch.tensor(3.0),
        "b.c": torch.arange(5),
        "half": torch.randn(2).bfloat16(),
        "true": torch.tensor([True, False]),
        "ü": torch.ones(2, dtype=torch.int8),
    }
    save_file(tensors, path, {"format": "pt"})
    read_tensors = tensors_of_file(path)
    assert set(read_tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(read_whole(read_tensors[name]), tensor)


def test_what_is_drawn_is_refused_wherever_the_library_of_the_format_refuses(
    tmp_path: Path,
) -> None:
    draw, theirs = random.Random(5), 0
    opened: Callable[..., Any] = safe_open
    for _ in range(150):
        damage, head, body = damages.broken_header(draw, header(), BODY)
        path = tmp_path / "odd.safetensors"
        path.write_bytes(head + body)
        with pytest.raises(CheckpointError):
            print(damage, tensors_of_file(path))
        try:
            with opened(path, "pt"):
                pass
        except (SafetensorError, RecursionError):
            theirs += 1
    assert theirs > 75
