"""The code blocks of docs/beyond_one_loss.md run unchanged; and layers that are frozen, then
trained.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import sgd
from support.ranks import run_ranks
from torch import Tensor, nn

import bigtrain
from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.errors import CheckpointError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import as_loss

PAGE = Path(__file__).parents[1] / "docs" / "beyond_one_loss.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
KEYS: dict[str, Any] = {"strategy": "single", "device": "cpu"}
SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 16), nn.Tanh()), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=draw), torch.randint(0, 3, (8,), generator=draw)


def test_the_page_has_four_blocks():
    assert len(BLOCKS) == 4


def test_the_block_on_an_average(tmp_path):
    with bigtrain.prepare(Net, F.cross_entropy, SGD, **KEYS) as engine:
        names = {"bigtrain": bigtrain, "engine": engine, "folder": tmp_path}
        exec(BLOCKS[0], {**names, "batches": [batch(step) for step in range(3)]})
        before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    saved = bigtrain.Checkpoint(bigtrain.newest_checkpoint(tmp_path / "averaged"))
    assert all(
        not torch.equal(saved.tensors[f"model.{name}"].read(extents_of(p)), p.flatten())
        for name, p in before.items()
    )


def extents_of(tensor: Tensor) -> Any:
    from bigtrain.tensors.shards import extents_of as found

    return found(tensor)


def test_the_block_on_a_penalty():
    names: dict[str, Any] = {"nn": nn, "torch": torch, "F": F, "Tensor": Tensor}
    exec(BLOCKS[1], names)
    inputs = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    with bigtrain.prepare(names["Critic"], names["loss"], SGD, **KEYS) as engine:
        expected = names["loss"](engine.model(inputs), inputs[:, :1]).detach()
        assert engine.step((inputs, inputs[:, :1])).loss == pytest.approx(float(expected))


def test_the_block_on_two_networks():
    draw = torch.Generator().manual_seed(0)
    points = [(torch.randn(8, 2, generator=draw), torch.randn(8, 4, generator=draw))] * 3
    names = {
        "bigtrain": bigtrain,
        "torch": torch,
        "Tensor": Tensor,
        "Adam": torch.optim.Adam,
        "Generator": lambda: nn.Linear(4, 2),
        "Discriminator": lambda: nn.Linear(2, 1),
        "judged": F.binary_cross_entropy_with_logits,
        "keys": KEYS,
        "points": points,
    }
    exec(BLOCKS[2], names)
    assert names["generator"].steps_done == names["critic"].steps_done == 3


def test_the_block_on_freezing():
    names = {"bigtrain": bigtrain, "F": F, "SGD": SGD, "Net": Net, "keys": KEYS}
    exec(BLOCKS[3], names)
    engine = names["engine"]
    before = engine.model.body[0].weight.detach().clone()
    engine.step(batch(0))
    assert torch.equal(engine.model.body[0].weight, before)
    engine.close()


def frozen_first(context: Any, strategy: str, folder: str) -> tuple[list[float], str]:
    """Two steps with a frozen body, two without; then the body is frozen again."""
    keys = {"device": "cpu", "train.global_batch_size": 8, "train.micro_batch_size": 2}
    job = job_from_keys(strategy, {**keys, "memory.predict": False, "memory.track_steps": 0})
    plan = make_plan(job, context.world_size, "cpu")
    loss, each = as_loss(F.cross_entropy), 8 // context.dp_size
    rank_rows = slice(context.dp_rank * each, (context.dp_rank + 1) * each)
    losses: list[float] = []
    saved = Path(folder)
    for frozen, steps in ((True, (0, 1)), (False, (2, 3)), (True, ())):
        torch.manual_seed(0)
        model = Net()
        model.body.requires_grad_(not frozen)
        inputs, targets = batch(0)
        example = example_batch((inputs[:2], targets[:2]), loss, job, plan)
        with Engine(model, loss, sgd, job, context, example=example) as engine:
            try:
                if losses:
                    engine.load(saved)
            except CheckpointError as error:
                return losses, str(error)
            for step in steps:
                inputs, targets = batch(step)
                losses.append(engine.step((inputs[rank_rows], targets[rank_rows])).loss)
            saved = engine.save(Path(folder))
    return losses, ""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "1f1b", "zero2", "tensor"])
def test_what_is_frozen_at_first_trains_after_a_save(strategy, tmp_path):
    torch.manual_seed(0)
    model, expected = Net(), []
    optimizer = sgd(model.parameters())
    for step in range(4):
        model.body.requires_grad_(step >= 2)
        inputs, targets = batch(step)
        optimizer.zero_grad()
        value = F.cross_entropy(model(inputs), targets)
        value.backward()
        optimizer.step()
        expected.append(float(value.detach()))
    axes = {"1f1b": {"pp": 2}, "tensor": {"tp": 2}}.get(strategy, {})
    for losses, message in run_ranks(frozen_first, 2, strategy, str(tmp_path), **axes):
        assert losses == pytest.approx(expected, rel=1e-5)
        # A resume does not freeze parameters that were trained
        assert "has a state for 'body.0." in message
