"""A library of which more is used than it promises: which names, and seen in which versions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal

from bigtrain.errors import ConfigError
from bigtrain.machine.versions import installed_version


@dataclass(frozen=True)
class ForeignName:
    """A name of another library's that its next version may be without."""

    path: str
    """Dotted; what only objects have stands behind their class."""
    use: Literal["read", "replace"]
    """Read or called; or given another value, or another function in its place."""
    why: str


def foreign_names(
    use: Literal["read", "replace"], why: str, owner: str, names: str
) -> Sequence[ForeignName]:
    """Several names of one module or class that are used for the same end.

    Args:
        use: see `ForeignName`.
        why: the end.
        owner: the dotted path of the module or class.
        names: in it, with spaces between them.
    """
    return [ForeignName(f"{owner}.{name}", use, why) for name in names.split()]


@dataclass(frozen=True)
class ForeignLibrary:
    """What is used of a library, and in which of its versions that was seen to work."""

    name: str
    oldest: str
    """The oldest version that was seen to work."""
    below: str
    """The first version that may be another; none from there on was seen."""
    names: tuple[ForeignName, ...]

    @property
    def requirement(self) -> str:
        """As pip takes it."""
        return f"{self.name}>={self.oldest},<{self.below}"

    @property
    def fix(self) -> str:
        """The command that installs a version which was seen to work."""
        return f'pip install "{self.requirement}"'

    def warning(self) -> str | None:
        """One line where the installed version is none that was seen to work; imports nothing."""
        version = installed_version(self.name)
        if version is None or (_release(self.oldest) <= _release(version) < _release(self.below)):
            return None
        return (
            f"{self.name} {version} is installed, and was never tried here: {self.requirement} was "
            f"seen to work. All names that are used of it are there. If it fails: `{self.fix}`."
        )

    def missing_names(self) -> Sequence[str]:
        """The names that lead nowhere in what is installed. Imports what has them."""
        return _missing(tuple(name.path for name in self.names))

    def does_not_load(self, error: Exception, user: str, instead: str) -> ConfigError:
        """To be raised where the library is not installed, or does not load here.

        Args:
            error: what its import raised.
            user: the key with its value that wants the library.
            instead: what else the user can do, as the end of a sentence.
        """
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ConfigError(
            f"{user} needs {self.name}, which does not load ({reason}). Run `{self.fix}`, or "
            f"{instead}."
        )

    def refuse_missing(self, user: str, instead: str) -> None:
        """Refuse a version that is without one of the names. Imports what has them.

        Args:
            user: see `does_not_load`.
            instead: the same.

        Raises:
            ConfigError: with the first name that is missing.
        """
        missing = self.missing_names()
        if not missing:
            return
        more = f" (nor {len(missing) - 1} more)" if len(missing) > 1 else ""
        name = next(name for name in self.names if name.path == missing[0])
        raise ConfigError(
            f"{user}: {self.name} {installed_version(self.name)} has no {name.path}{more}, which "
            f"is needed ({name.use}: {name.why}). {self.requirement} was seen to work. "
            f"Run `{self.fix}`, or {instead}."
        )


@cache
def _missing(paths: tuple[str, ...]) -> Sequence[str]:
    return [path for path in paths if not _is_there(path)]


def _is_there(path: str) -> bool:
    """Whether a dotted path leads somewhere.

    An attribute that is made for an object counts as there if a method of its class names it.
    """
    first, *rest = path.split(".")
    value: Any = import_module(first)
    dotted = first
    for part in rest:
        dotted = f"{dotted}.{part}"
        if isinstance(value, ModuleType) and hasattr(value, "__path__") and find_spec(dotted):
            value = import_module(dotted)
        elif hasattr(value, part):
            value = getattr(value, part)
        else:
            return isinstance(value, type) and dotted == path and part in _named_by(value)
    return True


@cache
def _named_by(kind: type) -> frozenset[str]:
    """All names in the code of a class and of those that it inherits from."""
    codes = [
        function.__code__
        for base in kind.__mro__
        for function in (getattr(f, "__func__", f) for f in vars(base).values())
        if isinstance(function, FunctionType)
    ]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return frozenset(names)


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version without trailing zeros; what else is in it counts as nothing."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    release = [int(number) for number in numbers.group().split(".")] if numbers else []
    while release and not release[-1]:
        release.pop()
    return tuple(release)


@contextmanager
def changed_environment(**values: str) -> Iterator[None]:
    """Give variables of the environment other values for a while."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


@contextmanager
def replaced(owner: Any, **values: object) -> Iterator[None]:
    """Give attributes other values for a while."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
