"""Only the adapters use internals of DeepSpeed and fairscale, and they list all that they use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from support.rooms import imported_names, sources, tree

from bigtrain.strategies.deepspeed_adapter import DEEPSPEED
from bigtrain.strategies.fairscale_adapter import FAIRSCALE

ADAPTER_OF = {
    "strategies.deepspeed_adapter": DEEPSPEED,
    "strategies.fairscale_adapter": FAIRSCALE,
}
PUBLIC = {
    "fairscale.nn.data_parallel.FullyShardedDataParallel",
    "fairscale.nn.data_parallel.ShardedDataParallel",
    "fairscale.nn.pipe.Pipe",
    "fairscale.optim.OSS",
}
"""Modules that users of the libraries import, and that techniques may import, too."""
NO_PRIVATE_NAMES_OF_THEIRS = {
    "_replace": "of a named tuple",
    "_cdata": "of torch's storages",
    "_parameters": "of torch's modules",
    "_buffers": "of torch's modules",
    "_non_persistent_buffers_set": "of torch's modules",
}
FOREIGN_OBJECTS = ("zero", "engine", "_engine", "coordinator", "bucket")
"""Names of variables and attributes that hold DeepSpeed's objects."""


def outside() -> dict[str, ast.Module]:
    return {name: tree(path) for name, path in sources().items() if name not in ADAPTER_OF}


def users() -> dict[str, ast.Module]:
    """The modules that use objects of the libraries."""
    pattern = re.compile(r"strategies\.(zero\.on_|pipeline\.).*(deepspeed|fairscale)")
    adapters = {
        name: node
        for name, node in outside().items()
        if pattern.match(name) or name == "models.parameters"  # it reads a parameter's whole shape
    }
    assert {"strategies.zero.on_deepspeed.shards", "strategies.pipeline.fairscale_runner"} <= {
        *adapters
    }
    return adapters


def attributes(node: ast.AST) -> Iterator[tuple[ast.expr, str, bool]]:
    """For each attribute: owner, name, and whether it is set; getattr and the like are included."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute):
            yield inner.value, inner.attr, not isinstance(inner.ctx, ast.Load)
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name):
            if inner.func.id not in ("getattr", "hasattr", "setattr", "delattr"):
                continue
            owner, name = inner.args[:2]
            if isinstance(name, ast.Constant):
                yield owner, ast.literal_eval(name), inner.func.id in ("setattr", "delattr")
            elif last_word(owner) in FOREIGN_OBJECTS:
                yield owner, "__dict__", True  # a computed name could be any attribute


def is_own(owner: ast.expr) -> bool:
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name):
        return owner.func.id == "super"
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def last_word(owner: ast.expr) -> str:
    return ast.unparse(owner).rpartition(".")[2]


def test_the_inside_of_a_library_is_imported_by_its_adapter_alone():
    path = re.compile(r"(deepspeed|fairscale)(\.[\w*]+)+")
    for module, node in outside().items():
        for inner in ast.walk(node):
            names = [name if "." in name else f"{name}.*" for name in imported_names(inner)]
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                names = [inner.value]
            strangers = {name for name in names if path.fullmatch(name)} - PUBLIC
            assert not strangers, (
                f"{module}: {strangers} may be imported only by an adapter in strategies/"
            )


def test_private_names_are_for_the_adapters():
    used = set()
    for module, node in users().items():
        for owner, name, _ in attributes(node):
            private = name == "__dict__" or (name.startswith("_") and not name.endswith("__"))
            if not private or is_own(owner):
                continue
            assert name in NO_PRIVATE_NAMES_OF_THEIRS, (
                f"{module}: only an adapter in strategies/ may use {ast.unparse(owner)}.{name}"
            )
            used.add(name)
    assert used == set(NO_PRIVATE_NAMES_OF_THEIRS), "a name is listed as torch's but used nowhere"


def test_only_the_adapters_replace_what_is_theirs():
    replaced = {
        name.path.rpartition(".")[2]
        for library in ADAPTER_OF.values()
        for name in library.names
        if name.use == "replace"
    }
    for module, node in users().items():
        for owner, name, is_set in attributes(node):
            assert is_own(owner) or not (is_set and name in replaced), (
                f"{module}: {ast.unparse(owner)}.{name} is replaced outside of an adapter"
            )


def test_what_is_read_of_their_engines_and_optimizers_is_listed():
    listed = {name.path.rpartition(".")[2] for name in DEEPSPEED.names}
    zero = "strategies.zero.on_deepspeed"
    modules = [f"{zero}.{name}" for name in ("build", "in_pipeline", "runner", "shards", "update")]
    modules += ["strategies.pipeline.deepspeed_runner", "strategies.deepspeed_adapter"]
    nodes = {name: tree(sources()[name]) for name in modules}
    seen = set()
    for module, node in nodes.items():
        for owner, name, _ in attributes(node):
            whose, word = ast.unparse(owner), last_word(owner)
            is_theirs = word in FOREIGN_OBJECTS and whose != "deepspeed.zero"
            if is_theirs or name.startswith("ds_"):
                assert name in listed, f"{module}: {whose}.{name} is not listed"
                seen.add(word)
    assert set(FOREIGN_OBJECTS) <= seen


@pytest.mark.parametrize("adapter", ADAPTER_OF)
def test_what_is_listed_is_used(adapter):
    words = {"muon_optimizer"}  # only imported
    body = [n for n in tree(sources()[adapter]).body if not _is_the_list(n)]
    for node in (*body, *users().values()):
        words |= {name for _, name, _ in attributes(node)}
        for inner in ast.walk(node):
            words |= {name.rpartition(".")[2] for name in imported_names(inner)}
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                words |= {inner.value, inner.value.strip(".")}
            elif isinstance(inner, ast.keyword):
                words.add(inner.arg or "")
    dead = {name.path for name in ADAPTER_OF[adapter].names} - {
        name.path for name in ADAPTER_OF[adapter].names if name.path.rpartition(".")[2] in words
    }
    assert not dead


def _is_the_list(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("ForeignLibrary(")
