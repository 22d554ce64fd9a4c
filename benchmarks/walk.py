"""Count the changes of file between `train.main` and `build_runner`: the walk of a reader.

    python benchmarks/walk.py [--depth N] [--show] [KEY=VALUE ...]

The calls of one real start are recorded with `sys.setprofile`, until `build_runner` is entered.
A stay is an unbroken run of calls and returns in one file; a reader who follows the start changes
the file that often. Calls that are nested more than N deep below `main` are what a reader skips:
they follow a call without opening it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (str(ROOT / "bigtrain"), str(ROOT / "strategies"))
SKIPPED = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>")


class _Arrived(BaseException):
    """`build_runner` has been entered."""


class Walk:
    """The calls and returns of product functions, with their depth below `main`."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str, str]] = []
        """(depth, file, function) of each call, and of the caller when a call returns."""
        self._stack: list[tuple[int, str, str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        del argument
        code = frame.f_code
        if not code.co_filename.startswith(PRODUCT) or code.co_name in SKIPPED:
            return
        if event == "call":
            here = (len(self._stack), _short(code.co_filename), code.co_qualname)
            if not self._stack and code.co_name != "main":
                return
            self._stack.append(here)
            self.events.append(here)
            if code.co_name == "build_runner":
                sys.setprofile(None)
                raise _Arrived
        elif event == "return" and self._stack:
            self._stack.pop()
            if self._stack:
                self.events.append(self._stack[-1])

    def stays(self, depth: int) -> list[tuple[str, list[str]]]:
        """The files in the order of the walk, each with the functions seen there."""
        stays: list[tuple[str, list[str]]] = []
        for level, file, function in self.events:
            if level > depth:
                continue
            if not stays or stays[-1][0] != file:
                stays.append((file, []))
            if function not in stays[-1][1]:
                stays[-1][1].append(function)
        return stays


def _short(file: str) -> str:
    return str(Path(file).resolve().relative_to(ROOT))


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def record(words: list[str]) -> Walk:
    """Start a run of one rank, up to `build_runner`."""
    from bigtrain import train

    walk = Walk()
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
    """Print stays, files and calls by depth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--show", action="store_true", help="each stay with its functions")
    options, words = parser.parse_known_args()
    walk = record(["--strategy", options.strategy, *words])
    for depth in range(1, 7):
        stays = walk.stays(depth)
        calls = sum(level <= depth for level, _, _ in walk.events)
        files = len({file for file, _ in stays})
        sys.stdout.write(f"depth {depth}: {len(stays)} stays, {files} files, {calls} events\n")
    if options.show:
        for file, functions in walk.stays(options.depth):
            sys.stdout.write(f"{file}: {', '.join(functions)}\n")


if __name__ == "__main__":
    main()
