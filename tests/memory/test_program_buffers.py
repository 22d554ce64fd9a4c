"""Buffers that compiled programs allocate without a dispatch mode seeing them."""

from __future__ import annotations

import pytest
import torch

from bigtrain.memory.program_buffers import announce_buffers
from bigtrain.memory.tracker import StorageTracker


def make(rows: int) -> torch.Tensor:
    """Allocate like a program of inductor, with the functions that it looks up when it
    is loaded.
    """
    return torch._C._dynamo.guards._empty_strided_cpu((rows, 4), (4, 1), torch.float32)


def test_a_tracker_counts_what_a_program_makes_and_drops() -> None:
    announce_buffers()
    announce_buffers()
    with StorageTracker() as tracker:
        buffer = make(8)
        assert tracker.live_bytes == 8 * 4 * 4
        second_buffer = make(2).view(-1)
        assert tracker.live_bytes == 10 * 4 * 4
        del buffer
        assert tracker.live_bytes == second_buffer.nbytes
        del second_buffer
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 10 * 4 * 4
    make(8)
    assert tracker.peak_bytes == 10 * 4 * 4


def test_a_forecast_does_not_count_what_a_run_makes_beside_it() -> None:
    announce_buffers()
    with StorageTracker(fake=True) as tracker:
        make(8)
    assert tracker.peak_bytes == 0


def test_a_limit_holds_for_the_buffers_of_programs() -> None:
    announce_buffers()
    with StorageTracker(limit_bytes=200) as tracker:
        within_limit = make(8)
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 128 bytes"):
            make(8)
        assert tracker.live_bytes == within_limit.nbytes
