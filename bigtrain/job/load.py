"""Make a `Job` from YAML files and the command line; error messages name file and line.

The order of precedence, lowest first: the defaults of `schema`, the job file, the strategy
(or plan) file, the command line. A `ConfigTree` records where each value was written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bigtrain.errors import ConfigError, UnreadableError, plain_text
from bigtrain.files.parse import parse_yaml
from bigtrain.job.deepspeed_json import said_of_job
from bigtrain.job.presets import (
    COMMAND_LINE,
    ConfigTree,
    KeyPath,
    is_file,
    preset_names,
    read_preset,
)
from bigtrain.job.public_names import PUBLIC_VALUES, public_hint, refuse_yacs
from bigtrain.job.schema import BATCH_KEYS, Job, deepspeed_file_in
from bigtrain.job.strategy_words import read_strategy, words_in

_MOST_DOTS = 16
"""The largest number of dots in a key; no key of a job has more."""


def parse_overrides(words: Sequence[str]) -> ConfigTree:
    """Read overrides such as `optim.lr=3e-4` and `OPTIM.LR 3e-4`, in any mixture.

    Args:
        words: the words of the command line, without options.

    Raises:
        ConfigError: a word is not a key, a key has no value, or a value is not YAML.
    """
    tree = ConfigTree()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("+"):
            raise ConfigError(f"{word!r}: write a strategy's words without spaces, as in ddp+full.")
        key, equals, text = word.partition("=")
        if not equals:
            if is_file(word) or word in preset_names("jobs"):
                raise ConfigError(f"{plain_text(word, 80)} is a job. Write --config {word}.")
            if not rest:
                raise ConfigError(f"{word!r} has no value. Write {word.lower()}=VALUE.")
            text = rest.pop(0)
        key = key.lower() if key.isupper() else key
        if key in ("strategy", "strategy.name") and not text.lstrip().startswith("{"):
            tree.strategy = text
            continue
        if not key or key.startswith("-") or key.count(".") > _MOST_DOTS:
            raise ConfigError(
                f"{_shown(word)} is not an option. See --help; keys are like train.steps=5."
            )
        try:
            value = parse_yaml(text)[1] if text else None
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{plain_text(key, 80)}={plain_text(text, 80)}: not a value"
                f"{_why(error)}. Put quotes around it."
            ) from None
        overrides: dict[KeyPath, Any] = {tuple(key.split(".")): value}
        if key == "strategy":
            tree.strategy, inner = words_in(value, key)
            if tree.strategy is not None:
                overrides = {(key, name): config for name, config in inner.items()}
        for path, config in overrides.items():
            tree.put(path, config, f"{COMMAND_LINE}, {key}", adds=True)
    return tree


def _why(error: yaml.YAMLError) -> str:
    """Return the problem of a value that is not YAML, unless quotes are all that it lacks."""
    problem = getattr(error, "problem", None)
    is_whole = problem is not None and getattr(error, "context", None) is None
    return f" ({plain_text(problem)})" if is_whole else ""


def load_job(
    config: str | None = None,
    strategy: str | None = None,
    overrides: Sequence[str] = (),
    *,
    plan: str | None = None,
) -> Job:
    """Read a job: a file or preset, overridden by a strategy, a plan and single keys.

    Args:
        config: a path, or the name of a preset in configs/jobs; None is `default`.
        strategy: presets in configs/strategies and paths, joined by `+`; None for the job's.
        overrides: KEY=VALUE words, as on the command line.
        plan: the path of a plan file.

    Raises:
        ConfigError: a file, a key or a value is wrong; the message contains the file, the line and
            the nearest valid key.
    """
    tree = read_preset("jobs", config or "default", "job")
    refuse_yacs(tree.values, str(config))
    _check_sections(tree)
    words = parse_overrides(overrides)
    if config is None and _is_own(words):
        _forget_optimizer(tree)
    named = (("--strategy", strategy), ("--plan", plan), ("strategy", words.strategy))
    for asked, text in named:
        if text is not None:
            tree.merge(read_strategy(str(text), asked))
    if all(text is None for _, text in named):
        if ("strategy", "deepspeed") in words.origins:  # DeepSpeed's file names the strategy
            tree.values["strategy"] = {"name": "deepspeed"}
        else:
            _resolve_strategy(tree)
    return _overridden(tree, words)


def _check_sections(tree: ConfigTree) -> None:
    """Drop empty sections, and refuse a section that is not a mapping.

    Without the refusal, an override of a key of that section would replace the section silently.
    """
    for name, value in list(tree.values.items()):
        if name not in Job.model_fields or name in ("strategy", "device"):
            continue
        if value is None:
            del tree.values[name]
        elif not isinstance(value, dict):
            validate_job(Job, ConfigTree({name: value}, tree.origins))


def _is_own(words: ConfigTree) -> bool:
    """Whether the overrides name a model by its import path."""
    model = words.values.get("model")
    return isinstance(model, Mapping) and ":" in str(model.get("name"))


def _forget_optimizer(tree: ConfigTree) -> None:
    """Drop `optim` of the default job, which suits only that job's model: the defaults apply."""
    tree.values.pop("optim", None)
    for path in [path for path in tree.origins if path[0] == "optim"]:
        del tree.origins[path]


