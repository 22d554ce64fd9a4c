"""Names in docstrings exist: names in backticks, and those in `Args:` and `Raises:`.

A renamed function stays in the sentences about it unless a test reads them. A name exists if a
reader can find it: in the function, its class or its module, among all definitions of bigtrain,
among the keys of a job, or in Python, torch and the other libraries.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import keyword
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from support.rooms import ROOT, sources, tree

from bigtrain import cli
from bigtrain.job.schema import Job

Function = ast.FunctionDef | ast.AsyncFunctionDef

LIBRARIES = (
    *("builtins", "torch", "torch.nn", "torch.nn.functional", "torch.nn.utils", "torch.Tensor"),
    *("torch.nn.Module", "torch.optim", "torch.distributed", "torch.distributed.fsdp"),
    *("torch.distributed.pipelining", "torch.distributed.tensor", "torch.autograd"),
    *("torch.utils.data", "torch.utils.checkpoint", "torch.cuda", "torch.optim.Optimizer"),
    *("torch.autograd.Function", "torch.UntypedStorage", "torch.library", "torch.profiler"),
    *("torch.optim.lr_scheduler", "torch.cuda.Event", "torch.nn.parallel"),
    "torch.nn.parallel.DistributedDataParallel",
)
"""A bare name that is not bigtrain's is searched in these."""
NOT_IMPORTED = (
    "deepspeed",
    "fairscale",
    "transformers",
    "timm",
    "horovod",
    "peft",
    "torchao",
    "trl",
    "tensorboard",
    "wandb",
)
"""Libraries that are not installed everywhere, or whose import changes the process."""
DATA = re.compile(r"\.(jsonl?|html|safetensors|lock|log|txt|bin|pt|index|idx)$")
CODE = re.compile(r"\.(py|md|yaml|yml|toml|sh)$")
FOREIGN_CODE = re.compile(r"\.(h|cpp|cu|c|so)$")


@dataclass
class Members:
    """The names of a class: methods, fields, and attributes that its methods set."""

    names: set[str] = field(default_factory=set)
    bases: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Docstring:
    """A docstring and its position."""

    module: str
    line: int
    text: str
    owners: tuple[ast.AST, ...]
    """The classes and functions around it, the innermost last."""

    @property
    def function(self) -> Function | None:
        owner = self.owners[-1] if self.owners else None
        return owner if isinstance(owner, Function) else None

    @property
    def place(self) -> str:
        return f"{sources()[self.module].relative_to(ROOT)}:{self.line}"


@cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(tree(sources()[module])))


def docstrings(module: str) -> Iterator[Docstring]:
    """The docstrings of a module, its classes, functions and assignments."""

    def walk(node: ast.AST, owners: tuple[ast.AST, ...]) -> Iterator[Docstring]:
        body = list(ast.iter_child_nodes(node))
        for before, inner in zip([None, *body], body, strict=False):
            if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):
                text = inner.value.value
                first = not isinstance(before, ast.stmt)
                if isinstance(text, str) and (
                    (first and isinstance(node, ast.Module | ast.ClassDef | Function))
                    or isinstance(before, ast.Assign | ast.AnnAssign)
                ):
                    yield Docstring(module, inner.lineno, text, owners)
            inside = isinstance(inner, ast.ClassDef | Function)
            yield from walk(inner, (*owners, inner) if inside else owners)

    yield from walk(tree(sources()[module]), ())


@cache
def classes() -> dict[str, Members]:
    """Every class of the product by its name; two classes of the same name share an entry."""
    members_by_name: dict[str, Members] = {}
    for module in sources():
        for node in nodes(module):
            if isinstance(node, ast.ClassDef):
                members = members_by_name.setdefault(node.name, Members())
                members.bases += [ast.unparse(base).partition("[")[0] for base in node.bases]
                members.names |= set(defined(node.body)) | attributes_set(node)
    return members_by_name


