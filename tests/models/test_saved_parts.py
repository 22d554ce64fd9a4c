"""Saved values that are read in parts: slices of the tp axis, and pieces of any size."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigtrain.assembly.materialize import Materializer
from bigtrain.checkpoint.foreign.state_dicts import open_state_dict
from bigtrain.models.blueprint import Blueprint, describe
from bigtrain.models.saved_parts import SavedParts
from bigtrain.ranks.context import RunContext
from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.slices import Slices, SliceSection
from bigtrain.slicing.state import ModelSlices, SlicedState
from bigtrain.tensors.shards import box_extents

SLICES = {
    "0.weight": Slices.even(0, 12),
    "0.bias": Slices.even(0, 12),
    "1.weight": Slices.even(1, 12),
    "2.weight": Slices(0, (SliceSection(6, 2), SliceSection(3), SliceSection(2))),
    "2.bias": Slices(0, (SliceSection(6, 2), SliceSection(3), SliceSection(2))),
}


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 5), nn.Linear(5, 11))


@pytest.fixture
def saved(tmp_path):
    """A described model with the values of a file, and these values."""
    torch.manual_seed(2)
    state = make().state_dict()
    save_file(state, tmp_path / "model.safetensors")
    blueprint = describe(make)
    blueprint.values = open_state_dict(tmp_path / "model.safetensors").model
    return blueprint, state


@pytest.mark.parametrize("piece_bytes", [8, 52, 1 << 20])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_slices(saved, rank, piece_bytes, monkeypatch):
    monkeypatch.setattr("bigtrain.tensors.shards.COPIED_BYTES", piece_bytes)
    blueprint, state = saved
    slices = SlicedState(ModelSlices(SLICES, size=2), SliceGroup(rank, 2))
    read: list[int] = []
    for name, value in blueprint.values.items():
        whole = value.read

        def count(extents, whole=whole):
            read.append(sum(extent.size for extent in extents))
            return whole(extents)

        object.__setattr__(blueprint.values[name], "read", count)
    materialize = Materializer(blueprint, RunContext.alone(), "fp32", (), slices)
    materialize(list(state))
    elements = 0
    for name, whole in state.items():
        found = blueprint.model.get_parameter(name)
        own = SLICES[name].local(whole, rank, 2) if name in SLICES else whole
        assert isinstance(found, nn.Parameter)
        assert torch.equal(found, own), name
        elements += own.numel()
    assert sum(read) == elements
    assert max(read) <= max(1, piece_bytes // 4)


def test_values_in_fp64_and_bf16_are_cast_once_read(saved):
    blueprint, state = saved
    Materializer(blueprint, RunContext.alone(), "fp64")(list(state))
    assert torch.equal(blueprint.model.get_parameter("0.weight"), state["0.weight"].double())
    low = Blueprint.twin(blueprint)
    Materializer(low, RunContext.alone(), "bf16", ["0.weight"])(list(state))
    assert torch.equal(low.model.get_parameter("0.weight"), state["0.weight"].bfloat16())
    assert torch.equal(low.model.get_parameter("0.bias"), state["0.bias"])


def test_parts_cover_only_what_is_saved_and_can_be_read_in_parts(saved):
    blueprint, state = saved
    done: set[str] = set()
    parts = SavedParts(blueprint, done)
    assert parts.cover(["0.weight", "2.bias"])
    target = torch.empty(3, 7, dtype=torch.float64)
    parts.copy("0.weight", target, box_extents((12, 7), (4, 0), (3, 7)))
    assert torch.equal(target.float(), state["0.weight"][4:7])
    assert done == {"0.weight"}
    blueprint.values = {n: v for n, v in blueprint.values.items() if n != "0.weight"}
    assert not parts.cover(["0.weight", "2.bias"])
    with pytest.raises(ValueError, match="0.weight has no saved value"):
        parts.copy("0.weight", target, ())
    assert not SavedParts(Blueprint.of(make()), done).cover(["0.weight"])
