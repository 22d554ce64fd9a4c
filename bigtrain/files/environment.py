"""Read environment variables that contain numbers or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigtrain.errors import UnreadableError, plain_text
from bigtrain.files.parse import as_object, parse_json

MOST_COUNT = 10_000_000
"""A number that is larger than that of the ranks, nodes or processes of any cluster."""


def count_in(text: str, most: int = MOST_COUNT) -> int | None:
    """Return a text as an integer from 0 to `most`; None if it is no such integer."""
    text = text.strip()
    if not (text.isascii() and text.isdecimal()) or len(text) > 20:
        return None
    return int(text) if int(text) <= most else None


def json_in(environ: Mapping[str, str], name: str) -> dict[str, Any] | None:
    """Return the JSON object in an environment variable; None if the variable is not set.

    Args:
        environ: the environment.
        name: the name of the variable.

    Raises:
        UnreadableError: the content of the variable is not a JSON object.
    """
    text = environ.get(name)
    if text is None:
        return None
    fix = f"Run: unset {name}"
    shown = f"{name}={plain_text(ascii(text), 60)}"
    return as_object(parse_json(text, shown, fix), shown, fix)


def odd_value(environ: Mapping[str, str], name: str, needed: str) -> UnreadableError:
    """Return the error for an environment variable with a wrong value.

    Args:
        environ: the environment.
        name: the name of the variable.
        needed: a noun phrase for the values that are accepted, for the message.
    """
    shown = plain_text(ascii(environ.get(name, "")), 80)
    return UnreadableError(
        name, needed, said=f"{name}={shown} is not {needed}. Run: unset {name}, or set it anew."
    )
