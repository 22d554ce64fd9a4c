"""Variables of the environment that hold more than a word: numbers and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigtrain.errors import UnreadableError, plain_text
from bigtrain.files.parse import as_object, parse_json

MOST_COUNT = 10_000_000
"""Beyond the ranks, nodes or processes of any machine."""


def count_in(text: str, most: int = MOST_COUNT) -> int | None:
    """The whole number from 0 on that a text is, at most `most`; None where it is none."""
    text = text.strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > 20:
        return None
    return int(text) if int(text) <= most else None


def json_in(environ: Mapping[str, str], name: str) -> dict[str, Any] | None:
    """The JSON object in a variable; None where it is not set.

    Raises:
        UnreadableError: it is something else.
    """
    text = environ.get(name)
    if text is None:
        return None
    fix = f"Run: unset {name}"
    shown = f"{name}={plain_text(ascii(text), 60)}"
    return as_object(parse_json(text, shown, fix), shown, fix)


def odd_value(environ: Mapping[str, str], name: str, needed: str) -> UnreadableError:
    """What is said of a variable that holds something else than is needed."""
    shown = plain_text(ascii(environ.get(name, "")), 80)
    return UnreadableError(
        name, needed, said=f"{name}={shown} is not {needed}. Run: unset {name}, or set it anew."
    )
