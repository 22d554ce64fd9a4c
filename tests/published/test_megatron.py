"""Table 1 of Narayanan et al. 2021 (arXiv 2104.04473): weak scaling of GPTs on A100s.

The rows are quoted from memory. Numbers of parameters and percentages are computed again with the
paper's formulas, and the models are counted as this project builds them.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from bigtrain.models.blueprint import describe
from bigtrain.models.gpt import GPT, GPTConfig
from published.formulas import Transformer

A100 = 312.0
LENGTH, VOCABULARY = 2048, 51200


class Row(NamedTuple):
    billions: float
    heads: int
    width: int
    layers: int
    tensor: int
    pp: int
    gpus: int
    batch: int
    teraflops: int
    """TFLOP/s of each GPU."""
    percent: int
    """Percent of the peak of 312 TFLOP/s."""
    petaflops: float
    """PFLOP/s of all GPUs."""
    seconds: float
    """Seconds of a step, derived here, as is the next field."""
    tokens: int
    """Tokens per second of each GPU."""

    @property
    def model(self) -> Transformer:
        return Transformer(self.layers, self.width, self.heads, LENGTH, VOCABULARY)


ROWS = [
    Row(1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 44, 4.4, 3.5, 9288),
    Row(3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 44, 8.8, 3.7, 4431),
    Row(7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 46, 18.2, 3.7, 2216),
    Row(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 43, 34.6, 9.4, 872),
    Row(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 44, 70.8, 14.5, 425),
    Row(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 45, 143.8, 16.1, 223),
    Row(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 47, 227.1, 24.8, 124),
    Row(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 50, 297.4, 37.6, 61),
    Row(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 52, 410.2, 54.1, 38),
    Row(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 52, 502.0, 102.6, 20),
]
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.billions}B")


@every_row
def test_parameters(row):
    """All ten as printed, by equation 2 and by the formula as the paper writes it."""
    l, h = row.layers, row.width  # noqa: E741 - the paper's symbols
    written = 12 * l * h**2 * (1 + 13 / (12 * h) + (VOCABULARY + LENGTH) / (12 * l * h))
    assert row.model.parameters == pytest.approx(written, rel=1e-14)
    assert round(row.model.parameters / 1e9, 1) == row.billions


@every_row
def test_percent_of_peak(row):
    """All ten as printed."""
    assert round(100 * row.teraflops / A100) == row.percent


@every_row
def test_all_gpus_together(row):
    """For six of ten, from 39.1B, the total is not the printed figure per GPU times GPUs.

    The printed figure is rounded; a figure that rounds to it gives the total.
    """
    total = row.teraflops * row.gpus / 1000
    assert (round(total, 1) == row.petaflops) == (row.billions < 39)
    assert abs(total - row.petaflops) <= 0.5 * row.gpus / 1000 + 0.05


@every_row
def test_seconds_of_a_step(row):
    """Derived here: the FLOPs with full recomputation, which these runs used, divided by
    the speed.
    """
    work = row.model.hardware_flops(row.batch, "full")
    seconds = work / (row.teraflops * 1e12 * row.gpus)
    assert round(seconds, 1) == row.seconds
    assert round(row.batch * LENGTH / seconds / row.gpus) == row.tokens
    # So the paper's utilization counts hardware FLOPs: with model FLOPs it would be a quarter less.
    model_only = row.model.model_flops(row.batch) / work
    assert 0.74 < model_only < 0.78


@every_row
def test_the_mesh_fills_the_gpus(row):
    """Data parallelism uses the ranks that tensor and pipeline parallelism leave, and divides
    the batch.
    """
    dp, left = divmod(row.gpus, row.tensor * row.pp)
    assert left == 0
    assert row.batch % dp == 0
    assert row.layers % row.pp == 0


def config_of(row: Row, *, tied: bool) -> GPTConfig:
    return GPTConfig(
        vocab_size=VOCABULARY,
        sequence_length=LENGTH,
        num_layers=row.layers,
        width=row.width,
        num_heads=row.heads,
        tie_embeddings=tied,
    )


@every_row
def test_the_same_models_here(row):
    """Our tied model also has the final norm, 2h, which the formula omits; untied, it has Vh more.

    A layer is 12h^2 + 13h in both: 9h of biases and 4h of two norms.
    """
    paper = row.model.parameters
    assert config_of(row, tied=True).num_parameters == paper + 2 * row.width
    assert config_of(row, tied=False).num_parameters == paper + (2 + VOCABULARY) * row.width


@pytest.mark.parametrize("tied", [True, False])
def test_the_models_tensors_are_counted_so(tied):
    """The row of 3.6B, described on the meta device and counted tensor by tensor."""
    config = config_of(ROWS[1], tied=tied)
    model = describe(lambda: GPT(config)).model
    tensors = list(model.parameters())
    assert all(tensor.is_meta for tensor in tensors)
    assert sum(tensor.numel() for tensor in tensors) == config.num_parameters
