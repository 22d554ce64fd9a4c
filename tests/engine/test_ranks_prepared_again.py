"""A module that is passed to `prepare` twice is trained as a whole or refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.zygote import interpreter

START = """
import sys
from pathlib import Path
from bigtrain.ranks.launch import start_ranks
sys.exit(start_ranks(2, sys.argv[2:], Path(sys.argv[1])))
"""
SCRIPT = """
import functools, os, sys
import torch
import bigtrain
from torch import nn

torch.manual_seed(0)
layers = [nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)]
x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
sgd = functools.partial(torch.optim.SGD, lr=0.1)
loss = nn.functional.cross_entropy

def step(model, strategy):
    keys = {"strategy": strategy, "example": (x, y), "train__global_batch_size": 8}
    with bigtrain.prepare(model, loss, sgd, **keys) as engine:
        size, rank = engine.context.dp_size, engine.context.dp_rank
        return engine.step((x.chunk(size)[rank], y.chunk(size)[rank])).loss

for strategy in sys.argv[1:]:
    model = nn.Sequential(*[type(l)(l.in_features, l.out_features) if isinstance(l, nn.Linear)
                            else l for l in layers])
    step(model, strategy)
    try:
        found = f"trained {step(model, strategy):.2f}"
    except bigtrain.ConfigError as error:
        found = f"refused {error}"
    if os.environ["RANK"] == "0":
        print(strategy, found, flush=True)
"""


@pytest.mark.parametrize(
    ("strategies", "word"),
    [(("ddp", "zero2"), "trained"), (("fsdp", "fsdp_zero2", "1f1b", "tensor", "zero3"), "refused")],
)
def test_a_module_is_whole_afterwards_or_refused(
    strategies: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    script = tmp_path / "twice.py"
    script.write_text(SCRIPT, "utf-8")
    command = [interpreter(), "-c", START, str(script), *strategies]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert list(lines) == list(strategies), done.stdout
    for strategy, outcome in lines.items():
        assert outcome.startswith(word), f"{strategy}: {outcome}"
        if word == "refused":
            assert f"and strategy {strategy} has left each rank a part of it" in outcome
            assert "Make a new module, or give the class or function" in outcome
