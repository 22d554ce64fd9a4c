"""Random slices of random tensors of many models give the numbers of one process."""

import copy
import warnings

import pytest
from support.fuzzed_nets import LARGE, NETS
from support.ranks import run_ranks
from support.sliced import compared, random_slices, slice_group

NEAR = 1e-11
"""Norms of few numbers amplify rounding errors; a wrong number differs by far more."""


def compare_random_slices(context, names, seeds, sequence_dim):
    """The comparison of each net with random slices, by seed."""
    warnings.simplefilter("ignore")
    results = []
    for name in names:
        whole, run = {**NETS, **LARGE}[name]()
        for seed in seeds:
            group = slice_group(context, sequence_dim)
            slices = random_slices(whole, group.size, seed, (0.15, 0.5, 0.9)[seed % 3])
            gathered = set(list(slices)[:: seed + 1])
            result = compared(copy.deepcopy(whole), run, slices, group, gathered=gathered)
            results.append((name, seed, result))
    return results


def assert_right(names, seeds, ranks, sequence_dim=None):
    runs = run_ranks(
        compare_random_slices, ranks, names, seeds, sequence_dim, tp=ranks, timeout_s=400
    )
    wrong = [
        (name, seed, result.worst, result.where, result.error[-1500:])
        for results in runs
        for name, seed, result in results
        if not result.worst < NEAR
    ]
    assert not wrong


def test_random_slices_give_the_numbers_of_one_process():
    assert_right([name for name in NETS if name not in ("resnext", "mobilenet")], [1], 2)


def test_more_random_slices_on_more_ranks():
    light = [name for name in NETS if name not in ("shufflenet", "mobilenet", "resnet", "resnext")]
    assert_right(light, [2], 3)


def test_random_slices_with_sequence_shards():
    assert_right(["gpt", "gpt, tied", "attention", "encoder, norm first", "vit"], [4, 5], 2, 1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("part", range(4))
def test_many_random_slices(ranks, part):
    names = [*NETS, *LARGE][part::4]
    assert_right(names, list(range(3, 9)), ranks)
    assert_right(names, [9, 10], ranks, 1)
