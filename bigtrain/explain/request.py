"""The settings that a file of another tool requests, as keys of a job, and its faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bigtrain.errors import ConfigError, plain_text
from bigtrain.explain.config_file import ConfigFile, dotted_leaves
from bigtrain.job.deepspeed_sections import is_true

FindingKind = Literal["contradiction", "no effect", "not forecast"]
TYPED = "the command line"
"""The reason for a value from the command line."""
FINDING_KINDS: tuple[FindingKind, ...] = ("contradiction", "no effect", "not forecast")


@dataclass(frozen=True)
class WrittenKey:
    """One key of a file with its value and its line."""

    path: str
    """The path of the file."""
    key: str
    """The dotted key."""
    value: Any = field(compare=False)  # lists have no hash
    line: int | None
    """The line of the key, from 1; None if it is unknown."""

    def __str__(self) -> str:
        return f"{self.key}={shown_value(self.value)}"


@dataclass(frozen=True)
class Asked:
    """A value for a key of a job, and where it comes from."""

    value: Any
    written: tuple[WrittenKey, ...] = ()
    """The keys of the file that set the value; empty if it is assumed."""
    why: str = ""
    """The reason for a value that no key sets; or a remark on a value that keys set."""


@dataclass(frozen=True)
class Finding:
    """Keys that contradict each other, do nothing, or cannot be forecast."""

    kind: FindingKind
    written: tuple[WrittenKey, ...]
    """The keys."""
    reason: str
    """The fault, without a full stop."""
    fix: str = ""
    """The remedy, as a sentence; empty if there is none."""

    def line(self, file: str) -> str:
        """Return the finding as one line.

        Args:
            file: the path of the explained file. Keys of other files are shown with their path.
        """
        numbers: dict[str, list[str]] = {}
        for each in self.written[:_LISTED]:
            if each.line is not None and str(each.line) not in numbers.setdefault(each.path, []):
                numbers[each.path].append(str(each.line))
        places = [
            f"{'' if path == file else f'{path} '}line{'s' if len(lines) > 1 else ''} "
            f"{', '.join(lines)}"
            for path, lines in numbers.items()
        ]
        keys = ", ".join(map(str, self.written[:_LISTED]))
        if len(self.written) > _LISTED:
            keys += f" and {len(self.written) - _LISTED} more"
        head = ": ".join(part for part in (" and ".join(places), keys) if part)
        return " ".join(part for part in (f"{head}: {self.reason}.", self.fix) if part)


_LISTED = 6
"""The largest number of keys that one line names."""


@dataclass
class ToolRequest:
    """The settings that a file requests, as keys of a job. The module of the tool fills it."""

    tool: str
    """The name of the tool, for messages."""
    file: ConfigFile
    """The explained file."""
    strategy: Asked = field(default_factory=lambda: Asked("ddp", why="nothing is sharded"))
    """The preset that distributes the model and its states over the ranks."""
    added: dict[str, Asked] = field(default_factory=dict)
    """Presets that are added to `strategy` by `+`: full, offload_cpu, ..."""
    keys: dict[str, Asked] = field(default_factory=dict)
    """Keys of the job, dotted."""
    ranks: Asked | None = None
    """The number of ranks; None if the file does not set it."""
    model: Asked | None = None
    """The name of the model; None if the file does not set it."""
    deepspeed: dict[str, Any] | None = None
    """The part of a DeepSpeed configuration for DeepSpeed's engine; None without a ZeRO stage."""
    deepspeed_path: str | None = None
    """The path of the DeepSpeed file, if it is the explained file."""
    layer_classes: Asked | None = None
    """Names of the layer classes that FSDP wraps; None if the file does not set them."""
    on_cpu: bool = False
    """Whether the file requests training on CPUs."""
    findings: list[Finding] = field(default_factory=list)
    """The faults of the file."""
    outside: list[str] = field(default_factory=list)
    """Keys that change neither the memory nor the seconds of a step."""

    @property
    def words(self) -> str:
        """The strategy as words, such as `zero2+offload_cpu`."""
        return "+".join([str(self.strategy.value), *self.added])

    def find(
        self, kind: FindingKind, written: Sequence[WrittenKey], reason: str, fix: str = ""
    ) -> None:
        """Add a finding about keys. Without a key, nothing is added.

        Args:
            kind: the kind of fault.
            written: the keys.
            reason: the fault, without a full stop.
            fix: the remedy, as a sentence.
        """
        if written:
            self.findings.append(Finding(kind, tuple(written), reason, fix))

    @property
    def usable_file(self) -> str | None:
        """The path of the DeepSpeed file, if a job can use the file unchanged; otherwise None."""
        faulty = ("contradiction", "not forecast")
        is_faulty = any(finding.kind in faulty for finding in self.findings)
        return None if is_faulty else self.deepspeed_path

    def of_kind(self, kind: FindingKind) -> list[Finding]:
        """Return the findings of a kind."""
        return [finding for finding in self.findings if finding.kind == kind]


