"""The documented table of a strategy's methods is complete, and replicas have distinct names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bigtrain.checkpoint.layout import STATE_PARTS
from bigtrain.core.state import replica_state, state_of_replica
from bigtrain.core.strategy import CutStrategy, Strategy
from bigtrain.tensors.shards import StateTensor

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")


def rows(title: str) -> set[str]:
    """The names in the first column of a table in CONTRIBUTING.md."""
    table = PAGE[PAGE.index(title) :].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


@pytest.mark.parametrize(
    ("title", "contract"),
    [("| method |", Strategy), ("| method of a `CutStrategy` |", CutStrategy)],
)
def test_the_contributing_page_lists_every_method_of_the_contract(title, contract):
    methods = {
        n for n, value in vars(contract).items() if callable(value) or type(value) is property
    }
    methods = {name for name in methods if not name.startswith(("_", "model_"))}
    if contract is Strategy:
        methods |= {"name", "role", "summary"}
    assert rows(title) == methods - ({"traits"} if contract is CutStrategy else set())


def tensors(value: float) -> dict[str, StateTensor]:
    return {"model.weight": StateTensor.of(torch.full((2,), value))}


@pytest.mark.parametrize("replica", [0, 1, 11])
def test_a_replica_reads_back_its_own_tensors_and_the_first_ones_where_it_has_none(replica):
    saved = {"replicas.outer.steps": 5}
    for number in (0, 1, 11):
        named = replica_state(tensors(number), number)
        assert all(name.startswith(STATE_PARTS) for name in named)
        assert not saved.keys() & named.keys()
        saved |= named
    read = state_of_replica(saved, replica)
    assert torch.equal(read["model.weight"].values(), torch.full((2,), float(replica)))
    assert read["replicas.outer.steps"] == 5
    absent = state_of_replica(saved, 2)
    assert torch.equal(absent["model.weight"].values(), torch.zeros(2))
