"""Check a library whose internals bigtrain uses: the names, and the versions that have them."""

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
    """A name inside a library that a later version of the library may lack."""

    path: str
    """The dotted path of the name. For an attribute that only instances have, the path is that of
    their class, followed by the attribute."""
    use: Literal["read", "replace"]
    """Whether bigtrain reads or calls the object with this name ("read"), or replaces it
    ("replace")."""
    why: str
    """The purpose of the use, for the message if the name is missing."""


def foreign_names(
    use: Literal["read", "replace"], why: str, owner: str, names: str
) -> Sequence[ForeignName]:
    """Return several names of one module or class that serve one purpose.

    Args:
        use: see `ForeignName`.
        why: the purpose of the use.
        owner: the dotted path of the module or class.
        names: the names of attributes of the owner, separated by spaces.
    """
    return [ForeignName(f"{owner}.{name}", use, why) for name in names.split()]


@dataclass(frozen=True)
class ForeignLibrary:
    """The names that bigtrain uses inside a library, and the versions that were tested."""

    name: str
    oldest: str
    """The oldest version that was tested."""
    below: str
    """The first version that was not tested."""
    names: tuple[ForeignName, ...]

    @property
    def requirement(self) -> str:
        """The tested versions as a requirement for pip."""
        return f"{self.name}>={self.oldest},<{self.below}"

    @property
    def fix(self) -> str:
        """The command that installs a tested version."""
        return f'pip install "{self.requirement}"'

    def warning(self) -> str | None:
        """Return a warning if the installed version was not tested, otherwise None.

        Nothing is imported.
        """
        version = installed_version(self.name)
        if version is None or (_release(self.oldest) <= _release(version) < _release(self.below)):
            return None
        return (
            f"{self.name} {version} is installed and was never tested with bigtrain: "
            f"{self.requirement} was. It has all names that bigtrain uses. If it fails: "
            f"`{self.fix}`."
        )

    def missing_names(self) -> Sequence[str]:
        """Return the dotted paths that the installed version lacks.

        The modules that should contain them are imported.
        """
        return _missing(tuple(name.path for name in self.names))

    def does_not_load(self, error: Exception, user: str, instead: str) -> ConfigError:
        """Return the error to raise if the library is not installed, or cannot be imported.

        Args:
            error: the exception of the import.
            user: the job's key and value that need the library, for the message.
            instead: an alternative for the user, as the end of a sentence.
        """
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ConfigError(
            f"{user} needs {self.name}, which does not load ({reason}). Run `{self.fix}`, or "
            f"{instead}."
        )

    def refuse_missing(self, user: str, instead: str) -> None:
        """Check that the installed version has all names; see `missing_names`.

        Args:
            user: see `does_not_load`.
            instead: see `does_not_load`.

        Raises:
            ConfigError: a name is missing. The message contains the first missing name.
        """
        missing = self.missing_names()
        if not missing:
            return
        more = f" (nor {len(missing) - 1} more)" if len(missing) > 1 else ""
        name = next(name for name in self.names if name.path == missing[0])
        raise ConfigError(
            f"{user}: {self.name} {installed_version(self.name)} has no {name.path}{more}, which "
            f"is needed ({name.use}: {name.why}). {self.requirement} was tested. "
            f"Run `{self.fix}`, or {instead}."
        )


@cache
def _missing(paths: tuple[str, ...]) -> Sequence[str]:
    return [path for path in paths if not _is_there(path)]


def _is_there(path: str) -> bool:
    """Return whether a dotted path exists.

    An attribute that only instances have exists if the code of their class contains its name.
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
    """Return all names in the code of the methods of a class and of its bases."""
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
    """Return the leading numbers of a version, without trailing zeros."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    release = [int(number) for number in numbers.group().split(".")] if numbers else []
    while release and not release[-1]:
        release.pop()
    return tuple(release)


@contextmanager
def changed_environment(**values: str) -> Iterator[None]:
    """Set environment variables inside a `with` block."""
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
    """Set attributes of an object inside a `with` block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
