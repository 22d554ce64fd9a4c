"""The predicted peak of compiled blocks equals the tracked one, or the reason why not is
reported.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.parity import adamw
from support.peaks import peaks, repeat_if_above
from support.ranks import run_ranks
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.workload import Workload
from bigtrain.data import MicroBatch
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.models import compiled
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.prediction.predict import Prediction, predict

BATCH = 4
SCALARS = 64
"""Bytes of losses and counts that wait between micro-batches, which no forecast includes."""


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.inner(x)))


def conv() -> nn.Module:
    blocks = nn.Sequential(ConvBlock(), ConvBlock())
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(nn.Conv2d(1, 8, 3), blocks, *ends)


def gpt() -> nn.Module:
    return GPT(GPTConfig(width=32, num_layers=3, num_heads=2, sequence_length=32, dropout=0.1))


def batch_for(model: Any) -> tuple[Tensor, Tensor]:
    if model is gpt:
        tokens = torch.randint(0, 256, (BATCH, 33))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return torch.randn(BATCH, 1, 18, 18), torch.arange(BATCH) % 3


CASES: dict[str, tuple[Any, ...]] = {
    "conv": (1, "single", conv, {}),
    "conv, bf16": (1, "single", conv, {"train.precision": "bf16"}),
    "conv, channels last": (1, "single", conv, {"train.memory_format": "channels_last"}),
    "conv, again": (1, "single_checkpointing", conv, {}),
    "gpt": (1, "single", gpt, {}),
    "gpt, bf16, again": (1, "single_checkpointing", gpt, {"train.precision": "bf16"}),
    "gpt, ddp": (2, "ddp", gpt, {"train.micro_batch_size": 2}),
    "gpt, fsdp, again": (2, "fsdp_checkpointing", gpt, {"train.precision": "bf16"}),
    "gpt, 1f1b": (2, "1f1b", gpt, {"train.micro_batch_size": 1, "train.global_batch_size": BATCH}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_compiled_blocks_is_foretold(case: str) -> None:
    world_size, strategy, model, keys = CASES[case]
    keys = {"train.compile": "blocks", "mesh.timeout": 300.0, **keys}
    arguments = (peaks, world_size, model, batch_for(model), strategy, keys, adamw)
    limits = {"timeout_s": 540.0, "timeout": 300.0, "pp": 2 if strategy == "1f1b" else 1}
    rows = repeat_if_above(
        lambda: run_ranks(*arguments, **limits), lambda row: row[1].bytes > row[0].bytes + SCALARS
    )
    for predicted, measured, note in rows:
        assert note is None
        assert predicted.bytes == pytest.approx(measured.bytes, abs=SCALARS)
        assert predicted.phase == measured.phase


def predict_conv(**keys: Any) -> Prediction:
    """The prediction of a run of the convolutional model."""
    inputs, targets = batch_for(conv)
    job = job_from_keys("single", {"train.global_batch_size": BATCH, **keys})
    example = MicroBatch(inputs, targets, BATCH, BATCH)
    workload = Workload(conv(), example, CrossEntropy(), adamw)
    return predict(resolve_plan(make_plan(job, 1, "cpu"), workload), workload)


def test_what_torch_does_not_compile_on_fakes_is_forecast_as_written_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_forward: Any, _options: Any) -> Any:
        raise NotImplementedError("no lowering of this")

    monkeypatch.setattr(compiled, "fake_program", broken)
    compiled._program.cache_clear()
    prediction = predict_conv(**{"train.compile": "blocks"})
    assert prediction.peak == predict_conv().peak
    assert prediction.advice[0] == (
        "train.compile=blocks: bytes are forecast for blocks as written "
        "(NotImplementedError: no lowering of this)"
    )
