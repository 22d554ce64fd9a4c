"""Compare predicted with published step times, where shapes, devices and batch are printed.

    python benchmarks/published_steps.py --output benchmarks/results/published_steps.json

The rows: GPT of Narayanan et al. 2021 (arXiv 2104.04473; tables 1 and 2) on nodes of A100, as
replicas of 1.7 billion parameters and with ZeRO stage 3 of 175 billion; FSDP of 175 billion of Zhao
et al. 2023 (arXiv 2304.11277). All recompute their blocks, in 16 bits. Their figure is TFLOP/s a
device, which counts 96 B L s h^2 (1 + s/(6h) + V/(16hL)) operations a step; it is converted to
seconds. The micro-batch of the first row is not printed: one rank's share of the batch is 16, which
is computed at once and in sixteen parts. Nothing is measured here: the cluster is
`configs/clusters/a100-node.yaml`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from harness import keep
from published_gpt import a100_nodes, flops, job_words

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import load_job
from bigtrain.machine.cluster import Cluster
from bigtrain.timing.run_seconds import forecast_on
from bigtrain.timing.step_time import StepTimer


class Published(NamedTuple):
    """One row of a paper's table."""

    source: str
    layers: int
    width: int
    heads: int
    strategy: str
    devices: int
    batch: int
    micro_batch: int
    tflops: float


ROWS = (
    Published("2104.04473 table 1", 24, 2304, 24, "ddp", 32, 512, 16, 137.0),
    Published("2104.04473 table 1", 24, 2304, 24, "ddp", 32, 512, 1, 137.0),
    Published("2104.04473 table 2", 96, 12288, 96, "fsdp", 384, 1536, 4, 144.0),
    Published("2104.04473 table 2", 96, 12288, 96, "fsdp", 768, 1536, 2, 88.0),
    Published("2104.04473 table 2", 96, 12288, 96, "fsdp", 1536, 1536, 1, 44.0),
    Published("2304.11277", 96, 12288, 96, "fsdp", 128, 128, 1, 173.0),
    Published("2304.11277", 96, 12288, 96, "fsdp", 128, 256, 2, 186.0),
)


def predicted(row: Published, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of the parts of a step."""
    words = [
        *job_words(row.layers, row.width, row.heads, row.batch),
        f"train.micro_batch_size={row.micro_batch}",
        "strategy.recompute=full",
    ]
    job = load_job(None, row.strategy, words)
    setup = open_setup(job, make_plan(job, row.devices, "cuda"))
    timer = StepTimer(cluster)
    return dict(forecast_on(timer, job, setup.resolved, setup.workload).parts)


def main() -> None:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--efficiency", type=float, help="instead of the cluster's own")
    options = parser.parse_args()
    cluster = a100_nodes(options.efficiency)
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        work = flops(row.layers, row.width, row.batch)
        parts, published = predicted(row, cluster), work / row.devices / row.tflops / 1e12
        seconds = sum(parts.values())
        rows.append({**row._asdict(), "published": published, "predicted": seconds, "parts": parts})
        shape = f"{row.layers} x {row.width}, {row.strategy} on {row.devices}"
        print(
            f"{row.source}: {shape}, micro-batch {row.micro_batch}: published {published:.2f} s, "
            f"predicted {seconds:.2f} s ({seconds / published - 1:+.0%})",
            {name: round(part, 2) for name, part in parts.items()},
            flush=True,
        )
        keep(options.output, {"efficiency": cluster.device.efficiency, "rows": rows})


if __name__ == "__main__":
    main()
