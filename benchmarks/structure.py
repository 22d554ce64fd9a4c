"""Count the size of the sources for a reader: modules, packages, names, lines, imports.

    python benchmarks/structure.py [FOLDER]

FOLDER is the top of a checkout, of any commit; the default is the checkout of this file. Prints one
JSON document. Everything is read as text and syntax trees, so no code of the checkout is run.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def python_files(top: Path, *folders: str) -> dict[str, Path]:
    """Return module name -> file, in folders of a checkout; links are not followed."""
    files = {}
    for folder in folders:
        for path in sorted((top / folder).rglob("*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            if any(part.is_symlink() for part in path.parents) or parts[:2] in LINKS:
                continue
            files[".".join(parts).removesuffix(".__init__")] = path
    return files


LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
FILE_WARNS_AT = 450
ROOM_WARNS_AT = 12
LINKS = {("bigtrain", "strategies"), ("bigtrain", "configs")}


def imported_modules(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the modules of the product that a module imports, also inside functions."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    targets = set()
    for name in names:
        name = name.removeprefix("bigtrain.") if ".strategies." in name else name
        while name and name not in modules:
            name = name.rpartition(".")[0]
        targets.add(name)
    return targets - {"", "bigtrain"}


def public_names(tree: ast.Module) -> Iterator[str]:
    """Return the public classes, functions and values of a module."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def code_lines(text: str) -> int:
    """Count the lines with code: not blank, no comment line and no docstring."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - strings)


def count(top: Path) -> dict[str, Any]:
    """Return the figures of a checkout, as JSON values."""
    product = python_files(top, "bigtrain", "strategies")
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in product.items()}
    lines = {name: len(path.read_text().splitlines()) for name, path in product.items()}
    functions = [
        node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)
    ]
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions)
    owners = defaultdict(set)
    for name, tree in trees.items():
        for public in public_names(tree):
            if not public.startswith("_") and public != "main":
                owners[public].add(name)
    modules = [name for name, path in product.items() if path.stem != "__init__"]
    rooms = Counter(name.rpartition(".")[0] for name in modules)
    arrows = {
        (name.rpartition(".")[0], imported.rpartition(".")[0])
        for name, tree in trees.items()
        for imported in imported_modules(tree, set(product))
    }
    tests = python_files(top, "tests")
    page = top / "docs" / "internals" / "architecture.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    nouns = re.findall(r"^\| `[A-Z]\w+`", text, re.MULTILINE)
    return {
        "modules": len(modules),
        "modules_at_the_root": rooms["bigtrain"],
        "rooms": len(rooms),
        "largest_room": dict([rooms.most_common(1)[0]]),
        "arrows_between_rooms": len({(a, b) for a, b in arrows if a != b}),
        "public_names": len(owners),
        "public_names_defined_twice": sorted(name for name, at in owners.items() if len(at) > 1),
        "product_lines": sum(lines.values()),
        "product_code_lines": sum(code_lines(path.read_text()) for path in product.values()),
        "files_over_450_lines": sorted(n for n, size in lines.items() if size > FILE_WARNS_AT),
        "rooms_over_12_modules": {n: size for n, size in rooms.items() if size > ROOM_WARNS_AT},
        "test_lines": sum(len(path.read_text().splitlines()) for path in tests.values()),
        "test_code_lines": sum(code_lines(path.read_text()) for path in tests.values()),
        "longest_file": dict([max(lines.items(), key=lambda item: item[1])]),
        "median_file": statistics.median(lines.values()),
        "functions": len(lengths),
        "longest_function": lengths[-1],
        "median_function": statistics.median(lengths),
        "rows_of_nouns_in_the_architecture_page": len(nouns),
        "architecture_page_lines": len(text.splitlines()),
        "readme_lines": len((top / "README.md").read_text(encoding="utf-8").splitlines()),
    }


def main() -> None:
    """Print the figures of the named checkout, or of this one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path(__file__).resolve().parents[1]
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="of a checkout")
    print(json.dumps(count(parser.parse_args().folder), indent=1))


if __name__ == "__main__":
    main()
