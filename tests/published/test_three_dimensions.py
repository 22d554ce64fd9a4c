"""The best use of tensor parallelism, pipelines and replicas, by Narayanan et al. 2021.

Figures 13 to 15 (arXiv 2104.04473) say which of five plans of 64 devices is fastest. Figure 10 is
in `test_figure_10.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import published_plans  # noqa: E402

PAIRS = [(2, 32), (4, 16), (8, 8), (16, 4), (32, 2)]


@pytest.mark.parametrize("batch", [32, 128])
def test_slices_of_a_node_and_pipelines_between_nodes_are_fastest(batch):
    meshes = [(tp, pp, 1) for tp, pp in PAIRS]
    throughputs = published_plans.throughputs(published_plans.GPT_162B, meshes, batch)
    assert max(throughputs, key=throughputs.__getitem__) == "pp 8 x dp 1 x tp 8"
    within, across = throughputs["pp 8 x dp 1 x tp 8"], throughputs["pp 2 x dp 1 x tp 32"]
    assert across < 0.8 * within  # slices over several nodes


@pytest.mark.parametrize("batch", [32, 128, 512])
@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_replicas_are_faster_than_more_ranks_of_another_axis(axis, batch):
    meshes = [(n, 1, dp) if axis == "tp" else (1, n, dp) for n, dp in PAIRS]
    throughputs = [*published_plans.throughputs(published_plans.GPT_6B, meshes, batch).values()]
    assert max(throughputs) == throughputs[0]
    if axis == "tp" or batch > 32:  # with few micro-batches the last three are within 5 percent
        assert throughputs == sorted(throughputs, reverse=True)
