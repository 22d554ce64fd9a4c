"""Run the `bigtrain` command for benchmarks, and describe the machine of the figures."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigtrain.compare.subprocess_runs import run_bigtrain
from bigtrain.machine.versions import hardware_and_versions as found_surroundings


def run_command(words: Sequence[str], limit_s: float, threads: int = 1) -> str | None:
    """Run `bigtrain WORDS`; return one line of its error, or None if it succeeds."""
    environ = {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        return run_bigtrain(words, Path(folder) / "log", limit_s, environ).reason


def surroundings(threads: int = 1) -> dict[str, Any]:
    """Return the hardware, the versions and the commit of the figures."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    facts = {**found_surroundings(), "commit": commit.stdout.strip()}
    facts["hardware"] += f"; {threads} thread{'s' * (threads > 1)} a rank"
    return facts


def keep(path: Path | None, figures: dict[str, Any], threads: int = 1) -> None:
    """Write figures and their surroundings as JSON if a path is given."""
    if path is not None:
        path.write_text(json.dumps({**surroundings(threads), **figures}, indent=1) + "\n", "utf-8")
