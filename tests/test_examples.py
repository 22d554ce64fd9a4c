"""The scripts in examples/ run as their docstrings say, on one rank and on two."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.peaks import repeat_if_above
from support.zygote import forked_script, interpreter

EXAMPLES = Path(__file__).parents[1] / "examples"
START = """
import sys
from pathlib import Path
from bigtrain.ranks.launch import start_ranks
sys.exit(start_ranks(2, sys.argv[2:], Path(sys.argv[1])))
"""


def run(name: str, *words: str, ranks: int = 1) -> str:
    """The output of an example; its ranks rendezvous by a file."""
    script = EXAMPLES / name
    if ranks == 1:
        done = forked_script(script, words)
    else:
        command = [interpreter(), "-c", START, str(script), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)$", printed, re.MULTILINE)]


def test_they_are_short() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert [path.stem for path in scripts] == [
        "horovod_script",
        "own_loop",
        "predicted_memory",
        "save_and_resume",
        "trainer",
    ]
    for path in scripts:
        text = path.read_text("utf-8")
        assert len(text.splitlines()) < (90 if path.stem == "trainer" else 40), path
        assert f"examples/{path.name}" in text.partition("import")[0], (
            "the docstring must contain the command that starts it"
        )


def test_a_loop_computes_the_same_under_any_strategy() -> None:
    alone = losses(run("own_loop.py", "single"))
    assert len(alone) == 10
    assert alone[-1] < 0.9 * alone[0]
    for strategy in ("fsdp+full", "1f1b+offload_disk"):
        assert losses(run("own_loop.py", strategy, ranks=2)) == pytest.approx(alone, abs=2e-4)


def test_a_script_for_horovod_computes_the_same_on_any_number_of_ranks() -> None:
    alone = losses(run("horovod_script.py"))
    assert len(alone) == 10
    assert alone[-1] < 0.9 * alone[0]
    assert losses(run("horovod_script.py", ranks=2)) == pytest.approx(alone, abs=2e-4)


@pytest.mark.parametrize(("strategy", "ranks"), [("single+full", 1), ("1f1b+full", 2), ("fsdp", 2)])
def test_the_predicted_memory_stands_beside_the_measured(strategy: str, ranks: int) -> None:
    line = re.compile(r"^rank (\d): predicted (\d+), measured (\d+)$", re.MULTILINE)
    rows = repeat_if_above(
        lambda: line.findall(run("predicted_memory.py", strategy, ranks=ranks)),
        lambda row: int(row[2]) > 1.01 * int(row[1]),
    )
    assert [int(rank) for rank, _, _ in rows] == [*range(ranks)]
    for _, predicted, measured in rows:
        assert int(predicted) == pytest.approx(int(measured), rel=0.01)


def test_a_checkpoint_goes_on_under_another_strategy(tmp_path: Path) -> None:
    alone = [
        loss
        for _ in range(2)
        for loss in losses(run("save_and_resume.py", str(tmp_path / "a"), "single"))
    ]
    moved = losses(run("save_and_resume.py", str(tmp_path / "b"), "single"))
    moved += losses(run("save_and_resume.py", str(tmp_path / "b"), "fsdp+offload_disk", ranks=2))
    assert len(alone) == 10
    assert moved == pytest.approx(alone, abs=2e-4)
