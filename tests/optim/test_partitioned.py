"""Updates in pieces: the partition, any optimizer on pieces, their state, and fp32 copies."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.whole import InMemory, as_saved, whole_tensors
from torch import nn

import bigtrain.optim.partitioned
from bigtrain.optim.partition import chunk_elements, merge_slices, partition_evenly
from bigtrain.optim.partitioned import PartitionedUpdate, ReplicaGroup, Slice
from bigtrain.optim.state_store import StateStore
from bigtrain.optim.update import MakeOptimizer, WholeUpdate

SIZES = {"a": 1000, "b": 1, "c": 64, "d": 3000}


@pytest.mark.parametrize("splits", [True, False])
def test_an_empty_parameter_has_an_empty_piece_on_one_rank(splits):
    cuts = partition_evenly({"a": 640, "none": 0, "b": 640}, 2, splits)
    assert cuts == [("a", 0, 0, 640), ("none", 1, 0, 0), ("b", 1, 0, 640)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("most", [None, 64, 256])
def test_cuts_cover_every_element_once_in_equal_stretches(ranks, most):
    cuts = partition_evenly(SIZES, ranks, may_split=True, max_elements=most)
    for name, size in SIZES.items():
        mine = [(start, stop) for n, _, start, stop in cuts if n == name]
        assert mine[0][0] == 0
        assert mine[-1][1] == size
        assert all(a[1] == b[0] for a, b in itertools.pairwise(mine))
    assert [rank for _, rank, _, _ in cuts] == sorted(rank for _, rank, _, _ in cuts)
    for rank in range(ranks):
        owned = sum(stop - start for _, owner, start, stop in cuts if owner == rank)
        assert owned == pytest.approx(sum(SIZES.values()) / ranks, abs=64)
    assert all(0 < stop - start <= (most or 10**9) for _, _, start, stop in cuts)


def test_uncuttable_parameters_go_whole_to_the_rank_of_their_middle():
    cuts = partition_evenly(SIZES, 2, may_split=False, max_elements=64)
    assert cuts == [("a", 0, 0, 1000), ("b", 0, 0, 1), ("c", 0, 0, 64), ("d", 1, 0, 3000)]


def test_neighbouring_cuts_of_an_owner_are_sent_as_one():
    cuts = [
        Slice("a", 0, 0, 64),
        Slice("a", 0, 64, 99),
        Slice("a", 1, 99, 120),
        Slice("b", 1, 0, 5),
    ]
    assert merge_slices(cuts) == [Slice("a", 0, 0, 99), Slice("a", 1, 99, 120), Slice("b", 1, 0, 5)]


def test_a_chunk_is_a_32nd_of_a_share_and_not_tiny():
    assert chunk_elements(10**9, 1) == pytest.approx(10**9 / 32, abs=64)
    assert chunk_elements(10**9, 4) == pytest.approx(10**9 / 128, abs=64)
    assert chunk_elements(1000, 4) == 1 << 18
    assert chunk_elements(10**9, 3) % 64 == 0


class Chunked(StateStore):
    """A store that moves nothing, but lets the update process a chunk at a time."""

    chunked = True


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(9, 33), nn.ReLU(), nn.Linear(33, 5))
    return layers.to(dtype)


def descend(module: nn.Module, update, steps: int, first: int = 0) -> None:
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        dtype = next(module.parameters()).dtype
        inputs = torch.randn(6, 9, generator=generator).to(dtype)
        module(inputs).square().sum().backward()
        update.step()
        module.zero_grad()


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module by name."""
    return dict(module.named_parameters())


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    **{
        name: (lambda p, name=name: getattr(torch.optim, name)(p, lr=0.01))
        for name in ("Adam", "Adamax", "NAdam", "RAdam", "Adagrad", "RMSprop", "Rprop", "ASGD")
    },
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(bigtrain.optim.partitioned, "chunk_elements", lambda *_: 64)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_gives_the_same_numbers_in_chunks(name):
    whole, cut = model(), model()
    descend(whole, WholeUpdate(parameters_of(whole), OPTIMIZERS[name]), 4)
    update = PartitionedUpdate(parameters_of(cut), OPTIMIZERS[name], state_store=Chunked())
    if name != "Adafactor":
        assert len(update.optimizer.param_groups[0]["params"]) > 4
    descend(cut, update, 4)
    for mine, theirs in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.usefixtures("small_chunks")
def test_an_optimizer_that_needs_whole_tensors_gets_them():
    cut = model()
    update = PartitionedUpdate(parameters_of(cut), torch.optim.Adafactor, state_store=Chunked())
    shapes = [p.shape for p in update.optimizer.param_groups[0]["params"]]
    assert shapes == [p.shape for p in cut.parameters()]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["SGD", "AdamW, fused", "AdamW, foreach", "Adafactor"])
def test_state_goes_from_pieces_to_whole_and_back(name):
    whole, in_pieces, third = model(), model(), model()
    pieces = PartitionedUpdate(parameters_of(whole), OPTIMIZERS[name], state_store=Chunked())
    descend(whole, pieces, 3)
    updates = [
        (in_pieces, WholeUpdate(parameters_of(in_pieces), OPTIMIZERS[name])),
        (third, PartitionedUpdate(parameters_of(third), OPTIMIZERS[name])),
    ]
    for module, update in updates:
        module.load_state_dict(whole.state_dict())
        for full, value in as_saved(whole_tensors(pieces.state())).items():
            parameter, _, key = full.rpartition(".")
            update.load_state(parameter, key, value)
        assert update.state().keys() == pieces.state().keys()
    for module, update in [(whole, pieces), *updates]:
        descend(module, update, 2, first=3)
    for mine, second, last in zip(
        *(m.parameters() for m in (whole, in_pieces, third)), strict=True
    ):
        assert torch.equal(mine, second)
        assert torch.equal(mine, last)


