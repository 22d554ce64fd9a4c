"""The page for users of other tools: each bigtrain line runs, or is read as a job or a command."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.zygote import interpreter

from bigtrain.assembly.make_plan import make_plan
from bigtrain.job.load import load_job

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
PYTHON = re.compile(r"^(\w+ = )?(engine\.|bigtrain\.prepare|print\()")


def bigtrain_code() -> list[str]:
    """The code in backticks in the last column of the tables."""
    rows = re.findall(r"^\|.*\| (.+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return [code for cell in rows for code in re.findall(r"`([^`]+)`", cell)]


WORDS = sorted(
    {code for code in bigtrain_code() if re.match(r"(--strategy |[a-z]+\.[a-z_.]+=)", code)}
)


def test_lines_of_python_run(tmp_path: Path) -> None:
    """In the page's script; each `prepare` makes an engine that replaces the previous one."""
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    lines = [code for code in dict.fromkeys(bigtrain_code()) if PYTHON.match(code)]
    assert len(lines) > 8
    script += "\n\nclass Sampler:\n    state_dict = dict\n    load_state_dict = print\n\n\n"
    script += "sampler = Sampler()\n"
    keys = ", example=data[:8], train__global_batch_size=32)"
    for line in lines:
        if "prepare(" in line:
            script += f"engine.close()\n{line.removesuffix(')')}{keys}\n"
            script += "result = engine.step(data[:32])\n"
        else:
            script += f"{line}\n"
    script += "engine.close()\n"
    (tmp_path / "lines.py").write_text(script, "utf-8")
    command = [interpreter(), "lines.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", WORDS)
def test_words_are_a_job_that_can_be_planned(words: str) -> None:
    split = words.split()
    strategy = split[1] if split[0] == "--strategy" else "fsdp"
    if "package.module" in words:
        return
    keys_and_values = split[2:] if split[0] == "--strategy" else split
    device = "cuda" if strategy.endswith("_cpu") else "cpu"
    job = load_job(None, strategy, ["train.global_batch_size=64", *keys_and_values])
    if strategy == "interleaved_1f1b" or "accumulation_steps" in words:
        job = load_job(None, strategy, keys_and_values)
    make_plan(job, 8, device)


def test_there_are_lines_of_each_kind() -> None:
    assert len(WORDS) > 20
    assert {"--strategy fsdp", "optim.clip_norm=1.0"} <= set(WORDS)
