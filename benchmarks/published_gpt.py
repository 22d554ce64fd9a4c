"""The GPT of Narayanan et al. 2021 (arXiv 2104.04473) and its cluster, for benchmarks.

It predates fused attention: the scores of all pairs of tokens are in memory. `written_out` makes
the GPT of bigtrain with such attention. The paper has one kernel for scale, mask and softmax, which
is one operation here. Dropout of 0.1 is another operation.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from bigtrain.machine.cluster import Cluster, load_cluster
from bigtrain.models.gpt import GPT, Attention, GPTConfig

SEQUENCE, VOCABULARY = 2048, 51200


class WrittenOutAttention(Attention):
    """Attention whose scores are in memory, as before fused kernels."""

    def forward(self, x_BTW: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Mix each token with the tokens before it. The mask is part of the softmax's kernel."""
        q_BHTD, k_BHTD, v_BHTD = (
            part_BTW.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part_BTW in self.qkv(x_BTW).chunk(3, dim=-1)
        )
        scores_BHTT = (q_BHTD @ k_BHTD.transpose(-1, -2)).softmax(dim=-1)
        # Dropout as CUDA computes it: one kernel, with one byte of mask for each score.
        shares_BHTT, _ = torch.native_dropout(scores_BHTT, self.dropout, train=True)
        out_BTW: Tensor = self.output((shares_BHTT @ v_BHTD).transpose(1, 2).flatten(-2))
        return out_BTW


def written_out(
    num_layers: int, width: int, num_heads: int, vocab_size: int, sequence_length: int
) -> GPT:
    """Make the GPT of 2021; see the module."""
    config = GPTConfig(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
    )
    model = GPT(config)
    for module in model.modules():
        if isinstance(module, Attention):
            module.__class__, module.dropout = WrittenOutAttention, 0.1
    return model


def flops(layers: int, width: int, batch: int) -> float:
    """Return the FLOPs of a step with recomputation, as the paper counts them."""
    n, h, s, v = layers, width, SEQUENCE, VOCABULARY
    return 96.0 * batch * n * s * h**2 * (1 + s / (6 * h) + v / (16 * h * n))


def job_words(layers: int, width: int, heads: int, batch: int, *, fused: bool = True) -> list[str]:
    """Return the words of its job, in bf16, for a number of samples a step.

    Args:
        layers: the number of blocks.
        width: the width of the model.
        heads: the number of heads.
        batch: the samples of a step.
        fused: whether attention is a fused kernel, as it is today.
    """
    size = {"num_layers": layers, "width": width, "num_heads": heads}
    size |= {"vocab_size": VOCABULARY, "sequence_length": SEQUENCE}
    return [
        f"model.name={'gpt' if fused else 'published_gpt:written_out'}",
        f"model.args={json.dumps(size)}",
        "data.name=synthetic",
        f"data.args={{kind: language, vocabulary: {VOCABULARY}, length: {SEQUENCE}, "
        f"samples: {batch}}}",
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
