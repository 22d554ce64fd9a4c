"""Sequence parallelism on real ranks: the numbers of one process, and the paper's exchanges."""

from collections import Counter
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from support.sliced_models import (
    WIDTH,
    build_model,
    differences,
    encoder_case,
    fingerprints,
    gpt_case,
    run_pass,
    slice_group,
    vit_case,
)

from bigtrain.slicing.sliced_tensor import SlicedTensor, local_of
from bigtrain.slicing.slices import Slices

CASES = {
    "gpt": lambda: gpt_case(tied=False),
    "tied": lambda: gpt_case(tied=True, length=7),
    "short": lambda: gpt_case(tied=False, length=2),
    "vit": vit_case,
    "encoder": lambda: encoder_case(batch_first=True),
    "sequence first": lambda: encoder_case(batch_first=False, norm_first=True),
}


def case_differences(context, names, modes):
    """Differences and fingerprints of each case, by name, mode and sequence dim."""
    results = {}
    for name in names:
        for mode in modes:
            for sequence_dim in (0 if name == "sequence first" else 1, None):
                group = slice_group(context, sequence_dim=sequence_dim)
                case = CASES[name]()
                key = (name, mode, sequence_dim)
                prints = fingerprints(case, group, mode)
                results[key] = differences(case, group, mode), prints, dict(group.gathers)
    return results


@pytest.mark.parametrize(
    ("ranks", "modes"),
    [
        (3, ("",)),
        (4, ("",)),
        *product((2, 3, 4), [("", "full", "selective")]),
    ],
)
def test_sequence_shards_have_the_gradients_of_one_process(ranks, modes):
    results = run_ranks(case_differences, ranks, [*CASES], modes, tp=ranks, timeout_s=120)
    for key, (_, wanted, _) in results[0].items():
        for rank in range(ranks):
            distance, prints, gathers = results[rank][key]
            assert max(distance.values()) < 1e-12, (key, rank, distance)
            assert prints == wanted, (key, rank)
            assert set(gathers) <= ({"__getitem__"} if key[0] == "vit" else set()), (key, gathers)


def count_exchanges(context, sequence_dim, layers, mode):
    """Exchanges of the size of (batch, seq, width), in the forward and in the backward pass."""
    exchanges = []
    group = slice_group(context, sequence_dim=sequence_dim, exchanges=exchanges)
    case = gpt_case(tied=False, layers=layers)
    model = build_model(case, group, mode)
    torch.manual_seed(1)
    loss = case.loss(model)
    forward = len(exchanges)
    loss.backward()
    size = 3 * 8 * WIDTH * 8
    kinds = [[e.kind for e in part if e.nbytes == size] for part in _halves(exchanges, forward)]
    small = [e.nbytes for e in exchanges[forward:] if e.nbytes != size]
    return *map(Counter, kinds), small


def _halves(exchanges, at):
    return exchanges[:at], exchanges[at:]


def exchanges_of_one_layer(context, sequence_dim, mode):
    """Return the exchanges of one additional layer, and the small ones of the backward pass."""
    one_layer, two = (count_exchanges(context, sequence_dim, layers, mode) for layers in (1, 2))
    return dict(two[0] - one_layer[0]), dict(two[1] - one_layer[1]), len(two[2]) - len(one_layer[2])


def exchanges_by_mode(context):
    """The exchanges of one layer, by sequence dim and mode."""
    return {
        (dim, mode): exchanges_of_one_layer(context, dim, mode)
        for dim in (None, 1)
        for mode in ("", "full", "selective")
    }


def test_a_layer_exchanges_what_the_papers_say():
    """Figures 4 and 5 of Korthikanti et al.

    2022; the backward pass gathers the products' inputs again.
    """
    (exchanges, second_rank) = run_ranks(exchanges_by_mode, 2, tp=2)
    assert exchanges == second_rank
    assert exchanges[None, ""] == ({"all_reduce": 2}, {"all_reduce": 2}, 0)
    forward = {"all_gather": 2, "reduce_scatter": 2}
    # Small ones: weight and bias of two norms, and two biases of row-sliced layers.
    assert exchanges[1, ""] == (forward, {"all_gather": 4, "reduce_scatter": 2}, 6)
    # Recomputed: all except for the last sum, which no product's gradient needs.
    assert exchanges[None, "full"] == ({"all_reduce": 2}, {"all_reduce": 3}, 0)
    assert exchanges[1, "full"] == (forward, {"all_gather": 6, "reduce_scatter": 3}, 6)
    # Products and their sums are saved.
    assert exchanges[None, "selective"] == exchanges[None, ""]
    assert exchanges[1, "selective"] == (forward, {"all_gather": 6, "reduce_scatter": 2}, 6)


