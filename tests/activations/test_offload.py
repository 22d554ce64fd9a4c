"""Activations that are moved between forward and backward: their values, bytes and times."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from support.moving import (
    BLOCK,
    CPU,
    LateCarrier,
    Mixed,
    Net,
    Saving,
    gates,
    gpt,
    mixed,
    residual,
    run_block,
    same,
    save_and_leave,
    train,
    wrap,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bigtrain.activations.offload import MIN_OFFLOADED_BYTES, ActivationOffloader
from bigtrain.activations.recompute import checkpoint_block
from bigtrain.errors import BigtrainError
from bigtrain.memory.tracker import StorageTracker
from bigtrain.tensors.fake import fake_model


@pytest.fixture
def mover(tmp_path) -> Iterator[ActivationOffloader]:
    made = ActivationOffloader("disk", CPU, str(tmp_path))
    yield made
    made.close()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("make", [mixed, residual, gates, gpt])
def test_the_numbers_stay(make, bf16, mover):
    plain = train(make, None, bf16=bf16)
    assert same(train(make, mover, bf16=bf16), plain)
    assert mover.bytes_moved > 0
    late = ActivationOffloader("cpu", CPU, carrier=LateCarrier())
    assert same(train(make, late, bf16=bf16), plain)
    assert late.bytes_moved == mover.bytes_moved
    gc.collect()
    for offloader in (mover, late):
        offloader._clear_up()
        assert offloader.bytes_away == 0


def live_bytes(
    folder: str, make=mixed, *, fake: bool, move: bool = True, bf16: bool = False
) -> tuple[list[int], ActivationOffloader]:
    """Live bytes at the end of each block in forward and backward, then the peak."""
    torch.manual_seed(0)
    model, batch = make()
    seen: list[int] = []
    with ExitStack() as stack:
        if fake:
            stack.enter_context(FakeTensorMode())
            model = fake_model(model, CPU, double=False)
        tracker = stack.enter_context(StorageTracker(fake=fake))
        tracker.label(model.parameters(), "parameters")
        tracker.label(model.buffers(), "buffers")
        mover = ActivationOffloader("disk", CPU, folder, fake=fake)

        def around(block, compute):
            out = mover.offload(block, compute) if move else compute()
            seen.append(tracker.live_bytes)
            out.register_hook(lambda _: seen.append(tracker.live_bytes))
            return out

        wrap(model, around)
        x = torch.empty(batch.shape, dtype=batch.dtype) if fake else batch
        tracker.label([x], "batch")
        for _ in range(2):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = model(x).float().square().mean()
                loss.backward()
                del loss
                seen.append(tracker.live_bytes)
            for parameter in model.parameters():
                parameter.grad = None
        seen.append(tracker.peak_bytes)
        mover.close()
    return seen, mover


def test_a_run_on_fake_tensors_makes_and_frees_the_same_bytes(tmp_path):
    plain, _ = live_bytes(str(tmp_path), fake=False, move=False)
    real, mover = live_bytes(str(tmp_path), fake=False)
    fake, predicted = live_bytes(str(tmp_path), fake=True)
    assert fake == real
    for count in ("bytes_moved", "bytes_freed", "peak_bytes_away"):
        assert getattr(predicted, count) == getattr(mover, count) > 0
    # Five blocks move, except for the batch, to which the caller holds a reference.
    assert plain[5] - real[5] == mover.bytes_freed // 4 == 5 * BLOCK - 65536
    assert mover.bytes_moved == 4 * 2 * 5 * BLOCK - 4 * 65536
    assert mover.peak_bytes_away == 5 * BLOCK
    assert plain[-1] - real[-1] > 2 * BLOCK


@pytest.mark.parametrize(
    ("make", "bf16"), [(mixed, True), (residual, False), (gpt, False), (gpt, True)]
)
def test_the_same_bytes_for_other_nets(make, bf16, tmp_path):
    plain, _ = live_bytes(str(tmp_path), make, fake=False, move=False, bf16=bf16)
    real, mover = live_bytes(str(tmp_path), make, fake=False, bf16=bf16)
    fake, predicted = live_bytes(str(tmp_path), make, fake=True, bf16=bf16)
    assert fake == real
    assert real[-1] < plain[-1]
    assert predicted.bytes_freed == mover.bytes_freed > 0


def test_one_block_is_under_way_and_one_block_ahead_is_fetched():
    carrier = LateCarrier()
    mover = ActivationOffloader("cpu", CPU, carrier=carrier)
    model, x = mixed(4)

    def around(block, compute):
        carrier.told.append("begin")
        out = mover.offload(block, compute)
        carrier.told.append("end")
        assert carrier.under_way == 0
        out.register_hook(lambda _: carrier.told.append("backward"))
        return out

    model.around = around
    loss = model(x).sum()
    forward = " ".join(carrier.told)
    puts = [" ".join(f"put {n}" for n in range(5 * b, 5 * b + 5)) for b in range(3)]
    assert forward == f"begin end begin {puts[0]} end begin {puts[1]} end begin {puts[2]} end"
    carrier.told.clear()
    loss.backward()
    calls = [word for word in carrier.told if word != "take"]
    takes = [sorted(int(t[5:]) for t in calls[a:b]) for a, b in calls_between(calls, "backward")]
    # The last block has not moved, and neither has the batch: the caller holds a reference to it.
    assert takes[:2] == [[10, 11, 12, 13, 14], [5, 6, 7, 8, 9]]
    assert len(takes[2]) == 4
    assert set(takes[2]) < set(range(5))
    assert takes[3] == []
    assert carrier.most_under_way <= 2 * 5


def calls_between(calls: list[str], word: str) -> list[tuple[int, int]]:
    marks = [n for n, call in enumerate(calls) if call == word] + [len(calls)]
    return [(a + 1, b) for a, b in zip(marks, marks[1:], strict=False)]


TYPES = [*(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64)]


@pytest.mark.parametrize("dtype", [*TYPES, torch.uint8, torch.complex64])
def test_every_type_comes_back_as_it_was(dtype, mover):
    whole = (torch.randn(96, 512) * 9).to(dtype)
    views = [whole, whole.t(), whole[3:9, 5::2], whole.view(96, 8, 64).permute(2, 0, 1)]
    wanted = [view.clone() for view in views]
    strides = [view.stride() for view in views]
    size = whole.untyped_storage().nbytes()
    y, seen = save_and_leave(mover, nn.Identity(), *views)
    assert mover.bytes_moved == mover.bytes_away == size, "a storage must be moved only once"
    assert mover.bytes_freed == 0
    del views, whole
    assert mover.bytes_freed == size
    y.backward()
    assert all(map(torch.equal, seen, wanted))
    assert [view.stride() for view in seen] == strides
    assert len({view.untyped_storage()._cdata for view in seen}) == 1
    assert mover.bytes_moved == 2 * size


def test_what_somebody_else_holds_is_not_read_again(mover):
    """A storage to which the caller holds a reference is used again instead of read from
    the copy.
    """
    tensor = torch.randn(96, 512)
    y, seen = save_and_leave(mover, nn.Identity(), tensor.view(-1))
    y.backward()
    assert seen[0].data_ptr() == tensor.data_ptr()
    assert mover.bytes_moved == tensor.nbytes
    assert mover.bytes_freed == 0


def test_what_stays(mover):
    """Parameters, buffers, small, conjugated, sparse and meta tensors are not moved."""
    layer = nn.BatchNorm1d(64)
    layer.weight = nn.Parameter(torch.randn(128, 128))
    layer.register_buffer("table", torch.randn(128, 128))
    small = torch.zeros(MIN_OFFLOADED_BYTES // 4 - 1)
    elsewhere = torch.empty(10**6, device="meta")
    turned = torch.randn(128, 128, dtype=torch.complex64).conj()
    sparse = torch.eye(128).to_sparse()
    parameter = nn.Parameter(torch.randn(128, 128))
    not_moved = [layer.weight.t(), layer.table[1:], small, turned, parameter]
    y, seen = save_and_leave(mover, layer, *not_moved, elsewhere, sparse)
    y.backward()
    assert mover.bytes_moved == 0
    assert [t.data_ptr() for t in seen[:5]] == [t.data_ptr() for t in not_moved]
    large = torch.zeros(MIN_OFFLOADED_BYTES // 4)
    save_and_leave(mover, layer, large)
    assert mover.bytes_moved == large.nbytes


def test_nothing_moves_where_there_is_nowhere_to_go():
    """An offload to the device of the tensors itself moves nothing."""
    offloader = ActivationOffloader("cpu", CPU)
    model, x = mixed(3)
    wrap(model, offloader.offload)
    model(x).sum().backward()
    assert offloader.bytes_moved == 0
    offloader.close()


def test_nothing_moves_without_gradients(mover):
    model, x = mixed(3)
    wrap(model, mover.offload)
    with torch.no_grad():
        model(x)
    assert mover.bytes_moved == 0


CHANGED = (
    r"A tensor \(128, 128\) of torch.float32 .* changed in place .* at version 1 instead of 0.*"
)


@pytest.mark.parametrize("when", ["inside", "before it left", "after it left"])
@pytest.mark.parametrize("where", ["itself", "view", "base"])
def test_what_is_changed_in_place_is_refused_as_torch_does(mover, when, where):
    refused = {
        mover.offload: (BigtrainError, CHANGED + r"`x = x \+ y` and not `x \+= y`"),
        run_block: (RuntimeError, "modified by an inplace operation"),
    }
    for around, (error, message) in refused.items():
        base = torch.randn(2, 128, 128)
        x = base[1] if where == "base" else torch.randn(128, 128)
        changed = {"itself": x, "view": x.detach()[5:], "base": base}[where]
        weight = torch.randn(128, 128, requires_grad=True)

        def compute(x=x, weight=weight, changed=changed) -> Tensor:
            y = x * weight
            if when == "inside":
                changed.add_(1)
            return y

        y = around(nn.Identity(), compute)
        if when == "before it left":
            changed.add_(1)
        for _ in range(2):
            y = around(nn.Identity(), lambda y=y: y * 2)
        if when == "after it left":
            changed.add_(1)
        with pytest.raises(error, match=message):
            y.sum().backward()


def test_a_parameter_that_was_changed_is_refused_as_torch_does(mover):
    layer, x = nn.Linear(128, 128), torch.randn(4, 128, requires_grad=True)
    y = mover.offload(layer, lambda: layer(x))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(BigtrainError, match=r"\(128, 128\).* changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("blocks_between", [0, 1, 2])
def test_both_states_of_a_storage_are_right_where_torch_allows_them(mover, blocks_between):
    """Two parts of a storage without a common version counter: one is changed after the other
    is saved.
    """
    first_half, second_half = torch.randn(128, 64).unsafe_chunk(2)
    seen: list[Tensor] = []
    x = torch.ones(1, requires_grad=True)
    wanted = [first_half.clone(), second_half.exp()]
    x = mover.offload(nn.Identity(), lambda x=x, part=first_half: Saving.apply(x, seen, part))
    for _ in range(blocks_between):
        x = mover.offload(nn.Identity(), lambda x=x: x * 2)
    second_half.exp_()
    x = mover.offload(nn.Identity(), lambda x=x, part=second_half: Saving.apply(x, seen, part))
    for _ in range(2):
        x = mover.offload(nn.Identity(), lambda x=x: x * 2)
    del first_half, second_half
    x.backward()
    assert torch.equal(seen[1], wanted[0])
    assert torch.equal(seen[0], wanted[1])


@pytest.mark.parametrize("order", ["first in first out", "last in first out", "one ahead"])
def test_several_forward_passes_under_way(mover, order):
    torch.manual_seed(0)
    model, _ = residual()
    batches = [torch.randn(4, 8, 16, 16) for _ in range(4)]
    results = []
    for around in (model.around, mover.offload):
        model.around, under_way, gradients = around, [], []
        model.eval()  # in training mode the second pass would change the statistics

        def backward(loss: Tensor, gradients=gradients) -> None:
            loss.backward()
            gradients += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()

        for batch in batches:
            under_way.append(model(batch).square().sum())
            if order == "one ahead" and len(under_way) == 2:
                backward(under_way.pop(0))
        while under_way:
            backward(under_way.pop(-1 if order == "last in first out" else 0))
        results.append(gradients)
    assert same(*results)


def test_the_room_in_the_file_is_used_again(mover):
    model, x = mixed()
    wrap(model, mover.offload)
    ends = []
    for _ in range(4):
        model(x).sum().backward()
        ends.append(mover._transfer._space.end)
    assert ends == [5 * BLOCK] * 4
    assert mover.peak_bytes_away == 5 * BLOCK


def test_a_graph_that_is_dropped_frees_its_room(mover):
    model, x = mixed()
    wrap(model, mover.offload)
    for _ in range(3):
        loss = model(x).sum()
        assert mover.bytes_away == 5 * BLOCK
        del loss
    mover._clear_up()
    assert mover.bytes_away == 0
    assert mover._transfer._space.end == 5 * BLOCK


def test_a_block_that_fails_leaves_everything_in_order(mover):
    model, x = mixed(3)

    def fails() -> None:
        model.blocks[1](x)
        raise KeyError("of the user's")

    y = mover.offload(model.blocks[0], lambda: model.blocks[0](x))
    with pytest.raises(KeyError, match="of the user's"):
        mover.offload(model.blocks[1], fails)
    assert mover.bytes_away == BLOCK
    y.sum().backward()
    mover._clear_up()
    assert mover.bytes_away == 0


def test_twice_through_the_same_graph(mover):
    """A second backward pass through the same graph finds the moved tensors."""
    torch.manual_seed(0)
    model, x = mixed()
    model.eval()
    model(x).square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    wrap(model, mover.offload)
    model.zero_grad()
    loss = model(x).square().sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert same([p.grad for p in model.parameters()], wanted)
        model.zero_grad()
        # Loaded tensors are freed, except those of two blocks.
        loaded = [r() for r in mover._brought if r() is not None and r().data is not None]
        assert sum(record.nbytes for record in loaded) <= 2 * BLOCK
    assert mover.bytes_moved > 2 * 5 * BLOCK


def test_gradients_of_gradients(mover):
    torch.manual_seed(0)
    model, x = mixed(3)
    model.eval()
    x.requires_grad_()
    results = []
    for around in (model.around, mover.offload):
        model.around = around
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(slope.square().sum(), list(model.parameters())[:4]))
    assert same(*map(list, results))


def test_moved_among_recomputed_and_recomputed_within_moved(mover):
    def among(block: nn.Module, compute):
        number = [*model.blocks].index(block)
        return (checkpoint_block if number % 2 else mover.offload)(block, compute)

    def within(block: nn.Module, compute):
        return mover.offload(block, lambda: checkpoint_block(block, compute) * 1.0)

    def around(block: nn.Module, compute):
        return checkpoint_block(block, lambda: mover.offload(block, compute))

    results = []
    for how in (None, among, within, around):
        torch.manual_seed(0)
        model, x = residual(5)
        wrap(model, how or model.around)
        seen = []
        for _ in range(2):
            model(x).square().mean().backward()
            seen += [p.grad.clone() for p in model.parameters()]
        results.append(seen + [b.clone() for b in model.buffers()])
    assert all(same(results[0], result) for result in results[1:])
    assert mover.bytes_moved > 0


def test_moved_within_moved(mover):
    torch.manual_seed(0)
    model, x = mixed(4)
    model.eval()
    model(x).square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    wrap(model, lambda b, c: mover.offload(b, lambda: F.relu(mover.offload(b, c)) * 0 + c()))
    model(x).square().sum().backward()
    assert same([p.grad for p in model.parameters()], wanted)


def test_blocks_that_save_nothing_are_passed_over(tmp_path):
    carrier = LateCarrier()
    mover = ActivationOffloader("cpu", CPU, carrier=carrier)
    blocks = [Mixed(), Mixed(), nn.Identity(), Mixed(), Mixed()]
    model = Net(blocks)
    wrap(model, mover.offload)
    loss = model(torch.randn(8, 32, 64)).sum()
    carrier.told.clear()
    loss.backward()
    assert len([t for t in carrier.told if t.startswith("take")]) == 3 * 5