@pytest.mark.usefixtures("small_chunks")
def test_images_laid_out_by_channels_are_updated_whole_and_saved_right():
    def conv() -> nn.Module:
        torch.manual_seed(2)
        return nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)

    def rounds(module: nn.Module, update) -> None:
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            inputs = torch.randn(2, 3, 5, 5, generator=generator).double()
            module(inputs).square().sum().backward()
            update.step()
            module.zero_grad()

    for make in (OPTIMIZERS["AdamW, fused"], torch.optim.Adafactor):
        whole, cut = conv(), conv()
        plain = WholeUpdate(parameters_of(whole), make)
        pieces = PartitionedUpdate(parameters_of(cut), make, state_store=Chunked())
        rounds(whole, plain)
        rounds(cut, pieces)
        assert torch.equal(whole.weight, cut.weight)
        state = whole_tensors(pieces.state())
        for key, value in whole_tensors(plain.state()).items():
            assert torch.equal(value, state[key]), key


def test_fp32_values_of_bf16_parameters_are_kept_once_and_updated():
    reference, low = model(torch.float32), model(torch.float32)
    update = PartitionedUpdate(parameters_of(low), OPTIMIZERS["SGD"], low_names=["0.weight"])
    assert low[0].weight.dtype == torch.bfloat16
    assert low[2].weight.dtype == torch.float32
    before = whole_tensors(update.masters())["0.weight"]
    assert torch.equal(before, reference[0].weight)
    for p in low.parameters():
        p.grad = torch.full_like(p, 2**-12)
    update.step()
    after = whole_tensors(update.masters())["0.weight"]
    assert after.dtype == torch.float32
    # The change is too small for bf16, but the fp32 copy has it.
    expected = before - 0.01 * (2**-12 + 0.1 * before)
    assert torch.allclose(after, expected, rtol=0, atol=1e-8)
    assert torch.equal(low[0].weight, after.bfloat16())
    update.load_master("0.weight", InMemory(before + 1))
    assert torch.equal(whole_tensors(update.masters())["0.weight"], before + 1)
    fp32_numbers = sum(
        t.numel() for t in update.resident_tensors() if t.shape == before.flatten().shape
    )
    assert fp32_numbers == 2 * before.numel()  # the fp32 values and their momentum


def test_parameters_without_gradient_or_elements_are_left_alone():
    module = nn.ParameterDict(
        {"used": nn.Parameter(torch.ones(3)), "not": nn.Parameter(torch.ones(3))}
    )
    module["empty"] = nn.Parameter(torch.zeros(0))
    for make in (OPTIMIZERS["SGD"], torch.optim.Adafactor):
        update = PartitionedUpdate(parameters_of(module), make, state_store=Chunked())
        module["used"].grad = torch.ones(3)
        update.step()
        assert torch.equal(module["not"], torch.ones(3))
        assert not torch.equal(module["used"], torch.ones(3))


def test_a_parameter_with_gaps_is_updated_nevertheless():
    whole, cut = (nn.ParameterDict({"p": nn.Parameter(torch.ones(4, 6)[:, :3])}) for _ in range(2))
    plain = WholeUpdate(parameters_of(whole), OPTIMIZERS["SGD"])
    for module, update in (
        (whole, plain),
        (cut, PartitionedUpdate(parameters_of(cut), OPTIMIZERS["SGD"], state_store=Chunked())),
    ):
        module["p"].grad = torch.ones(4, 3)
        update.step()
    assert torch.equal(whole["p"], cut["p"])


@pytest.mark.parametrize("name", ["SGD", "AdamW, fused", "NAdam"])
def test_the_state_of_a_number_without_dimensions_goes_to_pieces_and_back(name):
    def once(module: nn.Module, update) -> None:
        module["p"].grad = torch.tensor(0.5)
        update.step()

    def modules() -> nn.Module:
        return nn.ParameterDict({"p": nn.Parameter(torch.tensor(2.0))})

    whole, in_pieces, third = modules(), modules(), modules()
    updates = [(whole, WholeUpdate(parameters_of(whole), OPTIMIZERS[name]))]
    once(*updates[0])
    for module, kind in ((in_pieces, PartitionedUpdate), (third, WholeUpdate)):
        update, (source, before) = kind(parameters_of(module), OPTIMIZERS[name]), updates[-1]
        module.load_state_dict(source.state_dict())
        for full, value in as_saved(whole_tensors(before.state())).items():
            update.load_state(*full.split("."), value)
        updates.append((module, update))
    for module, update in updates:
        once(module, update)
    assert whole["p"] == in_pieces["p"] == third["p"]


def test_more_ranks_than_elements_leaves_some_with_nothing_to_update():
    parameter = nn.Parameter(torch.ones(5))
    update = PartitionedUpdate(
        {"p": parameter}, OPTIMIZERS["SGD"], replicas=ReplicaGroup(rank=1, size=3)
    )
    parameter.grad = torch.ones(5)
    assert update.optimizer.param_groups[0]["params"] == []
    update.optimizer.step()
