"""Printed peaks of training runs are forecast within the bars, with the rows' own settings."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import published_fsdp1 as fsdp1  # noqa: E402
import published_peaks as peaks  # noqa: E402
from published_rows import QUANTITIES, Published, all_rows  # noqa: E402

from bigtrain.costs.forecast import Profile  # noqa: E402
from bigtrain.memory.timeline import BlockTicks, Span, Timeline  # noqa: E402

KEPT = BENCHMARKS / "results" / "published_peaks.json"
BARS = {
    # the label of a row, its GPUs: the largest error of its peak, and of its end
    ("none", 1): (0.001, 0.0005),
    ("none", 2): (0.01, 0.0005),
    ("accelerated-peft-bnb-foak", 1): (0.001, 0.0005),
    ("foak-fast-kernels-liger", 4): (0.012, 0.0005),
}


def row_of(label: str, gpus: int) -> Published:
    """The first row of Mistral-7B with adapters that has this label."""
    return next(
        row
        for row in all_rows()
        if (row.label, row.gpus) == (label, gpus) and row.lora and row.model.startswith("Mistral")
    )


@pytest.mark.parametrize(("label", "gpus"), BARS)
def test_a_printed_peak_is_forecast(label: str, gpus: int):
    row = row_of(label, gpus)
    found = peaks.compared(row, peaks.Forecaster(row))
    peak_bar, end_bar = BARS[label, gpus]
    assert found["tuning"] == "lora r 16"
    assert found["trained"] == 13_631_488
    assert abs(found["error"]) < peak_bar
    assert abs(found["end_error"]) < end_bar
    assert sum(found["breakdown"].values()) + found["workspaces"] == found["forecast"]


def test_the_kept_figures_are_of_these_rows_and_within_the_bars():
    kept = json.loads(KEPT.read_text())
    rows = [row for row in all_rows() if row.family != "PEFT"]
    found = [row for row in kept["rows"] if row["family"] != "PEFT"]
    assert [(row["model"], row["printed"]) for row in found] == [
        (row.model, row.peak) for row in rows
    ]
    for row in kept["rows"]:
        assert abs(row["error"]) < peaks.MEDIAN_BAR or row["cause"], row["label"]
        if row["family"].startswith("fms"):
            # those that know no activations miss by more
            nearest = min(abs(other["error"]) for other in row["others"].values())
            assert nearest > abs(row["error"])
    errors = [abs(row["error"]) for row in kept["rows"]]
    assert statistics.median(errors) == pytest.approx(kept["medians"]["all"]["median"])
    assert statistics.median(errors) < peaks.MEDIAN_BAR
    assert all(row["reason"] for row in kept["not_forecast"])


def test_every_source_says_what_it_prints_and_no_row_is_there_twice():
    rows = all_rows()
    assert {row.family for row in rows} == set(QUANTITIES)
    assert len(set(rows)) == len(rows)


def test_frozen_blocks_under_fsdp1_keep_their_inputs_until_the_backward_pass_ends():
    """Two blocks: their forward passes end at 2 and 4, their backward passes at 8 and 6."""
    first = BlockTicks(((2, 2),), (False,), (1, 2), (6, 8))
    second = BlockTicks(((2, 2),), (False,), (3, 4), (5, 6))
    spans = (Span(100, "activations", 1, 8), Span(100, "activations", 3, 6))
    whole = Timeline((*spans, Span(10, "temporary", 7, 9)), ((0, "forward"), (5, "backward")))
    passes = {"first": whole, "later": whole}
    profile = Profile(16, 0, 0, 0, 0, passes=passes, blocks=((first, first), (second, second)))
    sizes = {"gpus": 2, "trained": 0, "width": 4, "frozen": 16, "block": 8, "rest": 4}
    held = fsdp1.Sharded(**sizes, block_trained=0, held_input=100, late=False)
    free = fsdp1.Sharded(**sizes, block_trained=0, held_input=0, late=False)
    # a rank's share, the root, and a gathered block besides what one process has
    assert fsdp1.sharded_peak(profile, free, 4).bytes == 8 + 4 + 2 * 8 + 200
    # at the end the inputs of both blocks and their gradients
    assert fsdp1.sharded_peak(profile, held, 4).bytes == 8 + 4 + 400 + 10
