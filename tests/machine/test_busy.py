"""Detection of other programs that used the machine during a run."""

from __future__ import annotations

import pytest

from bigtrain.machine import busy
from bigtrain.machine.busy import TICK_S, CpuClock, CpuUse, is_busy, others_cores


def test_what_is_not_of_the_ranks_is_others(monkeypatch):
    monkeypatch.setattr(busy, "usable_cores", lambda: 4)
    ranks = [CpuUse("a", 10.0, 9.0, 30.0), CpuUse("a", 10.0, 8.0, 29.0)]
    elsewhere = CpuUse("b", 10.0, 10.0, 40.0)
    assert others_cores([*ranks, elsewhere]) == pytest.approx((30 - 17 - TICK_S) / 10)
    assert is_busy([*ranks, elsewhere])
    quiet = [CpuUse("a", 10.0, 13.5, 30.0), CpuUse("a", 10.0, 13.0, 30.0)]
    assert not is_busy(quiet)  # others used 0.35 of four cores
    assert not is_busy([CpuUse("a", 10.0, 0.0, None)])  # the machine's total is unknown


def test_a_process_counts_itself_and_the_machine(monkeypatch):
    moments = iter([(5.0, 1.0, 100.0), (9.0, 3.5, 107.0)])
    monkeypatch.setattr(busy, "_now", lambda: next(moments))
    use = CpuClock().read()
    assert (use.elapsed, use.process, use.machine) == (4.0, 2.5, 7.0)
    monkeypatch.undo()
    clock = CpuClock()
    sum(range(300_000))
    use = clock.read()
    assert 0 < use.process <= 1.5 * use.elapsed
    assert use.machine is None or use.machine >= 0
