"""ZeRO-3 falls behind with more devices, as in figure 10 of Narayanan et al. 2021.

The figure (arXiv 2104.04473, table 2) has a GPT of 175 billion and a batch of 1,536 on 384 to 1,536
A100: 144, 88 and 44 TFLOP/s a device with ZeRO-3, and 153, 149 and 141 with tp 8 x pp 12.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bigtrain.machine.cluster import load_cluster
from bigtrain.machine.collective_cost import collective_seconds

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import published_zero3  # noqa: E402

DEVICES = (384, 768, 1536)
A100 = load_cluster("a100-node")
LAYERS, WIDTH, BATCH = 96, 12288, 1536
WORK = 96.0 * BATCH * LAYERS * 2048 * WIDTH**2
"""The FLOPs of the blocks in a step."""


def test_deepspeed_of_2021_loses_most_of_its_rate_on_four_times_the_devices():
    """Its host works for each rank of a group, and waits for the whole GPU."""
    rate = A100.device.flops.bf16 * A100.device.efficiency
    seconds = []
    for devices in DEVICES:
        compute = WORK / devices / rate
        step = published_zero3.step_seconds(LAYERS, WIDTH, devices, compute, A100)
        seconds.append(step["total"])
    rates = [WORK / devices / each for devices, each in zip(DEVICES, seconds, strict=True)]
    # The paper: from 384 to 768 devices 0.61 of the rate, and from 768 to 1,536 half of it.
    assert 0.55 < rates[1] / rates[0] < 0.8
    assert 0.4 < rates[2] / rates[1] < 0.6
    assert seconds[2] == pytest.approx(seconds[1], rel=0.15)  # the paper: 67 s on both


def test_the_latency_of_a_gather_grows_with_the_ranks():
    """Each rank of a ring adds a latency; gathers in stages would add one for a node only."""
    seconds = [collective_seconds("all_gather", 0, n, 1, A100) for n in DEVICES]
    assert seconds[2] == pytest.approx(4 * seconds[0], rel=0.02)
    assert seconds[2] > 1535 * A100.inside.latency


def test_the_kept_forecasts_are_in_the_order_of_the_figure():
    kept = json.loads((BENCHMARKS / "results" / "published_plans.json").read_text())
    (figure,) = (case for case in kept["crossovers"] if case["figure"] == "figure 10")
    ratios = [figure["tflops"][str(n)][0] / figure["tflops"][str(n)][1] for n in DEVICES]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[1] < 1
    assert ratios[2] < 0.6
