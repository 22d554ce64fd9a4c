"""The comparison of a cut's stages with the whole model, before a pipeline trains."""

from __future__ import annotations

import pytest
import torch
from support.nets import BlockLM
from torch import Tensor, nn

import bigtrain.cutting.self_check as self_check
from bigtrain.cutting.choose import CutRequest, choose_cut
from bigtrain.cutting.cut import Cut
from bigtrain.cutting.self_check import compare_cut
from bigtrain.cutting.traced_model import Numerics, TracedModel
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.losses.loss import CrossEntropy
from bigtrain.memory.tracker import StorageTracker

LOSS, CPU = CrossEntropy(), torch.device("cpu")


def tokens() -> MicroBatch:
    ids = torch.arange(24).view(4, 6) % 13
    return MicroBatch(ids, ids, 24, 4)


class Normed(nn.Module):
    """Blocks with statistics that every training pass changes, and a head tied to the embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(4))
        self.head = nn.Linear(width, 13)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(torch.tanh(block(x)))
        logits: Tensor = self.head(x)
        return logits


class Growing(Normed):
    """Its output depends on how often it was called, which no tensor says."""

    calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        Growing.calls += 1
        return super().forward(ids) * Growing.calls


def cut_of(model: nn.Module) -> Cut:
    traced_model = TracedModel(model, LOSS, CPU, Numerics())
    return choose_cut(traced_model, tokens(), CutRequest(2)).cut


@pytest.mark.parametrize("make", [BlockLM, Normed])
def test_equal_stages_pass_and_the_model_is_not_changed(make) -> None:
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert compare_cut(cut_of(model), model, tokens(), LOSS) <= 1e-5
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_keeps_its_state_outside_of_tensors_is_refused() -> None:
    model = Normed()
    cut = cut_of(model)
    model.__class__ = Growing
    with pytest.raises(ConfigError, match="compute something else.*differ by .*strategy.cut.at"):
        compare_cut(cut, model, tokens(), LOSS)


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_gradient_that_differs_is_named(monkeypatch, factor) -> None:
    def wrong(cut: Cut, model: nn.Module, batch: MicroBatch, loss: CrossEntropy) -> Tensor:
        for name, parameter in model.named_parameters():
            if name == "blocks.2.bias":
                parameter.register_hook(lambda gradient: gradient * factor + (factor - 1))
        return chain(cut, model, batch, loss)

    chain = self_check._chain
    monkeypatch.setattr(self_check, "_chain", wrong)
    with pytest.raises(ConfigError, match=r"whole model: blocks\.2\.bias: they differ by"):
        compare_cut(cut_of(Normed()), Normed(), tokens(), LOSS)


@pytest.mark.parametrize("lost", ["the stages'", "the model's"])
def test_a_gradient_that_only_one_of_the_two_has_is_named(monkeypatch, lost) -> None:
    def wrong(cut: Cut, model: nn.Module, batch: MicroBatch, loss: CrossEntropy) -> Tensor:
        result = chain(cut, model, batch, loss)
        if lost == "the stages'":
            model.get_parameter("blocks.2.bias").requires_grad_(False)
            result = chain(cut, model, batch, loss)
            model.get_parameter("blocks.2.bias").requires_grad_(True)
        return result

    def without_one(model: nn.Module) -> dict[str, Tensor]:
        gradients = take(model)
        if lost == "the model's":
            del gradients["blocks.2.bias"]
        return gradients

    chain, take = self_check._chain, self_check._take_gradients
    monkeypatch.setattr(self_check, "_chain", wrong)
    monkeypatch.setattr(self_check, "_take_gradients", without_one)
    with pytest.raises(ConfigError, match=r"blocks\.2\.bias: it has a gradient in only one"):
        compare_cut(cut_of(Normed()), Normed(), tokens(), LOSS)


def test_it_holds_the_parameters_and_their_gradients_once() -> None:
    model = Normed(width=256)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    cut = cut_of(model)
    with StorageTracker() as tracker:
        compare_cut(cut, model, tokens(), LOSS)
    tracker.close()
    assert tracker.peak_bytes < 2.7 * nbytes  # two copies of both would be 4
