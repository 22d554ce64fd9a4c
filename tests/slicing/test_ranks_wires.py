"""What stages send each other of a tensor that all ranks of the tp axis have: each its part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor

from bigtrain.ranks.context import RunContext
from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.wires import MIN_DEALT_BYTES, dealt, part_bytes, sent_meta, undealt

TYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64),
)
SHAPES = ((7, 11, 30), (2311,), (48, 1, 48))
"""Of which two divide by neither 2 nor 3."""


def wires() -> Iterator[Tensor]:
    numbers = torch.Generator().manual_seed(2)
    for dtype in TYPES:
        for shape in SHAPES:
            yield (100 * torch.rand(shape, generator=numbers)).to(dtype)


def there_and_back(context: RunContext) -> list[tuple[int, int]]:
    """Send every wire to a next stage that this rank is, too; the elements sent, and all."""
    group = SliceGroup(context.tp_rank, context.tp_size, context.group("tp"))
    counts = []
    for whole in wires():
        trains = whole.is_floating_point() or whole.is_complex()
        leaf = whole.clone().requires_grad_(trains)
        sent = dealt(leaf, group)
        meta = sent_meta(whole.to("meta").requires_grad_(trains), group)
        assert (sent.shape, sent.dtype, sent.requires_grad) == (meta.shape, meta.dtype, trains)
        assert sent.untyped_storage().nbytes() == sent.nbytes
        received = sent.detach().requires_grad_(trains)
        found = undealt(received, whole.to("meta"), group)
        assert torch.equal(found, whole)
        if trains:
            # A gradient that does not lie as its tensor does.
            gradient = whole.flip(0).t().contiguous().t() if whole.dim() == 2 else whole.flip(0)
            found.backward(gradient)
            assert received.grad.shape == sent.shape
            sent.backward(received.grad)
            assert torch.equal(leaf.grad, gradient)
        counts.append((sent.numel(), whole.numel()))
    return counts


@pytest.mark.parametrize("tp", [2, 3])
def test_parts_are_gathered_to_what_they_were_in_every_type(tp: int) -> None:
    found = run_ranks(there_and_back, tp, tp=tp)
    for of_ranks in zip(*found, strict=True):
        parts = [part for part, _ in of_ranks]
        assert sum(parts) == of_ranks[0][1]
        assert max(parts) - min(parts) <= 1


def test_what_fits_in_a_packet_goes_whole() -> None:
    group = SliceGroup(0, 4)
    small, large = torch.ones(MIN_DEALT_BYTES // 4 - 1), torch.ones(MIN_DEALT_BYTES // 4)
    assert dealt(small, group) is small
    assert undealt(small, small.to("meta"), group) is small
    assert part_bytes(small.nbytes, 4) == sent_meta(small, group).nbytes == small.nbytes
    assert dealt(large, group).shape == (MIN_DEALT_BYTES // 16,)
    assert part_bytes(large.nbytes, 4) == sent_meta(large, group).nbytes == MIN_DEALT_BYTES // 4


def test_without_slices_nothing_is_dealt_out() -> None:
    tensor: Any = torch.ones(MIN_DEALT_BYTES)
    assert dealt(tensor, None) is undealt(tensor, tensor, None) is sent_meta(tensor, None) is tensor
