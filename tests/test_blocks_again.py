"""What blocks may do and be called with, and what of it cannot be computed twice."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from parity import adamw
from ranks import run_ranks
from test_checkpointing import RECOMPUTE, WAYS, run
from torch import nn

from bigtrain.activations.offload import ActivationOffloader
from bigtrain.activations.policy import apply_policies, remove_policies
from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import resolve
from bigtrain.core.workload import Workload
from bigtrain.data import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy


def plainly(block, x):
    return block(x)


class Blocks(nn.Module):
    """Blocks of one kind, called as `call` says."""

    def __init__(self, kind, call=plainly, count=3) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.layers = nn.ModuleList(kind() for _ in range(count))
        self.head = nn.Linear(16, 3)
        self.call = call

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.3)

    def forward(self, x=None, many=(), seen=None):
        for extra in many:
            x = extra if x is None else x + extra
        if seen is not None:
            seen.append(len(seen))
            x = x * len(seen)
        return x + self.b(self.drop(torch.tanh(self.a(x))))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.b = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x.mul_(0.5))))


def rows() -> tuple[Any, Any]:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(7)), torch.arange(12) % 3


def keyword(block, x):
    return block(x=x)


def nested(block, x):
    return block(None, many=[x, x])


def appending(block, x):
    return block(x, seen=[0, 1])


def called_twice(block, x):
    return block(block(x))


CALLS = [
    (keyword, "full", "fp32"),
    (nested, "full", "bf16"),
    (nested, "inputs moved", "fp32"),
    (appending, "selective", "fp32"),
    (called_twice, "full", "fp32"),
    (called_twice, "selective", "bf16"),
]


@pytest.mark.parametrize(("call", "way", "precision"), CALLS)
def test_however_a_block_is_called(call, way, precision):
    keys = {"train.precision": precision}
    model = partial(Blocks, Inner, call)
    one = run_ranks(run, 1, model, rows(), keys)[0]
    other = run_ranks(run, 1, model, rows(), {**keys, **WAYS[way]})[0]
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize("way", ["full", "selective"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Spectral, "changes its buffer a.parametrizations.weight.0._u.*strategy.recompute.layers"),
        (ChangesItsInput, "changes its input in place.*strategy.recompute.layers"),
    ],
)
def test_what_cannot_be_computed_twice_is_refused(kind, message, way):
    with pytest.raises(Exception, match=message):
        run_ranks(run, 1, partial(Blocks, kind), rows(), WAYS[way])


def test_a_block_that_changes_its_input_is_kept_under_a_budget():
    assert "3 everything;" in settled_for(partial(Blocks, ChangesItsInput), 10**9).notes[0]


def settled_for(model, budget):
    job = job_from_keys("single", {"train.global_batch_size": 12, f"{RECOMPUTE}.budget": budget})
    loss = CrossEntropy()
    inputs, targets = rows()
    example = MicroBatch(inputs, targets, loss.count(targets), len(inputs))
    return resolve(make_plan(job, 1, "cpu"), Workload(model(), example, loss, adamw))


class Shared(Blocks):
    """One block stands in two lists."""

    def __init__(self) -> None:
        super().__init__(Inner)
        self.more = nn.ModuleList([self.layers[0], Inner()])

    def forward(self, x):
        x = self.stem(x)
        for layer in (*self.layers, *self.more):
            x = layer(x)
        return self.head(x)


def test_a_block_in_two_places_is_one_block():
    assert "4 blocks keep: 4 everything;" in settled_for(Shared, 10**9).notes[0]
    one = run_ranks(run, 1, Shared, rows(), {})[0]
    other = run_ranks(run, 1, Shared, rows(), WAYS["full"])[0]
    assert one[0] == other[0]


def test_a_scripted_block_is_refused():
    with pytest.warns(FutureWarning, match="deprecated"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="compiled by torch.jit.script"):
        apply_policies(nn.Sequential(scripted), {"0": "full"})


def test_a_copy_of_a_shaped_model_does_the_same_and_a_closed_one_is_as_it_was(tmp_path):
    model = Blocks(Inner)
    plain = model.layers[0].forward.__func__
    mover = ActivationOffloader("disk", torch.device("cpu"), str(tmp_path))
    apply_policies(
        model, {"layers.0": "full_offload", "layers.1": "full", "layers.2": "offload"}, mover
    )
    twin = copy.deepcopy(model)
    assert isinstance(pickle.loads(pickle.dumps(model)), Blocks)
    for one in (model, twin):
        torch.manual_seed(3)
        one(rows()[0]).sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    remove_policies(model)
    assert all("forward" not in layer.__dict__ for layer in model.layers)
    assert model.layers[0].forward.__func__ is plain
    mover.close()


class Flat(nn.Module):
    """Its weights are its own; what it has of modules is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))
        self.unused = nn.Identity()

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def test_nothing_to_keep_less_of_is_said():
    found = run_ranks(run, 1, Flat, rows(), WAYS["full"])[0]
    assert any("this model has no blocks" in line for line in found[3])
    found = run_ranks(run, 1, Flat, rows(), {f"{RECOMPUTE}.layers": ["unused"]})[0]
    assert any("unused is not called" in line for line in found[3])
