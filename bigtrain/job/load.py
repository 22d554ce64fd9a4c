"""From YAML files and the command line to a `Job`, with every complaint naming file and line.

The order of precedence, lowest first: the defaults of `config`, the job file, the strategy
(or plan) file, the command line. Each value remembers where it came from.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

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
from bigtrain.job.public_names import public_hint, refuse_yacs
from bigtrain.job.schema import BATCH_KEYS, Job, deepspeed_file_in
from bigtrain.job.strategy_words import read_strategy, words_in

_MOST_DOTS = 16
"""In a key: deeper than anything in a job."""


def parse_overrides(words: Sequence[str]) -> ConfigTree:
    """Read `optim.lr=3e-4` and `OPTIM.LR 3e-4`, in any mixture.

    Raises:
        ConfigError: a key without a value, or a value that is not YAML.
    """
    tree = ConfigTree()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("+"):
            raise ConfigError(f"{word!r}: a strategy's words have no space between: ddp+full.")
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
        said: dict[KeyPath, Any] = {tuple(key.split(".")): value}
        if key == "strategy":
            tree.strategy, inner = words_in(value, key)
            if tree.strategy is not None:
                said = {(key, name): config for name, config in inner.items()}
        for path, config in said.items():
            tree.put(path, config, f"{COMMAND_LINE}, {key}", beside=True)
    return tree


def _why(error: yaml.YAMLError) -> str:
    """What is wrong with a value, where that is no matter of quotes alone."""
    problem = getattr(error, "problem", None)
    own = problem is not None and getattr(error, "context", None) is None
    return f" ({plain_text(problem)})" if own else ""


def load_job(
    config: str | None = None,
    strategy: str | None = None,
    overrides: Sequence[str] = (),
    *,
    plan: str | None = None,
) -> Job:
    """Read a job: a file or preset, with a strategy, a plan and overrides laid over it.

    Args:
        config: a path, or the name of a preset under configs/jobs; None is `default`.
        strategy: presets under configs/strategies and paths, with `+` between them.
        overrides: words as on the command line.
        plan: a plan file.

    Raises:
        ConfigError: with the file, the line and the nearest valid key.
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
        if ("strategy", "deepspeed") in words.origins:  # the file says which, not the job
            tree.values["strategy"] = {"name": "deepspeed"}
        else:
            _resolve_strategy(tree)
    return _overridden(tree, words)


def _check_sections(tree: ConfigTree) -> None:
    """Drop empty sections, and refuse one that is no mapping.

    A word for one of its keys would displace it unsaid.
    """
    for name, value in list(tree.values.items()):
        if name not in Job.model_fields or name in ("strategy", "device"):
            continue
        if value is None:
            del tree.values[name]
        elif not isinstance(value, dict):
            validate_job(Job, ConfigTree({name: value}, tree.origins))


def _is_own(words: ConfigTree) -> bool:
    """Whether words name a model by its import path."""
    model = words.values.get("model")
    return isinstance(model, Mapping) and ":" in str(model.get("name"))


def _forget_optimizer(tree: ConfigTree) -> None:
    """Leave `optim` to the schema's defaults: what the default job says is for its own model."""
    tree.values.pop("optim", None)
    for path in [path for path in tree.origins if path[0] == "optim"]:
        del tree.origins[path]


def _resolve_strategy(tree: ConfigTree) -> None:
    """Put what a job's own words for its strategy mean in their place; keys beside them stay."""
    asked = f"{tree.origin(('strategy',))}: strategy"
    text, beside = words_in(tree.values.get("strategy", {}), asked)
    if text is not None:
        tree.merge(read_strategy(text, asked))
        tree.lay(ConfigTree({"strategy": beside}))


def override_job(job: Job, words: Sequence[str]) -> Job:
    """A job with some keys changed, by words as on the command line; a strategy comes whole.

    Raises:
        ConfigError: with the key and the fix.
    """
    tree = ConfigTree(job.model_dump(mode="json", exclude_defaults=True))
    changes = parse_overrides(words)
    if changes.strategy is not None:
        tree.merge(read_strategy(changes.strategy, "strategy"))
    return _overridden(tree, changes)


def _overridden(tree: ConfigTree, words: ConfigTree) -> Job:
    # First they displace what lower layers say, then all of them are there, in whatever order.
    for beside in (False, True):
        for path, origin in words.origins.items():
            tree.put(path, _value_at(words.values, path), origin, beside=beside)
        if not beside:
            _lay_deepspeed_file(tree, words.values)
    return validate_job(Job, tree)


