"""What a checkpoint consists of: its files and the hash of each piece; how they are checked."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from bigtrain.checkpoint.layout import PIECE_BYTES, STATE_PARTS
from bigtrain.errors import CheckpointError, DamagedCheckpointError

FORMAT = 2
"""1 had one file for each part, and no manifest: `state.json` had their hashes."""
_HASHES: dict[str, Callable[[bytes | memoryview], Any]] = {
    "xxh3_128": xxhash.xxh3_128,
    "sha256": hashlib.sha256,  # of format 1
}
_BLOCK = 4 << 20
MANIFEST, STATE = "manifest.json", "state.json"


def hash_piece(data: bytes | memoryview) -> str:
    """The hash of a piece, by which damage is noticed; it is no signature.

    XXH3 with 128 bits: it takes a tenth of the time of SHA-256 or less.
    """
    return str(xxhash.xxh3_128(data).hexdigest())


def record_of(nbytes: int, hashes: Sequence[str]) -> dict[str, Any]:
    """What a manifest says of a file: its size, and what `hash_piece` gives of each piece."""
    return {"bytes": nbytes, "xxh3_128": list(hashes)}


def file_record(data: bytes) -> dict[str, Any]:
    """Of a file with these contents."""
    starts = range(0, max(1, len(data)), PIECE_BYTES)
    return record_of(len(data), [hash_piece(data[s : s + PIECE_BYTES]) for s in starts])


def manifest_text(files: Mapping[str, Mapping[str, Any]]) -> str:
    """The manifest of these files, with its own hash."""
    content = {"format": FORMAT, "piece_bytes": PIECE_BYTES, "files": dict(sorted(files.items()))}
    return json.dumps({**content, "sha256": _own_hash(content)}, indent=1)


def _own_hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """The files of one checkpoint, as they were written."""

    path: Path
    """The checkpoint's folder."""
    format: int
    piece_bytes: int
    files: Mapping[str, Mapping[str, Any]]

    @classmethod
    def open(cls, path: Path) -> Manifest:
        """Read a checkpoint's manifest, and check it by its own hash.

        Raises:
            CheckpointError: it is missing or damaged, or its format is a newer one.
        """
        if not (path / MANIFEST).is_file() and (path / STATE).is_file():
            return cls._of_format_1(path)
        try:
            text = (path / MANIFEST).read_bytes()
            found: dict[str, Any] = json.loads(text)
            own_hash, version = found.pop("sha256"), int(found["format"])
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise DamagedCheckpointError(f"{path / MANIFEST} is not readable: {error}.") from None
        # A newer format may be hashed in another way.
        _refuse_newer(path, version)
        if version != FORMAT or own_hash != _own_hash(found):
            raise DamagedCheckpointError(
                f"{path / MANIFEST} is damaged: its contents changed on disk."
            )
        return cls(path, version, int(found["piece_bytes"]), found["files"])

    @classmethod
    def _of_format_1(cls, path: Path) -> Manifest:
        try:
            state: dict[str, Any] = json.loads((path / STATE).read_text("utf-8"))
            version, files = int(state["format"]), dict(state.get("files", {}))
            whole = {
                name: {"bytes": int(one["bytes"]), "sha256": [str(one["sha256"])]}
                for name, one in files.items()
            }
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise DamagedCheckpointError(f"{path / STATE} is not readable: {error}.") from None
        _refuse_newer(path, version)
        if version != 1:  # a later one, whose manifest is gone
            raise DamagedCheckpointError(f"{path / MANIFEST} is missing.")
        longest = max((int(one["bytes"]) for one in files.values()), default=1)
        return cls(path, version, max(1, longest), whole)

    @property
    def tensor_files(self) -> list[str]:
        """The names of those with tensors."""
        ends = ".safetensors"
        return [n for n in self.files if n.endswith(ends) and n.startswith(STATE_PARTS)]

    def damage(self, name: str, share: tuple[int, int] = (0, 1)) -> str | None:
        """What is wrong with a file, as a sentence; None where nothing is.

        Args:
            name: of the file.
            share: (i, n): only every n-th piece is looked at, from the i-th on.
        """
        path, record = self.path / name, self.files[name]
        if not path.is_file():
            return f"{path} is missing."
        size = path.stat().st_size
        if size != record["bytes"]:
            return f"{path} is damaged: it has {size} bytes, {record['bytes']} were written."
        first, step = share
        kind = next((kind for kind in _HASHES if kind in record), None)
        if kind is None:
            return f"{path} cannot be checked: its hash is none of {', '.join(_HASHES)}."
        with path.open("rb", buffering=0) as file:
            for piece in range(first, len(record[kind]), step):
                if self._hash_of(kind, file.fileno(), piece) != record[kind][piece]:
                    place = "" if len(record[kind]) == 1 else f" (piece {piece})"
                    return f"{path} is damaged: its contents changed on disk{place}."
        return None

    def _hash_of(self, kind: str, descriptor: int, piece: int) -> str:
        """In blocks: the memory that it takes is not that of a piece."""
        digest = _HASHES[kind](b"")
        position, end = piece * self.piece_bytes, (piece + 1) * self.piece_bytes
        while position < end:
            block = os.pread(descriptor, min(_BLOCK, end - position), position)
            if not block:
                break
            digest.update(block)
            position += len(block)
        return str(digest.hexdigest())

    def find_damage(self, share: tuple[int, int] = (0, 1)) -> str | None:
        """What is wrong with the first file that is damaged; see `damage`."""
        for name in self.files:
            found = self.damage(name, share)
            if found is not None:
                return found
        return None


def _refuse_newer(path: Path, version: int) -> None:
    if version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, this bigtrain reads up to {FORMAT}. "
            "Run: pip install --upgrade bigtrain"
        )
