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
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils import flop_counter
from torch.utils.flop_counter import flop_registry

from bigtrain.ranks.context import RunContext
from bigtrain.slicing.sliced_tensor import _rebuilt
from bigtrain.tensors.op_cost import flops_of
from bigtrain.versions.torch_versions import (
    COUNTS_EXCHANGES,
    SPLITS_BACKWARD,
    TORCH,
    all_gather_single,
    backward_for_inputs,
    backward_for_weights,
    reduce_scatter_single,
    shard_integers,
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


def _as_torch_2_11(count: Any) -> Any:
    """A formula that refuses fewer heads of keys and values than of queries, as torch 2.11 has."""

    def strict(*args: Any, out_val: Any = None) -> int:
        del out_val
        shapes = [each if isinstance(each, torch.Size) else each.shape for each in args]
        assert len({shape[1] for shape in shapes}) == 1, "shapes are incompatible"
        flops: int = count(*shapes)
        return flops

    return strict


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("old", [False, True], ids=["installed", "2.11"])
def test_grouped_heads_count_as_all_heads(monkeypatch, kernel: str, old: bool) -> None:
    aten = torch.ops.aten
    forward = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
    back = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward")
    if old:
        for operation, count in (
            (forward, flop_counter.sdpa_flop_count),
            (back, flop_counter.sdpa_backward_flop_count),
        ):
            monkeypatch.setitem(flop_registry, operation, _as_torch_2_11(count))
    query, shared = torch.empty(2, 8, 16, 4), torch.empty(2, 2, 16, 4)
    product = 2 * 2 * 8 * 16 * 16 * 4
    counted = flops_of(forward.default, (query, shared, shared), {}, query)
    assert counted == 2 * product
    counted = flops_of(back.default, (query, query, shared, shared), {}, query)
    assert counted == 5 * product


def test_older_versions_shard_integers(monkeypatch) -> None:
    def old(self: Any, param: nn.Parameter) -> None:
        """The words of torch 2.11, which has no argument requires_grad here."""

    monkeypatch.setattr(_fsdp_param, "nn", nn)
    monkeypatch.setattr(_fsdp_param.FSDPParam, "_init_sharded_param", old)
    shard_integers()
    assert not _fsdp_param.nn.Parameter(torch.zeros(3, dtype=torch.uint8)).requires_grad
    assert _fsdp_param.nn.Parameter(torch.zeros(3)).requires_grad
    assert not _fsdp_param.nn.Parameter(torch.zeros(3), requires_grad=False).requires_grad
    assert _fsdp_param.nn.Module is nn.Module


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


def test_a_mapped_slice_may_become_anything() -> None:
    """torch 2.11's `checkpoint` maps its arguments to None."""
    assert _rebuilt([None], ()) is None
