"""The file that caches tokens: written once on a node, memory-mapped by all of its ranks.

The parts of the file, in order: the tokens (uint32, the highest bit marks an answer); padding to a
multiple of 8 bytes; the index of the first token of each document, then the number of all tokens
(int64); the number of targets in each document that are answers (int64); a footer (JSON: the sizes,
the counts, a hash of all bytes before it); the length of the footer in bytes (uint64,
little-endian); 8 fixed bytes that mark the end of the file.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from bigtrain.data.cache_folders import cache_folders, check_room
from bigtrain.data.tokens.encode import ANSWER, Tokens
from bigtrain.errors import ConfigError, UnreadableError
from bigtrain.files.drafts import replacing_file, say_damaged
from bigtrain.files.parse import parse_json
from bigtrain.files.regular import is_there
from bigtrain.machine.cache import lock_file
from bigtrain.units import MIB, format_bytes

_MAGIC = b"BTTOKEN1"
_TAIL = 16
_MOST_FOOTER = MIB
_HASHED_AT_ONCE = 16 * MIB


@dataclass(frozen=True)
class TokenFile:
    """The memory-mapped arrays of a cache."""

    path: Path
    tokens: Tokens
    """The ids of all tokens; the bit `ANSWER` marks tokens of answers."""
    starts: npt.NDArray[np.int64]
    """Index of the first token of each document, then the number of all tokens."""
    answers: npt.NDArray[np.int64]
    """Number of targets in each document that are answers."""
    counts: Mapping[str, int]
    """Documents by form; see `Encoder.counts`."""
    digest: str
    """A hash of the tokens, `starts` and `answers`."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A loading process maps the file again; pickling the arrays would send the tokens.
        return _mapped_again, (self.path,)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each document."""
        return np.diff(self.starts)


class DamagedError(Exception):
    """A cache does not have the contents that were written; the message describes the damage."""


def map_tokens(path: Path, *, checked: bool = True) -> TokenFile:
    """Memory-map a cache, and check that it is complete.

    Args:
        path: the file.
        checked: whether the contents are also compared with their hash, which reads all of them.

    Raises:
        DamagedError: the contents are not those that were written.
        OSError: the file cannot be read.
    """
    if not path.stat().st_size:
        raise DamagedError("it is empty")
    whole = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    size = len(whole)
    if size < _TAIL or bytes(whole[-8:]) != _MAGIC:
        raise DamagedError("it does not end as it should")
    length = int.from_bytes(bytes(whole[-_TAIL:-8]), "little")
    if length > min(_MOST_FOOTER, size - _TAIL):
        raise DamagedError("its footer is longer than the file")
    body = size - _TAIL - length
    try:
        footer = parse_json(bytes(whole[body : size - _TAIL]), path)
        count, documents = int(footer["tokens"]), int(footer["documents"])
        counts, digest = dict(footer["counts"]), str(footer["digest"])
    except (UnreadableError, KeyError, TypeError, ValueError):
        raise DamagedError("its footer cannot be read") from None
    begin = 8 * math.ceil(4 * count / 8)
    if body != begin + 8 * (2 * documents + 1):
        raise DamagedError("its arrays have another size than its footer says")
    if checked and _digest(whole[:body]) != digest:
        raise DamagedError("its contents have another hash")
    middle = begin + 8 * (documents + 1)
    return TokenFile(
        path,
        np.asarray(whole[: 4 * count].view(np.uint32)),
        np.asarray(whole[begin:middle].view(np.int64)),
        np.asarray(whole[middle:body].view(np.int64)),
        counts,
        digest,
    )


def _mapped_again(path: Path) -> TokenFile:
    return map_tokens(path, checked=False)


def _digest(data: npt.NDArray[np.uint8]) -> str:
    found = xxhash.xxh3_128()
    for start in range(0, len(data), _HASHED_AT_ONCE):
        found.update(data[start : start + _HASHED_AT_ONCE].data)
    return found.hexdigest()


class _Writer:
    """Writes a cache to an open file.

    Args:
        file: an empty file, open for writing.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, xxhash.xxh3_128()
        self._starts, self._answers = [0], [0]
        self._count = 0

    def add(self, tokens: Tokens, *, ends: bool) -> None:
        """Append tokens to the current document; after `ends`, the next tokens begin a new one."""
        self._put(np.ascontiguousarray(tokens, dtype="<u4").tobytes())
        # The first token of a document is no target.
        targets = tokens[1:] if self._count == self._starts[-1] else tokens
        self._answers[-1] += int(np.count_nonzero(targets & ANSWER))
        self._count += len(tokens)
        if ends:
            self._starts.append(self._count)
            self._answers.append(0)

    def finish(self, counts: Mapping[str, int]) -> None:
        """Write the arrays of the documents, and the footer."""
        self._put(bytes(-4 * self._count % 8))
        self._put(np.asarray(self._starts, dtype="<i8").tobytes())
        self._put(np.asarray(self._answers[:-1], dtype="<i8").tobytes())
        footer = {
            "tokens": self._count,
            "documents": len(self._starts) - 1,
            "counts": dict(counts),
            "digest": self._hash.hexdigest(),
        }
        text = json.dumps(footer).encode()
        self._file.write(text + len(text).to_bytes(8, "little") + _MAGIC)

    def _put(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)


class Documents:
    """Pieces of documents to be cached, as an iterable that is read once.

    Args:
        pieces: pairs of tokens, and whether they end a document.
        counts: see `TokenFile.counts`; complete once all pieces have been read.
    """

    def __init__(self, pieces: Iterable[tuple[Tokens, bool]], counts: Mapping[str, int]) -> None:
        self.pieces, self.counts = pieces, counts


def cached_tokens(
    name: str, make: Callable[[], Documents], source_bytes: int, shown: str
) -> TokenFile:
    """Return the cache with a name, which is written first if it is missing or damaged.

    If several processes need the cache, one of them writes it and the others wait for its lock.

    Args:
        name: the file's name, without a folder.
        make: returns the `Documents`; called only if the cache has to be written.
        source_bytes: bytes of the source files, an estimate of the cache's size.
        shown: the source's name, for messages.

    Raises:
        ConfigError: the file cannot be written to any folder, or `make` raised this error.
    """
    refused: list[str] = []
    for folder in cache_folders():
        target = folder / name
        try:
            found = _usable(target)
            if found is None:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                with _locked(target):
                    found = _usable(target) or _made(target, make, source_bytes)
        except OSError as error:
            refused.append(f"{folder} ({error.strerror or error})")
        else:
            return found
    raise ConfigError(
        f"data.path: the tokens of {shown} need a cache of about {format_bytes(source_bytes)}, and "
        f"it cannot be written to {' or '.join(refused)}. Set XDG_CACHE_HOME to a folder with room."
    )


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    with lock_file(target.with_suffix(".lock"), math.inf):
        yield


def _usable(target: Path) -> TokenFile | None:
    if not is_there(target):
        return None
    try:
        return map_tokens(target)
    except DamagedError as error:
        say_damaged(target, str(error))
        return None


def _made(target: Path, make: Callable[[], Documents], source_bytes: int) -> TokenFile:
    check_room(target.parent, source_bytes)
    documents = make()
    with replacing_file(target) as file:
        writer = _Writer(file)
        for tokens, ends in documents.pieces:
            writer.add(tokens, ends=ends)
        writer.finish(documents.counts)
    return map_tokens(target, checked=False)
