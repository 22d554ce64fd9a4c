"""Compare plain training scripts with the same scripts on bigtrain: changed lines and numbers.

Each pair in `benchmarks/carried` does what a public example of Accelerate or Lightning does, in our
own words, on data that every machine has: `plain_NAME.py` is a plain torch loop, `on_NAME.py` the
same script on `bigtrain.prepare`. The table counts the lines that differ, without blank ones. Each
script on bigtrain runs on two ranks under several strategies, and every number that it prints
(losses, rates, norms, held-out figures, step by step) is compared with the plain script's.

    OMP_NUM_THREADS=1 python benchmarks/carried_over.py [NAME ...] [--output FILE]

Three of the scripts need transformers, and all need scikit-learn.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import keep

SCRIPTS = Path(__file__).parent / "carried"
SOURCES = {
    "images": "Accelerate, cv_example",
    "text_classes": "Accelerate, nlp_example",
    "language_model": "Lightning, basics/transformer",
    "accumulation": "Accelerate, gradient_accumulation_for_autoregressive_models",
    "resume": "Accelerate, by_feature/checkpointing",
    "early_stop": "Lightning, basics/autoencoder; Accelerate, by_feature/early_stopping",
    "cross_validation": "Accelerate, by_feature/cross_validation",
    "fine_tuning": "Lightning, domain_templates/computer_vision_fine_tuning",
    "averaged": "Lightning, callback WeightAveraging",
    "gan": "Lightning, domain_templates/generative_adversarial_net",
}
"""By the name of a pair: the public example that does the same."""
STRATEGIES = ("ddp", "fsdp", "zero2", "1f1b")
LIMIT_S = 600.0
RANKS = """
import sys
from pathlib import Path
from bigtrain.ranks.launch import start_ranks
sys.exit(start_ranks(2, sys.argv[2:], Path(sys.argv[1])))
"""


def lines_changed(name: str) -> tuple[int, int, int]:
    """Return the numbers of lines of the plain script, of removed lines and of added lines."""
    texts = [(SCRIPTS / f"{kind}_{name}.py").read_text("utf-8") for kind in ("plain", "on")]
    plain, carried = ([line for line in text.splitlines() if line.strip()] for text in texts)
    marks = [line[0] for line in difflib.ndiff(plain, carried)]
    return len(plain), marks.count("-"), marks.count("+")


def numbers_of(command: list[str]) -> tuple[list[dict[str, float]], str]:
    """Return the JSON lines that a command prints, and its last line of errors if it failed."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=SCRIPTS, capture_output=True, text=True, timeout=LIMIT_S, env=environ
    )
    numbers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    errors = [line for line in done.stderr.splitlines() if "bigtrain: " in line or "Error" in line]
    return numbers, (errors or ["it said nothing"])[-1] if done.returncode else ""


def run(name: str, strategy: str | None) -> tuple[list[dict[str, float]], str]:
    """Return the numbers of a plain script, or of the one on bigtrain on two ranks."""
    kind = "plain" if strategy is None else "on"
    command = [sys.executable, f"{kind}_{name}.py"]
    if strategy is not None:
        command = [sys.executable, "-c", RANKS, command[1], strategy]
    with tempfile.TemporaryDirectory() as folder:
        # In `resume` one process starts, and another one continues.
        runs = 2 if name == "resume" else 1
        parts = [numbers_of([*command, f"{folder}/saved"]) for _ in range(runs)]
    return [number for numbers, _ in parts for number in numbers], next(
        (f for _, f in parts if f), ""
    )


def largest_difference(measured: list[dict[str, float]], want: list[dict[str, float]]) -> float:
    """Return the largest relative difference of two scripts' numbers; infinite if lines differ."""
    if [sorted(line) for line in measured] != [sorted(line) for line in want]:
        return float("inf")
    pairs = [(a[key], b[key]) for a, b in zip(measured, want, strict=True) for key in a]
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)


def compare(name: str) -> dict[str, Any]:
    """Return a row: lines, and the difference from the plain script under each strategy."""
    want, fault = run(name, None)
    assert not fault, f"plain_{name}.py: {fault}"
    plain_lines, gone, new = lines_changed(name)
    row: dict[str, Any] = {"name": name, "source": SOURCES[name], "numbers": len(want)}
    row |= {
        "lines": plain_lines,
        "lines_gone": gone,
        "lines_new": new,
        "differences": {},
        "refused": {},
    }
    for strategy in STRATEGIES:
        measured, fault = run(name, strategy)
        if fault:
            row["refused"][strategy] = fault
        else:
            row["differences"][strategy] = largest_difference(measured, want)
    return row


def main() -> None:
    """Compare the pairs, print a table, and write the rows if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(SOURCES), metavar="NAME")
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    for name in options.names:
        row = compare(name)
        rows.append(row)
        shown = [f"{s} {d:.1e}" for s, d in row["differences"].items()]
        shown += [f"{s} refused: {reason}" for s, reason in row["refused"].items()]
        lines = f"{row['lines']} lines, {row['lines_gone']} gone, {row['lines_new']} new"
        print(f"{name:18} {lines:28} {'; '.join(shown)}", flush=True)
    keep(options.output, {"rows": rows})


if __name__ == "__main__":
    main()
