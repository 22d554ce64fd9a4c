"""Instructions that are on every machine: signatures of Python's library and their docstrings.

    python benchmarks/docstring_pairs.py pairs.jsonl
    bigtrain train model.name=hf:FOLDER data.path=pairs.jsonl data.args.packing=true

Each line is a conversation: the user gives the first line of a function, the assistant answers with
its docstring. The sources are parsed and not imported, so the result depends on the Python version
alone. Records are ordered by a hash of module and name, so that the last ones, which are held out,
are of all modules.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

SHORTEST = 30
"""A docstring with so many characters or fewer says little."""
ASKED = "Write the docstring of this Python function.\n\n"
_NOT_OURS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def library_files(root: Path) -> list[Path]:
    """Return the sources of the library, without its tests and without installed packages."""
    found = [path for path in root.rglob("*.py") if not _NOT_OURS & set(path.parts)]
    return sorted(found)


def pairs_of(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield the qualified name, the signature and the docstring of each documented function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes in old literals
        module = ast.parse(source)
    pending: list[tuple[str, ast.AST]] = [("", module)]
    while pending:
        prefix, node = pending.pop(0)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{prefix}{child.name}"
                pending.append((f"{name}.", child))
                if not isinstance(child, ast.ClassDef):
                    text = ast.get_docstring(child) or ""
                    if len(text) > SHORTEST:
                        yield name, _signature(child), text
            elif list(ast.iter_child_nodes(child)):
                pending.append((prefix, child))


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    word = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    result = f" -> {ast.unparse(function.returns)}" if function.returns is not None else ""
    return f"{word} {function.name}({ast.unparse(function.args)}){result}:"


def records(root: Path, form: str) -> list[dict[str, object]]:
    """Return a record of each pair, in an order that mixes modules.

    Args:
        root: the folder of the library.
        form: "messages", or "prompt" for prompt and response.
    """
    found: dict[str, dict[str, object]] = {}
    for path in library_files(root):
        try:
            source = path.read_text(encoding="utf-8")
            pairs = list(pairs_of(source))
        except (SyntaxError, UnicodeDecodeError):  # such as templates of lib2to3
            continue
        for number, (name, signature, docstring) in enumerate(pairs):
            place = f"{path.relative_to(root).as_posix()}\0{name}\0{number}"
            key = hashlib.sha256(place.encode()).hexdigest()
            asked = f"{ASKED}{signature}"
            if form == "messages":
                turns = [("user", asked), ("assistant", docstring)]
                messages = [{"role": role, "content": content} for role, content in turns]
                found[key] = {"messages": messages}
            else:
                found[key] = {"prompt": f"{asked}\n", "response": docstring}
    return [found[key] for key in sorted(found)]


def main() -> None:
    """Write the file and say how many pairs it has."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("output", type=Path, help="the file of JSON lines to write")
    parser.add_argument("--form", choices=["messages", "prompt"], default="messages")
    options = parser.parse_args()
    lines = [
        json.dumps(record, ensure_ascii=False)
        for record in records(Path(sysconfig.get_paths()["stdlib"]), options.form)
    ]
    options.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines):,} pairs, {options.output.stat().st_size:,} bytes: {options.output}")


if __name__ == "__main__":
    main()
