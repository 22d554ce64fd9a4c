"""The trainer of the examples equals a plain torch loop under strategies, and resumes."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.zygote import forked_script, interpreter
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler

from bigtrain.models.blueprint import describe

SCRIPT = Path(__file__).parents[2] / "examples" / "trainer.py"
START = """
import sys
from pathlib import Path
from bigtrain.ranks.launch import start_ranks
sys.exit(start_ranks(2, sys.argv[2:], Path(sys.argv[1])))
"""


@functools.cache
def script() -> Any:
    spec = importlib.util.spec_from_file_location("trainer_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


Numbers = tuple[list[tuple[float, float]], list[tuple[float, float]]]
"""Loss and rate of each step; validation loss and accuracy of each epoch."""


def numbers(printed: str) -> Numbers:
    steps = re.findall(r"^step \d+  loss (\S+)  lr (\S+)$", printed, re.MULTILINE)
    epochs = re.findall(r"^epoch \d+  (\S+)  (\S+)$", printed, re.MULTILINE)
    return [(float(a), float(b)) for a, b in steps], [(float(a), float(b)) for a, b in epochs]


@functools.cache
def plain(precision: str) -> Numbers:
    """The same numbers from a plain torch loop on one process; bf16 by autocast."""
    example = script()
    model = describe(example.net).materialize("cpu", seed=0)
    double = precision == "fp64"
    model = model.double() if double else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    per_epoch = -(-example.ROWS // example.BATCH)
    scheduler = CosineAnnealingLR(optimizer, T_max=example.EPOCHS * per_epoch)
    train, held_out = example.rows(0), example.rows(1)
    sampler = DistributedSampler(train, 1, 0)
    steps, epochs = [], []

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            output: torch.Tensor = model(x.double() if double else x)
        return output.float() if precision == "bf16" else output

    for epoch in range(example.EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train, example.BATCH, sampler=sampler):
            loss = F.cross_entropy(forward(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.append((loss.item(), optimizer.param_groups[0]["lr"]))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        with torch.no_grad():
            outputs, targets = forward(held_out.tensors[0]), held_out.tensors[1]
            loss = F.cross_entropy(outputs, targets)
            epochs.append((loss.item(), example.accuracy(outputs, targets).item()))
    return steps, epochs


def run(folder: Path, strategy: str, precision: str) -> Numbers:
    """Two epochs, on two ranks or for `single` on one."""
    words = [str(folder), strategy, precision]
    if strategy == "single":
        done = forked_script(SCRIPT, words)
    else:
        command = [interpreter(), "-c", START, str(SCRIPT), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return numbers(done.stdout)


TOLERANCES = {"fp64": (1e-8, 0.0), "fp32": (2e-6, 0.0), "bf16": (1e-2, 0.021)}
"""For losses: relative, after twenty steps of AdamW. For accuracies: absolute (a row is 0.007)."""


def compare(first: Numbers, second: Numbers, precision: str) -> None:
    (steps, epochs), (wanted, figures) = (
        tuple(a + b for a, b in zip(first, second, strict=True)),
        plain(precision),
    )
    assert len(steps) == len(wanted) == 20
    by_loss, by_accuracy = TOLERANCES[precision]
    assert [lr for _, lr in steps] == pytest.approx([lr for _, lr in wanted], abs=1e-9)
    losses = [loss for loss, _ in steps]
    assert losses == pytest.approx([loss for loss, _ in wanted], rel=by_loss)
    assert losses[-1] < 0.8 * losses[0]
    assert [loss for loss, _ in epochs] == pytest.approx([loss for loss, _ in figures], rel=by_loss)
    accuracies = [a for _, a in epochs]
    assert accuracies == pytest.approx([a for _, a in figures], abs=by_accuracy + 1e-4)


PAIRS = [
    *(("ddp", "fsdp"), ("fsdp", "zero2"), ("zero2", "zero3"), ("zero3", "1f1b")),
    *(("1f1b", "tensor"), ("tensor", "ddp")),
]


CASES = [
    (*pair, precision)
    for precision in ("fp32", "bf16", "fp64")
    for pair in PAIRS
    # DeepSpeed does not support fp64
    if precision != "fp64" or not any("zero" in word for word in pair)
]


@pytest.mark.parametrize(("first", "second", "precision"), CASES)
def test_it_equals_a_plain_loop_and_goes_on_under_another_strategy(
    first: str, second: str, precision: str, tmp_path: Path
) -> None:
    compare(run(tmp_path, first, precision), run(tmp_path, second, precision), precision)


def test_it_begins_alone_and_goes_on_in_shards(tmp_path: Path) -> None:
    compare(run(tmp_path, "single", "fp32"), run(tmp_path, "fsdp", "fp32"), "fp32")
    assert list(tmp_path.glob("events.out.tfevents*"))
