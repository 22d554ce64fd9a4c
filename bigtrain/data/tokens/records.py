"""Readers of files of plain text and of JSON lines."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from bigtrain.errors import ConfigError, UnreadableError, did_you_mean, plain_text
from bigtrain.files.parse import parse_json
from bigtrain.files.regular import open_regular, unreadable
from bigtrain.units import MIB

LINE_SUFFIXES = (".jsonl", ".ndjson")
"""Suffixes of files with a JSON object on each line."""
_FIX = "Correct it, or leave the file out with data.args.pattern."
_READABLE = "Make it readable, or leave it out with data.args.pattern."
_LONGEST_LINE = 64 * MIB
_FORMS = {
    "text": (("text",), ()),
    "prompt": (("prompt", "response"), ()),
    "messages": (("messages",), ("tools",)),
}
"""By the field that decides the form of a record, its required and its optional fields."""
_ALIASES = {"completion": "response"}


@dataclass(frozen=True)
class TextPart:
    """A part of a file of plain text; the parts of a file are one document."""

    text: str
    is_last: bool


@dataclass(frozen=True)
class TextRecord:
    """A line of a file of JSON lines."""

    place: str
    """The file and the number of the line, for messages."""
    text: str | None = None
    """The document, of which every token is learned; or the answer, if there is a prompt."""
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    tools: Any = None


def is_lines(path: Path) -> bool:
    """Whether the suffix of a file is that of JSON lines."""
    return path.suffix.lower() in LINE_SUFFIXES


def read_text_parts(
    path: Path, *, lenient: bool, part_bytes: int = MIB
) -> Iterator[tuple[TextPart, int]]:
    """Yield the parts of a file of plain text, each with its number of bytes.

    A part ends after a line, or else before a space, so that no word is cut. A part without either
    ends between two characters.

    Args:
        path: the file.
        lenient: whether bytes that are not UTF-8 are replaced; otherwise they are refused.
        part_bytes: approximate number of bytes in a part.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    left = b""
    with _opened(path) as file:
        while data := _read(file, path, part_bytes):
            data = left + data
            cut = _last_cut(data)
            yield TextPart(_decoded(path, data[:cut], lenient), is_last=False), cut
            left = data[cut:]
        yield TextPart(_decoded(path, left, lenient), is_last=True), len(left)


def read_parts(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in parts of 1 MiB.

    Raises:
        ConfigError: the file cannot be read.
    """
    with _opened(path) as file:
        while data := _read(file, path, MIB):
            yield data


def _last_cut(data: bytes) -> int:
    """Return the offset after the last line, else before the last space or the last character."""
    cut = data.rfind(b"\n") + 1 or max(data.rfind(b" "), 0)
    if cut:
        return cut
    for back in range(1, min(4, len(data)) + 1):
        if data[-back] < 0x80:
            break  # not within a character of several bytes
        if data[-back] >= 0xC0:
            return len(data) - back
    return len(data)


def _decoded(path: Path, data: bytes, lenient: bool) -> str:
    try:
        return data.decode("utf-8", "replace" if lenient else "strict")
    except UnicodeDecodeError as error:
        raise UnreadableError(
            path,
            "",
            said=f"data.path: {path} is not UTF-8 text ({error.reason}). Convert it, or leave it "
            "out with data.args.pattern.",
        ) from None


def read_records(path: Path, ignored: Collection[str]) -> Iterator[tuple[TextRecord, int]]:
    """Yield the records of a file of JSON lines, each with the number of bytes of its line.

    Empty lines are skipped.

    Args:
        path: the file.
        ignored: names of fields that are left out.

    Raises:
        ConfigError: the file cannot be read; a line is no JSON object, or its fields are no record.
    """
    with _opened(path) as raw:
        file: BinaryIO = io.BufferedReader(raw, MIB)
        number = 0
        while line := _line(file, path, number + 1):
            number += 1
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield _record(f"{path}:{number}", text, ignored), len(line)


def _line(file: BinaryIO, path: Path, number: int) -> bytes:
    try:
        line = file.readline(_LONGEST_LINE + 1)
    except OSError as error:
        raise unreadable(path, error, _READABLE) from None
    if len(line) > _LONGEST_LINE:
        raise ConfigError(
            f"data.path: {path}:{number} has more than {_LONGEST_LINE:,} bytes, which are the "
            "most of a line. A file of JSON lines has an object on each line."
        )
    return line


def _record(place: str, line: bytes, ignored: Collection[str]) -> TextRecord:
    try:
        found = parse_json(line, place)
    except UnreadableError as error:
        raise ConfigError(f"data.path: {place}: {error.reason}. {_FIX}") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"data.path: {place} is a {type(found).__name__}, and a record is an object such as "
            f'{{"text": "..."}}. {_FIX}'
        )
    fields = {key: value for key, value in found.items() if key not in ignored}
    fields = {_ALIASES.get(key, key): value for key, value in fields.items()}
    form = next((form for form in _FORMS if form in fields), None)
    needed, optional = _FORMS[form] if form is not None else ((), ())
    missing = [key for key in needed if key not in fields]
    if form is None or missing:
        got = ", ".join(map(repr, found)) or "none"
        raise ConfigError(
            f"data.path: {place} has the fields {plain_text(got)}, and a record has 'text', or "
            "'prompt' and 'response', or 'messages'. Rename the fields."
        )
    for key in fields:
        if key not in (*needed, *optional):
            raise ConfigError(_unknown_field(place, key, form, ignored))
    return _checked(place, fields)


def _unknown_field(place: str, key: str, form: str, ignored: Collection[str]) -> str:
    needed, optional = _FORMS[form]
    known = (*needed, *optional)
    words = ",".join(sorted({*ignored, key}))
    return (
        f"data.path: {place} has a field {plain_text(key, 60)!r}, which a record of "
        f"{' and '.join(map(repr, needed))} does not use{did_you_mean(key, known)} To leave it out "
        f"set data.args.ignore_fields=[{plain_text(words, 120)}]."
    )


def _checked(place: str, fields: Mapping[str, Any]) -> TextRecord:
    for key in ("text", "prompt", "response"):
        if key in fields and not isinstance(fields[key], str):
            raise ConfigError(
                f"data.path: {place}: {key!r} is a {type(fields[key]).__name__}, and a text is "
                f"needed. {_FIX}"
            )
    if "messages" not in fields:
        text = fields["response"] if "prompt" in fields else fields["text"]
        return TextRecord(place, text=text, prompt=fields.get("prompt"))
    messages = fields["messages"]
    is_list = isinstance(messages, list) and bool(messages)
    for number, message in enumerate(messages if is_list else [None]):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            where = f"message {number + 1} of 'messages'" if is_list else "'messages'"
            raise ConfigError(
                f"data.path: {place}: {where} is not usable: a list of objects with 'role' and "
                f"'content' is needed. {_FIX}"
            )
    return TextRecord(place, messages=messages, tools=fields.get("tools"))


def _opened(path: Path) -> io.FileIO:
    try:
        return open_regular(path)
    except UnreadableError as error:
        raise UnreadableError(
            path, error.reason, said=f"data.path: cannot read {path}: {error.reason}. {_READABLE}"
        ) from None


def _read(file: io.FileIO, path: Path, most: int) -> bytes:
    try:
        return file.read(most)
    except OSError as error:
        raise unreadable(path, error, _READABLE) from None
