"""Measure how well one timed product predicts this machine's speed some seconds later.

    python benchmarks/product_drift.py --output benchmarks/results/product_drift.json

Two threads, like two ranks, multiply matrices of the sizes of a block for `SAMPLE_S` seconds, again
and again. A sample is the mean seconds of a product. `deviation` is the standard deviation of the
samples, relative to their mean. `correlations` has the correlation of samples by the number of
samples between them. If forecasts were scaled by a product timed before, `scaled` would be the
standard deviation of their error, by that number; without scaling it is `deviation`.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path

import torch
from harness import keep

RANKS, ROWS, INNER, COLUMNS = 2, 512, 768, 3072
SAMPLE_S, PAUSE_S = 0.5, 0.5
SAMPLES = 240
GAPS = (1, 5, 20, 60, 120)
"""The numbers of samples between two samples that are compared; a sample takes a second."""


def mean_seconds(left: torch.Tensor, right: torch.Tensor, means: list[float]) -> None:
    """Append the mean seconds of a product to `means`."""
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < SAMPLE_S:
        left @ right
        count += 1
    means.append((time.perf_counter() - began) / count)


def sample(matrices: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the mean seconds of a product while all threads multiply."""
    means: list[float] = []
    threads = [threading.Thread(target=mean_seconds, args=(*pair, means)) for pair in matrices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.fmean(means)


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    matrices = [(torch.randn(ROWS, INNER), torch.randn(INNER, COLUMNS)) for _ in range(RANKS)]
    samples = []
    for _ in range(SAMPLES):
        samples.append(sample(matrices))
        time.sleep(PAUSE_S)
    mean = statistics.fmean(samples)
    pairs = {gap: list(zip(samples, samples[gap:], strict=False)) for gap in GAPS}
    figures = {
        "sample_seconds": SAMPLE_S,
        "pause_seconds": PAUSE_S,
        "samples": samples,
        "deviation": statistics.pstdev(samples) / mean,
        "correlations": {
            gap: statistics.correlation(samples[:-gap], samples[gap:]) for gap in GAPS
        },
        "scaled": {
            gap: statistics.pstdev([after / before for before, after in each])
            for gap, each in pairs.items()
        },
    }
    print(f"deviation {figures['deviation']:.3f}")
    print(f"scaled {figures['scaled']}\ncorrelations {figures['correlations']}")
    keep(options.output, figures)


if __name__ == "__main__":
    main()
