"""The partition into stages, compared with all possible partitions."""

import itertools
import math
import random

import pytest

from bigtrain.cutting.partition import LayerCosts, partition
from bigtrain.errors import ConfigError


def random_pieces(dice, n):
    def tensors(count):
        return [
            (dice.randint(1, 50), dice.sample(range(n), dice.randint(1, min(3, n))))
            for _ in range(count)
        ]

    return LayerCosts(
        seconds=[dice.randint(1, 9) * 0.1 for _ in range(n)],
        crossing=[dice.randint(1, 5) * 10 for _ in range(n)],
        params=tensors(n),
        saved=tensors(2 * n),
    )


def cost(layers, cuts, bandwidth, factor, in_flight):
    """Seconds and bytes of each stage, and the bytes over each cut, by their definitions."""
    n = len(layers.seconds)
    seconds, stage_bytes = [], []
    for stage, (a, b) in enumerate(itertools.pairwise((0, *cuts, n))):
        sent = sum(layers.crossing[cut] for cut in (a, b) if 0 < cut < n)
        seconds.append(math.fsum(layers.seconds[a:b]) + sent / bandwidth)
        inside = set(range(a, b))
        params = sum(size for size, users in layers.params if inside & set(users))
        saved = sum(size for size, users in layers.saved if inside & set(users))
        stage_bytes.append(math.ceil(factor * params) + in_flight[stage] * saved)
    return seconds, stage_bytes, sum(layers.crossing[cut] for cut in cuts)


def all_partitions(layers, stages, *rest):
    """Yield every partition with its `cost`."""
    n = len(layers.seconds)
    for cuts in itertools.combinations(range(1, n), stages - 1):
        yield cuts, *cost(layers, cuts, *rest)


@pytest.mark.parametrize("seed", range(60))
def test_the_best_of_all_partitions(seed):
    dice = random.Random(seed)
    n = dice.randint(1, 9)
    stages = dice.randint(1, n)
    layers = random_pieces(dice, n)
    bandwidth = dice.choice([math.inf, 100.0, 1000.0])
    in_flight = [stages - s for s in range(stages)]
    options = (bandwidth, 4.0, in_flight)
    rows = list(all_partitions(layers, stages, *options))
    memory = None
    if dice.random() < 0.7:  # the memory of some partition, so that one fits
        memory = dice.choice(rows)[2]
        rows = [row for row in rows if all(h <= m for h, m in zip(row[2], memory, strict=True))]
    best = min(max(row[1]) for row in rows)
    ties = [row for row in rows if max(row[1]) <= best * (1 + 1e-12)]
    most_even = min(sum(s * s for s in row[1]) for row in ties)

    result = partition(
        layers, stages, bandwidth=bandwidth, state_factor=4.0, in_flight=in_flight, memory=memory
    )
    assert result.slowest == pytest.approx(best, rel=1e-12)
    assert result.proven
    assert sum(s * s for s in result.seconds) <= most_even + 1e-6 * best * best
    seconds, stage_bytes, _ = cost(layers, result.cuts, *options)
    assert result.seconds == pytest.approx(seconds, rel=1e-12)
    assert result.bytes == tuple(stage_bytes)


def test_a_shared_tensor_counts_once_in_each_stage():
    layers = LayerCosts(
        seconds=[1.0, 1.0, 1.0],
        crossing=[0, 1, 1],
        params=[(100, [0, 2]), (10, [1, 1])],
        saved=[(7, [0, 1]), (1, [2])],
    )
    result = partition(
        layers, 3, bandwidth=math.inf, state_factor=2, in_flight=[3, 2, 1], memory=None
    )
    assert result.bytes == (200 + 21, 20 + 14, 200 + 1)
    whole = partition(layers, 1, bandwidth=math.inf, state_factor=2, in_flight=[1], memory=None)
    assert whole.bytes == (220 + 8,)
    assert whole.cuts == ()


def test_sending_is_part_of_a_stage():
    """The seconds of sending count as seconds of the stage."""
    layers = LayerCosts(seconds=[1.0] * 4, crossing=[0, 10, 100, 10], params=[], saved=[])
    in_flight = [1, 1]
    free = partition(
        layers, 2, bandwidth=math.inf, state_factor=1, in_flight=in_flight, memory=None
    )
    assert (free.cuts, free.slowest) == ((2,), 2.0)
    slow = partition(layers, 2, bandwidth=10.0, state_factor=1, in_flight=in_flight, memory=None)
    assert (slow.cuts, slow.seconds, slow.crossing) == ((1,), (2.0, 4.0), 10)


