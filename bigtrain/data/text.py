"""Text files, memory-mapped: next-byte prediction, or documents of a tokenizer's tokens.

For bytes, files are concatenated once into a cache that all ranks of a node map, so a corpus costs
no memory beyond the pages in use. A single file is mapped directly.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from bigtrain.data.cache_folders import cache_folders, check_room
from bigtrain.data.source import Data, PositiveCount, SampleFraction, SampleSubset
from bigtrain.data.tokens.records import LINE_SUFFIXES, is_lines
from bigtrain.data.tokens.token_text import DEFAULT_LENGTH, TextFile, TokenOptions, TokenText
from bigtrain.data.tokens.tokenizer import check_tokenizer, load_tokenizer, positions_beside
from bigtrain.errors import ConfigError, UnreadableError, as_word
from bigtrain.files.drafts import replacing_file
from bigtrain.files.regular import is_regular, is_there, open_regular, unreadable
from bigtrain.losses.tasks import LanguageTask
from bigtrain.units import MIB, format_bytes

_TEXT = "csv html json jsonl log md rst sql tex toml tsv txt xml yaml yml cfg ini"
_PROGRAMS = "c cc cpp css go h hpp java js py rb rs sh ts"
SUFFIXES = frozenset({*LINE_SUFFIXES, *(f".{suffix}" for suffix in f"{_TEXT} {_PROGRAMS}".split())})
"""Suffixes of the files that are read without `data.args.pattern`."""

DEFAULT_SEQUENCE_LENGTH = 128
_BLOCK = MIB
_BASELINE_BLOCKS = 256
_READABLE = "Make it readable, or leave it out with data.args.pattern."


class ByteSamples(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of a memory-mapped file: inputs (seq,) and the next bytes, int64.

    Args:
        path: the file.
        start: offset of the first byte.
        stop: offset after the last byte.
        sequence_length: bytes per sample.
    """

    deterministic = True

    def __init__(self, path: Path, start: int, stop: int, sequence_length: int) -> None:
        self.path, self.start, self.stop = path, start, stop
        self.sequence_length = sequence_length
        self._map()

    def _map(self) -> None:
        size = len(self) * self.sequence_length
        data = _mapped(self.path)
        # Two views of the same pages; the second is shifted by one byte. A row is one sample.
        rows = (len(self), self.sequence_length)
        self._inputs = data[self.start : self.start + size].reshape(rows)
        self._targets = data[self.start + 1 : self.start + 1 + size].reshape(rows)

    def __getstate__(self) -> dict[str, Any]:
        # A loading process maps the file again; pickling the arrays would send the bytes.
        return {k: v for k, v in self.__dict__.items() if k not in ("_inputs", "_targets")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def __len__(self) -> int:
        return (self.stop - self.start - 1) // self.sequence_length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        inputs = torch.from_numpy(self._inputs[indices].astype(np.int64))
        targets = torch.from_numpy(self._targets[indices].astype(np.int64))
        return list(zip(inputs, targets, strict=True))


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """`text`: a file or a folder; without a path, the source code of Python's standard library.

    Without a tokenizer a token is a byte, and the files are one text. With a tokenizer each file of
    plain text and each line of a file of JSON lines is a document; see `tokens.encode.Encoder`.
    """

    takes_tokenizer: ClassVar[bool] = True
    """Tells the catalog to pass a model name `hf:...` as `tokenizer`, if none is given."""

    path: Path | None = None
    tokenizer: str | None = None
    """A folder with a tokenizer's files, or an id of the hub; by default that of a model
    `hf:FOLDER_OR_ID`, otherwise a token is a byte. `bytes` means bytes with any model."""
    sequence_length: PositiveCount | None = None
    """Tokens per sample; by default the built-in model's sequence length, or 128 bytes, or 1024
    tokens of a tokenizer, at most the model's positions."""
    pattern: str | None = None
    """Glob for the files of a folder, at any depth; by default the usual text suffixes. With a
    tokenizer, if a folder has files of JSON lines (.jsonl, .ndjson), only these are read."""
    validation_fraction: SampleFraction = 0.05
    """Fraction at the end that is held out for validation: of the bytes; of the documents of JSON
    lines; of the tokens of plain text."""
    validation_samples: PositiveCount = 512
    """Largest number of held-out samples that a validation reads; they are evenly spread."""
    validation_path: Path | None = None
    """With a tokenizer: a file or folder for validation, instead of a held-out fraction."""
    packing: bool = False
    """With a tokenizer: fill a sample with several documents. No token attends to another document:
    the model gets an attention mask, and positions that begin at 0 in each document. Without
    packing a sample has one document and padding."""
    long: Literal["drop", "split"] | None = None
    """With a tokenizer: documents longer than a sample are left out and counted (drop), or cut into
    several samples (split). By default split for plain text, drop for JSON lines."""
    loss_on: Literal["answers", "everything"] = "answers"
    """With a tokenizer: the targets that the loss counts. Every token of plain text is an answer.
    In a prompt and its response, the response is the answer; in messages, those of the
    assistant are."""
    ignore_fields: tuple[str, ...] = ()
    """Fields of JSON lines that are left out; other unknown fields are refused."""

    def check(self) -> None:
        """Refuse a path that does not exist, files that are all empty, or a missing tokenizer."""
        if self.uses_bytes:
            self._refuse_tokenizer_options()
        else:
            check_tokenizer(str(self.tokenizer))
            self._held_out_files()
        self._files()

    def prepare(self) -> None:
        """Write the cache of the text or of its tokens, if it is missing."""
        if self.uses_bytes:
            self._joined()
        else:
            self.check()
            text = self._token_text(DEFAULT_LENGTH)
            for files in (self._files(), self._held_out_files()):
                if files is not None:
                    text.tokens(files)

    @property
    def uses_bytes(self) -> bool:
        """Whether a token is a byte."""
        return self.tokenizer in (None, "bytes")

    def open(self, *, seed: int, sequence_length: int | None) -> Data:
        """Map the text or its tokens, and hold the last part out; the seed is not used."""
        del seed
        self.check()
        if not self.uses_bytes:
            length = self.sequence_length or sequence_length or self._default_length()
            return self._token_text(length).data(self._files(), self._held_out_files())
        length = self.sequence_length or sequence_length or DEFAULT_SEQUENCE_LENGTH
        path, files = self._joined()
        total = path.stat().st_size
        held_out = round(total * self.validation_fraction)
        cut = total - held_out
        self._check_length("for training", cut, total, length)
        train = ByteSamples(path, 0, cut, length)
        validation, baseline = None, {}
        if held_out:
            self._check_length("held out", held_out, total, length)
            held_out_samples = ByteSamples(path, cut, total, length)
            num_taken = min(len(held_out_samples), self.validation_samples)
            validation = SampleSubset(
                held_out_samples, [i * len(held_out_samples) // num_taken for i in range(num_taken)]
            )
            baseline = {"bits_per_byte": _bits_per_byte(_mapped(path), cut)}
        return Data(
            train=train,
            validation=validation,
            task=LanguageTask(256, byte_level=True),
            baseline=baseline,
            description=f"text: {format_bytes(total)} of {files} files, "
            f"{len(train)} samples of {length} bytes, {format_bytes(held_out)} held out",
        )

    def _refuse_tokenizer_options(self) -> None:
        """Refuse options that mean nothing for bytes.

        Raises:
            ConfigError: such an option is set.
        """
        for key in ("packing", "long", "loss_on", "ignore_fields", "validation_path"):
            value = getattr(self, key)
            if value != type(self).__dataclass_fields__[key].default:
                shown = str(value) if isinstance(value, Path) else value
                raise ConfigError(
                    f"{as_word(f'data.args.{key}', shown)} is for documents of a tokenizer's "
                    "tokens, and here a token is a byte. Set data.args.tokenizer=FOLDER, or leave "
                    "it out."
                )

    def _token_text(self, length: int) -> TokenText:
        options = TokenOptions(
            length=length,
            packing=self.packing,
            long=self.long,
            loss_on=self.loss_on,
            ignore_fields=self.ignore_fields,
            validation_fraction=self.validation_fraction,
            validation_samples=self.validation_samples,
        )
        tokenizer = load_tokenizer(str(self.tokenizer))
        # Some files of Python's tests are not UTF-8.
        return TokenText(tokenizer, options, self._shown(), lenient=self.path is None)

    def _default_length(self) -> int:
        """Return 1024 tokens, or all positions of a model that has fewer."""
        return min(DEFAULT_LENGTH, positions_beside(str(self.tokenizer)) or DEFAULT_LENGTH)

    def _held_out_files(self) -> list[TextFile] | None:
        if self.validation_path is None:
            return None
        try:
            path = self.validation_path.expanduser()
            return replace(self, path=path, validation_path=None)._files()
        except RuntimeError as error:  # there is no such user
            raise ConfigError(
                f"data.args.validation_path={self.validation_path}: {error}. Write the path out."
            ) from None
        except ConfigError as error:
            raise ConfigError(
                str(error).replace("data.path", "data.args.validation_path")
            ) from None

    def _check_length(self, part: str, size: int, total: int, length: int) -> None:
        if size >= length + 1:
            return
        fix = "Give more text"
        if size >= 2:
            fix += f" or set data.args.sequence_length={size - 1}"
        if part == "held out":
            fix += " or data.args.validation_fraction=0"
        raise ConfigError(
            f"data.path: {self._shown()} has {total} bytes, {size} of them {part}; one sample "
            f"needs sequence_length + 1 = {length + 1}. {fix}."
        )

    def _shown(self) -> str:
        return str(self.path) if self.path else "the Python library"

    def _files(self) -> list[TextFile]:
        """Return relative name, path and stat of the files, in the order of concatenation."""
        if self.path is not None and not is_there(self.path):
            raise ConfigError(
                f"data.path: {self.path} does not exist. Give a file or a folder, or leave "
                "data.path out to train on the source of the Python library."
            )
        root = self.path or Path(sysconfig.get_paths()["stdlib"])
        try:
            matching = [root] if is_regular(root) else self._matches(root)
            named = [(path.relative_to(root).as_posix(), path, path.stat()) for path in matching]
        except OSError as error:
            raise unreadable(error.filename or root, error, _READABLE) from None
        files = [entry for entry in named if entry[2].st_size]
        if not files:
            raise ConfigError(
                f"data.path: {self._shown()} has no bytes to read in {len(matching)} matching "
                "files "
                f"(pattern: {self.pattern or 'text suffixes'}). Set data.args.pattern='*'."
            )
        # By a hash of the name: this mixes folders, so that the held-out end is no single folder.
        return sorted(files, key=lambda entry: hashlib.sha256(os.fsencode(entry[0])).digest())

    def _matches(self, root: Path) -> list[Path]:
        pattern = self.pattern
        if pattern is None:
            pattern = "*" if self.path else "*.py"
        parts = Path(pattern).parts
        if not parts or Path(pattern).is_absolute() or ".." in parts:
            raise ConfigError(
                f"data.args.pattern={pattern!r} must be a glob relative to data.path. "
                "Write it like '*.txt' or 'books/*'."
            )
        lines_only = not self.uses_bytes and self.pattern is None and self._has_lines(root)
        installed = {"site-packages", "dist-packages"} if self.path is None else set()
        return [
            path
            for path in root.rglob(pattern)
            if not any(
                part.startswith(".") or part in installed for part in path.relative_to(root).parts
            )
            and (self.pattern is not None or path.suffix.lower() in SUFFIXES)
            and (not lines_only or is_lines(path))
            and is_regular(path)
        ]

    @staticmethod
    def _has_lines(root: Path) -> bool:
        """Whether a folder has files of JSON lines; its other files are then not documents."""
        return any(is_lines(path) and is_regular(path) for path in root.rglob("*"))

    def _joined(self) -> tuple[Path, int]:
        """Return the file with all bytes, creating it if necessary, and the number of files."""
        files = self._files()
        if len(files) == 1:
            return files[0][1], 1
        key = hashlib.sha256()
        for name, _, state in files:
            key.update(os.fsencode(f"{name}\0{state.st_size}\0{state.st_mtime_ns}\0"))
        key.update(os.fsencode(str((self.path or Path()).absolute())))
        size = sum(state.st_size for _, _, state in files)
        name = f"text-{key.hexdigest()[:24]}.bin"
        refused: list[str] = []
        for folder in cache_folders():
            target = folder / name
            try:
                if not is_regular(target) or target.stat().st_size != size:
                    check_room(folder, size)
                    _join(files, target)
            except OSError as error:
                refused.append(f"{folder} ({error.strerror})")
            else:
                return target, len(files)
        name, _, largest = max(files, key=lambda entry: entry[2].st_size)
        raise ConfigError(
            f"data.path: {self._shown()} needs a cache of {format_bytes(size)}, and cannot be "
            f"written to {' or '.join(refused)}. Set XDG_CACHE_HOME to a folder with room, or take "
            f"fewer files by data.args.pattern: the largest is {name} with "
            f"{format_bytes(largest.st_size)}{_of_which_written(largest)}."
        )


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def _of_which_written(state: os.stat_result) -> str:
    """Return a clause for a sparse file, which has fewer bytes on the disk than its size."""
    written = state.st_blocks * 512
    return f", of which {format_bytes(written)} are written" if 2 * written < state.st_size else ""


def _join(files: Sequence[tuple[str, Path, os.stat_result]], target: Path) -> None:
    """Concatenate the files; the target appears complete or not at all.

    Raises:
        ConfigError: a file cannot be read, or its size changed.
        OSError: the target cannot be written.
    """
    with replacing_file(target) as joined:
        for _, path, state in files:
            with _readable(path) as part:
                left = state.st_size
                while data := _read_part(part, path, min(left, MIB)):
                    joined.write(data)
                    left -= len(data)
                if left or _read_part(part, path, 1):
                    changed = "shorter" if left else "longer"
                    raise ConfigError(
                        f"data.path: the files changed while they were read: {path} is {changed} "
                        f"than its {state.st_size} bytes. Start again when nothing writes there."
                    )


def _read_part(file: FileIO, path: Path, most: int) -> bytes:
    try:
        return file.read(most)
    except OSError as error:
        raise unreadable(path, error, _READABLE) from None


def _readable(file: Path) -> FileIO:
    try:
        return open_regular(file)
    except UnreadableError as error:
        raise UnreadableError(
            file, error.reason, said=f"data.path: cannot read {file}: {error.reason}. {_READABLE}"
        ) from None


def _histogram(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Count the occurrences of each byte; of a long text, in 256 evenly spread blocks of 1 MiB."""
    counts = np.zeros(256, dtype=np.float64)
    blocks = max(1, min(_BASELINE_BLOCKS, math.ceil(len(data) / _BLOCK)))
    for block in range(blocks):
        start = block * _BLOCK if len(data) <= blocks * _BLOCK else block * len(data) // blocks
        counts += np.bincount(data[start : start + _BLOCK], minlength=256)
    return counts


def _bits_per_byte(data: npt.NDArray[np.uint8], cut: int) -> float:
    """Return the cross entropy of the held-out bytes under the frequencies before `cut`, in bits.

    1 is added to each count before `cut`: otherwise a byte that does not occur there would cost
    infinitely many bits.
    """
    seen, held_out = _histogram(data[:cut]) + 1, _histogram(data[cut:])
    bits = -np.log2(seen / seen.sum())
    return float((held_out * bits).sum() / held_out.sum())
