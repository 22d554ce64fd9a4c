"""The table of data sources by name, and checks of a job's `data` section."""

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
from torch.utils.data import Dataset, IterableDataset

from bigtrain.data.source import Data, Source
from bigtrain.data.tokens.tokenizer import MODEL_PREFIX
from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.files.regular import check_name
from bigtrain.job.import_path import load_object
from bigtrain.job.load import describe_fault
from bigtrain.job.sections import refuse_truth

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
"""The built-in sources by name, as module:class. A module is imported when its source is used."""


def open_data(
    name: str,
    path: str | None,
    args: Mapping[str, Any],
    *,
    seed: int,
    sequence_length: int | None = None,
    model: str | None = None,
) -> Data:
    """Open a data source, and return its data sets and its task.

    Args:
        name: `data.name`: a built-in source, or `package.module:callable`. The callable is a
            function that returns a `Data`, or a class with the methods of `Source`. A function may
            take `path`, `seed`, `sequence_length` and any other arguments.
        path: `data.path`; None if it is not set.
        args: `data.args`.
        seed: `train.seed`.
        sequence_length: the model's tokens per sample; None if the model has no such length.
        model: `model.name`. If it begins with `hf:` and `args` name no tokenizer, a source of text
            uses the model's tokenizer.

    Raises:
        ConfigError: the source, an argument or the path is unknown or invalid, or a data set has no
            samples or cannot be read by index.
    """
    source = _source(name, path, args, model)
    data = source.open(seed=seed, sequence_length=sequence_length)
    if not isinstance(data, Data):
        raise ConfigError(
            f"data.name: {name} returned a {type(data).__name__}, and a bigtrain.data.Data is "
            "needed. Return Data(train=..., validation=..., task=...)."
        )
    for part, samples in (("train", data.train), ("validation", data.validation)):
        if samples is not None:
            _check_samples(name, part, samples, path)
    return data


def _check_samples(name: str, part: str, samples: Any, path: str | None) -> None:
    """Refuse a data set from which samples cannot be drawn by index.

    Raises:
        ConfigError: the data set has no length, has no samples, or can only be iterated.
    """
    kind = type(samples).__name__
    # `__getitem__` of torch's base class only raises.
    has_getitem = getattr(type(samples), "__getitem__", None) not in (None, Dataset.__getitem__)
    if isinstance(samples, IterableDataset) or not has_getitem or not hasattr(samples, "__len__"):
        lacks = (
            "__getitem__" if not has_getitem or isinstance(samples, IterableDataset) else "__len__"
        )
        raise ConfigError(
            f"data.name: {name} gives a {kind} in {part}, which has no {lacks}: samples are drawn "
            "by index, in an order that a resumed run continues. Give a map-style data set, with "
            "__len__ and __getitem__; for a stream write your own loop around bigtrain.prepare."
        )
    if not len(samples):
        hint = f"Check data.path={path}" if path is not None else "Check the function's files"
        raise ConfigError(
            f"data.name: {name} has no samples in {part} (a {kind} of length 0), at least 1 is "
            f"needed. {hint}."
        )


def check_data(
    name: str, path: str | None, args: Mapping[str, Any], model: str | None = None
) -> None:
    """Check a source's name, arguments, path and packages, without reading the data.

    Raises:
        ConfigError: one of them is missing, unknown or invalid; see `open_data`.
    """
    _source(name, path, args, model).check()


def prepare_data(
    name: str, path: str | None, args: Mapping[str, Any], model: str | None = None
) -> None:
    """Download or build the files that the processes of a node share.

    One process of each node calls this function, and the others wait. A second call changes
    nothing. Other processes never see a partial file.

    Raises:
        ConfigError: the files cannot be made.
    """
    _source(name, path, args, model).prepare()


@dataclass(frozen=True)
class _Function:
    """A source that calls a user's function."""

    function: Callable[..., Any]
    path: str | None
    args: Mapping[str, Any]

    def check(self) -> None:
        """Do nothing: `_checked` has already checked the arguments."""

    def prepare(self) -> None:
        """Do nothing: the function is called on every rank."""

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


def _source(
    name: str, path: str | None, args: Mapping[str, Any], model: str | None = None
) -> Source:
    if path is not None:
        check_name(path, "data.path")
    factory = _load(name)
    checked = _checked(name, factory, args)
    is_hub_model = model is not None and model.startswith(MODEL_PREFIX)
    if is_hub_model and getattr(factory, "takes_tokenizer", False):
        checked.setdefault("tokenizer", model)
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
    """Return the arguments, converted to the types of the source's annotations.

    Raises:
        ConfigError: an argument is unknown, missing or of the wrong type.
    """
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
    """Return the types of the arguments whose annotations can be resolved."""
    parameters = inspect.signature(factory).parameters.items()
    annotations = {key: p.annotation for key, p in parameters if p.annotation is not p.empty}
    hints = {key: hint for key, hint in annotations.items() if not isinstance(hint, str)}
    inner = vars(factory).get("__init__") if isinstance(factory, type) else None
    for annotated in (factory, inner or factory):
        # Only a type checker may be able to resolve a user's annotation.
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
        return value  # pydantic cannot check this type
