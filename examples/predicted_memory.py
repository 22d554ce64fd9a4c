"""Predicted and measured: `torchrun --nproc-per-node 2 examples/predicted_memory.py 1f1b+full`."""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import bigtrain


class Tower(nn.Module):
    """Any module works: this one knows nothing of stages or shards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.TransformerEncoderLayer(64, 4, 256, 0) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 16, 64) -> (rows, 16, 64)."""
        return torch.add(x, self.blocks(x))


with bigtrain.prepare(
    Tower,
    mse_loss,
    torch.optim.AdamW,
    strategy=sys.argv[1],
    example=(torch.zeros(4, 16, 64), torch.zeros(4, 16, 64)),  # one micro-batch
    train__global_batch_size=16,
    train__micro_batch_size=4,
) as engine:
    for _ in range(3):  # each replica takes its share of the global batch
        inputs = torch.rand(16 // engine.context.dp_size, 16, 64)
        engine.step((inputs, inputs.cos()))
    report = engine.memory()  # all ranks call it, rank 0 gets the report
for rank in report.as_json()["ranks"] if report else ():
    print("rank {rank}: predicted {predicted_peak_bytes}, measured {peak_bytes}".format(**rank))
