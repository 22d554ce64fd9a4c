"""The manifest of a checkpoint: its files with the hash of each piece, and how they are checked."""

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
from bigtrain.errors import CheckpointError, DamagedCheckpointError, UnreadableError
from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import is_there, open_regular, unreadable

FORMAT = 2
"""The format that is written. Format 1, which can be read, has one file per part and no manifest:
its `state.json` has the hashes."""
_HASHES: dict[str, Callable[[bytes | memoryview], Any]] = {
    "xxh3_128": xxhash.xxh3_128,
    "sha256": hashlib.sha256,  # of format 1
}
_BLOCK = 4 << 20
MANIFEST, STATE = "manifest.json", "state.json"


def hash_piece(data: bytes | memoryview) -> str:
    """Return the hash of a piece, which detects damage; it is not a signature.

    It is XXH3 with 128 bits, which takes at most a tenth of the time of SHA-256.
    """
    return str(xxhash.xxh3_128(data).hexdigest())


def record_of(nbytes: int, hashes: Sequence[str]) -> dict[str, Any]:
    """Return a file's record in the manifest: its size in bytes, and the hash of each piece."""
    return {"bytes": nbytes, "xxh3_128": list(hashes)}


def file_record(data: bytes) -> dict[str, Any]:
    """Return the record of a file with this content."""
    starts = range(0, max(1, len(data)), PIECE_BYTES)
    return record_of(len(data), [hash_piece(data[s : s + PIECE_BYTES]) for s in starts])


def manifest_text(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the manifest of these files, with the manifest's own hash."""
    content = {"format": FORMAT, "piece_bytes": PIECE_BYTES, "files": dict(sorted(files.items()))}
    return json.dumps({**content, "sha256": _own_hash(content)}, indent=1)


def _own_hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """The records of one checkpoint's files, made when the files were written."""

    path: Path
    """The checkpoint's folder."""
    format: int
    piece_bytes: int
    """Bytes of each piece; the last piece of a file may be shorter."""
    files: Mapping[str, Mapping[str, Any]]
    """The record of each file by its name; see `record_of`."""

    @classmethod
    def open(cls, path: Path) -> Manifest:
        """Read a checkpoint's manifest, and check it by its own hash.

        Raises:
            CheckpointError: the manifest is missing or damaged, or has a newer format.
        """
        if not is_there(path / MANIFEST) and is_there(path / STATE):
            return cls._of_format_1(path)
        content = _read_object(path / MANIFEST)
        own_hash, version = content.pop("sha256", None), content.get("format")
        # A newer format may use another hash, so the format is checked first.
        _refuse_newer(path, version)
        if version != FORMAT or own_hash != _own_hash(content):
            raise DamagedCheckpointError(
                f"{path / MANIFEST} is damaged: its contents changed on disk."
            )
        opened = cls(path, FORMAT, content.get("piece_bytes", 0), content.get("files", {}))
        fits = _is_count(opened.piece_bytes, 1) and opened._has_records()
        if not fits or STATE not in opened.files:
            raise DamagedCheckpointError(f"{path / MANIFEST} is damaged: it lists no files.")
        return opened

    def _has_records(self) -> bool:
        """Whether every record has a plain file name, a size, and a hash for each piece."""
        return isinstance(self.files, dict) and all(
            _is_plain(name) and _is_record(record, self.piece_bytes)
            for name, record in self.files.items()
        )

    @classmethod
    def _of_format_1(cls, path: Path) -> Manifest:
        state = _read_object(path / STATE)
        version = state.get("format")
        _refuse_newer(path, version)
        if version != 1:  # a later format, whose manifest is missing
            raise DamagedCheckpointError(f"{path / MANIFEST} is missing.")
        files, sizes = state.get("files", {}), [1]
        records: dict[str, dict[str, Any]] = {}
        for name, entry in files.items() if isinstance(files, dict) else ():
            record = entry if isinstance(entry, dict) else {}
            records[name] = {"bytes": record.get("bytes"), "sha256": [record.get("sha256")]}
            sizes += [record["bytes"]] if _is_count(record.get("bytes")) else []
        opened = cls(path, 1, max(sizes), records)  # each file is one piece
        if not isinstance(files, dict) or not opened._has_records():
            raise DamagedCheckpointError(f"{path / STATE} is damaged: it has no list of files.")
        return opened

    @property
    def tensor_files(self) -> list[str]:
        """Names of the files that hold tensors."""
        ends = ".safetensors"
        return [n for n in self.files if n.endswith(ends) and n.startswith(STATE_PARTS)]

    def damage(self, name: str, share: tuple[int, int] = (0, 1)) -> str | None:
        """Describe the damage of a file as a sentence; None if there is none.

        Args:
            name: the name of the file.
            share: (i, n): check only every n-th piece, beginning with piece i, counted from 0.
        """
        path = self.path / name
        try:
            return self._damage(path, self.files[name], share)
        except UnreadableError as error:
            if error.missing:
                return f"{path} is missing."
            return f"{path} is not readable: {error.reason}."
        except OSError as error:
            return f"{path} is not readable: {unreadable(path, error).reason}."

    def _damage(self, path: Path, record: Mapping[str, Any], share: tuple[int, int]) -> str | None:
        """Describe the damage of a file; see `damage`.

        Raises:
            UnreadableError: the file cannot be opened.
            OSError: the file cannot be read.
        """
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record["bytes"]:
                return f"{path} is damaged: it has {size} bytes, {record['bytes']} were written."
            first, step = share
            kind = next(kind for kind in _HASHES if kind in record)
            for piece in range(first, len(record[kind]), step):
                if self._hash_of(kind, file.fileno(), piece) != record[kind][piece]:
                    where = "" if len(record[kind]) == 1 else f" (piece {piece})"
                    return f"{path} is damaged: its contents changed on disk{where}."
        return None

    @property
    def looks_whole(self) -> bool:
        """Whether every file exists with its recorded size; no file is read."""
        try:
            return all(
                os.stat(self.path / name).st_size == record["bytes"]
                for name, record in self.files.items()
            )
        except OSError:
            return False

    def _hash_of(self, kind: str, descriptor: int, piece: int) -> str:
        """Hash a piece in blocks, so that it is never in memory as a whole."""
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
        """Describe the damage of the first damaged file; None if there is none. See `damage`."""
        for name in self.files:
            damage = self.damage(name, share)
            if damage is not None:
                return damage
        return None


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint.

    Raises:
        DamagedCheckpointError: the file holds no JSON object, or cannot be read.
    """
    try:
        return read_json_object(path)
    except UnreadableError as error:
        raise DamagedCheckpointError(f"{path} is not readable: {error.reason}.") from None


def _refuse_newer(path: Path, version: object) -> None:
    if not _is_count(version, 1):
        raise DamagedCheckpointError(f"{path} is damaged: its files name no format.")
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, this bigtrain reads up to {FORMAT}. "
            "Run: pip install --upgrade bigtrain"
        )


def _is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _is_plain(name: str) -> bool:
    """Whether a name is that of a file directly in the checkpoint's folder."""
    return name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name


def _is_record(record: object, piece_bytes: int) -> bool:
    """Whether a value is a complete record of a file; see `record_of`."""
    if not isinstance(record, dict) or not _is_count(record.get("bytes")):
        return False
    hashes = next((record[kind] for kind in _HASHES if kind in record), None)
    pieces = max(1, -(-int(record["bytes"]) // piece_bytes))
    return (
        isinstance(hashes, list)
        and len(hashes) == pieces
        and all(isinstance(digest, str) for digest in hashes)
    )
