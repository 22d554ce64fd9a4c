"""Behaviour that differs between versions of torch: the result here is the same for all of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.rooms import sources
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from bigtrain.ranks.context import RunContext
from bigtrain.tensors.op_cost import flops_of
from bigtrain.versions.torch_versions import (
    COUNTS_EXCHANGES,
    SPLITS_BACKWARD,
    TORCH,
    all_gather_single,
    backward_for_inputs,
    backward_for_weights,
    reduce_scatter_single,
)


class Twice(nn.Module):
    """A layer that is used twice, and several outputs of one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.heads = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer((self.layer(x) + x).tanh())
        a, b, c = self.heads(self.norm(y)).chunk(3, -1)
        return a * b + c + y, self.heads(b + c)[..., :4]


def gradients(*, split: bool) -> list[Any]:
    torch.manual_seed(1)
    model = Twice().double()
    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    outputs = model(x)
    out_gradients = [torch.randn_like(out) for out in outputs]
    if split:
        edges = [get_gradient_edge(out) for out in outputs]
        input_gradients, groups = backward_for_inputs(edges, out_gradients, [x], model.parameters())
        assert input_gradients[0] is x.grad
        assert all(parameter.grad is None for parameter in model.parameters())
        backward_for_weights(model.parameters(), groups)
    else:
        torch.autograd.backward(outputs, out_gradients)
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.skipif(not SPLITS_BACKWARD, reason=f"torch {TORCH} cannot split the backward pass")
def test_a_backward_pass_in_two_parts_begins_at_edges_and_gives_all_gradients() -> None:
    for whole, parts in zip(gradients(split=False), gradients(split=True), strict=True):
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-14)


def test_attention_on_a_cpu_counts() -> None:
    query = torch.randn(2, 3, 8, 16)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result = forward(query, query, query)
    products = 2 * 2 * 3 * 8 * 8 * 16  # two FLOPs for each of m, n, k and the batch
    assert flops_of(forward.default, (query, query, query), {}, result) == 2 * products
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    arguments = (result[0], query, query, query, *result, 0.0, False)
    assert flops_of(back.default, arguments, {}, back(*arguments)) == 5 * products


def run_collectives(context: RunContext) -> tuple[list[float], list[float], int | None]:
    """The results of collectives on one tensor, and the recorded bytes."""
    context.recorder.traffic.begin()
    rank_value, group = torch.full((2,), float(context.rank)), context.group()
    whole, share = torch.empty(4), torch.empty(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        all_gather_single(whole, rank_value, group=group)
        reduce_scatter_single(share, whole, group=group)
    counted = context.recorder.traffic.end()
    return whole.tolist(), share.tolist(), counted and counted["all_gather", 2]


def test_collectives_of_one_tensor_are_called_without_a_warning() -> None:
    size = 16 if COUNTS_EXCHANGES else None
    for rank, result in enumerate(run_ranks(run_collectives, 2)):
        assert result == ([0, 0, 1, 1], [2.0 * rank] * 2, size)


def test_the_version_is_asked_for_in_one_place() -> None:
    """And listed in a few places: with measured rates and forecasts, which depend on it."""
    names = {
        module
        for module, path in sources().items()
        if "torch.__version__" in path.read_text("utf-8").replace("{torch.__version__}", "")
    }
    assert names == {
        "versions.torch_versions",
        "machine.cache",
        "checkpoint.save",
    }
