"""Build the page of all keys from the types of a job and of the techniques.

The text of a key is the docstring under its field, so the page cannot differ from the code.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from bigtrain.core.registry import TECHNIQUES, Engines
from bigtrain.job.import_path import load_object
from bigtrain.job.schema import ROLES, Bytes, Job, RoleConfig, StrategyConfig
from bigtrain.units import format_bytes

HEAD = """# Every key of a job

Made from the types in `bigtrain/job/schema.py`, `optim_keys.py` and `strategies/`; do not
edit it by hand. How a job is written, with examples: [jobs.md](jobs.md). How strategies are named:
[strategies.md](strategies.md). Write a key in a YAML file (`train: {steps: 100}`), on the command
line (`train.steps=100`), or, if it has an effect in your own loop, as an argument of
`bigtrain.prepare` (`train__global_batch_size=32`). A size is a number of bytes or has a unit:
`25MiB`, `8GiB`. `null` means that nothing is set.
"""


def _takes_size(annotation: Any, metadata: list[Any]) -> bool:
    """Whether a key is a number of bytes that may be written with a unit."""
    parser = get_args(Bytes)[1]
    return annotation == Bytes or Bytes in get_args(annotation) or parser in metadata


BAR = "\\|"
"""A vertical bar inside a table cell, where a plain one would end the cell."""


def field_texts(cls: type) -> dict[str, str]:
    """The docstring under each field of a class, including its base classes."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not (issubclass(base, BaseModel) and base.__module__.startswith("bigtrain")):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name)
                texts[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts


def values_of(annotation: Any, metadata: list[Any]) -> str:
    """The values that a key accepts, as text for the page."""
    if annotation is RoleConfig:
        return "a word, or a mapping with `name`"
    if _takes_size(annotation, metadata):
        kind = "size"
    elif get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    elif get_origin(annotation) in (Union, types.UnionType):
        kinds = [one for one in get_args(annotation) if one is not type(None)]
        return " or ".join(dict.fromkeys(values_of(one, metadata) for one in kinds))
    else:
        outer = get_origin(annotation) or annotation
        kind = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}.get(
            outer, {dict: "mapping", tuple: "list", list: "list"}.get(outer, "value")
        )
    bounds = {name: getattr(meta, name) for meta in metadata for name in ("ge", "gt", "le", "lt")
              if getattr(meta, name, None) is not None}  # fmt: skip
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = " and ".join(f"{signs[name]} {value}" for name, value in bounds.items())
    return f"{kind}, {limits}" if limits else kind


def default_of(field: FieldInfo) -> str:
    """The default as a user would write it."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "needed"
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and _takes_size(field.annotation, field.metadata):
        return f"`{format_bytes(value).replace(' ', '')}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def rows_of(cls: type[BaseModel], prefix: str) -> list[str]:
    """The table of one section's keys, as lines."""
    texts = field_texts(cls)
    lines = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in cls.model_fields.items():
        values = values_of(field.annotation, field.metadata)
        cells = (f"`{prefix}{name}`", values, default_of(field), texts.get(name, ""))
        lines.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
        # A section that may be left out; roles have tables of their own.
        for inner in () if cls is StrategyConfig else get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                lines += rows_of(inner, f"{prefix}{name}.")[2:]
    return lines


def technique_sections() -> list[str]:
    """A table for each technique that has keys."""
    lines: list[str] = []
    for role in ROLES:
        for name, where in TECHNIQUES[role].items():
            cls = load_object(where.options if isinstance(where, Engines) else where, "keys")
            if cls.model_fields:
                lines += ["", f"### `strategy.{role}`, name `{name}`", "", f"{cls.summary}.", ""]
                lines += rows_of(cls, f"strategy.{role}.")
    return lines


def contents(lines: list[str]) -> list[str]:
    """A list of links to the sections of a page, as lines."""
    headings = [line[3:] for line in lines if line.startswith("## ")]
    return ["## Contents", "", *(f"* [{head}](#{head.strip('`')})" for head in headings)]


def key_reference() -> str:
    """The complete text of the page."""
    lines: list[str] = []
    for section, field in Job.model_fields.items():
        cls = field.annotation
        if not (isinstance(cls, type) and issubclass(cls, BaseModel)):
            continue
        first = (cls.__doc__ or "").partition("\n")[0]
        lines += ["", f"## `{section}`", "", first, "", *rows_of(cls, f"{section}.")]
        if cls is StrategyConfig:
            lines += technique_sections()
    device = values_of(Job.model_fields["device"].annotation, [])
    text = field_texts(Job)["device"]
    lines += ["", "## `device`", "", text, f"Values: {device}; default `auto`."]
    return re.sub(r"\n{3,}", "\n\n", "\n".join([HEAD, *contents(lines), *lines])).strip() + "\n"