def gather_common_input(context):
    """Three linear layers with one input, which is gathered once in each direction."""
    torch.manual_seed(0)
    exchanges = []
    group = slice_group(context, sequence_dim=1, exchanges=exchanges)
    whole = torch.randn(2, 5, 6, dtype=torch.float64)
    weights = [torch.randn(4, 6, dtype=torch.float64) for _ in range(3)]
    sequence_slices, columns = Slices.even(1, 5), Slices.even(0, 4)
    shard = sequence_slices.local(whole, group.rank, group.size).clone().requires_grad_()
    weight_shards = [
        columns.local(w, group.rank, group.size).clone().requires_grad_() for w in weights
    ]
    x = SlicedTensor.of(shard, sequence_slices, group)
    made = [F.linear(x, SlicedTensor.of(w, columns, group)) for w in weight_shards]
    assert len(group.inputs) == 1
    del x
    assert not group.inputs
    loss_sum = sum(result.square().sum() for result in made)
    forward = [e.kind for e in exchanges]
    loss_sum.backward()
    wanted = whole.requires_grad_()
    plain = [w.requires_grad_() for w in weights]
    sum(F.linear(wanted, w).square().sum() for w in plain).backward()
    assert torch.allclose(
        sequence_slices.local(wanted.grad, group.rank, group.size), shard.grad, atol=1e-12
    )
    for w, gradient in zip(plain, weight_shards, strict=True):
        mine = columns.local(w.grad, group.rank, group.size)
        assert torch.allclose(mine, gradient.grad, atol=1e-12)
    return forward, Counter(e.kind for e in exchanges[len(forward) :])


def test_linear_layers_of_one_input_gather_it_together():
    for forward, backward in run_ranks(gather_common_input, 2, tp=2):
        assert forward == ["all_gather", *["all_reduce"] * 3]  # and three sums over columns
        assert backward == {"all_gather": 1, "reduce_scatter": 1}


def masks(context):
    """Dropout of ones: of a sharded sequence, and of a whole tensor."""
    group = slice_group(context, sequence_dim=1)
    torch.manual_seed(3)
    sequence_slices = Slices.even(1, 64)
    ones = sequence_slices.local(torch.ones(2, 64, 8), group.rank, group.size)
    first, second = (
        local_of(F.dropout(SlicedTensor.of(ones, sequence_slices, group))) for _ in range(2)
    )
    return first.tolist(), second.tolist(), F.dropout(torch.ones(2, 64, 8)).tolist()


def test_each_shard_has_its_own_masks_and_whole_tensors_have_equal_ones():
    (a, again, whole), (b, _, second_whole) = run_ranks(masks, 2, tp=2)
    assert whole == second_whole
    assert a != b
    assert a != again
    assert 0.3 < torch.tensor([a, b]).eq(0).double().mean() < 0.7


def with_dropout(context, build, sequence_dim):
    """Gradients of a model with dropout, saved and recomputed."""
    case = CASES_WITH_DROPOUT[build]()
    gradients = []
    for mode in ("", "full", "selective"):
        group = slice_group(context, sequence_dim=sequence_dim)
        model = build_model(case, group, mode)
        loss = run_pass(model, case)
        gradients.append([loss.item(), *(p.grad.tolist() for p in model.parameters())])
    whole = {n: p.grad.tolist() for n, p in model.named_parameters() if n not in case.slices}
    return gradients, loss.item(), whole


CASES_WITH_DROPOUT = {
    "gpt": lambda: gpt_case(tied=False, dropout=0.2),
    "encoder": lambda: encoder_case(batch_first=True, dropout=0.2),
}


@pytest.mark.parametrize("build", CASES_WITH_DROPOUT)
def test_dropout_draws_the_same_when_computed_again(build):
    for sequence_dim in (1, None):
        results = run_ranks(with_dropout, 2, build, sequence_dim, tp=2)
        for gradients, _, _ in results:
            assert gradients[0] == gradients[1]
            assert gradients[0] == gradients[2]
        assert results[0][1:] == results[1][1:]


def split_backward(context, sequence_dim, count):
    """Gradients of the input first and of the weights later, as in pipelines that split
    the pass.
    """
    torch.manual_seed(0)
    exchanges = []
    group = slice_group(context, sequence_dim=sequence_dim, exchanges=exchanges)
    columns, sequence_slices = Slices.even(0, 4), Slices.even(1, 5)
    whole = torch.randn(2, 5, 6, dtype=torch.float64)
    weights = [torch.randn(4, 6, dtype=torch.float64) for _ in range(count)]
    weight_shards = [
        columns.local(w, group.rank, group.size).clone().requires_grad_() for w in weights
    ]
    leaf = whole if sequence_dim is None else sequence_slices.local(whole, group.rank, group.size)
    leaf = leaf.clone().requires_grad_()
    x = leaf * 1.0
    sliced_input = x if sequence_dim is None else SlicedTensor.of(x, sequence_slices, group)
    made = sum(
        local_of(F.linear(sliced_input, SlicedTensor.of(w, columns, group))).sum()
        for w in weight_shards
    )
    del exchanges[:]
    (to_leaf,) = torch.autograd.grad(made, [leaf], retain_graph=True)
    first = Counter(e.kind for e in exchanges)
    del exchanges[:]
    to_weights = torch.autograd.grad(made, weight_shards)
    second = Counter(e.kind for e in exchanges)
    wanted = sum(w.sum(0) for w in weights).expand_as(whole)
    wanted = (
        wanted if sequence_dim is None else sequence_slices.local(wanted, group.rank, group.size)
    )
    assert torch.allclose(to_leaf, wanted, atol=1e-12)
    for gradient in to_weights:
        assert torch.allclose(gradient, whole.sum((0, 1)).expand_as(gradient), atol=1e-12)
    return first, second


def split_backwards(context):
    return {
        (dim, count): split_backward(context, dim, count) for dim in (None, 1) for count in (1, 2)
    }


def test_a_backward_pass_in_two_parts_exchanges_each_thing_once():
    for exchanges in run_ranks(split_backwards, 2, tp=2):
        for (dim, _), (first, second) in exchanges.items():
            assert first == {"all_reduce" if dim is None else "reduce_scatter": 1}
            assert second == ({} if dim is None else {"all_gather": 1})
