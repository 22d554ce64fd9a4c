"""The memory tracker against figures computed by hand, and fake tensors against real ones."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from bigtrain.memory.cap import device_capacity_bytes
from bigtrain.memory.meter import MemoryMeter
from bigtrain.memory.timeline import (
    MEMORY_KINDS,
    Breakdown,
    Peak,
    Span,
    Timeline,
    highest_peak,
    kinds_in,
)
from bigtrain.memory.tracker import StorageTracker

MB = 1_000_000


def test_a_timeline_finds_its_peak_and_what_it_is_made_of():
    spans = (
        Span(10, "parameters", 1, 99),
        Span(5, "activations", 2, 6),
        Span(7, "temporary", 4, 5),
        Span(20, "temporary", 7, 8),
    )
    timeline = Timeline(spans, ((0, "forward"), (7, "backward")))
    peak = timeline.peak()
    assert peak == Peak("backward", Breakdown(parameters=10, temporary=20))
    assert timeline.peak(Breakdown(optimizer=100)).bytes == 130
    assert highest_peak([peak, Peak("step", Breakdown(buffers=3))]) == peak
    assert Timeline((), ((0, "step"),)).peak() == Peak("step", Breakdown())


def test_frozen_parameters_are_a_part_only_where_there_are_any():
    some, none = Breakdown(parameters=3, frozen=4), Breakdown(parameters=3)
    assert (some.total, some.by_kind()["frozen"]) == (7, 4)
    assert "frozen" not in none.by_kind()
    assert kinds_in([none.by_kind(), None]) == [kind for kind in MEMORY_KINDS if kind != "frozen"]
    assert kinds_in([none.by_kind(), some.by_kind()]) == list(MEMORY_KINDS)
    layer = nn.Linear(2, 3)
    layer.weight.requires_grad_(False)
    meter = MemoryMeter(torch.device("cpu"), track_steps=1)
    with meter.window():
        held = layer.weight.clone(), layer.bias.clone()
        meter.label_parameters([held[0].detach(), held[1]])
    peak = meter.measured().peak
    assert peak is not None
    assert (peak.breakdown.frozen, peak.breakdown.parameters) == (24, 12)


def test_a_freed_storage_makes_room_before_the_next_is_counted():
    with StorageTracker() as tracker:
        for _ in range(3):
            x = torch.empty(MB, dtype=torch.uint8)
            del x
        assert tracker.live_bytes == 0
    assert tracker.peak_bytes == MB


def test_views_share_their_storage_and_in_place_operations_make_none():
    with StorageTracker() as tracker:
        x = torch.zeros(MB, dtype=torch.uint8)
        view = x[: MB // 2].view(-1, 10)
        view.add_(1)
        assert tracker.live_bytes == MB
        y = x.clone()
        assert tracker.live_bytes == 2 * MB
        del x
        assert tracker.live_bytes == 2 * MB  # the view still refers to the storage
        del view, y
    assert tracker.live_bytes == 0


def test_a_storage_resized_in_place_is_counted_at_its_new_size():
    with StorageTracker() as tracker:
        x = torch.zeros(MB, dtype=torch.uint8)
        tracker.label([x], "parameters")
        x.untyped_storage().resize_(3 * MB)
        assert tracker.live_bytes == 3 * MB
        x.untyped_storage().resize_(0)
        assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 3 * MB
    assert tracker.timeline().peak().breakdown.parameters == 3 * MB
    before = x.untyped_storage().nbytes()
    x.untyped_storage().resize_(before + 5)  # outside the window changes are not reported
    assert tracker.live_bytes == 0


def linear_step(meter: MemoryMeter, rows: int) -> None:
    net = nn.Linear(100, 50, bias=False, dtype=torch.float64)
    meter.label(net.parameters(), "parameters")
    with meter.step():
        x = torch.ones(rows, 100, dtype=torch.float64)
        meter.label([x], "activations")
        meter.phase("forward")
        y = net(x)
        loss = (y * y).sum()
        del y
        meter.phase("backward")
        loss.backward()
        meter.label((p.grad for p in net.parameters()), "gradients")


def test_the_parts_of_a_linear_layer_are_those_of_the_textbook():
    meter = MemoryMeter(torch.device("cpu"), track_steps=1)
    linear_step(meter, rows=1000)
    peak = meter.measured().peak
    assert peak is not None
    parts = peak.breakdown
    assert parts.parameters == 100 * 50 * 8
    assert peak.phase == "backward"
    # Input 1000 x 100; the layer's output 1000 x 50, saved twice by the product (one storage).
    assert parts.activations >= 1000 * 100 * 8 + 1000 * 50 * 8
    assert parts.total == peak.bytes == meter.peak_bytes()


def test_the_window_closes_and_then_costs_nothing():
    meter = MemoryMeter(torch.device("cpu"), track_steps=1)
    assert meter.tracking
    linear_step(meter, rows=10)
    assert not meter.tracking
    before = meter.peak_bytes()
    with meter.window():
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        torch.zeros(10 * MB)
    assert meter.peak_bytes() == before


def test_no_tracking_measures_only_the_process():
    meter = MemoryMeter(torch.device("cpu"), track_steps=0)
    assert not meter.tracking
    assert meter.peak_bytes() is None
    assert meter.measured().peak is None


def test_fake_tensors_have_the_same_timeline_as_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = MemoryMeter(torch.device("cpu"), track_steps=1)
    linear_step(real, rows=77)
    with FakeTensorMode(), StorageTracker(fake=True) as fake, StorageTracker() as unmoved:
        net = nn.Linear(100, 50, bias=False, dtype=torch.float64)
        x = torch.ones(77, 100, dtype=torch.float64)
        loss = net(x).square().sum()
        loss.backward()
    assert fake.live_bytes == (2 * 100 * 50 + 77 * 100 + 1) * 8
    assert unmoved.peak_bytes == 0  # a real run does not count fake tensors


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux can reset a process's peak"
)
def test_the_process_peak_sees_what_came_and_went():
    # In a new process, because an old one reuses memory that it has freed.
    program = """
import torch
from bigtrain.memory.meter import ProcessPeak
process = ProcessPeak()
block = torch.ones(64 * 2**20, dtype=torch.uint8)
del block
print(process.bytes())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert 60 * 2**20 < int(done.stdout) < 90 * 2**20


def test_the_host_says_how_much_it_has():
    capacity = device_capacity_bytes(torch.device("cpu"))
    assert capacity is not None
    assert capacity > 2**28


def test_an_exchange_is_over_when_its_own_storages_are_gone():
    meter = MemoryMeter(torch.device("cpu"))
    with meter.step():
        tensor = torch.zeros(8)
        before = meter.peak_bytes()
        with meter.exchange():
            buffers = [torch.zeros(1024)]  # a thread releases the buffer a moment later
            thread = threading.Thread(target=lambda: (time.sleep(0.01), buffers.clear()))
            thread.start()
        again = torch.zeros(1024)
        assert meter.peak_bytes() == before + again.nbytes
        thread.join()
    assert tensor.nbytes == 32