def attributes_set(node: ast.ClassDef) -> set[str]:
    """Attributes that methods set on `self`, and those in `__slots__` or assigned in tuples."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id in ("self", "cls")
    }


def defined(body: list[ast.stmt]) -> Iterator[str]:
    """Names that statements define, also in branches, but not inside functions."""
    for node in body:
        if isinstance(node, ast.ClassDef | Function):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        else:
            yield from (
                inner.id
                for inner in ast.walk(node)
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
            )
            for part in ("body", "orelse", "finalbody", "handlers"):
                yield from defined(getattr(node, part, []))


@cache
def module_names(module: str) -> frozenset[str]:
    return frozenset(defined(tree(sources()[module]).body))


@cache
def definitions() -> frozenset[str]:
    """Every name that the product defines outside of functions: modules, classes, members."""
    names = {part for module in sources() for part in module.split(".")}
    for module in sources():
        names |= module_names(module)
    for members in classes().values():
        names |= members.names
    return frozenset(names)


@cache
def words() -> frozenset[str]:
    """Words with a meaning in a job or on the command line, and one-word strings in the code."""
    known = {*cli.COMMANDS, "record", "pace"}
    for path in [*ROOT.glob("configs/*/*.yaml")]:
        known |= {path.stem, *re.findall(r"[\w.]+", path.read_text("utf-8"))}
    for module in sources():
        documents = {id(node.value) for node in nodes(module) if isinstance(node, ast.Expr)}
        for node in nodes(module):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and id(node) not in documents and " " not in text:
                known |= {text, *re.findall(r"[A-Za-z_][\w.]*", text)}
    return frozenset(known)


def is_job_key(name: str) -> bool:
    """Whether a name is a key of a job, complete ('train.steps') or a section ('optim')."""
    model: Any = Job
    for part in name.split("."):
        fields = getattr(model, "model_fields", None)
        if fields is None:
            return True  # keys below `model.args` and similar mappings are the user's
        if part not in fields:
            return False
        kinds = [fields[part].annotation, *get_args(fields[part].annotation)]
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
    return True


@cache
def library(name: str) -> Any:
    """An outermost module by its name; None if it does not exist."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@cache
def foreign(dotted: str) -> bool:
    """Whether a library defines the name; libraries that are not imported count as defining
    all names.
    """
    parts = dotted.split(".")
    if parts[0] in NOT_IMPORTED:
        return True
    value = library(parts[0])
    if value is None:
        return False
    for number, part in enumerate(parts[1:], start=2):
        if hasattr(value, part):
            value = getattr(value, part)
            continue
        if inspect.isclass(value) and part in getattr(value, "__annotations__", ()):
            return True
        try:
            value = importlib.import_module(".".join(parts[:number]))
        except ImportError:
            return False
    return True


