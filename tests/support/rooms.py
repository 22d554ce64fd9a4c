"""The order of the rooms, and who imports whom.

Everything is read from the sources as text and syntax trees, so an import inside a function and
one for type checkers count like any other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import bigtrain

ROOT = Path(__file__).resolve().parents[2]

# From the ground up. A module imports from its own room or from one that stands before it here.
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
    *("planner", "compare", "speedup", "verify", "doctor"),
    *("hvd", "train", "cli", "__main__"),
)


@cache
def sources() -> dict[str, Path]:
    """Every module of the package, without its first name: '' is bigtrain itself."""
    found = {}
    for folder, prefix in (("bigtrain", ()), ("strategies", ("strategies",))):
        found |= _modules(ROOT / folder, prefix)
    return found | _modules(ROOT / "configs", ("configs",))


def _modules(folder: Path, prefix: tuple[str, ...]) -> dict[str, Path]:
    found = {}
    for path in sorted(folder.rglob("*.py")):
        inner = path.relative_to(folder).with_suffix("").parts
        # The links are followed from where they point to; newer Pythons follow them here as well.
        if not prefix and inner[0] in ("strategies", "configs"):
            continue
        names = (*prefix, *inner)
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(node: ast.AST) -> Iterator[str]:
    """The dotted names that one import statement may load, `from a import b` as 'a.b'."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: write `from bigtrain.x import y` in full"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def uses(module: str) -> set[str]:
    """The modules of ours that a module names: imports, `bigtrain.NAME`, "bigtrain.x:Class"."""
    found = set()
    for node in ast.walk(tree(sources()[module])):
        names = list(imported(node))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"\A(bigtrain(?:\.\w+)+):\w+\Z", node.value)
        for name in names:
            first, _, rest = name.partition(".")
            if first == "bigtrain" and rest:
                found.add(home(rest))
    # The package's own __init__ imports for type checkers only: see the test of the public names.
    return set() if module == "" else found - {module}


def home(name: str) -> str:
    """The module that has a name: 'config.Job' is config's, 'Job' too, by the lazy table."""
    while name not in sources():
        if "." not in name:
            return bigtrain._MODULE_OF.get(name, "")
        name = name.rpartition(".")[0]
    return name
