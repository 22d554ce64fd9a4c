"""`bigtrain init FOLDER`: write a model, a data source, a job and a test that run unchanged."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from bigtrain.errors import ConfigError
from bigtrain.job.command_parser import CommandParser

_MYLIB = '''\
"""Your model and data. `job.yaml` names them mylib:Net and mylib:points."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bigtrain.data import Data
from bigtrain.losses.tasks import ClassificationTask

CLASSES = 3


class Net(nn.Module):
    """Maps points (batch, 2) to logits (batch, CLASSES). Use any nn.Module instead."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        # A list of equal blocks: strategies cut, shard and recompute a model block by block.
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)
        )
        self.last = nn.Linear(width, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


def points(samples: int = 6000, seed: int = 0) -> Data:
    """Return points on the three arms of a spiral; the arm is the class.

    Every rank calls this and gets the same data; bigtrain picks each rank's samples in every step.
    job.yaml sets `samples` (data.args.samples); `seed` is train.seed of the job.
    """
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (samples,), generator=generator)
    radius = torch.rand(samples, generator=generator)
    noise = 0.1 * torch.randn(samples, generator=generator)
    angle = 4 * radius + classes * 2 * torch.pi / CLASSES + noise
    inputs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    held_out = samples // 6
    return Data(
        train=TensorDataset(inputs[held_out:], classes[held_out:]),
        validation=TensorDataset(inputs[:held_out], classes[:held_out]),
        task=ClassificationTask(CLASSES),
        description=f"points: {samples - held_out} to train on, {held_out} held out",
    )
'''

_JOB = """\
# bigtrain train job.yaml -n 2                      two ranks on this machine
# bigtrain train job.yaml -n 2 --strategy fsdp      the same numbers in less memory
# bigtrain train job.yaml --dry-run                 print the plan and its predicted memory
model:
  name: mylib:Net
  args: {width: 64, depth: 4}      # arguments of Net
data:
  name: mylib:points
  args: {samples: 6000}            # arguments of points
optim:
  name: adamw
  lr: 3.0e-3
  weight_decay: 0.0
  warmup_steps: 0
  schedule: cosine
  clip_norm: null
train:
  epochs: 6
  global_batch_size: 100           # samples of a step over all ranks
  precision: fp32                  # or bf16
strategy: ddp                      # bigtrain strategies lists the others
"""

_TEST = '''\
"""Run with `pytest`, in this folder."""

import pytest
import torch
from mylib import CLASSES, Net, points
from torch.nn.functional import cross_entropy

import bigtrain


def test_the_model_takes_the_data() -> None:
    inputs, targets = points(samples=60).train[:10]
    assert Net()(inputs).shape == (10, CLASSES)
    assert 0 <= int(targets.min()) <= int(targets.max()) < CLASSES


@pytest.mark.parametrize("strategy", ["single", "single+full"])
def test_it_learns_under_a_strategy_as_in_a_plain_loop(strategy: str) -> None:
    inputs, targets = points(samples=600).train[:]

    torch.manual_seed(0)
    model = Net()
    twin = Net()
    twin.load_state_dict(model.state_dict())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = []
    for _ in range(5):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    with bigtrain.prepare(twin, cross_entropy, sgd, strategy=strategy, device="cpu") as engine:
        found = [engine.step((inputs, targets)).loss for _ in range(5)]

    assert found == pytest.approx(plain, rel=1e-5)
    assert found[-1] < found[0]
'''

FILES = {"mylib.py": _MYLIB, "job.yaml": _JOB, "test_mylib.py": _TEST}
"""By name, the content of the files that `bigtrain init` writes."""


def main(arguments: list[str]) -> int:
    """Write the files, print the commands that run them, and return the exit status.

    Args:
        arguments: the command line of `bigtrain init`, without the program's name.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
    """
    parser = CommandParser(
        prog="bigtrain init",
        description="Write a model, a data source, a job and a test that run unchanged.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="a new folder, or an empty one")
    folder = Path(parser.parse_args(arguments).folder)
    write_starter(folder)
    lines = [
        f"made {', '.join(str(folder / name) for name in FILES)}. Next:",
        *([] if folder.resolve() == Path.cwd() else [f"cd {shlex.quote(str(folder))}"]),
        "bigtrain train job.yaml -n 2",
        "pytest",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def write_starter(folder: Path) -> None:
    """Write the files into a new or empty folder.

    Raises:
        ConfigError: the path is not a folder, or the folder is not empty or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        existing = sorted(path.name for path in folder.iterdir())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"init: {folder} cannot be made: {reason}. Name a new folder: bigtrain init first"
        ) from None
    if existing:
        shown = ", ".join(existing[:3]) + (
            f" and {len(existing) - 3} more" if len(existing) > 3 else ""
        )
        raise ConfigError(
            f"init: {folder} is not empty ({shown}), and init overwrites nothing. Name a new "
            "folder: bigtrain init first"
        )
    try:
        for name, text in FILES.items():
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"init: {folder} cannot be written: {error.strerror}.") from None
