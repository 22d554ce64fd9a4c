"""The types of the tables that define the keys of a tool, and the functions that apply them."""

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
    """A finding to report if keys are on and a condition on the whole file is true."""

    kind: FindingKind
    keys: tuple[str, ...]
    """The names of the keys, or patterns with * and ?."""
    test: Callable[[FileSection], bool]
    """The condition on the file."""
    reason: str
    """The fault, without a full stop."""
    fix: str
    """The remedy, as a sentence."""
    even_off: bool = False
    """Whether keys that are off count, too."""


@dataclass(frozen=True)
class KeyTable:
    """The top-level keys in files of a tool."""

    tool: str
    """The name of the tool."""
    numbers: Mapping[str, tuple[str, NumberKind]]
    """By key, the key of a job with the same number, and the kind of number."""
    read: frozenset[str]
    """Keys that the module of the tool reads itself."""
    outside: tuple[str, ...]
    """Keys or patterns that change neither the memory nor the seconds of a step."""
    not_forecast: Mapping[str, tuple[str, str]]
    """By key or pattern, why the key has no counterpart, and the fix."""
    rules: tuple[KeyRule, ...] = field(default=())
    """The rules about contradictions, and about keys that do nothing."""

    @property
    def known(self) -> set[str]:
        """All names and patterns of keys in the table."""
        return {*self.numbers, *self.read, *self.outside, *self.not_forecast}


def read_numbers(request: ToolRequest, section: FileSection, table: KeyTable) -> None:
    """Add the numbers of the file that are also numbers of a job.

    Args:
        request: gets the keys of the job.
        section: the file.
        table: the keys of the tool.

    Raises:
        ConfigError: a value is not a number.
    """
    for key, (ours, kind) in table.numbers.items():
        asked = section.count(key) if kind == "count" else section.number(key)
        if asked is not None:
            request.keys[ours] = asked


def apply_rules(request: ToolRequest, section: FileSection, rules: Iterable[KeyRule]) -> None:
    """Add the findings of the rules whose keys are on and whose test is true."""
    for rule in rules:
        written = matching(section, rule.keys, even_off=rule.even_off)
        if written and rule.test(section):
            request.find(rule.kind, written, rule.reason, rule.fix)


def matching(
    section: FileSection, patterns: Sequence[str], *, even_off: bool = False
) -> list[WrittenKey]:
    """Return the keys of a section that match a name or pattern and are on.

    Args:
        section: the section.
        patterns: names, or patterns with * and ?.
        even_off: return keys that are off, too.
    """
    names = [
        key
        for key in section.values
        if any(fnmatchcase(key, pattern) for pattern in patterns)
        and (section.is_on(key) or (even_off and section.get(key) is not None))
    ]
    return section.written(*names)


def sort_remaining(request: ToolRequest, section: FileSection, table: KeyTable) -> None:
    """Report the keys that nothing has read: without influence, not forecast, or unknown."""
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
    """Return the fix for an unknown key: the nearest known key, or the advice to check its name."""
    hint = did_you_mean(key, known)
    if hint == ".":
        return "Check its name."
    return f"D{hint.removeprefix(', d')} Write that, or leave it out."


def fits(key: str, patterns: Iterable[str]) -> bool:
    """Whether a key matches one of some names or patterns."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def default(request: ToolRequest, ours: str, value: object, why: str) -> None:
    """Set a key of the job to the tool's default, unless the file has set it.

    Args:
        request: the settings so far.
        ours: the key of the job.
        value: the default.
        why: the reason for the value, for the explanation.
    """
    request.keys.setdefault(ours, Asked(value, why=why))
