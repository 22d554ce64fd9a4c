"""The peak of recurrent layers, whose kernels save a workspace for the backward pass."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.parity import sgd
from support.peaks import peaks, repeat_if_above
from support.ranks import run_ranks
from torch import Tensor, nn

LAYERS = {
    "lstm": partial(nn.LSTM, 64, 64),
    "lstm, both ways": partial(nn.LSTM, 64, 48, num_layers=2, bidirectional=True),
    "lstm without biases": partial(nn.LSTM, 64, 64, bias=False),
    "lstm, projected": partial(nn.LSTM, 64, 64, proj_size=32),
    "gru": partial(nn.GRU, 64, 64),
    "rnn, both ways": partial(nn.RNN, 64, 64, num_layers=2, bidirectional=True),
}


class Recurrent(nn.Module):
    """A recurrent layer that reads each row of numbers several times."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer = LAYERS[name](batch_first=True)
        self.head = nn.Linear(self._width(), 8)

    def _width(self) -> int:
        layer = self.layer
        return (layer.proj_size or layer.hidden_size) * (1 + layer.bidirectional)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.layer(x[:, None].expand(-1, 12, -1))[0][:, -1])
        return output


def autocast_has_lstms() -> bool:
    """Whether torch runs an LSTM in bf16 autocast here; oneDNN needs AVX-512 for it."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(64, 64)(torch.randn(4, 12, 64))
    except RuntimeError:
        return False
    return True


def peaks_of_all(context, strategy, names, precision):
    batch = torch.randn(16, 64), torch.arange(16) % 8
    keys = {"train.precision": precision}
    return [peaks(context, partial(Recurrent, n), batch, strategy, keys, sgd) for n in names]


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("ddp", "fp32"),
        ("fsdp", "bf16"),
        ("ddp", "bf16"),
        ("fsdp", "fp32"),
        ("zero2", "fp32"),
        ("zero3", "fp32"),
        ("zero3", "bf16"),
    ],
)
def test_the_peak_of_recurrent_layers_is_predicted(strategy, precision):
    names = list(LAYERS)
    if precision == "bf16" and strategy != "fsdp" and not autocast_has_lstms():
        names = [name for name in names if not name.startswith("lstm")]
    rows = repeat_if_above(
        lambda: [
            row
            for rank in run_ranks(peaks_of_all, 2, strategy, names, precision, timeout_s=150)
            for row in rank
        ],
        lambda row: row[1].bytes > 1.005 * row[0].bytes,
    )
    for name, (predicted, measured, note) in zip(names * 2, rows, strict=True):
        assert note is None
        assert predicted.bytes == pytest.approx(measured.bytes, rel=0.005), (strategy, name)
