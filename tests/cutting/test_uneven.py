"""A cut that gives one rank most of the work is reported, with the tensor that forces it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.caching_nets import CachingLM
from support.nets import BlockLM
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.workload import Workload
from bigtrain.cutting.choose import CutRequest, choose_cut
from bigtrain.cutting.traced_model import Numerics, TracedModel
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.models.blueprint import Blueprint


def tokens() -> MicroBatch:
    ids = torch.arange(24).view(4, 6) % 13
    return MicroBatch(ids, ids, 24, 4)


def chosen_cut(model: nn.Module, request: CutRequest):  # type: ignore[no-untyped-def]
    """The cut that is chosen for this request."""
    traced_model = TracedModel(model, CrossEntropy(), torch.device("cpu"), Numerics())
    return choose_cut(traced_model, tokens(), request)


class Lists(nn.Module):
    """Its blocks store tensors in an attribute of the model, which the head reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head = nn.Linear(16, 13)

    def forward(self, ids: Tensor) -> Tensor:
        hidden_states = [self.embed(ids)]
        for block in self.blocks:
            hidden_states.append(block(hidden_states[-1]))
        return self.head(torch.stack(hidden_states).sum(0))


class OneHeavyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.small = nn.Embedding(13, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 4000)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.small(self.embed(ids)))[..., :13]


@pytest.mark.parametrize("blocks", [4, 8, 12])
def test_a_cache_makes_one_stage_nearly_everything_and_is_named(blocks):
    model, stages = CachingLM(blocks), 2
    cut = chosen_cut(model, CutRequest(stages))
    shares = [s / sum(cut.partition.seconds) for s in cut.partition.seconds]
    assert max(shares) > 0.6
    assert f"has {100 * max(shares):.0f} % of the work of {stages} ranks" in cut.uneven
    assert "the model cannot be cut before 'blocks." in cut.uneven
    assert ".key' returns is passed on past it" in cut.uneven
    Blueprint.of(model)  # without the cache every block can be cut
    cut = chosen_cut(model, CutRequest(stages))
    assert cut.uneven == ""


@pytest.mark.parametrize(
    ("make", "request_", "message"),
    [
        (Lists, CutRequest(2), ""),  # a list in the outermost forward can be cut
        (OneHeavyLayer, CutRequest(2), "between 'head' and the end no module is called"),
        (Lists, CutRequest(2, at=("head",)), "strategy.cut.at asks for it. Leave it out to"),
        (CachingLM, CutRequest(1), ""),
    ],
)
def test_what_is_said_of_other_cuts(make, request_, message):
    note = chosen_cut(make(), request_).uneven
    assert message in note
    assert bool(note) is bool(message)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_named_cut_costs_what_a_balanced_one_at_the_same_places_costs(stages):
    """A stage between two others sends at both ends."""
    balanced = chosen_cut(BlockLM(), CutRequest(stages))
    at = tuple(name for name, _ in balanced.cut.call_sites)
    named = chosen_cut(BlockLM(), CutRequest(stages, at=at))
    assert named.partition == replace(balanced.partition, proven=False)
    assert balanced.partition.proven


def test_a_place_that_cannot_be_cut_names_the_tensor_and_the_fix():
    with pytest.raises(
        ConfigError,
        match=r"the model cannot be cut before 'blocks.2': a tensor \(4, 6, 16\) of "
        r"torch.float32 that "
        r"'blocks.0.key' returns is passed on past it, but not by arguments and results: "
        r"by an attribute, or by an object in which.* Let the layer return the tensor",
    ):
        chosen_cut(CachingLM(), CutRequest(2, at=("blocks.2",)))


def test_the_notes_of_a_plan_have_it():
    job = job_from_keys("1f1b", {"train.global_batch_size": 8, "train.micro_batch_size": 4})
    plan = make_plan(job, 2, "cpu")
    workload = Workload(CachingLM(8), tokens(), CrossEntropy(), torch.optim.AdamW, notes=("a",))
    notes = resolve_plan(plan, workload).notes
    assert notes[0] == "a"
    assert notes[1].startswith("cut: rank 1 has")


def test_stages_that_share_a_rank_say_nothing():
    assert chosen_cut(Lists(), CutRequest(4, devices=(0, 1, 0, 1))).uneven == ""
