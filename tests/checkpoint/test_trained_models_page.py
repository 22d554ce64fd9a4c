"""The commands and code blocks of the page on trained models run in order in one folder."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.zygote import forked_cli, interpreter

PAGE = Path(__file__).parents[2] / "docs" / "trained_models.md"
COUNTED = """
assert checkpoint.model_state().keys() == Net().state_dict().keys()
assert outputs.shape == (32, 3)
assert torch.equal(outputs.argmax(dim=1), model(inputs[:32]).argmax(dim=1))
"""


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    folder, script = tmp_path, ""
    for language, block in re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        if language == "python":
            script += block
            continue
        for line in block.splitlines():
            first, *words = shlex.split(line)
            if first == "cd":
                folder = folder / words[0]
                continue
            assert first == "bigtrain"
            done = forked_cli(words, cwd=folder)
            assert done.returncode == 0, done.stderr
    (folder / "use.py").write_text(f"{script}{COUNTED}", "utf-8")
    command = [interpreter(), "use.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (right,) = re.findall(r"^right: (\S+)$", done.stdout, re.MULTILINE)
    assert float(right) > 0.8
    (saved,) = (folder / "runs" / "second" / "checkpoints").glob("step-*")
    assert saved.name == "step-50"


def test_a_place_without_a_checkpoint_is_told_of(tmp_path: Path) -> None:
    from bigtrain.checkpoint.read import Checkpoint
    from bigtrain.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"there is no checkpoint \S+/step-9: no such folder"):
        Checkpoint(tmp_path / "step-9")
