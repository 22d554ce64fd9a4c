"""The sources by name: the literal table, and the checks of what a job says about them."""

from __future__ import annotations

import contextlib
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from bigtrain.data.source import Data, Source
from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.files.regular import check_name
from bigtrain.job.import_path import load_object
from bigtrain.job.load import describe_fault
from bigtrain.job.schema import refuse_truth

SOURCES = {
    "cifar10": "bigtrain.data.images:Cifar10Source",
    "digits": "bigtrain.data.digits:DigitsSource",
    "image_folder": "bigtrain.data.folders:ImageFolderSource",
    "imagenet": "bigtrain.data.folders:ImageNetSource",
    "mnist": "bigtrain.data.images:MnistSource",
    "synthetic": "bigtrain.data.synthetic:SyntheticSource",
    "text": "bigtrain.data.text:TextSource",
    "voc": "bigtrain.data.voc:VocSource",
}
"""Every built-in source; its module is imported when it is chosen."""


def open_data(
    name: str,
    path: str | None,
    args: Mapping[str, Any],
    *,
    seed: int,
    sequence_length: int | None = None,
) -> Data:
    """Open a source for training.

    Args:
        name: `data.name`, a built-in source, or `package.module:callable`: a function that takes
            what it names of `path`, `seed`, `sequence_length` and its own arguments and returns
            a `Data`, or a class like the built-in ones (see `Source`).
        path: `data.path`.
        args: `data.args`.
        seed: `train.seed`.
        sequence_length: tokens per sample that the model takes, where it says so.

    Raises:
        ConfigError: the source, an argument or the path is not known or does not fit.
    """
    data = _source(name, path, args).open(seed=seed, sequence_length=sequence_length)
    if not isinstance(data, Data):
        raise ConfigError(
            f"data.name: {name} returned a {type(data).__name__}, and a bigtrain.data.Data is "
            "needed. Return Data(train=..., validation=..., task=...)."
        )
    for part, samples in (("train", data.train), ("validation", data.validation)):
        if samples is not None and not (hasattr(samples, "__len__") and len(samples)):
            raise ConfigError(
                f"data.name: {name} has no samples in {part}, at least 1 is needed (a map-style "
                f"data set with a length). {_look_at(name, path)}"
            )
    return data


def _look_at(name: str, path: str | None) -> str:
    """Where the user finds what is wrong with samples."""
    return f"Look at what {name} returns." if path is None else f"Check data.path={path}."


def check_data(name: str, path: str | None, args: Mapping[str, Any]) -> None:
    """Check name, arguments, path and packages without reading the data.

    Raises:
        ConfigError: as `open_data`, as far as it can be known cheaply.
    """
    _source(name, path, args).check()


def prepare_data(name: str, path: str | None, args: Mapping[str, Any]) -> None:
    """Download or build what a node's processes share; for one of them, the others wait.

    Doing it again does nothing. Another process never sees a half-built file.

    Raises:
        ConfigError: it cannot be had.
    """
    _source(name, path, args).prepare()


@dataclass(frozen=True)
class _Function:
    """A user's function as a source."""

    function: Callable[..., Any]
    path: str | None
    args: Mapping[str, Any]

    def check(self) -> None:
        """Nothing more than what the call has told."""

    def prepare(self) -> None:
        """Nothing: the function is called on every rank."""

    def open(self, *, seed: int, sequence_length: int | None) -> Data:
        arguments = {
            "path": self.path,
            "seed": seed,
            "sequence_length": sequence_length,
            **self.args,
        }
        parameters = inspect.signature(self.function).parameters
        if not _takes_anything(parameters):
            arguments = {key: value for key, value in arguments.items() if key in parameters}
        data: Data = self.function(**arguments)
        return data


def _takes_anything(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _source(name: str, path: str | None, args: Mapping[str, Any]) -> Source:
    if path is not None:
        check_name(path, "data.path")
    factory = _load(name)
    checked = _checked(name, factory, args)
    if isinstance(factory, type) and hasattr(factory, "open"):
        source: Source = factory(path=None if path is None else _expanded(path), **checked)
        return source
    return _Function(factory, path, checked)


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # there is no such user
        raise ConfigError(f"data.path={path}: {error}. Write the folder out.") from None


def _load(name: str) -> Callable[..., Any]:
    if name not in SOURCES and ":" not in name:
        raise ConfigError(
            f"data.name: unknown source {name!r}{did_you_mean(name, SOURCES)} Known: "
            f"{', '.join(sorted(SOURCES))}, or your own as package.module:function."
        )
    return load_object(SOURCES.get(name, name), "data.name")


def _checked(name: str, factory: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, known by name and of the type that the source states."""
    parameters = inspect.signature(factory).parameters
    accepted = [key for key in parameters if key not in ("path", "seed")]
    checked = dict(args)
    for key, value in args.items():
        if key not in accepted:
            if _takes_anything(parameters) and key not in ("path", "seed"):
                continue
            raise ConfigError(
                f"data.args.{key}: {name} has no such argument{did_you_mean(key, accepted)} "
                f"It takes: {', '.join(accepted) or 'none'}."
            )
        checked[key] = _typed(key, value, _hints(factory).get(key, Any))
    for key in accepted:
        parameter = parameters[key]
        optional = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not optional and key not in checked:
            if key == "sequence_length":
                continue
            raise ConfigError(f"data.args.{key} is missing: {name} needs it. Set data.args.{key}=")
    return checked


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """The types of the arguments, as far as they can be known here."""
    parameters = inspect.signature(factory).parameters.items()
    plain = {key: p.annotation for key, p in parameters if p.annotation is not p.empty}
    hints = {key: hint for key, hint in plain.items() if not isinstance(hint, str)}
    inner = vars(factory).get("__init__") if isinstance(factory, type) else None
    for annotated in (factory, inner or factory):
        # A user's annotation may be one that only a type checker can resolve.
        with contextlib.suppress(NameError, TypeError):
            hints.update(typing.get_type_hints(annotated, include_extras=True))
    return hints


def _typed(key: str, value: Any, hint: Any) -> Any:
    try:
        refuse_truth(hint, value)
    except ValueError as error:
        raise ConfigError(f"data.args.{key}: {error}.") from None
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        raise ConfigError(describe_fault(error.errors()[0], f"data.args.{key}")) from None
    except (PydanticUserError, TypeError):
        return value  # a type that cannot be checked is the source's own business
