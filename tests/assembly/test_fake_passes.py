"""The number of passes of the model on fake tensors while a run is planned: one per question."""

from __future__ import annotations

import pytest

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import load_job
from bigtrain.models.gpt import GPT

WORDS = [
    "train.global_batch_size=8",
    "model.args={num_layers: 4, width: 32, num_heads: 2, sequence_length: 32}",
]
ROUTES, USES, CUT, SLICES = 2, 1, 2, 1
"""Passes that look for routes (two, which may differ), for uses of parameters and the loss's graph,
for cuts (training and evaluation), and for slices."""


@pytest.mark.parametrize(
    ("strategy", "ranks", "expected"),
    [("single", 1, USES), ("ddp", 2, ROUTES + USES), ("3d", 8, ROUTES + USES + CUT + SLICES)],
)
def test_a_plan_runs_the_model_once_for_each_question(
    monkeypatch: pytest.MonkeyPatch, strategy: str, ranks: int, expected: int
) -> None:
    calls = []
    forward = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, *args: calls.append(1) or forward(self, *args))
    job = load_job("default", strategy, WORDS)
    open_setup(job, make_plan(job, ranks, "cpu"))
    assert len(calls) == expected


def test_a_loss_that_misses_a_parameter_is_looked_for_in_more_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def forward(self: GPT, *args: object) -> object:
        calls.append(1)
        return original(self, *args).detach() + self.head.weight.sum()

    original = GPT.forward
    monkeypatch.setattr(GPT, "forward", forward)
    job = load_job("default", "single", [*WORDS, "model.chunked_loss=false"])
    setup = open_setup(job, make_plan(job, 1, "cpu"))
    assert len(calls) > USES + 2
    assert len(setup.resolved.unreached) > 4