def _lay_deepspeed_file(tree: ConfigTree, words: Mapping[str, Any]) -> None:
    """Put what a DeepSpeed file says over the job file; words of the command line stay.

    Of the three keys of the batch, one that only a lower layer says is left to the others, and the
    accumulation where all are said: the plan's is compared with the file's.
    """
    path = deepspeed_file_in(tree.values.get("strategy"))
    if path is None:
        return
    said = {tuple(key.split(".")): one for key, one in said_of_job(path).items()}
    given = {key for key in said if _is_given(words, key)}
    for key, one in said.items():
        if key not in given:
            tree.put(key, one.value, f"{path}: {one.key}")
    batch = [("train", key) for key in BATCH_KEYS]
    firm = [key for key in batch if key in said or _is_given(words, key)]
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
    """A job from a strategy and dotted keys alone, without a job file."""
    tree, words = read_strategy(strategy, "strategy"), ConfigTree()
    for key, value in keys.items():
        words.put(tuple(key.split(".")), value, f"{key}={value!r}", beside=True)
    return _overridden(tree, words)


def _value_at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values[key]
    return values


def validate_job(kind: type[Job], tree: ConfigTree) -> Job:
    """Make the typed job, or say the first thing that is wrong with it."""
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
    """One line for the first of pydantic's complaints: place, key, reason, fix.

    Args:
        error: of pydantic.
        kind: what was to be made.
        tree: knows where each key was written.
        section: what stands before each key, with its dot.
    """
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    path = tuple(str(part) for part in first["loc"])
    if isinstance(cause, ConfigError) and not path:  # a check across sections names its keys itself
        return str(cause)
    place = _place(first, path, kind, tree) if tree else None
    prefix = f"{place}: " if place and not place.startswith(COMMAND_LINE) else ""
    if isinstance(cause, UnreadableError):  # so does a path that no file can have
        return f"{prefix}{cause}"
    name = section + ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _fields_at(kind, path[:-1])
        return f"{prefix}unknown key {name}{_suggest(path, known, kind)}"
    if first["type"] == "missing":
        return f"{prefix}{name} is missing. Add {name}=..."
    if tree and first["type"] != "value_error" and _is_deepspeeds(place, tree):
        return (
            f"{prefix}{_needed(first)} (got {_shown(first['input'])}). Write such a value, or "
            f'"auto" and set {name}.'
        )
    return f"{prefix}{describe_fault(first, name)}"


def _place(
    fault: ErrorDetails, path: KeyPath, kind: type[BaseModel], tree: ConfigTree
) -> str | None:
    """Where the key stands that is at fault.

    Of a whole section, whose keys contradict each other, it is the last of those that the complaint
    names: who says something over a preset is told of his own words. Where nobody has said them, no
    place is named.
    """
    known = _fields_at(kind, path)
    if len(path) != 1 or fault["type"] != "value_error" or not known:
        return tree.origin(path)
    keys = [key for key in re.findall(r"\b(\w+)=", str(fault["msg"])) if key in known]
    places = [tree.origins[(*path, key)] for key in keys if (*path, key) in tree.origins]
    said = [place for place in places if place.startswith(COMMAND_LINE)]
    own = [place for place in places if not _is_preset(place)]
    return next(iter([*said, *own, *places]), None)


def _is_preset(place: str) -> bool:
    """Whether a place is in a file that comes with bigtrain."""
    return place.startswith(("jobs/", "strategies/"))


def _is_deepspeeds(place: str | None, tree: ConfigTree) -> bool:
    """Whether a value is a DeepSpeed file's, which no word of the command line may displace."""
    path = deepspeed_file_in(tree.values.get("strategy"))
    return path is not None and str(place).startswith(f"{path}: ")


def describe_fault(fault: ErrorDetails, name: str) -> str:
    """A value that pydantic refuses: its key, what is needed, what was got, the words to type."""
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
"""What is needed, by the beginning of pydantic's word for its complaint."""
_BOUNDS = {
    "greater_than_equal": ("ge", "{:g} or more", "{}={:g}"),
    "greater_than": ("gt", "more than {:g}", ""),
    "less_than_equal": ("le", "{:g} or less", "{}={:g}"),
    "less_than": ("lt", "less than {:g}", ""),
}


def _needed(fault: ErrorDetails) -> str:
    """What would be right, in place of pydantic's sentence where there is a plainer one."""
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
    """Words to type, where the complaint tells which."""
    kind = str(fault["type"])
    if kind in _BOUNDS and _BOUNDS[kind][2]:
        key, _, words = _BOUNDS[kind]
        return f" Use {words.format(name, fault['ctx'][key])}."
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", str(fault["ctx"]["expected"]))
        near = difflib.get_close_matches(str(fault["input"]).lower(), known, n=1)
        if near:
            return f" Use {name}={near[0]}."
    return f" Set {name} to such a value."


def _shown(value: object) -> str:
    """What was given, short."""
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
        inner = info.annotation if info else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        kind = inner
    return list(kind.model_fields)


ONE_PROCESS = (
    *("mesh.pp=null", "mesh.dp=-1", "mesh.tp=1", "train.accumulation_steps=null"),
    "train.micro_batch_size=null",
)
"""The words that leave of a job what one process can do: its global batch at once."""
