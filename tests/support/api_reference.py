"""Build the pages of all public names from their signatures and docstrings.

A name is public if `bigtrain` or `bigtrain.strategy` lists it in `__all__`. For a class, the page
shows the constructor, the fields with their docstrings, and the public methods and properties,
including those inherited from base classes in bigtrain.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cached_property
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

import bigtrain
import bigtrain.strategy

HEAD = """# API reference

Every name that `import bigtrain` offers. This page is generated from signatures and docstrings
(`python tests/test_docs.py --write`); do not edit it. How a training loop uses these names:
[your_loop.md](your_loop.md). Names for authors of strategies:
[api_strategies.md](api_strategies.md).
"""
AUTHORS = """# API reference for authors of strategies

Every name that `bigtrain.strategy` offers. This page is generated from signatures and docstrings
(`python tests/test_docs.py --write`); do not edit it. How to write a strategy, step by step:
[CONTRIBUTING.md](../CONTRIBUTING.md). Names for training loops: [api.md](api.md).
"""
WIDTH = 120
SECTIONS = ("Args", "Returns", "Raises", "Yields")


def is_ours(cls: type) -> bool:
    """Whether a class is defined in bigtrain, and so documented here."""
    return cls.__module__.partition(".")[0] == "bigtrain"


def wrap_paragraph(text: str, first: str = "", following: str = "") -> list[str]:
    """Wrap a paragraph into lines of the page's width, without breaking code in backticks.

    Args:
        text: the paragraph.
        first: indentation or bullet of the first line.
        following: indentation of the other lines.
    """
    joined = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), " ".join(text.split()))
    lines = textwrap.wrap(
        joined,
        WIDTH,
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def docstring_as_markdown(docstring: str | None) -> list[str]:
    """Convert a docstring to Markdown: paragraphs, lists, code, and its sections as lists
    of names.
    """
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring or "")):
        name, _, body = block.partition(":\n")
        if name in SECTIONS:
            lines += ["", f"{name}:", "", *section(textwrap.dedent(body))]
        elif block.startswith(("    ", "* ", "- ", "| ")):
            lines += ["", *block.splitlines()]
        elif block:
            lines += ["", *wrap_paragraph(block)]
    return lines[1:]


def section(body: str) -> Iterator[str]:
    """Yield the entries of `Args:` or `Raises:` as list items; yield text without names
    unchanged.
    """
    for entry in re.split(r"\n(?=\S)", body):
        name, colon, meaning = entry.partition(":")
        if colon and re.fullmatch(r"[\w., *]+", name):
            yield from wrap_paragraph(f"`{name}`: {meaning}", "* ", "  ")
        else:
            yield from wrap_paragraph(entry)


def annotation(value: Any) -> str:
    """The source text of a type annotation."""
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))


def signature(name: str, function: Any) -> list[str]:
    """The call signature as a code block: on one line, or with one line for each parameter."""
    made = inspect.signature(function)
    words, stars = [], False
    for parameter in made.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not stars:
            words, stars = [*words, "*"], True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(
            parameter.kind, ""
        )
        stars = stars or prefix == "*"
        word = f"{prefix}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            word += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            word += f" = {default(parameter.default)}"
        words.append(word)
    result = ""
    if made.return_annotation not in (made.empty, "None", None):
        result = f" -> {annotation(made.return_annotation)}"
    line = f"{name}({', '.join(words)}){result}"
    if len(line) <= WIDTH - 20:
        return ["```python", line, "```"]
    return ["```python", f"{name}(", *(f"    {word}," for word in words), f"){result}", "```"]


def default(value: Any) -> str:
    """The source text of a default value, without the memory address of an object."""
    text = repr(value)
    return "..." if " object at 0x" in text or text.startswith(("<", "functools")) else text


def field_texts(cls: type) -> dict[str, tuple[str, str]]:
    """Type and docstring of each field that a class or its base classes in bigtrain declare."""
    texts: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__):
        if not is_ours(base):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, [*body.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            if not field.target.id.startswith("_"):
                texts[field.target.id] = (ast.unparse(field.annotation), text)
    return texts


def fields(cls: type) -> list[str]:
    """The fields of a class as list items; for a type, the values it may have."""
    lines = []
    for name, (kind, text) in field_texts(cls).items():
        if kind.startswith("ClassVar"):
            kind = f"{kind[9:-1]}, of the class"
        lines += wrap_paragraph(f"`{name}`: `{kind}`. {text}", "* ", "  ")
    return ["", "Fields:", "", *lines] if lines else []


def members(cls: type) -> list[str]:
    """The public methods and properties, each with its signature and docstring."""
    lines: list[str] = []
    for name, member in sorted(attributes(cls).items()):
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if isinstance(plain, property | cached_property):
            function = plain.fget if isinstance(plain, property) else plain.func
            kind = annotation(inspect.signature(function).return_annotation)
            lines += ["", f"#### `{cls.__name__}.{name}`", "", f"Attribute: `{kind}`."]
            lines += ["", *docstring_as_markdown(function.__doc__)]
        elif inspect.isfunction(plain):
            documented = plain.__doc__ or inspect.getdoc(getattr(cls, name))
            if documented:
                lines += ["", f"#### `{cls.__name__}.{name}`", "", *signature(name, plain)]
                lines += ["", *docstring_as_markdown(documented)]
    return lines


def attributes(cls: type) -> dict[str, Any]:
    """Public attributes of a class by name, inherited ones in bigtrain included; a subclass
    overrides.
    """
    attributes_found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if is_ours(base) and base is not BaseModel:
            attributes_found |= {
                name: value for name, value in vars(base).items() if name[0] != "_"
            }
    return attributes_found


def entry(module: str, name: str, value: Any) -> list[str]:
    """The entry of one public name: heading, signature or type, and docstring."""
    lines = ["", f"### `{name}`", ""]
    if get_origin(value) is not None:
        first = get_origin(value) is Annotated  # the other arguments are instructions to pydantic
        values = get_args(value)[:1] if first else get_args(value)
        return [*lines, f"A type: {', '.join(f'`{annotation(part)}`' for part in values)}."]
    where = value.__module__
    lines += [f"From `{where}`.", ""] if where != module else []
    if not inspect.isclass(value):
        return [*lines, *signature(name, value), "", *docstring_as_markdown(value.__doc__)]
    takes_fields = is_dataclass(value) or issubclass(value, tuple | BaseModel)
    own_init = "__init__" in vars(value) and not takes_fields
    if own_init and not issubclass(value, BaseException):
        lines += [*signature(name, value.__init__), ""]
    lines += docstring_as_markdown(value.__doc__)
    if value is bigtrain.Job:
        return [*lines, "", "Its keys, with values and defaults: [keys.md](keys.md)."]
    return [*lines, *fields(value), *members(value)]


def short(docstring: str | None) -> str:
    """The first sentence of a docstring, for the overview table."""
    first = re.split(r"\n\s*\n", inspect.cleandoc(docstring or ""))[0]
    return " ".join(first.split())


def names_of(module: Any) -> list[str]:
    """The public names of a module, in the order of `__all__`."""
    return sorted(module.__all__, key=str.lower)


def overview(module: Any, page: str) -> list[str]:
    """The overview table: one line for each public name of a module, with a link to its entry."""
    lines = []
    for name in names_of(module):
        value = getattr(module, name)
        text = short(value.__doc__) if get_origin(value) is None else "A type."
        at = page_of(name)
        lines.append(f"| [`{name}`]({'' if at == page else at}#{name.lower()}) | {text} |")
    return ["| name | what it is |", "| --- | --- |", *lines]


def page_of(name: str) -> str:
    """The page with a name's entry: names for authors of strategies have a page for themselves."""
    of_authors = name in bigtrain.strategy.__all__ and name != "ConfigError"
    return "api_strategies.md" if of_authors else "api.md"


def api_reference(page: str) -> str:
    """The complete text of `api.md` or `api_strategies.md`."""
    head, module = {"api.md": (HEAD, bigtrain), "api_strategies.md": (AUTHORS, bigtrain.strategy)}[
        page
    ]
    lines = [head, "## Contents", "", *overview(module, page)]
    names = [name for name in names_of(module) if page_of(name) == page]
    lines += ["", f"## `{module.__name__}`"]
    for name in names:
        lines += entry(module.__name__, name, getattr(module, name))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