@cache
def aliases() -> dict[str, set[str]]:
    """The aliases under which modules of the product import library modules: nn is torch.nn."""
    modules: dict[str, set[str]] = {"F": {"torch.nn.functional"}}
    for module in sources():
        for node in nodes(module):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    modules.setdefault(alias.asname or alias.name, set()).add(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    modules.setdefault(alias.asname or alias.name, set()).add(name)
    return modules


def members_of(name: str) -> set[str]:
    """The names of a class and of its base classes in the product."""
    if name not in classes():
        return set()
    inherited = (members_of(base.rpartition(".")[2]) for base in classes()[name].bases)
    return classes()[name].names.union(*inherited)


def has_member(name: str, member: str) -> bool:
    """Whether a class or one of its bases, a library's included, has a member."""
    if name not in classes():
        head, _, tail = name.partition(".")
        full = aliases().get(head, {head, f"builtins.{head}"})
        return any(foreign(".".join(filter(None, (f, tail, member)))) for f in full)
    members = classes()[name]
    return member in members.names or any(has_member(base, member) for base in members.bases)


def parameters(function: Function) -> set[str]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return {argument.arg for argument in every}


def local_names(docstring: Docstring) -> set[str]:
    """The names of the functions and classes around a docstring."""
    names: set[str] = set()
    for owner in docstring.owners:
        if isinstance(owner, Function):
            names |= parameters(owner)
            names |= {
                inner.id
                for inner in ast.walk(owner)
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
            }
            names |= {n.name for n in ast.walk(owner) if isinstance(n, ast.ClassDef | Function)}
        elif isinstance(owner, ast.ClassDef):
            names |= members_of(owner.name)
            for inner in owner.body:
                if isinstance(inner, Function) and inner.name == "__init__":
                    names |= parameters(inner)
    return names


@cache
def repository_files() -> frozenset[str]:
    folders = ("bigtrain", "strategies", "configs", "tests", "benchmarks", "docs")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    return frozenset(str(path.relative_to(ROOT)) for path in [*paths, *ROOT.glob("*.*")])


def is_file(name: str) -> bool:
    """Whether the repository contains the file or the code names it; library files are accepted."""
    if FOREIGN_CODE.search(name):
        return True
    if CODE.search(name) and any(f"/{path}".endswith(f"/{name}") for path in repository_files()):
        return True
    return Path(name).name in words() or Path(name).stem in words()


def exists(name: str, docstring: Docstring) -> bool:
    """Whether a name exists for the reader of this docstring."""
    if "/" in name or any(kind.search(name) for kind in (DATA, CODE, FOREIGN_CODE)):
        return is_file(name)
    first, *tail = name.split(".")
    near = local_names(docstring) | module_names(docstring.module)
    if not tail:
        return (
            name in near
            or is_placeholder(name)
            or name in definitions()
            or name in words()
            or is_job_key(name)
            or keyword.iskeyword(name)
            or any(foreign(f"{library}.{name}") for library in LIBRARIES)
        )
    if is_placeholder(name) or is_job_key(name) or name in words() or has_product(name):
        return True
    libraries = aliases().get(first, {first, f"builtins.{first}"})
    if any(foreign(".".join([full, *tail])) for full in libraries):
        return True
    if first in classes() or not (first in near or first in definitions()):
        return False
    last = tail[-1]
    return last in definitions() or any(foreign(f"{library}.{last}") for library in LIBRARIES)


def is_placeholder(name: str) -> bool:
    """Whether a part in capitals is a placeholder: `model.NAME`, `first_WAY`."""
    parts = re.split(r"[._]", name)
    has_lower = "." in name or not name.isupper()
    return has_lower and any(part.isupper() and len(part) > 1 for part in parts)


def has_product(name: str) -> bool:
    """Whether a module or class of the product defines it: 'rates.link_ranks', 'Job.train'."""
    parts = name.removeprefix("bigtrain.").split(".")
    for cut in range(len(parts), 0, -1):
        head, tail = ".".join(parts[:cut]), parts[cut:]
        for module in sources():
            named = module == head or module.endswith(f".{head}")
            if named and (not tail or (tail[0] in module_names(module) and has_members(tail))):
                return True
    return parts[0] in classes() and has_members(parts)


def has_members(parts: list[str]) -> bool:
    """Whether the second part is a member of the class named first; True if there is one part."""
    if len(parts) == 1 or parts[0] not in classes():
        return len(parts) == 1 or parts[1] in definitions()
    return has_member(parts[0], parts[1])


def quoted(text: str) -> Iterator[str]:
    """The names in backticks: identifiers, dotted or called. Other words are shell commands."""
    for word in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
        match = re.fullmatch(r"([A-Za-z_][\w./]*?)(?:\(\)|\(\.\.\.\))?\.*", word)
        if match:
            yield match[1]
        elif key := re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)+)=\S+", word):
            yield key[1]


def missing_names(docstring: Docstring) -> list[str]:
    return [name for name in quoted(docstring.text) if not exists(name, docstring)]


def listed(text: str, heading: str) -> list[str]:
    """The names before the colons of a section."""
    section = re.search(rf"^( *){heading}:\n((?:(?:\1 +\S.*)?\n?)*)", text, re.MULTILINE)
    if section is None:
        return []
    lines = [line for line in section[2].splitlines() if line.strip()]
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    entries = [line.strip() for line in lines if len(line) - len(line.lstrip()) == indent]
    return [entry.partition(":")[0].lstrip("*") for entry in entries]


