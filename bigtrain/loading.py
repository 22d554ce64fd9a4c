"""From YAML files and the command line to a `Job`, with every complaint naming file and line.

The order of precedence, lowest first: the defaults of `config`, the job file, the strategy
(or plan) file, the command line. Each value remembers where it came from.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from bigtrain.config import Job
from bigtrain.errors import ConfigError, nearest

KeyPath = tuple[str, ...]

PLAN_KEYS = ("mesh", "strategy", "train", "optim", "memory", "device")
"""What a strategy or plan file may say about a job."""


@dataclass
class Tree:
    """Nested values, and for each key path the place that it was written in."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    preset: str | None = None
    """The strategy that `strategy=NAME` names; `strategy.KEY=...` may stand beside it."""

    def origin(self, path: KeyPath) -> str | None:
        """Where the nearest enclosing key was written."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path[:-1]
        return None

    def put(self, path: KeyPath, value: Any, origin: str, *, beside: bool = False) -> None:
        """Set one key, making the mappings on the way.

        Args:
            path: of the key.
            value: of the key.
            origin: where it is written.
            beside: whether what it displaces stays: it is said in the same place.
        """
        node = self.values
        for depth, key in enumerate(path[:-1], start=1):
            child = node.get(key)
            if isinstance(child, str) and depth > 1:  # `replicate: ddp` is short for its name
                child = {"name": child}
            if not isinstance(child, dict):
                child = {}
            node[key] = child
            node = child
        if not beside:
            _forget_arguments(node, path[:-1], {path[-1]: value})
        node[path[-1]] = value
        self.origins[path] = origin

    def merge(self, other: Tree) -> None:
        """Lay another tree over this one; a strategy replaces the whole strategy."""
        if "strategy" in other.values:
            self.values.pop("strategy", None)
        _merge(self.values, other.values, ())
        self.origins.update(other.origins)


def _merge(base: dict[str, Any], over: dict[str, Any], path: KeyPath) -> None:
    _forget_arguments(base, path, over)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value, (*path, key))
        else:
            base[key] = value


def _forget_arguments(base: dict[str, Any], path: KeyPath, over: dict[str, Any]) -> None:
    """Drop what a higher layer displaces: another model's arguments, the other length."""
    if path == ("train",):
        for said, displaced in (("steps", "epochs"), ("epochs", "steps")):
            if over.get(said) is not None and displaced not in over:
                base.pop(displaced, None)
    if path in (("model",), ("data",)) and over.get("name", base.get("name")) != base.get("name"):
        base.pop("args", None)
        base.pop("path", None)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice."""


def read_yaml(path: Path, shown: str | None = None) -> Tree:
    """Read one YAML mapping with the line of every key.

    Raises:
        ConfigError: no such file, not YAML, not a mapping, or a key twice.
    """
    shown = shown or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {shown}: {error}") from None
    try:
        root = yaml.compose(text, Loader=_Loader)
        values = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown}:{mark.line + 1}" if mark else shown
        raise ConfigError(
            f"{where}: not valid YAML: {getattr(error, 'problem', error)}. "
            "Look at the indentation and the quotes there."
        ) from None
    if values is None:
        return Tree()
    if not isinstance(values, dict):
        raise ConfigError(f"{shown}: a job is a mapping like 'train: {{steps: 100}}'.")
    return Tree(values, dict(_lines(root, (), shown)))


def _lines(node: yaml.Node | None, path: KeyPath, shown: str) -> Iterator[tuple[KeyPath, str]]:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = str(key_node.value)
        where = f"{shown}:{key_node.start_mark.line + 1}"
        if key in seen:
            raise ConfigError(f"{where}: the key {key!r} is written twice. Keep one of them.")
        seen.add(key)
        yield (*path, key), where
        yield from _lines(value_node, (*path, key), shown)


def preset_names(kind: str) -> list[str]:
    """The names of the YAML presets of a kind: 'jobs' or 'strategies'."""
    folder = resources.files("bigtrain.configs").joinpath(kind)
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))


def read_preset(kind: str, name: str, asked: str) -> Tree:
    """Read a preset by name, or a YAML file by path.

    Args:
        kind: 'jobs' or 'strategies'.
        name: a preset's name or a path that ends in .yaml, .yml or holds a separator.
        asked: the argument or key that named it, for the message.

    Raises:
        ConfigError: neither; the message has the nearest name and the known ones.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or "/" in name:
        if not path.is_file():
            raise ConfigError(f"{asked}: there is no file {name!r} (looked from {Path.cwd()}).")
        tree = read_yaml(path)
        stem = path.stem
    else:
        names = preset_names(kind)
        if name not in names:
            known = ", ".join(names)
            raise ConfigError(f"{asked}: unknown {name!r}{nearest(name, names)} Known: {known}.")
        source = resources.files("bigtrain.configs").joinpath(kind, f"{name}.yaml")
        with resources.as_file(source) as file:
            tree = read_yaml(file, shown=f"{kind}/{name}.yaml")
        stem = name
    if kind == "strategies":
        _name_strategy(tree, stem)
    return tree


