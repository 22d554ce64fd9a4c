"""The form of the tables that say what the keys of a tool mean, and the loops that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from bigtrain.errors import did_you_mean
from bigtrain.explain.request import Asked, FileSection, FindingKind, ToolRequest, WrittenKey

NumberKind = Literal["count", "number"]


@dataclass(frozen=True)
class KeyRule:
    """A finding about keys that are on while a test of the whole file holds."""

    kind: FindingKind
    keys: tuple[str, ...]
    """Names or patterns."""
    test: Callable[[FileSection], bool]
    reason: str
    fix: str
    even_off: bool = False
    """Whether keys with the value false count, too."""


@dataclass(frozen=True)
class KeyTable:
    """The keys of a tool at the top of its file."""

    tool: str
    numbers: Mapping[str, tuple[str, NumberKind]]
    """By key: the key of a job that is the same number."""
    read: frozenset[str]
    """Keys that the tool's module reads itself."""
    outside: tuple[str, ...]
    """Keys or patterns that change neither the memory nor the seconds of a step."""
    not_forecast: Mapping[str, tuple[str, str]]
    """By key or pattern: why there is no counterpart, and the fix."""
    rules: tuple[KeyRule, ...] = field(default=())

    @property
    def known(self) -> set[str]:
        """All keys, and the patterns."""
        return {*self.numbers, *self.read, *self.outside, *self.not_forecast}


def read_numbers(request: ToolRequest, section: FileSection, table: KeyTable) -> None:
    """Add the keys of a job that are the same numbers in the file.

    Raises:
        ConfigError: a value is no number.
    """
    for key, (ours, kind) in table.numbers.items():
        asked = section.count(key) if kind == "count" else section.number(key)
        if asked is not None:
            request.keys[ours] = asked


def apply_rules(request: ToolRequest, section: FileSection, rules: Iterable[KeyRule]) -> None:
    """Add the findings of the rules whose test holds."""
    for rule in rules:
        written = matching(section, rule.keys, even_off=rule.even_off)
        if written and rule.test(section):
            request.find(rule.kind, written, rule.reason, rule.fix)


def matching(
    section: FileSection, patterns: Sequence[str], *, even_off: bool = False
) -> list[WrittenKey]:
    """Return the keys of a section that fit a name or pattern and are on."""
    names = [
        key
        for key in section.values
        if any(fnmatchcase(key, pattern) for pattern in patterns)
        and (section.is_on(key) or (even_off and section.get(key) is not None))
    ]
    return section.written(*names)


def sort_remaining(request: ToolRequest, section: FileSection, table: KeyTable) -> None:
    """Sort the keys that nothing has read: without influence, not forecast, or unknown."""
    for key in section.values:
        if key in table.numbers or key in table.read or section.get(key) is None:
            continue
        if fits(key, table.outside):
            request.outside.append(key)
            continue
        pattern = next((each for each in table.not_forecast if fnmatchcase(key, each)), None)
        if pattern is not None:
            if section.is_on(key):
                reason, fix = table.not_forecast[pattern]
                request.find("not forecast", section.written(key), reason, fix)
            else:
                request.outside.append(key)
            continue
        request.find(
            "not forecast",
            section.written(key),
            f"it is not a key of {table.tool} that is known here",
            fix_of_name(str(key), table.known),
        )


def fix_of_name(key: str, known: Iterable[str]) -> str:
    """Return the fix for a key that is not known: the nearest one, or to look at it."""
    hint = did_you_mean(key, known)
    if hint == ".":
        return "Check its name."
    return f"D{hint.removeprefix(', d')} Write that, or leave it out."


def fits(key: str, patterns: Iterable[str]) -> bool:
    """Whether a key is one of some names, or fits one of some patterns."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def default(request: ToolRequest, ours: str, value: object, why: str) -> None:
    """Set a key that the file does not give to the tool's default."""
    request.keys.setdefault(ours, Asked(value, why=why))
