"""Compare every number that is known before a run with the JSON files in this folder.

    python tests/golden/check.py                  compare all, with the first differences
    python tests/golden/check.py --quick          compare a representative part
    python tests/golden/check.py --only planner   compare one part
    python tests/golden/check.py --write          write the files again

A change that is meant to leave all numbers equal must leave all of the files equal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = ("forecasts", "planner", "listing", "messages")
EVERY = {"forecasts": 131, "planner": 14, "listing": 9, "messages": 5}
"""The quick part has every n-th case; n is prime to the lengths of the rows of cases."""
MOST_SHOWN = 20
FIXED = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "100",
    "LINES": "40",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "PYTHONHASHSEED": "0",
}
"""Environment variables that would change the results, for example a terminal's width."""


def main() -> int:
    """Compare or write; return 1 if anything differs."""
    options = _options()
    os.environ.update(FIXED)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI_"))]:
        del os.environ[name]
    began, differences, count = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as empty:
        os.environ["XDG_CACHE_HOME"] = f"{empty}/cache"
        with _workers(options.jobs, empty) as workers:
            for part in [options.only] if options.only else PARTS:
                names = workers.apply(_names, (part,))
                names = names[:: EVERY[part]] if options.quick else names
                asked = [(part, name) for name in names]
                computed = dict(workers.imap_unordered(_compute, asked, chunksize=1))
                count += len(computed)
                if options.write:
                    _write(part, computed)
                else:
                    differences += _compare(part, computed, whole=not options.quick)
    print(f"{count} cases in {time.monotonic() - began:.0f} s, {differences} differ")
    return 1 if differences else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the files anew")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--quick", action="store_true", help="a representative part")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="processes (default 2); 0: this one"
    )
    options = parser.parse_args()
    if options.write and options.quick:
        parser.error("--write writes whole files; leave --quick out")
    return options


@contextlib.contextmanager
def _workers(jobs: int, folder: str) -> Iterator[Any]:
    """A pool of processes that compute cases; with `jobs` 0 this process, with its
    output hidden.
    """
    if jobs:
        with multiprocessing.get_context("spawn").Pool(jobs, _start, (folder,)) as pool:
            yield pool
        return
    shown, errors = sys.stdout, sys.stderr
    _start(folder)
    try:
        yield _ThisProcess(shown)
    finally:
        os.chdir(HERE)  # the folder is removed next
        sys.stdout, sys.stderr = shown, errors


class _ThisProcess:
    """The interface of a pool, computed in this process; output between two parts is shown."""

    def __init__(self, shown: Any) -> None:
        self._silent, self._shown = sys.stdout, shown
        sys.stdout = shown

    def apply(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with contextlib.redirect_stdout(self._silent):
            return function(*arguments)

    def imap_unordered(
        self, function: Callable[[Any], Any], asked: list[Any], chunksize: int
    ) -> list[Any]:
        assert chunksize == 1
        return [self.apply(function, (case,)) for case in asked]


def _start(folder: str) -> None:
    """Prepare a worker: no output, one thread, and an empty folder."""
    sys.path.insert(0, str(HERE.parent))
    worker_folder = Path(folder) / f"worker-{os.getpid()}"
    worker_folder.mkdir()
    os.chdir(worker_folder)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import torch

    torch.set_num_threads(1)


def _names(part: str) -> list[str]:
    return list(import_module(f"golden.{part}").cases())


def _compute(asked: tuple[str, str]) -> tuple[str, Any]:
    """One case as JSON would return it; floats have twelve digits, folders are replaced
    by names.
    """
    part, name = asked
    import torch

    torch.manual_seed(0)
    module = import_module(f"golden.{part}")
    text = json.dumps(_rounded(module.compute(module.cases()[name])))
    return name, json.loads(text.replace(os.getcwd(), "CWD"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value


def _write(part: str, computed: dict[str, Any]) -> None:
    """Write the cases sorted, with one line for each field."""
    cases = []
    for name in sorted(computed):
        fields = computed[name] if isinstance(computed[name], dict) else {"": computed[name]}
        lines = [
            f"  {json.dumps(key)}: {json.dumps(value, sort_keys=True)}"
            for key, value in sorted(fields.items())
        ]
        cases.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    (HERE / f"{part}.json").write_text("{\n" + ",\n".join(cases) + "\n}\n", "utf-8")


def _compare(part: str, computed: dict[str, Any], *, whole: bool) -> int:
    """Show the first differences of a part; return the number of differing cases."""
    written = json.loads((HERE / f"{part}.json").read_text("utf-8"))
    wanted = written if whole else {name: written.get(name) for name in computed}
    differing = []
    for name in sorted(wanted.keys() | computed.keys()):
        now = computed.get(name)
        now = now if isinstance(now, dict) or name not in computed else {"": now}
        if wanted.get(name) != now:
            differing.append((name, wanted.get(name), now))
    shown = 0
    for name, was, now in differing:
        for field, before, after in _leaves(was, now, ""):
            if shown < MOST_SHOWN:
                print(f"{part}: {name}\n  {field or '(all)'}\n    was {before}\n    is  {after}")
            shown += 1
    if shown > MOST_SHOWN:
        print(f"{part}: and {shown - MOST_SHOWN} more fields")
    if differing:
        print(f"{part}: {len(differing)} of {len(computed)} cases differ")
    return len(differing)


def _leaves(was: Any, now: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield the fields in which two values differ, as deep as both have the same type."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            if was.get(key, _leaves) != now.get(key, _leaves):
                inner = (was.get(key, "(not there)"), now.get(key, "(not there)"))
                yield from _leaves(*inner, f"{path} {key}".strip())
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for place, (before, after) in enumerate(zip(was, now, strict=True)):
            if before != after:
                yield from _leaves(before, after, f"{path}[{place}]")
    else:
        yield path, *(json.dumps(value, sort_keys=True)[:400] for value in (was, now))


if __name__ == "__main__":
    sys.exit(main())
