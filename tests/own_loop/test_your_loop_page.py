"""Every code block of the page on custom loops, run in order as one script."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.zygote import interpreter

PAGE = Path(__file__).parents[2] / "docs" / "your_loop.md"
START = """
import sys
from pathlib import Path
from bigtrain.ranks.launch import start_ranks
sys.exit(start_ranks(int(sys.argv[2]), sys.argv[3:], Path(sys.argv[1])))
"""


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def run_page(folder: Path, strategy: str, ranks: int) -> str:
    """The output of the page's script on some ranks."""
    script = folder / "my_loop.py"
    script.write_text("\n".join(blocks()), "utf-8")
    command = [interpreter(), "-c", START, str(script), str(ranks), strategy]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def figures(text: str) -> list[tuple[float, ...]]:
    """For each epoch: steps, loss, rate, norm, accuracy."""
    rows = re.findall(r"^(\d+) (\S+) (\S+) (\S+) (\S+)$", text, re.MULTILINE)
    return [tuple(map(float, row)) for row in rows]


def test_there_are_no_other_blocks() -> None:
    assert len(blocks()) == PAGE.read_text("utf-8").count("```") // 2 == 7


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", 1),
        ("fsdp", 2),
        ("1f1b", 2),
        ("zero3", 2),
    ],
)
def test_the_page_runs_as_it_stands(strategy: str, ranks: int, tmp_path: Path) -> None:
    text = run_page(tmp_path, strategy, ranks)
    first, second = figures(text)
    assert (first[0], second[0]) == (8, 16)
    assert second[1] < first[1]
    assert second[2] < first[2] < 0.01
    assert 0 < second[4] <= 1
    assert f"Peak memory, {strategy} on cpu, rank" in text
    assert list((tmp_path / "logs").glob("events*"))
    assert (tmp_path / "checkpoints" / "step-16").is_dir()
