"""The output of the commands about themselves: the strategies as JSON, and every --help."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

COMMANDS = ("init", "train", "plan", "compare", "verify", "strategies", "doctor", "record")


def cases() -> dict[str, list[str]]:
    """The words after `bigtrain`, by name of the case."""
    helps = {f"{name} --help": [name, "--help"] for name in COMMANDS}
    return {"strategies --json": ["strategies", "--json"], "--help": ["--help"], **helps}


def compute(words: list[str]) -> Any:
    """Exit status and output; a JSON list of named rows becomes a mapping by name."""
    done = subprocess.run(
        [sys.executable, "-m", "bigtrain", *words], capture_output=True, text=True, timeout=300
    )
    if "--json" in words and done.returncode == 0:
        return {row["name"]: row for row in json.loads(done.stdout)}
    return {"status": done.returncode, "lines": [*done.stdout.splitlines(), *done.stderr.split()]}