def _name_strategy(tree: Tree, name: str) -> None:
    predicted = tree.values.pop("predicted", None)  # a plan file tells what it expects
    del predicted
    for key in tree.values:
        if key not in PLAN_KEYS:
            raise ConfigError(
                f"{tree.origin((key,))}: a strategy file has no key {key!r}"
                f"{nearest(key, PLAN_KEYS)} It may say {', '.join(PLAN_KEYS)}."
            )
    strategy = tree.values.setdefault("strategy", {})
    if isinstance(strategy, dict):
        strategy.setdefault("name", name)


def parse_overrides(words: Sequence[str]) -> Tree:
    """Read `optim.lr=3e-4` and `OPTIM.LR 3e-4`, in any mixture.

    Raises:
        ConfigError: a key without a value, or a value that is not YAML.
    """
    tree = Tree()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"{word!r} has no value. Write {word.lower()}=VALUE.")
            text = rest.pop(0)
        key = key.lower() if key.isupper() else key
        if key == "strategy" and text and not text.lstrip().startswith("{"):
            tree.preset = text
            continue
        if not key or key.startswith("-"):
            raise ConfigError(
                f"{word!r} is not an option. See --help; keys are like train.steps=5."
            )
        try:
            value = yaml.safe_load(text) if text else None
        except yaml.YAMLError:
            raise ConfigError(f"{key}={text}: not a value. Put quotes around it.") from None
        tree.put(tuple(key.split(".")), value, f"command line, {key}", beside=True)
    return tree


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
        strategy: a preset under configs/strategies, or a path.
        overrides: words as on the command line.
        plan: a plan file.

    Raises:
        ConfigError: with the file, the line and the nearest valid key.
    """
    tree = read_preset("jobs", config or "default", "--config")
    words = parse_overrides(overrides)
    if ("strategy", "deepspeed") in words.origins and not (strategy or plan or words.preset):
        tree.values["strategy"] = {"name": "deepspeed"}  # the file says which, not the job
    for asked, name in (("--strategy", strategy), ("--plan", plan), ("strategy", words.preset)):
        if name is not None:
            tree.merge(read_preset("strategies", str(name), asked))
    inner = tree.values.get("strategy")
    if isinstance(inner, str):
        preset = read_preset("strategies", inner, "strategy")
        tree.values.pop("strategy")
        tree.merge(preset)
    return _overridden(tree, words)


def changed_job(job: Job, words: Sequence[str]) -> Job:
    """A job with some keys changed, by words as on the command line; a strategy comes whole.

    Raises:
        ConfigError: with the key and the fix.
    """
    tree = Tree(job.model_dump(mode="json", exclude_defaults=True))
    changes = parse_overrides(words)
    if changes.preset is not None:
        tree.merge(read_preset("strategies", changes.preset, "strategy"))
    return _overridden(tree, changes)


def _overridden(tree: Tree, words: Tree) -> Job:
    # First they displace what lower layers say, then all of them are there, in whatever order.
    for beside in (False, True):
        for path, origin in words.origins.items():
            tree.put(path, _value_at(words.values, path), origin, beside=beside)
    return validate(Job, tree)


def job_of(strategy: str, keys: Mapping[str, Any]) -> Job:
    """A job from a strategy and dotted keys alone, without a job file."""
    tree = read_preset("strategies", strategy, "strategy")
    for key, value in keys.items():
        tree.put(tuple(key.split(".")), value, f"{key}={value!r}")
    return validate(Job, tree)


def _value_at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values[key]
    return values


def validate(kind: type[Job], tree: Tree) -> Job:
    """Make the typed job, or say the first thing that is wrong with it."""
    try:
        return kind.model_validate(tree.values)
    except ValidationError as error:
        raise ConfigError(explain(error, kind, tree)) from None


def explain(error: ValidationError, kind: type[BaseModel], tree: Tree | None = None) -> str:
    """One line for the first of pydantic's complaints: place, key, reason, fix."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # a check across sections, which names its keys itself
        return str(cause)
    path = tuple(str(part) for part in first["loc"])
    place = tree.origin(path) if tree else None
    prefix = f"{place}: " if place and not place.startswith("command line") else ""
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _fields_at(kind, path[:-1])
        return f"{prefix}unknown key {name}{_suggest(path, known, kind)}"
    if first["type"] == "missing":
        return f"{prefix}{name} is missing. Add {name}=..."
    message = str(first["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    got = first["input"]
    shown = "" if isinstance(got, dict) or first["type"] == "value_error" else f" (got {got!r})"
    return f"{prefix}{name}: {message}{shown}."


def _suggest(path: KeyPath, known: list[str], kind: type[BaseModel]) -> str:
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