def missing_arguments(docstring: Docstring) -> list[str]:
    """Entries of `Args:` that are not parameters of the function or of the class's constructor."""
    entries = listed(inspect.cleandoc(docstring.text), "Args")
    if not entries:
        return []
    owner = docstring.owners[-1] if docstring.owners else None
    if isinstance(owner, Function):
        taken = parameters(owner)
    elif isinstance(owner, ast.ClassDef):
        taken = local_names(docstring)
    else:
        return entries
    return [name for entry in entries for name in entry.split(", ") if name not in taken]


def missing_exceptions(docstring: Docstring) -> list[str]:
    """Entries of `Raises:` that are not exceptions."""

    def is_exception(name: str) -> bool:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type):
            return issubclass(kind, BaseException)
        head, _, tail = name.partition(".")
        paths = {f"{full}.{tail}" if tail else full for full in aliases().get(head, {head})}
        return name in classes() or any(
            path.partition(".")[0] != "bigtrain" and foreign(path) for path in paths if "." in path
        )

    entries = listed(inspect.cleandoc(docstring.text), "Raises")
    return [one for entry in entries for one in entry.split(", ") if not is_exception(one)]


FIRST_WORD = re.compile(r"(?:\A|(?<=[.:;!?])\s|\n\s*\n)\s*(What\b[^.!?]*)([.!?]|\Z)")
"""A sentence that begins with "What", and its end."""


def checked_modules() -> list[str]:
    return list(sources())


def comments(module: str) -> Iterator[tuple[int, str]]:
    """The comments of a module with their lines; comments on consecutive lines are joined."""
    last = -1
    text = ""
    with tokenize.open(sources()[module]) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type != tokenize.COMMENT:
                continue
            if text and token.start[0] != last + 1:
                yield last, text
                text = ""
            last = token.start[0]
            text = f"{text} {token.string.lstrip('# ')}".strip()
    if text:
        yield last, text


def noun_sentences(text: str) -> list[str]:
    """The sentences that begin with "What" and are not questions."""
    return [words for words, end in FIRST_WORD.findall(text) if end != "?"]


@pytest.mark.parametrize(
    "find", [missing_names, missing_arguments, missing_exceptions], ids=lambda f: f.__name__
)
def test_names_in_docstrings_exist(find):
    wrong = [
        f"{docstring.place}: {name}"
        for module in checked_modules()
        for docstring in docstrings(module)
        for name in find(docstring)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_sentence_begins_with_what_unless_it_is_a_question():
    wrong = []
    for module in checked_modules():
        wrong += [
            f"{docstring.place}: {sentence}"
            for docstring in docstrings(module)
            for sentence in noun_sentences(inspect.cleandoc(docstring.text))
        ]
        wrong += [
            f"{module}:{line}: {sentence}"
            for line, text in comments(module)
            for sentence in noun_sentences(text)
        ]
    assert not wrong, "\n".join(wrong)


def test_a_sentence_that_begins_with_what_is_found():
    sentences = ["What lies", "What a save writes, in order"]
    assert noun_sentences("A. What lies. What a save writes, in order") == sentences
    assert noun_sentences("A way: What is it?\n\nSomewhat, and what follows.") == []
    assert noun_sentences("Summary\n\nWhat goes\naway.") == ["What goes\naway"]


def test_a_name_that_does_not_exist_is_found():
    function = ast.parse("def scale(rate):\n    ratio = rate\n").body[0]
    text = """Scale by `rate`, `ratio`, `gone`, `rates.link_ranks`, `rates.gone`, `Job.train`,
    `Job.gone`, `train.steps`, `train.gone`, `torch.cuda.Event`, `torch.gone`, `--strategy ddp`,
    `nn.Linear`, `nn.Gone`, `optimizer.NAME.KEY`, `unwritten.json`, `memory.json`.

    Args:
        rate: samples a second.
        pace: is no parameter,
            whatever follows: a colon.

    Raises:
        ValueError, torch.cuda.OutOfMemoryError: exist.
        GoneError: does not.
    """
    docstring = Docstring("errors", 1, text, (function,))
    gone = ["gone", "rates.gone", "Job.gone", "train.gone", "torch.gone", "nn.Gone"]
    assert missing_names(docstring) == [*gone, "unwritten.json"]
    assert missing_arguments(docstring) == ["pace"]
    assert missing_exceptions(docstring) == ["GoneError"]
