"""The GPT of Narayanan et al. 2021 (arXiv 2104.04473) and its cluster, for benchmarks."""

from __future__ import annotations

import json

from bigtrain.machine.cluster import Cluster, load_cluster

SEQUENCE, VOCABULARY = 2048, 51200


def flops(layers: int, width: int, batch: int) -> float:
    """Return the FLOPs of a step with recomputation, as the paper counts them."""
    n, h, s, v = layers, width, SEQUENCE, VOCABULARY
    return 96.0 * batch * n * s * h**2 * (1 + s / (6 * h) + v / (16 * h * n))


def job_words(layers: int, width: int, heads: int, batch: int) -> list[str]:
    """Return the words of its job, in bf16, for a number of samples a step."""
    size = {"num_layers": layers, "width": width, "num_heads": heads}
    size |= {"vocab_size": VOCABULARY, "sequence_length": SEQUENCE}
    return [
        "model.name=gpt",
        f"model.args={json.dumps(size)}",
        "data.name=synthetic",
        f"data.args={{kind: language, vocabulary: {VOCABULARY}, samples: {batch}}}",
        "train.precision=bf16",
        f"train.global_batch_size={batch}",
    ]


def a100_nodes(efficiency: float | None = None) -> Cluster:
    """Return nodes of A100, optionally with another share of the peak for matrix products."""
    cluster = load_cluster("a100-node")
    if efficiency is None:
        return cluster
    device = cluster.device.model_copy(update={"efficiency": efficiency})
    return cluster.model_copy(update={"device": device})
