"""The loader: samples of a step do not depend on ranks, micro-batches or worker processes."""

import itertools
import os
import random
import subprocess
import sys
from collections import Counter, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from bigtrain.data import GlobalOrder, StepLoader, validation_batches
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.losses.loss import CrossEntropy

# Python 3.12 and later warn that forking a process with threads is risky; torch's loader forks.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@dataclass
class Numbers(Dataset):
    """Sample i is (i with noise, i); the noise represents random augmentation."""

    size: int
    noise: bool = False

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        noise = torch.rand(()) / 2 if self.noise else torch.zeros(())
        return index + noise, torch.tensor(index)


def steps(dataset, batch, number, *, seed=3, drop_last=False, **options):
    order = GlobalOrder(len(dataset), batch, seed=seed, drop_last=drop_last)
    loader = StepLoader(dataset, order, count=len, **options)
    return list(itertools.islice(loader, number))


def rows(step):
    """The (target, input) pairs of one rank's step, without padding."""
    pairs = []
    for part in step.micro_batches:
        if part.padding:
            assert (part.count, part.rows) == (0, 0)
        else:
            assert part.count == part.rows == len(part.targets)
            pairs += zip(part.targets.tolist(), part.inputs.tolist(), strict=True)
    return pairs


def samples_of_all_ranks(dataset, batch, number, ranks, **options):
    """The samples of each step, over all ranks."""
    each = [
        steps(dataset, batch, number, dp_rank=rank, dp_size=ranks, **options)
        for rank in range(ranks)
    ]
    for at_once in zip(*each, strict=True):
        assert len({len(step.micro_batches) for step in at_once}) == 1
        assert len({(s.samples, s.epoch, s.last_in_epoch) for s in at_once}) == 1
    return [sum((rows(step) for step in at_once), []) for at_once in zip(*each, strict=True)]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (2, 1), (3, 2), (8, 5)])
def test_samples_and_their_augmentation_do_not_depend_on_the_layout(ranks, micro):
    dataset = Numbers(10, noise=True)
    reference = [rows(step) for step in steps(dataset, 4, 8, micro_batch_size=4)]
    assert samples_of_all_ranks(dataset, 4, 8, ranks, micro_batch_size=micro) == reference


@forks
def test_reading_ahead_changes_nothing():
    dataset = Numbers(10, noise=True)
    reference = [rows(step) for step in steps(dataset, 4, 5, micro_batch_size=2)]
    ahead = [rows(step) for step in steps(dataset, 4, 5, micro_batch_size=2, workers=2)]
    assert ahead == reference


def test_augmentation_changes_with_the_epoch_and_the_seed():
    dataset = Numbers(6, noise=True)
    first, second = (dict(rows(step)) for step in steps(dataset, 6, 2, micro_batch_size=6))
    second_seed = dict(rows(steps(dataset, 6, 1, seed=4, micro_batch_size=6)[0]))
    for index in range(6):
        assert len({first[index], second[index], second_seed[index]}) == 3
    assert len({value % 1 for value in first.values()}) == 6


def test_a_subset_is_seeded_sample_by_sample():
    dataset = Subset(Numbers(20, noise=True), range(0, 20, 2))
    reference = samples_of_all_ranks(dataset, 4, 3, 1, micro_batch_size=4)
    assert samples_of_all_ranks(dataset, 4, 3, 2, micro_batch_size=1) == reference


