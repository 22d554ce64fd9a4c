"""The global order of samples: a seeded permutation, divided among ranks and resumable."""

import itertools
import math

import numpy as np
import pytest

from bigtrain.data.sampler import GlobalOrder, derive_seed, permute_indices, split_global_batch
from bigtrain.errors import ConfigError

SIZES = [1, 2, 3, 5, 10, 16, 17, 97, 1000]


def sequence(order, start, number, batch=None):
    """The next `number` global samples from a position, as (epoch, index)."""
    seen = []
    while len(seen) < number:
        epoch, indices = order.batch_at(start + len(seen))
        assert 1 <= len(indices) <= order.global_batch_size
        seen += [(epoch, index) for index in indices]
    return seen[:number]


@pytest.mark.parametrize("size", SIZES)
def test_permute_is_a_permutation(size):
    for seed in range(3):
        places = permute_indices(range(size), size, seed)
        assert sorted(places.tolist()) == list(range(size))
        pieces = [int(permute_indices(at, size, seed)[0]) for at in range(size)]
        assert pieces == places.tolist()  # an entry depends only on its position


def test_permute_mixes_well():
    size, seeds = 1000, 50
    places = np.stack([permute_indices(range(size), size, seed) for seed in range(seeds)])
    assert abs(places[:, 0].mean() / size - 0.5) < 0.15
    neighbours = np.abs(np.diff(places, axis=1)) == 1
    assert abs(neighbours.mean() - 2 / size) < 1 / size
    correlation = [np.corrcoef(row, np.arange(size))[0, 1] for row in places]
    assert np.abs(correlation).max() < 0.15
    fixed = (places == np.arange(size)).sum(axis=1).mean()
    assert 0.5 < fixed < 1.7  # 1 for a uniform permutation
    orders = {tuple(permute_indices(range(3), 3, seed).tolist()) for seed in range(100)}
    assert len(orders) == 6


def test_permute_needs_no_memory_for_the_data_set():
    assert len(set(permute_indices(range(1000), 10**15, 0).tolist())) == 1000


def test_the_order_never_changes():
    # A resumed run relies on it: a different torch, numpy or machine must give the same order.
    assert permute_indices(range(10), 10, 0).tolist() == [2, 1, 7, 3, 8, 6, 5, 4, 9, 0]
    assert GlobalOrder(10, 4, seed=1).batch_at(14).indices == [0, 2, 8, 5]
    assert derive_seed(1, 2) != derive_seed(12) != derive_seed(2, 1)


@pytest.mark.parametrize(("size", "batch"), list(itertools.product([1, 7, 24, 50], [1, 4, 24, 60])))
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_comes_once_an_epoch(size, batch, shuffle):
    order = GlobalOrder(size, batch, seed=5, shuffle=shuffle)
    position, steps = 0, 0
    for wanted in range(3):
        seen = []
        while len(seen) < size:
            epoch, indices = order.batch_at(position)
            assert epoch == wanted
            seen += indices
            position += len(indices)
            steps += 1
        assert sorted(seen) == list(range(size))
        assert shuffle or seen == list(range(size))
    assert steps == 3 * order.steps_per_epoch


def test_epochs_and_seeds_differ():
    first = sequence(GlobalOrder(100, 100, seed=0), 0, 200)
    assert [i for _, i in first[:100]] != [i for _, i in first[100:]]
    assert first != sequence(GlobalOrder(100, 100, seed=1), 0, 200)


def test_drop_last_leaves_out_what_fills_no_batch():
    order = GlobalOrder(10, 4, seed=0, drop_last=True)
    assert (order.steps_per_epoch, order.samples_per_epoch) == (2, 8)
    batches = [order.batch_at(position) for position in range(0, 40, 4)]
    assert all(len(batch.indices) == 4 for batch in batches)
    assert [batch.epoch for batch in batches] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    left_out = [set(range(10)) - {*a.indices, *b.indices} for a, b in itertools.pairwise(batches)]
    # Not the same samples in every epoch
    assert len({frozenset(omitted) for omitted in left_out[::2]}) > 1


@pytest.mark.parametrize("other_batch", [1, 3, 8, 50])
def test_a_resumed_position_continues_the_sequence_at_any_batch_size(other_batch):
    reference = sequence(GlobalOrder(23, 6, seed=2), 0, 80)
    resumed = GlobalOrder(23, other_batch, seed=2)
    for start in (0, 6, 18, 23, 41):
        assert sequence(resumed, start, 30) == reference[start : start + 30]


@pytest.mark.parametrize("total", [1, 2, 3, 7, 8, 9, 31, 32])
@pytest.mark.parametrize(
    ("ranks", "micro"), list(itertools.product([1, 2, 3, 8], [1, 2, 3, 4, 64]))
)
def test_the_ranks_together_have_the_batch(total, ranks, micro):
    indices = list(range(100, 100 + total))
    shares = [split_global_batch(indices, rank, ranks, micro) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1  # each rank runs as many forward passes
    assert len(shares[0]) == math.ceil(math.ceil(total / ranks) / micro)
    drawn_indices = [
        i for share in shares for plan in share if not plan.padding for i in plan.indices
    ]
    assert drawn_indices == indices
    rows = [sum(len(p.indices) for p in share if not p.padding) for share in shares]
    assert max(rows) - min(rows) <= 1
    for plan in itertools.chain(*shares):
        assert 1 <= len(plan.indices) <= micro
        # Distinct samples: one sample many times would distort the statistics of BatchNorm.
        assert not plan.padding or list(plan.indices) == indices[:micro]


def test_a_rank_without_rows_gets_padding():
    assert split_global_batch([7, 8], 0, 4, 2) == [([7, 8], True)]
    assert split_global_batch([7, 8], 1, 4, 2) == [([7], False)]
    assert split_global_batch([7], 2, 4, 3) == [([7], True)]


def test_a_rank_that_computes_no_loss_gets_one_micro_batch_of_padding():
    assert split_global_batch([7, 8, 9, 10], None, 2, 1) == [([7], True)]


def test_bad_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"data\.path: the training set has 0 samples"):
        GlobalOrder(0, 4)
    with pytest.raises(ConfigError, match=r"train\.global_batch_size=0: at least 1"):
        GlobalOrder(5, 0)
    with pytest.raises(ConfigError, match=r"size=8 is more than the 5 samples.*size=5 or less"):
        GlobalOrder(5, 8, drop_last=True)