def _resolve_strategy(tree: ConfigTree) -> None:
    """Replace the words of a job's `strategy` by the roles they mean; keep the other keys."""
    asked = f"{tree.origin(('strategy',))}: strategy"
    text, others = words_in(tree.values.get("strategy", {}), asked)
    if text is not None:
        tree.merge(read_strategy(text, asked))
        tree.lay(ConfigTree({"strategy": others}))


def override_job(job: Job, words: Sequence[str]) -> Job:
    """Return a job with some keys changed; `strategy=WORDS` replaces the whole strategy.

    Args:
        job: the job, which does not change.
        words: KEY=VALUE words, as on the command line.

    Raises:
        ConfigError: a key or a value is wrong; the message contains the key and the fix.
    """
    tree = ConfigTree(job.model_dump(mode="json", exclude_defaults=True))
    changes = parse_overrides(words)
    if changes.strategy is not None:
        tree.merge(read_strategy(changes.strategy, "strategy"))
    return _overridden(tree, changes)


def _overridden(tree: ConfigTree, words: ConfigTree) -> Job:
    # The first pass replaces keys of lower layers; the second sets all overrides, in any order.
    for adds in (False, True):
        for path, origin in words.origins.items():
            tree.put(path, _value_at(words.values, path), origin, adds=adds)
        if not adds:
            _apply_deepspeed_file(tree, words.values)
    return validate_job(Job, tree)


def _apply_deepspeed_file(tree: ConfigTree, words: Mapping[str, Any]) -> None:
    """Override the job file by a DeepSpeed file, except for keys of the command line.

    A batch key that only a lower layer sets is dropped if the file or the command line sets the
    other two. If they set all three, the file's accumulation is dropped, too: the accumulation that
    follows from the other keys is compared with the file's later.
    """
    path = deepspeed_file_in(tree.values.get("strategy"))
    if path is None:
        return
    settings = {tuple(key.split(".")): setting for key, setting in said_of_job(path).items()}
    typed = {key for key in settings if _is_given(words, key)}
    for key, setting in settings.items():
        if key not in typed:
            tree.put(key, setting.value, f"{path}: {setting.key}")
    batch = [("train", key) for key in BATCH_KEYS]
    firm = [key for key in batch if key in settings or _is_given(words, key)]
    for key in batch if len(firm) >= len(batch) - 1 else ():
        derived = key not in firm or (len(firm) == len(batch) and key == batch[-1])
        if derived and not _is_given(words, key):
            tree.put(key, None, path)


def _is_given(values: Any, path: KeyPath) -> bool:
    for key in path:
        if not isinstance(values, Mapping) or key not in values:
            return False
        values = values[key]
    return True


def job_from_keys(strategy: str, keys: Mapping[str, Any]) -> Job:
    """Return a job from a strategy and dotted keys, without a job file.

    Args:
        strategy: the words of the strategy, or a path.
        keys: values by dotted key, such as `train.micro_batch_size`.

    Raises:
        ConfigError: a key or a value is wrong.
    """
    tree, words = read_strategy(strategy, "strategy"), ConfigTree()
    for key, value in keys.items():
        words.put(tuple(key.split(".")), value, f"{key}={value!r}", adds=True)
    return _overridden(tree, words)


def _value_at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values[key]
    return values


def validate_job(kind: type[Job], tree: ConfigTree) -> Job:
    """Return the typed job of a tree.

    Args:
        kind: the class of the job.
        tree: the values, and where each was written.

    Raises:
        ConfigError: a key or a value is wrong; the message is the first complaint.
    """
    try:
        return kind.model_validate(tree.values)
    except ValidationError as error:
        raise ConfigError(format_validation_error(error, kind, tree)) from None


def format_validation_error(
    error: ValidationError,
    kind: type[BaseModel],
    tree: ConfigTree | None = None,
    section: str = "",
) -> str:
    """Return pydantic's first complaint in one line: file and line, key, reason, fix.

    Args:
        error: the error that pydantic raised.
        kind: the class that the values were checked against.
        tree: the origins of the keys; None leaves file and line out.
        section: a prefix of all keys, with a dot at its end.
    """
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    path = tuple(str(part) for part in first["loc"])
    if isinstance(cause, ConfigError) and not path:  # a check of all sections names its keys
        return str(cause)
    origin = _origin_of(first, path, kind, tree) if tree else None
    prefix = f"{origin}: " if origin and not origin.startswith(COMMAND_LINE) else ""
    if isinstance(cause, UnreadableError):  # a path that no file can have names its key
        return f"{prefix}{cause}"
    name = section + ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _fields_at(kind, path[:-1])
        return f"{prefix}unknown key {name}{_suggest(path, known, kind)}"
    if first["type"] == "missing":
        return f"{prefix}{name} is missing. Add {name}=..."
    if tree and first["type"] != "value_error" and _is_deepspeeds(origin, tree):
        return (
            f"{prefix}{_needed(first)} (got {_shown(first['input'])}). Write such a value, or "
            f'"auto" and set {name}.'
        )
    return f"{prefix}{describe_fault(first, name)}"