def test_more_stages_than_pieces():
    layers = LayerCosts(seconds=[1.0] * 3, crossing=[0] * 3, params=[], saved=[])
    with pytest.raises(ConfigError, match=r"4 stages, .* cut at 2 places: at most 3 .*mesh\.pp=3"):
        partition(layers, 4, bandwidth=1.0, state_factor=1, in_flight=[1] * 4, memory=None)


@pytest.mark.parametrize("seed", range(10))
def test_what_would_fit_is_said(seed):
    dice = random.Random(seed)
    layers = random_pieces(dice, 7)
    in_flight = [3, 2, 1]
    needed = min(max(row[2]) for row in all_partitions(layers, 3, math.inf, 4.0, in_flight))
    options = {"bandwidth": math.inf, "state_factor": 4.0, "in_flight": in_flight}
    partition(layers, 3, **options, memory=[needed] * 3)
    with pytest.raises(ConfigError, match=rf"stage \d needs {needed} bytes .* has {needed - 1} "):
        partition(layers, 3, **options, memory=[needed - 1] * 3)


@pytest.mark.parametrize("seed", range(40))
def test_stages_that_share_a_device_share_its_memory(seed):
    dice = random.Random(seed)
    layers = random_pieces(dice, 9)
    devices = dice.choice([[0, 1, 0, 1], [0, 1, 1, 0]])
    in_flight = [3, 2, 2, 1]
    options = {"bandwidth": math.inf, "state_factor": 4.0, "in_flight": in_flight}

    def together(stage_bytes):
        return [
            sum(h for h, d in zip(stage_bytes, devices, strict=True) if d == rank)
            for rank in (0, 1)
        ]

    rows = list(all_partitions(layers, 4, math.inf, 4.0, in_flight))
    best_fit = sorted(max(together(row[2])) for row in rows)
    room = best_fit[len(best_fit) // 3]
    fitting = [row for row in rows if max(together(row[2])) <= room]
    result = partition(layers, 4, **options, memory=[room] * 4, devices=devices)
    assert max(together(result.bytes)) <= room
    best = min(max(row[1]) for row in fitting)
    assert result.slowest >= best * (1 - 1e-12)
    assert result.slowest <= best * 1.25
    if result.proven:
        assert result.slowest == pytest.approx(best, rel=1e-12)
    with pytest.raises(ConfigError, match=r"no cut into 4 stages fits the memory: at best"):
        partition(layers, 4, **options, memory=[best_fit[0] - 1] * 4, devices=devices)


def test_a_large_model():
    dice = random.Random(0)
    n = 1500
    layers = LayerCosts(
        seconds=[dice.random() for _ in range(n)],
        crossing=[dice.randint(1, 10**6) for _ in range(n)],
        params=[(dice.randint(1, 10**7), [i]) for i in range(n)] + [(10**8, [0, n - 1])],
        saved=[(dice.randint(1, 10**6), [i, min(i + 3, n - 1)]) for i in range(2, n)],
    )
    options = {
        "bandwidth": 1e9,
        "state_factor": 4.0,
        "in_flight": [64 - s for s in range(64)],
    }
    free = partition(layers, 64, **options, memory=None)
    assert free.slowest < 1.2 * sum(layers.seconds) / 64
    tight = partition(layers, 64, **options, memory=[int(max(free.bytes) * 0.95)] * 64)
    assert max(tight.bytes) <= max(free.bytes) * 0.95
    assert free.slowest <= tight.slowest


def test_what_does_not_belong_together():
    with pytest.raises(ValueError, match="2 layers with 1 crossings"):
        LayerCosts(seconds=[1.0, 1.0], crossing=[0], params=[], saved=[])
    with pytest.raises(ValueError, match="layer 0 or 2 of 2"):
        LayerCosts(seconds=[1.0, 1.0], crossing=[0, 0], params=[(1, [0, 2])], saved=[])
    layers = LayerCosts(seconds=[1.0, 1.0], crossing=[0, 0], params=[], saved=[])
    with pytest.raises(ValueError, match="in_flight has 1 entries for 2 stages"):
        partition(layers, 2, bandwidth=1.0, state_factor=1, in_flight=[1], memory=None)
