"""The order of the rooms (folders of bigtrain), and the imports between modules.

Everything is read from the sources as text and syntax trees, so an import inside a function or one
for type checkers counts like any other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import bigtrain

ROOT = Path(__file__).resolve().parents[2]

# From the bottom up. A module imports from its room or from a room that is listed above it here.
ORDER = (
    *("errors", "units", "devices"),
    *(
        "files",
        "versions",
        "job",
        "recorder",
        "memory",
        "ranks",
        "machine",
        "tensors",
        "checkpoint",
    ),
    "slicing",
    *("losses", "data", "hub", "models", "activations", "optim"),
    *("schedules", "tracing", "cutting", "slice_planning"),
    *("costs", "core", "strategy", "pipeline", "prediction", "strategies"),
    *("assembly", "timing", "own_loop", "engine", "report"),
    *("planner", "fit", "explain", "compare", "speedup", "verify", "doctor"),
    *("hvd", "train", "cli", "__main__"),
)


@cache
def sources() -> dict[str, Path]:
    """The path of every module of the package, by name without `bigtrain.`; '' is
    bigtrain itself.
    """
    modules = {}
    for folder, prefix in (("bigtrain", ()), ("strategies", ("strategies",))):
        modules |= _modules(ROOT / folder, prefix)
    return modules | _modules(ROOT / "configs", ("configs",))


def _modules(folder: Path, prefix: tuple[str, ...]) -> dict[str, Path]:
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        inner = path.relative_to(folder).with_suffix("").parts
        # The links are resolved first, because only newer Pythons follow links while globbing.
        if not prefix and inner[0] in ("strategies", "configs"):
            continue
        names = (*prefix, *inner)
        modules[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return modules


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_names(node: ast.AST) -> Iterator[str]:
    """Yield the dotted names that one import statement may load, `from a import b` as 'a.b'."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: write `from bigtrain.x import y` in full"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def used_modules(module: str) -> set[str]:
    """The modules of bigtrain that a module names: imports, `bigtrain.NAME`, "bigtrain.x:Class"."""
    modules = set()
    for node in ast.walk(tree(sources()[module])):
        names = list(imported_names(node))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"\A(bigtrain(?:\.\w+)+):\w+\Z", node.value)
        for name in names:
            first, _, tail = name.partition(".")
            if first == "bigtrain" and tail:
                modules.add(module_of(tail))
    # The package's __init__ imports only for type checkers: see the test of the public names.
    return set() if module == "" else modules - {module}


def module_of(name: str) -> str:
    """The module that defines a name: 'config.Job' -> config; 'Job' too, by the lazy
    import table.
    """
    while name not in sources():
        if "." not in name:
            return bigtrain._MODULE_OF.get(name, "")
        name = name.rpartition(".")[0]
    return name