def _origin_of(
    fault: ErrorDetails, path: KeyPath, kind: type[BaseModel], tree: ConfigTree
) -> str | None:
    """Return where the faulty key was written; None if no file or override sets it.

    If keys of a section contradict each other, the result is the origin of a key that the complaint
    names: preferably the command line, then a user's file, then a preset.
    """
    known = _fields_at(kind, path)
    if len(path) != 1 or fault["type"] != "value_error" or not known:
        return tree.origin(path)
    keys = [key for key in re.findall(r"\b(\w+)=", str(fault["msg"])) if key in known]
    places = [tree.origins[(*path, key)] for key in keys if (*path, key) in tree.origins]
    typed = [origin for origin in places if origin.startswith(COMMAND_LINE)]
    users = [origin for origin in places if not _is_preset(origin)]
    return next(iter([*typed, *users, *places]), None)


def _is_preset(origin: str) -> bool:
    """Whether an origin is one of bigtrain's presets."""
    return origin.startswith(("jobs/", "strategies/"))


def _is_deepspeeds(origin: str | None, tree: ConfigTree) -> bool:
    """Whether a value was written in the DeepSpeed file, where no override can replace it."""
    path = deepspeed_file_in(tree.values.get("strategy"))
    return path is not None and str(origin).startswith(f"{path}: ")


def describe_fault(fault: ErrorDetails, name: str) -> str:
    """Return the message for a value that pydantic refuses.

    The message contains the key, the kind of value that is needed, the given value, and the fix.

    Args:
        fault: pydantic's description of the error.
        name: the dotted key.
    """
    if fault["type"] == "value_error":
        message = str(fault["msg"]).removeprefix("Value error, ").rstrip(".")
        return f"{name}: {message[:1].lower()}{message[1:]}."
    return f"{name}: {_needed(fault)} (got {_shown(fault['input'])}).{_fix(fault, name)}"


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "a word",
    "dict": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "tuple": "a list",
    "list": "a list",
}
"""The needed value, by the beginning of pydantic's error type."""
_BOUNDS = {
    "greater_than_equal": ("ge", "{:g} or more", "{}={:g}"),
    "greater_than": ("gt", "more than {:g}", ""),
    "less_than_equal": ("le", "{:g} or less", "{}={:g}"),
    "less_than": ("lt", "less than {:g}", ""),
}


def _needed(fault: ErrorDetails) -> str:
    """Return the kind of value that is needed, in plainer words than pydantic's if possible."""
    kind = str(fault["type"])
    if kind in _BOUNDS:
        key, words, _ = _BOUNDS[kind]
        return f"needs {words.format(fault['ctx'][key])}"
    if kind == "literal_error":
        return f"needs {fault['ctx']['expected']}"
    for beginning, needed in _KINDS.items():
        if kind.startswith(beginning):
            return f"needs {needed}"
    message = str(fault["msg"])
    return message[:1].lower() + message[1:]


def _fix(fault: ErrorDetails, name: str) -> str:
    """Return the override that fixes a value, if the complaint contains it, or else a hint."""
    kind = str(fault["type"])
    if kind in _BOUNDS and _BOUNDS[kind][2]:
        key, _, words = _BOUNDS[kind]
        return f" Use {words.format(name, fault['ctx'][key])}."
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", str(fault["ctx"]["expected"]))
        value = str(fault["input"]).lower()
        near = difflib.get_close_matches(value, known, n=1)
        meant = PUBLIC_VALUES.get(name, {}).get(value) or (near[0] if near else None)
        if meant:
            return f" Use {name}={meant}."
    return f" Set {name} to such a value."


def _shown(value: object) -> str:
    """Return a value for a message, cut to 60 characters."""
    text = str(value) if isinstance(value, date) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _suggest(path: KeyPath, known: list[str], kind: type[BaseModel]) -> str:
    public = public_hint(path)
    if public is not None:
        return f", did you mean {public}?"
    close = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
    if close:
        return f", did you mean {'.'.join((*path[:-1], close[0]))}?"
    everywhere = {
        f"{section}.{key}" for section in kind.model_fields for key in _fields_at(kind, (section,))
    }
    for full in sorted(everywhere):  # the right key in the wrong section
        if full.endswith(f".{path[-1]}"):
            return f", did you mean {full}?"
    return f". Known here: {', '.join(known)}."


def _fields_at(kind: type[BaseModel], path: KeyPath) -> list[str]:
    for key in path:
        info = kind.model_fields.get(key)
        kinds = (info.annotation, *get_args(info.annotation)) if info else ()  # X, and X | None
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if inner is None:
            return []
        kind = inner
    return list(kind.model_fields)


ONE_PROCESS = (
    *("mesh.pp=null", "mesh.dp=-1", "mesh.tp=1", "train.accumulation_steps=null"),
    "train.micro_batch_size=null",
)
"""Overrides that make a job run in one process, with the global batch as one micro-batch."""
