"""Attention with sliced heads on real ranks: shared keys and values, and a decoder."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from support.sliced_models import (
    HEAD,
    HEADS,
    WIDTH,
    Case,
    build_model,
    differences,
    layer_slices,
    slice_group,
)
from torch import Tensor, nn

from bigtrain.slicing.slices import Slices


class Grouped(nn.Module):
    """Separate projections, where several query heads share keys and values."""

    def __init__(self, shared: int, *, repeats: bool) -> None:
        super().__init__()
        self.shared, self.repeats = shared, repeats
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, shared * HEAD)
        self.v = nn.Linear(WIDTH, shared * HEAD, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        if self.repeats:
            k, v = (t.repeat_interleave(HEADS // self.shared, 1) for t in (k, v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mixed = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=not self.repeats)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, shared: int, *, repeats: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Grouped(shared, repeats=repeats)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.attention(self.norm(x))


def grouped_case(shared: int, *, sliced: bool, repeats: bool = False) -> Case:
    slices = {f"attention.q.{kind}": Slices.even(0, WIDTH, HEAD) for kind in ("weight", "bias")}
    slices["attention.o.weight"] = Slices.even(1, WIDTH, HEAD)
    slices["first.weight"] = Slices.even(1, WIDTH)
    for name in ("k.weight", "k.bias", "v.weight") if sliced else ():
        slices[f"attention.{name}"] = Slices.even(0, shared * HEAD, HEAD)

    def loss(model: nn.Module) -> Tensor:
        return model(torch.randn(2, 7, WIDTH, dtype=torch.float64)).square().mean()

    return Case(lambda: Block(shared, repeats=repeats), slices, lambda model: [model], loss)


class Both(nn.Module):
    """An encoder, and a decoder that attends to it."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": batch_first}
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, **options)
        self.decoders = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, HEADS, 96, **options) for _ in range(2)
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(source)
        for layer in self.decoders:
            target = layer(target, memory)
        return target


def both_case(*, batch_first: bool) -> Case:
    names = ("self_attn.in_proj_", "self_attn.out_proj", "linear1", "linear2")
    slices = layer_slices("encoder", *names, 96)
    for n in range(2):
        slices |= layer_slices(f"decoders.{n}", *names, 96)
        slices |= layer_slices(
            f"decoders.{n}", "multihead_attn.in_proj_", "multihead_attn.out_proj", *names[2:], 96
        )

    def loss(model: nn.Module) -> Tensor:
        source, target = (torch.randn(3, n, WIDTH, dtype=torch.float64) for n in (9, 6))
        if not batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        return model(source, target).square().mean()

    return Case(lambda: Both(batch_first=batch_first), slices, lambda _: [], loss)


class Matrices(nn.Module):
    """Products written as `@`, `matmul` and `addmm`, of matrices (width, columns)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.start = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.randn(WIDTH, 96) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(96, WIDTH) / WIDTH**0.5)
        self.flat = nn.Parameter(torch.randn(WIDTH, 96) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(96))
        self.back = nn.Parameter(torch.randn(96, WIDTH) / WIDTH**0.5)
        self.end = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.start  # in rows
        x = x + torch.matmul(torch.tanh(self.norm(x) @ self.up), self.down)
        rows = self.norm(x).view(-1, WIDTH)
        hidden = torch.tanh(torch.addmm(self.bias, rows, self.flat).view(*x.shape[:-1], 96))
        return x + torch.addmm(self.end, hidden.view(-1, 96), self.back).view(x.shape)


def matrices_case() -> Case:
    slices = {"up": Slices.even(1, 96), "down": Slices.even(0, 96), "start": Slices.even(0, WIDTH)}
    slices |= {"flat": Slices.even(1, 96), "bias": Slices.even(0, 96), "back": Slices.even(0, 96)}

    def loss(model: nn.Module) -> Tensor:
        return model(torch.randn(2, 7, WIDTH, dtype=torch.float64)).square().mean()

    return Case(Matrices, slices, lambda _: [], loss)


CASES = {
    "shared by three": lambda ranks: grouped_case(2, sliced=ranks == 2),
    "shared by all": lambda _: grouped_case(1, sliced=False),
    "whole": lambda _: grouped_case(3, sliced=False),
    "repeated": lambda ranks: grouped_case(2, sliced=ranks == 2, repeats=True),
    "uneven": lambda ranks: grouped_case(3, sliced=ranks < 4),
    "decoder": lambda _: both_case(batch_first=True),
    "decoder, sequence first": lambda _: both_case(batch_first=False),
    "matrices": lambda _: matrices_case(),
}


def case_differences(context):
    """Differences and gathers of each case, by name and sequence dim."""
    results = {}
    for name, make in CASES.items():
        for sequence_dim in (0 if "first" in name else 1, None):
            group = slice_group(context, sequence_dim=sequence_dim)
            case = make(context.tp_size)
            results[name, sequence_dim] = differences(case, group), dict(group.gathers)
    return results


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_heads_in_slices_have_the_gradients_of_one_process(ranks):
    for by_case in run_ranks(case_differences, ranks, tp=ranks):
        for key, (distance, gathers) in by_case.items():
            assert max(distance.values()) < 1e-12, (key, distance)
            assert not gathers, key


def matrix_exchanges(context):
    """Exchanges of the size of (batch, seq, width)."""
    exchanges = []
    group = slice_group(context, sequence_dim=1, exchanges=exchanges)
    case = matrices_case()
    build_model(case, group)(torch.randn(2, 7, WIDTH, dtype=torch.float64))
    return Counter(e.kind for e in exchanges)


def test_a_sequence_is_known_again_in_the_rows_of_a_matrix():
    """Three products by rows, one of which is a view of two dims; and two inputs of columns."""
    for exchanges in run_ranks(matrix_exchanges, 2, tp=2):
        assert exchanges == {"reduce_scatter": 3, "all_gather": 2}
