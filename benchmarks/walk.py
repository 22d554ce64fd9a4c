"""Count the changes of file on a reader's path from `train.main` to `build_runner`.

    python benchmarks/walk.py [--top CHECKOUT] [--depth N] [--show] [--strategy S] [KEY=VALUE ...]

One real start of one rank is recorded with `sys.setprofile`, until `build_runner` is entered. We
assume that a reader opens a function where it is first called, and not again, and that functions of
one statement are understood by their names. A stay is an unbroken run of such functions in one
file. The path from `main` to `build_runner` is followed to its end; other calls are followed N
deep, where 1 means the calls that a function of the path makes itself.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

SKIPPED = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>")


class _Arrived(BaseException):
    """`build_runner` has been entered."""


class Walk:
    """The calls of product functions below `main`, each with its chain of callers.

    Args:
        top: of the checkout.
    """

    def __init__(self, top: Path) -> None:
        self._top = str(top)
        self._sources = tuple(str(top / name) for name in ("bigtrain", "strategies"))
        self.calls: list[tuple[int, ...]] = []
        """For each call the places, in `functions`, of the functions that are open."""
        self.functions: list[tuple[str, str, int]] = []
        """File, qualified name and first line; each once, in the order of their first calls."""
        self._places: dict[tuple[str, str, int], int] = {}
        self._stack: list[int] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        del argument
        code = frame.f_code
        if not code.co_filename.startswith(self._sources) or code.co_name in SKIPPED:
            return
        if event == "call" and (self._stack or code.co_name == "main"):
            key = (os.path.realpath(code.co_filename), code.co_qualname, code.co_firstlineno)
            if key not in self._places:
                self._places[key] = len(self.functions)
                self.functions.append(key)
            self._stack.append(self._places[key])
            self.calls.append(tuple(self._stack))
            if code.co_name == "build_runner":
                sys.setprofile(None)
                raise _Arrived
        elif event == "return" and self._stack:
            self._stack.pop()

    def stays(self, depth: int) -> list[tuple[str, list[str]]]:
        """The files in the order of the walk, each with the functions opened there."""
        path = set(self.calls[-1])
        opened: set[int] = set()
        stays: list[tuple[str, list[str]]] = []
        for chain in self.calls:
            depth_left = next((n for n, place in enumerate(chain) if place not in path), len(chain))
            file, name, line = self.functions[chain[-1]]
            if len(chain) - depth_left > depth or chain[-1] in opened or _is_short(file, line):
                continue
            opened.add(chain[-1])
            short = os.path.relpath(file, self._top)
            if not stays or stays[-1][0] != short:
                stays.append((short, []))
            stays[-1][1].append(name)
        return stays


@cache
def _lengths(file: str) -> dict[int, int]:
    """Return the statements of each function of a file, without docstring, by first line."""
    lengths = {}
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lengths[first] = len(body) if not _has_block(body) else 2
    return lengths


def _has_block(body: list[ast.stmt]) -> bool:
    return any(hasattr(statement, "body") for statement in body)


def _is_short(file: str, line: int) -> bool:
    return _lengths(file).get(line, 0) < 2


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def record(top: Path, words: list[str]) -> Walk:
    """Start a run of one rank, up to `build_runner`."""
    sys.path.insert(0, str(top))
    from bigtrain import train

    walk = Walk(top)
    with tempfile.TemporaryDirectory() as folder, _inside(folder):
        sys.setprofile(walk)
        try:
            train.main([*words, f"log.dir={folder}"])
        except _Arrived:
            pass
        finally:
            sys.setprofile(None)
    return walk


def main() -> None:
    """Print stays, files and functions by depth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--top", default=str(Path(__file__).resolve().parents[1]))
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--show", action="store_true", help="each stay with its functions")
    options, words = parser.parse_known_args()
    walk = record(Path(options.top).resolve(), ["--strategy", options.strategy, *words])
    for depth in range(5):
        stays = walk.stays(depth)
        functions = sum(len(names) for _, names in stays)
        files = len({file for file, _ in stays})
        print(f"depth {depth}: {len(stays)} stays, {files} files, {functions} functions")
    if options.show:
        for file, names in walk.stays(options.depth):
            print(f"{file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