def test_the_generators_of_the_training_are_left_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    steps(Numbers(10, noise=True), 4, 3, micro_batch_size=2)
    list(validation_batches(Numbers(10, noise=True), count=len, micro_batch_size=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_only_the_cpu_generator_is_seeded(monkeypatch):
    def fail(*_):
        raise AssertionError("would reset the accelerators' generators")

    monkeypatch.setattr(torch, "manual_seed", fail)
    monkeypatch.setattr(torch.random, "manual_seed", fail)
    steps(Numbers(10, noise=True), 4, 3, micro_batch_size=2)


@pytest.mark.parametrize(("ranks", "batch"), [(1, 5), (2, 5), (4, 3), (3, 12)])
def test_resuming_with_another_world_continues_the_sequence(ranks, batch):
    dataset = Numbers(13, noise=True)
    reference = sum(samples_of_all_ranks(dataset, 5, 30, 2, micro_batch_size=2), [])
    for position in (0, 5, 13, 18):
        resumed = samples_of_all_ranks(
            dataset, batch, 6, ranks, micro_batch_size=2, samples_seen=position
        )
        flat = sum(resumed, [])
        assert len(flat) >= 13
        assert flat == reference[position : position + len(flat)]


def test_steps_know_their_epoch_and_its_end():
    taken = steps(Numbers(10), 4, 5, micro_batch_size=4)
    assert [step.samples for step in taken] == [4, 4, 2, 4, 4]
    assert [step.epoch for step in taken] == [0, 0, 0, 1, 1]
    assert [step.last_in_epoch for step in taken] == [False, False, True, False, False]
    taken = steps(Numbers(10), 4, 4, micro_batch_size=4, drop_last=True)
    assert [step.last_in_epoch for step in taken] == [False, True, False, True]
    assert {step.samples for step in taken} == {4}


class Counting(Numbers):
    read = 0

    def __getitem__(self, index):
        self.read += 1
        return super().__getitem__(index)


def test_no_more_is_read_than_is_asked_for():
    dataset = Counting(100_000)
    steps(dataset, 8, 3, micro_batch_size=2)
    assert dataset.read == 24


@dataclass
class Bulk(Numbers):
    deterministic: bool = True
    calls: int = 0

    def __getitems__(self, indices):
        self.calls += 1
        return [Numbers(self.size)[index] for index in indices]


def test_deterministic_samples_are_read_in_bulk():
    dataset = Bulk(12)
    assert len(steps(dataset, 8, 3, micro_batch_size=4)) == 3
    assert dataset.calls == 5  # 4 + 4, 4, 4 + 4
    dataset = Bulk(12, deterministic=False)
    steps(dataset, 8, 3, micro_batch_size=4)
    assert dataset.calls == 0


@pytest.mark.parametrize("size", [1, 2, 7, 24, 25])
@pytest.mark.parametrize(("ranks", "micro"), list(itertools.product([1, 2, 3, 5], [1, 4, 10])))
def test_validation_covers_each_sample_once(size, ranks, micro):
    shares = [
        list(
            validation_batches(
                Numbers(size), count=len, dp_rank=rank, dp_size=ranks, micro_batch_size=micro
            )
        )
        for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1
    parts = [part for share in shares for part in share]
    seen = Counter(t for part in parts if not part.padding for t in part.targets.tolist())
    assert seen == Counter(range(size))
    assert sum(part.rows for part in parts) == sum(part.count for part in parts) == size


def test_the_mean_over_ranks_and_micro_batches_is_the_batchs():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (11, 5), generator=generator)
    targets[torch.rand(11, 5, generator=generator) < 0.5] = -100
    weight = torch.randn(6, 5 * 4, generator=generator, dtype=torch.float64, requires_grad=True)
    loss = CrossEntropy()
    dataset = list(zip(inputs, targets, strict=True))

    def gradient(ranks, micro):
        order = GlobalOrder(11, 11)
        taken = [
            next(
                iter(
                    StepLoader(
                        dataset,
                        order,
                        count=loss.count,
                        dp_rank=rank,
                        dp_size=ranks,
                        micro_batch_size=micro,
                    )
                )
            )
            for rank in range(ranks)
        ]
        parts = [part for step in taken for part in step.micro_batches]
        count = sum(part.count for part in parts)
        total = sum(
            loss((part.inputs @ weight).unflatten(-1, (5, 4)), part.targets) / count
            for part in parts
            if not part.padding
        )
        return total.detach(), torch.autograd.grad(total, weight)[0]

    expected = gradient(1, 11)
    for ranks, micro in [(1, 1), (2, 3), (4, 2), (13, 1)]:
        for got, wanted in zip(gradient(ranks, micro), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_a_users_collate_is_used():
    def collate(samples):
        return {"x": torch.stack([x for x, _ in samples])}, [y for _, y in samples]

    step = steps(Numbers(8), 4, 1, micro_batch_size=4, collate=collate)[0]
    assert step.micro_batches[0].inputs["x"].shape == (4,)
    assert isinstance(step.micro_batches[0].targets, list)


def test_move_keeps_the_structure():
    point = namedtuple("point", ["x", "y"])  # noqa: PYI024
    value = {"a": [torch.zeros(1), 5], "b": point(torch.ones(2), "name")}
    moved = MicroBatch(value, None, 1, 1).to("meta").inputs
    assert moved["a"][0].device.type == moved["b"].x.device.type == "meta"
    assert (moved["a"][1], moved["b"].y, type(moved["b"])) == (5, "name", point)
    part = MicroBatch((torch.zeros(2),), torch.zeros(2), 2, 2).to("meta")
    assert part.inputs[0].device.type == part.targets.device.type == "meta"
    assert (part.count, part.rows, part.padding) == (2, 2, False)


class Pids(Numbers):
    def __getitem__(self, index):
        return torch.tensor(os.getpid()), torch.tensor(index)


@forks
def test_readers_outlive_the_signals_of_a_scheduler():
    order = GlobalOrder(100, 2)
    loader = iter(StepLoader(Pids(100), order, count=len, micro_batch_size=2, workers=1))
    reader = int(next(loader).micro_batches[0].inputs[0])
    assert reader != os.getpid()
    script = f"import os; [os.kill({reader}, number) for number in (15, 2, 10, 15)]"
    subprocess.run([sys.executable, "-c", script], check=True)
    later = [int(next(loader).micro_batches[0].inputs[0]) for _ in range(20)]
    assert set(later) == {reader}
    loader.close()
    with pytest.raises(ProcessLookupError):
        os.kill(reader, 0)


def test_bad_numbers_are_refused():
    order = GlobalOrder(4, 2)
    with pytest.raises(ConfigError, match=r"mesh\.dp=2: rank 2 is not one of 0 to 1"):
        StepLoader(Numbers(4), order, count=len, dp_rank=2, dp_size=2)
    with pytest.raises(ConfigError, match=r"train\.micro_batch_size=0: at least 1"):
        StepLoader(Numbers(4), order, count=len, micro_batch_size=0)
    with pytest.raises(ConfigError, match=r"the validation set has 0 samples"):
        validation_batches(Numbers(0), count=len)


class Drawn(Numbers):
    """Sample i with noise from the generators of Python and numpy."""

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand()]), torch.tensor(index)


def test_other_generators_than_torchs_do_not_depend_on_the_layout_either():
    before = random.getstate(), np.random.get_state()[1].tolist()
    alone = samples_of_all_ranks(Drawn(20), 6, 4, 1)
    assert samples_of_all_ranks(Drawn(20), 6, 4, 2, micro_batch_size=2) == alone
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    noise = [tuple(inputs) for step in alone for _, inputs in step]
    assert len(set(noise)) == len(noise)
