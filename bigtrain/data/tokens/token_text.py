"""The data of `text` with a tokenizer: documents, windows, held-out documents."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from bigtrain.data.source import Data, SampleSubset
from bigtrain.data.tokens.encode import (
    MARKED_ANSWERS,
    PLAIN_FILES,
    RENDERED_ANSWERS,
    Encoder,
    Tokens,
)
from bigtrain.data.tokens.model_inputs import masks_for, tokens_name
from bigtrain.data.tokens.records import is_lines, read_parts
from bigtrain.data.tokens.token_cache import Documents, TokenFile, cached_tokens
from bigtrain.data.tokens.tokenizer import TextTokenizer
from bigtrain.data.tokens.windows import (
    LeftOut,
    TokenSamples,
    document_pieces,
    one_each,
    packed,
)
from bigtrain.errors import ConfigError
from bigtrain.losses.tasks import LanguageTask
from bigtrain.machine.cache import Cache

DEFAULT_LENGTH = 1024
"""Tokens per sample, if neither a key nor a built-in model sets them."""
_SETTLED_S = 2.0
"""Seconds in which a file may change twice with the same modification time."""
_REMEMBERED_BYTES = 64 << 20
"""The hash of files with fewer bytes in total is not cached."""
_MOST_REMEMBERED = 100
TextFile = tuple[str, Path, os.stat_result]
"""The relative name, the path and the stat result of a file."""


@dataclass(frozen=True)
class _Part:
    """Some documents in a row, of which the first and the last may be cut."""

    documents: range
    begin: int | None = None
    """Index of the first token, if the first document is cut."""
    end: int | None = None
    """Index after the last token, if the last document is cut."""


@dataclass(frozen=True)
class _Cut:
    """The cut between the documents for training and those that are held out.

    Records are held out whole. Files of plain text are few and long, so a fraction of their tokens
    is held out. If this cuts a file, training and validation each have a document of it.
    """

    num_documents: int
    num_before: int
    """Number of documents for training, including a document that is cut."""
    first_after: int
    """The number of the first held-out document, which may be one that is cut."""
    token: int | None
    """Index of the token at which a document is cut; None if no document is cut."""

    @classmethod
    def of(cls, file: TokenFile, fraction: float) -> _Cut:
        """Return the cut that holds out a fraction of the tokens of plain text, or of records."""
        number = len(file.answers)
        if set(file.counts) != {PLAIN_FILES}:
            before = number - round(number * fraction)
            return cls(number, before, before, None)
        total = int(file.starts[-1])
        token = total - round(total * fraction)
        document = int(np.searchsorted(file.starts, token, side="right")) - 1
        if token >= total or token == int(file.starts[document]):
            return cls(number, min(document, number), min(document, number), None)
        return cls(number, document + 1, document, token)

    @property
    def num_after(self) -> int:
        """Number of documents that are held out."""
        return self.num_documents - self.first_after

    def before(self) -> _Part:
        """Return the part for training."""
        return _Part(range(self.num_before), end=self.token)

    def after(self) -> _Part:
        """Return the part that is held out."""
        return _Part(range(self.first_after, self.num_documents), begin=self.token)


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """The options of documents and windows; see `TextSource`."""

    length: int
    packing: bool
    long: Literal["drop", "split"] | None
    loss_on: Literal["answers", "everything"]
    ignore_fields: tuple[str, ...]
    validation_fraction: float
    validation_samples: int


class TokenText:
    """Encodes files as documents, and arranges the documents in windows of tokens.

    Args:
        tokenizer: the tokenizer.
        options: see `TokenOptions`.
        shown: the name of the files, for messages.
        lenient: whether bytes that are not UTF-8 are replaced; otherwise they are refused.
    """

    def __init__(
        self, tokenizer: TextTokenizer, options: TokenOptions, shown: str, *, lenient: bool
    ) -> None:
        self._tokenizer, self._options, self._shown = tokenizer, options, shown
        self._lenient = lenient

    def tokens(self, files: Sequence[TextFile]) -> TokenFile:
        """Return the tokens of the files from the cache, which is written if it is missing."""
        contents = _contents_hash(files)
        key = hashlib.sha256()
        # Names determine the order of documents, and suffixes how files are read.
        for part in (
            contents,
            self._tokenizer.fingerprint,
            json.dumps([name for name, _, _ in files]),
            json.dumps([sorted(self._options.ignore_fields), self._lenient]),
        ):
            key.update(part.encode("utf-8", "surrogatepass") + b"\0")
        size = sum(state.st_size for _, _, state in files)
        make = partial(self._documents, files, size)
        return cached_tokens(f"tokens-{key.hexdigest()[:24]}.bin", make, size, self._shown)

    def _documents(self, files: Sequence[TextFile], size: int) -> Documents:
        encoder = Encoder(
            self._tokenizer, ignored=self._options.ignore_fields, lenient=self._lenient
        )

        def pieces() -> Iterator[tuple[Tokens, bool]]:
            with tokenizing_bar(self._shown, size) as advance:
                for _, path, _ in files:
                    yield from encoder.documents(path, advance)

        return Documents(pieces(), encoder.counts)

    def data(self, files: Sequence[TextFile], held_out: Sequence[TextFile] | None) -> Data:
        """Return the windows for training and for validation.

        Args:
            files: the files.
            held_out: the files for validation; None to hold out the last documents of `files`.

        Raises:
            ConfigError: a file or a line is wrong, the tokenizer cannot encode it, or no document
                fits a window.
        """
        options = self._options
        file = self.tokens(files)
        cut = _Cut.of(file, 0.0 if held_out is not None else options.validation_fraction)
        train, left_out = self._samples(file, cut.before(), files)
        documents = [f"{cut.num_before:,} documents for training"]
        if not len(train):
            raise ConfigError(self._nothing_fits(left_out, "for training"))
        validation, lines = None, [_line(train, left_out, options)]
        counts = {"train": _figures(train, left_out, cut.num_before)}
        digests = [file.digest]
        if held_out is not None:
            other = self.tokens(held_out)
            digests.append(other.digest)
            num_held_out = len(other.answers)
            validation, rest = self._samples(other, _Cut.of(other, 0.0).before(), held_out)
        elif cut.num_after:
            num_held_out = cut.num_after
            validation, rest = self._samples(file, cut.after(), files)
        if validation is not None:
            if not len(validation):
                raise ConfigError(self._nothing_fits(rest, "held out"))
            documents.append(f"{num_held_out:,} held out")
            lines.append(f"held out: {_line(validation, rest, options)}")
            counts["held out"] = _figures(validation, rest, num_held_out)
        found = "; ".join(
            [f"text: {', '.join(documents)}, by {self._tokenizer.name}", *lines, *_how(file)]
        )
        data = Data(
            train=train,
            validation=None if validation is None else self._spread(validation),
            task=LanguageTask(self._tokenizer.size),
            description=found,
            counts=counts,
            digest=" ".join(digests),
        )
        return replace(data, for_model=partial(self._for_model, data, train, validation))

    def _samples(
        self, file: TokenFile, part: _Part, files: Sequence[TextFile]
    ) -> tuple[TokenSamples, LeftOut]:
        options = self._options
        is_plain = not any(is_lines(path) for _, path, _ in files)
        splits = options.long == "split" if options.long else is_plain
        answers_only = options.loss_on == "answers"
        pieces, left_out = document_pieces(
            file,
            part.documents,
            options.length,
            splits=splits,
            answers_only=answers_only,
            begin=part.begin,
            end=part.end,
        )
        samples = TokenSamples(
            file,
            pieces,
            packed(pieces, options.length) if options.packing else one_each(pieces),
            length=options.length,
            padding=self._tokenizer.padding,
            answers_only=answers_only,
        )
        return samples, left_out

    def _nothing_fits(self, left_out: LeftOut, part: str) -> str:
        options = self._options
        if left_out.too_long:
            return (
                f"data.path: every document {part} of {self._shown} has more than "
                f"sequence_length + 1 = {options.length + 1} tokens (the shortest "
                f"{left_out.shortest:,}, the longest {left_out.longest:,}). Set "
                f"data.args.sequence_length={left_out.shortest - 1} or more, or "
                "data.args.long=split."
            )
        return (
            f"data.path: no document {part} of {self._shown} has an answer "
            f"({left_out.without_answer:,} without one). Give a response or a message of the "
            "assistant, or set data.args.loss_on=everything."
        )

    def _for_model(
        self, data: Data, train: TokenSamples, held_out: TokenSamples | None, model: nn.Module
    ) -> Data:
        """Return the data with the inputs that a model needs; see `masks_for`."""
        options = self._options
        masks, window = masks_for(
            model, packs=options.packing, length=options.length, tokens=self._tokenizer.size
        )
        inputs = (masks, window, tokens_name(model))
        validation = None if held_out is None else held_out.with_masks(*inputs)
        return replace(
            data,
            train=train.with_masks(*inputs),
            validation=None if validation is None else self._spread(validation),
            for_model=None,
        )

    def _spread(self, samples: TokenSamples) -> SampleSubset:
        taken = min(len(samples), self._options.validation_samples)
        return SampleSubset(samples, [n * len(samples) // taken for n in range(taken)])


def _line(samples: TokenSamples, left_out: LeftOut, options: TokenOptions) -> str:
    """Describe the number of windows, how full they are, and the documents that are in none."""
    length, windows = options.length, len(samples)
    share = samples.num_inputs / max(1, windows * length)
    kind = "packed" if options.packing else "padded"
    words = [f"{windows:,} {kind} samples of {length:,} tokens, {share:.0%} of them text"]
    if left_out.too_long:
        words.append(
            f"LEFT OUT: {left_out.too_long:,} documents longer than {length:,} tokens (up to "
            f"{left_out.longest - 1:,}; data.args.long=split keeps them)"
        )
    if left_out.without_answer:
        words.append(f"{left_out.without_answer:,} documents without an answer left out")
    if left_out.pieces_without_answer:
        words.append(f"{left_out.pieces_without_answer:,} pieces without an answer left out")
    return ", ".join(words)


def _figures(samples: TokenSamples, left_out: LeftOut, documents: int) -> dict[str, int]:
    """Return the figures of a part of the data, for `data.json`."""
    return {
        "documents": documents,
        "samples": len(samples),
        "tokens_of_a_sample": samples.length,
        "tokens_that_are_no_padding": samples.num_inputs,
        "documents_too_long": left_out.too_long,
        "tokens_of_the_longest_document": left_out.longest,
        "documents_without_an_answer": left_out.without_answer,
        "pieces_without_an_answer": left_out.pieces_without_answer,
    }


def _how(file: TokenFile) -> list[str]:
    """Describe how the answers of conversations were found; empty without conversations."""
    return [
        f"{file.counts[key]:,} conversations with {key}"
        for key in (MARKED_ANSWERS, RENDERED_ANSWERS)
        if key in file.counts
    ]


def _contents_hash(files: Sequence[TextFile]) -> str:
    """Return a hash of the bytes of the files.

    Hashing large files in every process would take long. So their hash is cached under their paths,
    sizes, modification times and inodes, unless a file changed less than `_SETTLED_S` ago.

    Raises:
        ConfigError: a file cannot be read.
    """
    total = sum(state.st_size for _, _, state in files)
    if total < _REMEMBERED_BYTES:
        return _hash_of(files)
    states = [
        [str(path.absolute()), s.st_size, s.st_mtime_ns, s.st_ino, s.st_dev] for _, path, s in files
    ]
    key = hashlib.sha256(json.dumps(states).encode("utf-8", "surrogatepass")).hexdigest()
    cache = Cache("text_contents")
    known = cache.read().get(key)
    if isinstance(known, str):
        return known
    settled = time.time() - max(s.st_mtime for _, _, s in files) > _SETTLED_S
    found = _hash_of(files)
    if settled:

        def remember(entries: dict[str, Any]) -> None:
            for oldest in list(entries)[: max(0, len(entries) - _MOST_REMEMBERED)]:
                del entries[oldest]
            entries[key] = found

        cache.update(remember)
    return found


def _hash_of(files: Sequence[TextFile]) -> str:
    found = hashlib.sha256()
    for _, path, state in files:
        found.update(state.st_size.to_bytes(8, "little"))
        for data in read_parts(path):
            found.update(data)
    return found.hexdigest()


@contextmanager
def tokenizing_bar(shown: str, size: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar inside a `with` block, if standard error is a terminal.

    The block calls the yielded function with the number of bytes that were done since its last
    call. The bar is on standard error, because standard output may be a command's JSON.

    Args:
        shown: the name of the files.
        size: bytes of all files.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=40),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"tokens of {shown}", total=size)
        yield lambda done: progress.advance(task, done)
