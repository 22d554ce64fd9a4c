"""Boundary tensors between stages with tensor parallelism: each rank sends a part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor

from bigtrain.cutting.stage_program import BoundaryTensor
from bigtrain.ranks.context import RunContext
from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.scatter_gather import (
    MIN_SCATTERED_BYTES,
    Crossing,
    gather_boundary,
    scatter_boundary,
    scattered_bytes,
    sent_meta,
)
from bigtrain.slicing.sliced_tensor import SlicedTensor, is_sliced, local_of, whole_of
from bigtrain.slicing.slices import Slices

TYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64),
)
SHAPES = ((7, 11, 30), (2311,), (48, 1, 48))
"""Two of these numbers of elements or dims are divisible by neither 2 nor 3."""


def boundary_tensors() -> Iterator[Tensor]:
    numbers = torch.Generator().manual_seed(2)
    for dtype in TYPES:
        for shape in SHAPES:
            yield (100 * torch.rand(shape, generator=numbers)).to(dtype)


def send_and_receive(context: RunContext) -> list[tuple[int, int]]:
    """Send every boundary tensor to this rank as the next stage; return (sent, all) elements."""
    group = SliceGroup(context.tp_rank, context.tp_size, context.group("tp"))
    counts = []
    for whole in boundary_tensors():
        trains = whole.is_floating_point() or whole.is_complex()
        leaf = whole.clone().requires_grad_(trains)
        sent = scatter_boundary(leaf, group)
        meta = sent_meta(whole.to("meta").requires_grad_(trains), group)
        assert (sent.shape, sent.dtype, sent.requires_grad) == (meta.shape, meta.dtype, trains)
        assert sent.untyped_storage().nbytes() == sent.nbytes
        received = sent.detach().requires_grad_(trains)
        gathered = gather_boundary(received, whole.to("meta"), group)
        assert torch.equal(gathered, whole)
        if trains:
            # A gradient whose strides differ from its tensor's.
            gradient = whole.flip(0).t().contiguous().t() if whole.dim() == 2 else whole.flip(0)
            gathered.backward(gradient)
            assert received.grad.shape == sent.shape
            sent.backward(received.grad)
            assert torch.equal(leaf.grad, gradient)
        counts.append((sent.numel(), whole.numel()))
    return counts


@pytest.mark.parametrize("tp", [2, 3])
def test_parts_are_gathered_to_what_they_were_in_every_type(tp: int) -> None:
    results = run_ranks(send_and_receive, tp, tp=tp)
    for of_ranks in zip(*results, strict=True):
        parts = [part for part, _ in of_ranks]
        assert sum(parts) == of_ranks[0][1]
        assert max(parts) - min(parts) <= 1


def test_what_fits_in_a_packet_goes_whole() -> None:
    group = SliceGroup(0, 4)
    small, large = torch.ones(MIN_SCATTERED_BYTES // 4 - 1), torch.ones(MIN_SCATTERED_BYTES // 4)
    assert scatter_boundary(small, group) is small
    assert gather_boundary(small, small.to("meta"), group) is small
    assert scattered_bytes(small.nbytes, 4) == sent_meta(small, group).nbytes == small.nbytes
    assert scatter_boundary(large, group).shape == (MIN_SCATTERED_BYTES // 16,)
    assert (
        scattered_bytes(large.nbytes, 4)
        == sent_meta(large, group).nbytes
        == MIN_SCATTERED_BYTES // 4
    )


def test_without_a_group_tensors_are_whole() -> None:
    tensor: Any = torch.ones(MIN_SCATTERED_BYTES)
    assert (
        scatter_boundary(tensor, None)
        is gather_boundary(tensor, tensor, None)
        is sent_meta(tensor, None)
        is tensor
    )


def send_and_receive_shards(context: RunContext) -> list[str]:
    """Send a tensor of 7 positions to itself as the next stage; return the exchanges."""
    exchanges: list[Any] = []
    group_arguments = (context.tp_rank, context.tp_size, context.group("tp"), exchanges)
    group, slices, kinds = SliceGroup(*group_arguments, sequence_dim=1), Slices.even(1, 7), []
    numbers = torch.arange(3 * 7 * 4, dtype=torch.float64).view(3, 7, 4)
    for whole in (numbers, numbers.permute(1, 0, 2).contiguous().permute(1, 0, 2)):
        shard = slices.local(whole, group.rank, group.size)
        boundary = BoundaryTensor.of((0, 0), whole, trained=True)
        for is_between_ranks in (True, False):
            for lies_so in (True, False):
                crossing = Crossing(group, is_between_ranks)
                leaf = (shard if lies_so else whole).clone().requires_grad_()
                sent = boundary.send(
                    SlicedTensor.of(leaf, slices, group) if lies_so else leaf, crossing
                )
                meta = boundary.sent_meta(crossing)
                assert (sent.shape, sent.dtype) == (meta.shape, meta.dtype)
                assert sent.requires_grad is meta.requires_grad is sent.is_contiguous() is True
                assert boundary.gathered_bytes(crossing) == 0
                received = sent.detach().requires_grad_()
                received_tensor = boundary.receive(received, crossing)
                assert is_sliced(received_tensor)
                assert received_tensor.shape == whole.shape
                assert torch.equal(local_of(received_tensor), shard)
                local_of(received_tensor).backward(shard.flip(0))
                sent.backward(received.grad)
                kinds += [exchange.kind for exchange in exchanges]
                assert torch.equal(leaf.grad, (shard if lies_so else whole).flip(0))
                # A tensor that is whole here has a whole gradient: the backward pass needs one
                # gather.
                assert [exchange.kind for exchange in exchanges] == ["all_gather"] * (not lies_so)
                exchanges.clear()
    return kinds


@pytest.mark.parametrize("tp", [2, 3])
def test_a_sequence_shard_is_sent_without_a_gather(tp: int) -> None:
    for kinds in run_ranks(send_and_receive_shards, tp, tp=tp):
        assert kinds == ["all_gather"] * 4


def test_which_tensors_are_sent_as_sequence_shards() -> None:
    """Sequence activations are; masks, tables, short sequences and tensors without a width
    are not.
    """

    def lies(*shape: int, trained: bool = True, size: int = 4, **kind: Any) -> Slices | None:
        whole = torch.empty(shape, device="meta", **kind).requires_grad_(trained)
        crossing = Crossing(SliceGroup(0, size, sequence_dim=1))
        assert Crossing(SliceGroup(0, size), is_between_ranks=True).sequence_shard(whole) is None
        assert Crossing().sequence_shard(whole) is None
        shard = crossing.sequence_shard(whole)
        return None if shard is None else shard[0]

    assert lies(2, 9, 8) == Slices.even(1, 9)
    assert lies(2, 4, 3, 8, dtype=torch.bfloat16) == Slices.even(1, 4)
    assert lies(2, 3, 8) is None
    assert lies(9, 8) is None
    assert lies(2, 9, 8, trained=False) is None
    assert lies(2, 9, 9, trained=False, dtype=torch.bool) is None
    assert lies(2, 9, 8, dtype=torch.complex64) is None


def test_tensors_other_than_sequence_shards_are_scattered() -> None:
    group = SliceGroup(0, 4, sequence_dim=1)
    table = torch.ones(1, 64, 32)
    boundary = BoundaryTensor.of((0, 0), table, trained=False)
    between, within = Crossing(group, is_between_ranks=True), Crossing(group)
    assert boundary.sent_meta(between).shape == (512,)
    assert boundary.gathered_bytes(between) == table.nbytes
    assert boundary.sent_meta(within).shape == table.shape
    assert boundary.gathered_bytes(within) == 0
    assert whole_of(boundary.receive(boundary.send(table, within), within)).equal(table)
