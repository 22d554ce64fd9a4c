"""Several ranks record residuals at the same time."""

from __future__ import annotations

import pytest
from support.ranks import run_ranks
from support.residual_files import entry, on_cpu

from bigtrain.machine.residuals import (
    record_residuals,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bigtrain"


def write_often(context, times):
    for number in range(times):
        record_residuals([entry(when=f"{context.rank}-{number}")] * 2)


def test_runs_that_end_at_once_all_leave_their_entries(cache):
    run_ranks(write_often, 3, 30)
    assert on_cpu("torch").ranks == 3 * 30 * 2
    assert on_cpu("torch").runs == 3 * 30
    assert sorted(p.name for p in cache.iterdir()) == ["residuals.json", "residuals.lock"]