class FileSection:
    """Access to the keys of a file, or of one of its sections.

    Args:
        file: the file.
        values: the values of the section.
        above: the dotted key of the section with a dot at its end; empty for the whole file.
    """

    def __init__(self, file: ConfigFile, values: Mapping[str, Any], above: str = "") -> None:
        self.file, self.values, self._above = file, values, above

    def get(self, key: str) -> Any:
        """Return the value of a dotted key; None if it is not set, empty, or the word none."""
        value: Any = self.values
        for part in key.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        return None if value in ("", "none", "None", "null") else value

    def is_on(self, key: str) -> bool:
        """Whether a key has a value other than false, no, off, 0 or an empty one."""
        value = self.get(key)
        if isinstance(value, str):
            return value.lower() not in ("false", "no", "off", "0")
        return bool(value)

    def written(self, *keys: str) -> list[WrittenKey]:
        """Return those of the keys that are written with a value."""
        return [
            WrittenKey(
                self.file.path,
                f"{self._above}{key}",
                self.get(key),
                self.file.line_of(f"{self._above}{key}"),
            )
            for key in keys
            if self.get(key) is not None
        ]

    def asked(self, key: str, value: Any = None) -> Asked:
        """Return a key of the file as a value for a job.

        Args:
            key: the key of the file.
            value: the value for the job; None for the value in the file.
        """
        return Asked(self.get(key) if value is None else value, tuple(self.written(key)))

    def inner(self, key: str) -> FileSection | None:
        """Return an inner section; None if the key is not a mapping."""
        values = self.get(key)
        if not isinstance(values, Mapping):
            return None
        return FileSection(self.file, values, f"{self._above}{key}.")

    def names(self) -> Iterator[str]:
        """Yield the dotted names of the keys that are written with a value."""
        for name, value in dotted_leaves(self.values):
            if value not in (None, "", {}, []):
                yield name

    def count(self, key: str, least: int = 1) -> Asked | None:
        """Return a whole number; None if the key is not set or is `auto`.

        Args:
            key: the key of the file.
            least: the smallest number that is accepted.

        Raises:
            ConfigError: the value is not a whole number, or is less than `least`.
        """
        return self._number(key, least, whole=True)

    def number(self, key: str, least: float = 0.0) -> Asked | None:
        """Return a number, which YAML may have read as text (1e-4); see `count`.

        Raises:
            ConfigError: the value is not a number, or is less than `least`.
        """
        return self._number(key, least, whole=False)

    def _number(self, key: str, least: float, *, whole: bool) -> Asked | None:
        value = self.get(key)
        if value is None or value == "auto":
            return None
        try:
            if isinstance(value, bool):
                raise ValueError
            number: float = float(value)
            if number < least or (whole and number != int(number)):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            (written,) = self.written(key)
            kind = "whole number" if whole else "number"
            raise ConfigError(
                f"{self.place(key)}: {written}: a {kind} of {least:g} or more is needed. Correct "
                f"{key}."
            ) from None
        return self.asked(key, int(number) if number == int(number) else number)

    def place(self, key: str) -> str:
        """Return the path of the file with the line of a key, PATH:LINE."""
        line = self.file.line_of(f"{self._above}{key}")
        return self.file.path if line is None else f"{self.file.path}:{line}"


def shown_value(value: object) -> str:
    """Return a value as YAML, in one short line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shown_value(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return plain_text(f"[{', '.join(map(shown_value, value))}]", 60)
    return plain_text(value, 60)


def said_true(value: object) -> bool:
    """Whether a tool may take a value for true. `auto` counts, because the tool then chooses."""
    return value == "auto" or is_true(value)
