"""The predicted seconds of blocks, compared with figures computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigtrain.cutting.choose import DeviceRates
from bigtrain.data import MicroBatch
from bigtrain.prediction.operation_log import block_costs

CPU = torch.device("cpu")


class Two(nn.Module):
    """Blocks of a linear layer and an activation, and a layer outside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.exp()


def costs(rates: DeviceRates):
    rows = torch.zeros(32, 64)
    batch = MicroBatch(rows, rows, 32, 32)
    return block_costs(Two(), ["layers.0", "layers.1"], batch, rates, CPU)


def test_arithmetic_where_that_takes_longest():
    block_costs = costs(DeviceRates(flops=1.0, nbytes=1e30, sent=1.0))
    product = 2 * 32 * 64 * 64
    assert block_costs["layers.0"].whole == pytest.approx(product)
    assert block_costs["layers.1"].whole == pytest.approx(product)
    assert block_costs[""].whole == pytest.approx(2 * product)
    assert block_costs["layers.0"].between == pytest.approx(0.0, abs=1e-20)


def test_reading_and_writing_where_that_takes_longest():
    block_costs = costs(DeviceRates(flops=1e30, nbytes=1.0, sent=1.0))
    activations, weight = 4 * 32 * 64, 4 * 64 * 64
    assert block_costs["layers.0"].whole == 2 * activations + weight + 2 * activations
    assert block_costs["layers.0"].between == 2 * activations  # the activation's input and output
    assert block_costs[""].whole == 2 * block_costs["layers.0"].whole + 2 * activations


def test_the_model_is_left_as_it_is():
    model = Two()
    before = {name: p.clone() for name, p in model.named_parameters()}
    rows = torch.zeros(4, 64)
    rates = DeviceRates(flops=1.0, nbytes=1.0, sent=1.0)
    block_costs(model, ["layers.0"], MicroBatch(rows, rows, 4, 4), rates, CPU, bf16=True)
    assert not model.layers[0]._forward_hooks
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
