"""Tensors that column-parallel layers save, and their exchanges, on fakes of one rank of two."""

import pytest
import torch
import torch.nn.functional as F
from support.sliced_models import HEADS, WORDS, gpt_case, recompute
from support.sliced_models import WIDTH as MODEL_WIDTH
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bigtrain.memory.tracker import StorageTracker
from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.install import RULES, slice_modules, slice_tensors
from bigtrain.slicing.sliced_tensor import SlicedTensor, local_of
from bigtrain.slicing.slices import Slices
from bigtrain.tensors.fake import fake_model

BATCH, LENGTH, WIDTH, COLUMNS = 2, 8, 6, 10


class Order(TorchDispatchMode):
    """Records matrix products in order, each with the exchanges before it."""

    def __init__(self, exchanges):
        super().__init__()
        self.exchanges, self.seen = exchanges, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket.__name__ in ("mm", "addmm"):
            self.seen.append([e.kind for e in self.exchanges])
        return func(*args, **(kwargs or {}))


def make_inputs(group, sequence, count, dtype=torch.float32):
    """An input, sliced along the sequence if wanted, and `count` column-sliced weights."""
    assert RULES
    whole = torch.empty(BATCH, LENGTH, WIDTH, dtype=dtype)
    sequence_slices, columns = Slices.even(1, LENGTH), Slices.even(0, COLUMNS)
    shard = sequence_slices.local(whole, group.rank, group.size) if sequence else whole
    x = shard.clone().requires_grad_() * 1.0
    weights = [
        torch.empty(COLUMNS // 2, WIDTH, dtype=torch.float32, requires_grad=True)
        for _ in range(count)
    ]
    sliced = [SlicedTensor.of(w, columns, group) for w in weights]
    return SlicedTensor.of(x, sequence_slices, group) if sequence else x, sliced


@pytest.mark.parametrize("sequence", [False, True])
def test_one_product_adds_up_while_its_weight_has_its_gradient(sequence):
    exchanges = []
    group = SliceGroup(0, 2, exchanges=exchanges, sequence_dim=1 if sequence else None)
    with FakeTensorMode():
        x, (weight,) = make_inputs(group, sequence, 1)
        made = local_of(F.linear(x, weight)).sum()
        del exchanges[:]
        with Order(exchanges) as order:
            made.backward()
    if sequence:  # the gather overlaps with the input's gradient
        assert order.seen == [["all_gather"], ["all_gather", "reduce_scatter"]]
    else:
        assert order.seen == [[], ["all_reduce"]]


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_of_three_products_are_added_up_together(sequence):
    exchanges = []
    group = SliceGroup(0, 2, exchanges=exchanges, sequence_dim=1 if sequence else None)
    with FakeTensorMode():
        x, weights = make_inputs(group, sequence, 3)
        made = sum(local_of(F.linear(x, weight)).sum() for weight in weights)
        assert len(exchanges) == (1 if sequence else 0)
        made.backward()
    kinds = [e.kind for e in exchanges]
    assert kinds == (["all_gather", "all_gather", "reduce_scatter"] if sequence else ["all_reduce"])


@pytest.mark.parametrize("sequence", [False, True])
def test_an_autocast_exchanges_what_it_computes_with(sequence):
    """fp32 inputs are cast once for all products, before they are sent."""
    exchanges = []
    group = SliceGroup(0, 2, exchanges=exchanges, sequence_dim=1 if sequence else None)
    nbytes = BATCH * LENGTH * WIDTH * 2
    with FakeTensorMode(), StorageTracker(fake=True) as tracker:
        x, weights = make_inputs(group, sequence, 3)
        before = tracker.live_bytes
        with torch.autocast("cpu", torch.bfloat16):
            results = [local_of(F.linear(x, weight)) for weight in weights]
        assert all(result.dtype == torch.bfloat16 for result in results)
        group.inputs.clear()
        made = sum(result.numel() * 2 for result in results)
        cast = sum(local_of(weight).numel() * 2 for weight in weights)
        assert tracker.live_bytes - before == made + cast + nbytes // (2 if sequence else 1)
        sum(result.float().sum() for result in results).backward()
    assert {e.nbytes for e in exchanges} == {nbytes}


def test_a_sharded_input_is_saved_as_a_shard():
    group = SliceGroup(0, 2, sequence_dim=1)
    shard_bytes = BATCH * LENGTH // 2 * WIDTH * 4
    with FakeTensorMode(), StorageTracker(fake=True) as tracker:
        x, weights = make_inputs(group, True, 2)
        before = tracker.live_bytes
        results = [local_of(F.linear(x, weight)) for weight in weights]
        made = sum(result.numel() * 4 for result in results)
        # Gathered once more, for a third product
        assert tracker.live_bytes - before == made + 2 * shard_bytes
        del x
        assert tracker.live_bytes - before == made


def test_what_is_gathered_is_let_go_when_another_product_begins():
    group = SliceGroup(0, 2, sequence_dim=1)
    with FakeTensorMode():
        x, (weight,) = make_inputs(group, True, 1)
        hidden = F.linear(x, weight)
        assert len(group.inputs) == 1
        down = torch.empty(WIDTH, COLUMNS // 2)
        F.linear(hidden, SlicedTensor.of(down, Slices.even(1, COLUMNS), group))
        assert not group.inputs


def kept_bytes(layers, sequence_dim, mode):
    """Bytes that the first of two ranks saves of an fp32 GPT for the backward pass."""
    case = gpt_case(tied=False, layers=layers)
    group = SliceGroup(0, 2, sequence_dim=sequence_dim)
    with FakeTensorMode():
        model = fake_model(case.make(), torch.device("cpu"), double=False)
        slice_tensors(model, case.slices, group)
        slice_modules(model, case.slices, group)
        recompute(case.blocks(model), mode)
        with StorageTracker(fake=True) as tracker:
            tracker.label(model.parameters(), "parameters")
            before = tracker.live_bytes
            logits = model(torch.empty(3, 8, dtype=torch.long))
            assert logits.shape[-1] == WORDS
            return tracker.live_bytes - before


@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_selective_saves_sums_and_not_partial_products(sequence_dim):
    """In sbh numbers: input and first sum, whole or in shards; q, k, v, mixed, 4 of the MLP.

    The sum at the end of the block is not read again.
    """
    more = kept_bytes(3, sequence_dim, "selective") - kept_bytes(2, sequence_dim, "selective")
    sbh, rows = 3 * 8 * MODEL_WIDTH, 3 * 8 * HEADS  # attention saves one number per row of scores
    between = 2 * sbh if sequence_dim is None else sbh
    assert more == 4 * (between + 8 * sbh // 2 + rows // 2)
