"""The elements that each rank saves: stated before a run, and read from the engine's own tensors.

The forecast of a save and the run know them from different sources: a forecast is made before
anything is built, and a run asks torch's DTensors and DeepSpeed's buffers. Both have to agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn

from bigtrain.assembly.state_peaks import _State
from bigtrain.checkpoint.layout import Held
from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.engine.workloads import resolve_on_ranks
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy, as_loss
from bigtrain.models.blueprint import as_blueprint

WORDS = 30


class Uneven(nn.Module):
    """A tied embedding, sizes that no number of ranks divides, a buffer and a frozen layer."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 12)
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(7))
        self.fixed = nn.Linear(12, 5).requires_grad_(False)
        self.register_buffer("steps", torch.arange(3.0))
        self.head = nn.Linear(12, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, positions) -> (rows, positions, WORDS)."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden)) * self.scale.sum()
        hidden = hidden + self.fixed(hidden).sum() + self.steps.sum()
        logits: Tensor = self.head(hidden)
        return logits


def grouped_adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Two groups, not in the model's order: DeepSpeed has a buffer of each."""
    listed = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in listed if p.ndim < 2], "weight_decay": 0.0},
            {"params": [p for p in listed if p.ndim >= 2]},
        ]
    )


def layouts(context: Any, strategy: str, precisions: list[str]) -> list[tuple[Any, Any]]:
    """By precision, the tensors that this rank contributes: as stated, and after a step."""
    pairs = []
    for precision in precisions:
        keys = {"train.global_batch_size": 8, "train.micro_batch_size": 2}
        job = job_from_keys(strategy, {**keys, "train.precision": precision})
        tokens = torch.arange(8 // context.dp_size * 6).view(-1, 6) % WORDS
        loss, rows = CrossEntropy(), tokens[:2]
        example = MicroBatch(rows, rows, loss.count(rows), 2)
        blueprint = as_blueprint(Uneven)
        workload, resolved = resolve_on_ranks(
            blueprint, as_loss(loss), grouped_adamw, example, job, context
        )
        state = _State.of(resolved, workload, context.tp_rank)
        stated = state.held(context.dp_rank, context.pp_rank)
        with Engine(Uneven, loss, grouped_adamw, job, context, example=example) as engine:
            engine.step((tokens.clone(), tokens.clone()))
            held = {name: Held.of(tensor) for name, tensor in engine.runner.state().items()}
        pairs.append((stated, held))
    return pairs


def with_elements(tensors: dict[str, Held]) -> dict[str, Held]:
    """Leave out tensors of which a rank holds nothing: naming them or not says the same."""
    return {name: held for name, held in tensors.items() if held.extents}


@pytest.mark.parametrize(
    ("strategy", "ranks", "axes"),
    [
        ("fsdp", 2, {}),
        ("zero1_torch", 2, {}),
        ("zero3", 2, {}),
        ("zero2", 2, {}),
        ("oss", 2, {}),
        ("sharded_ddp", 2, {}),
        ("ddp", 2, {}),
        ("fsdp_zero2", 2, {}),
        ("tensor", 2, {"tp": 2}),
        ("1f1b", 2, {"pp": 2}),
        ("1f1b_zero1", 4, {"pp": 2}),
        ("1f1b_fsdp", 4, {"pp": 2}),
        ("interleaved_1f1b", 2, {"pp": 2}),
        ("pipeline_deepspeed_zero1", 4, {"pp": 2}),
        ("parameter_server", 3, {}),
        ("hybrid", 4, {}),
    ],
)
def test_ranks_hold_what_was_stated(strategy: str, ranks: int, axes: dict[str, int]) -> None:
    for pairs in run_ranks(layouts, ranks, strategy, ["fp32", "bf16"], **axes):
        for stated, held in pairs:
            assert with_elements(stated) == with_elements(held)
