"""Recomputed blocks compute the same, whatever they contain and however they are called."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.ranks import run_ranks
from support.recomputed import RECOMPUTE, WAYS, run
from support.recomputed_blocks import Blocks, ChangesItsInput, Inner, resolved_plan_for, rows
from torch import nn


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.b = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


def keyword(block, x):
    """Call the block by keyword."""
    return block(x=x)


def nested(block, x):
    """Call the block with tensors in a list."""
    return block(None, many=[x, x])


def appending(block, x):
    """Call the block with a list that it appends to."""
    return block(x, seen=[0, 1])


def called_twice(block, x):
    """Call the block twice."""
    return block(block(x))


CALLS = [
    (keyword, "full", "fp32"),
    (nested, "full", "bf16"),
    (nested, "inputs moved", "fp32"),
    (appending, "selective", "fp32"),
    (called_twice, "full", "fp32"),
    (called_twice, "selective", "bf16"),
]


@pytest.mark.parametrize(("call", "mode", "precision"), CALLS)
def test_however_a_block_is_called(call, mode, precision):
    keys = {"train.precision": precision}
    model = partial(Blocks, Inner, call)
    plain = run_ranks(run, 1, model, rows(), keys)[0]
    recomputed = run_ranks(run, 1, model, rows(), {**keys, **WAYS[mode]})[0]
    assert plain[0] == recomputed[0]
    assert all(torch.equal(plain[1][name], recomputed[1][name]) for name in plain[1])


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Spectral, "changes its buffer a.parametrizations.weight.0._u.*strategy.recompute.layers"),
        (ChangesItsInput, "changes its input in place.*strategy.recompute.layers"),
    ],
)
def test_what_cannot_be_computed_twice_is_refused(kind, message, mode):
    with pytest.raises(Exception, match=message):
        run_ranks(run, 1, partial(Blocks, kind), rows(), WAYS[mode])


class Shared(Blocks):
    """One block is in two lists of blocks."""

    def __init__(self) -> None:
        super().__init__(Inner)
        self.more = nn.ModuleList([self.layers[0], Inner()])

    def forward(self, x):
        x = self.stem(x)
        for layer in (*self.layers, *self.more):
            x = layer(x)
        return self.head(x)


def test_a_block_in_two_places_is_one_block():
    assert "of 4 blocks, 4 save all activations;" in resolved_plan_for(Shared, 10**9).notes[0]
    plain = run_ranks(run, 1, Shared, rows(), {})[0]
    recomputed = run_ranks(run, 1, Shared, rows(), WAYS["full"])[0]
    assert plain[0] == recomputed[0]


class Flat(nn.Module):
    """Has weights of its class and never calls its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))
        self.unused = nn.Identity()

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def test_nothing_to_keep_less_of_is_said():
    """A model without blocks, and one whose block is not called, are reported."""
    result = run_ranks(run, 1, Flat, rows(), WAYS["full"])[0]
    assert any("this model has no repeated blocks" in line for line in result[3])
    result = run_ranks(run, 1, Flat, rows(), {f"{RECOMPUTE}.layers": ["unused"]})[0]
    assert any("unused is not called" in line for line in result[3])
