"""DataParallel without a GPU: its refusals, forecast, traffic, and division of rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.traffic import profile

import bigtrain.strategies.data_parallel as data_parallel
from bigtrain.assembly.make_plan import make_plan
from bigtrain.core.strategy import Plan
from bigtrain.costs.forecast import Forecast
from bigtrain.costs.traffic import StepVolume
from bigtrain.data.loader import MicroBatch
from bigtrain.engine.run_loss.choose_loss import choose_loss
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy
from bigtrain.losses.loss import CrossEntropy
from bigtrain.memory.timeline import Span, Timeline
from bigtrain.models import make_model
from bigtrain.models.spec import ModelSpec


def plan_on(strategy: str = "single", ranks: int = 1, device: str = "cuda", rows: int = 8) -> Plan:
    """A plan for a GPU that this machine lacks."""
    job = job_from_keys(strategy, {"train.global_batch_size": rows * ranks})
    return replace(make_plan(job, ranks, "cpu"), device_type=device)


@pytest.mark.parametrize("rows", [1, 2, 5, 7, 8, 9, 64])
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_rows_are_dealt_out_as_torch_does(rows, devices):
    chunk_sizes = [len(part) for part in torch.zeros(rows).chunk(devices)]
    assert data_parallel.rows_of_devices(rows, devices) == chunk_sizes


@pytest.mark.parametrize(
    ("gpus", "options", "plan", "message"),
    [
        (0, {}, plan_on(device="cpu"), r"it needs CUDA, and the device is cpu. Use --strategy ddp"),
        (2, {}, plan_on("ddp", 2), r"2 ranks were started. Use --strategy ddp, or start one rank"),
        (
            1,
            {},
            plan_on(),
            r"needs 2 GPUs in this process, .* sees 1. Use --strategy single",
        ),
        (
            2,
            {"devices": 4},
            plan_on(),
            r"needs 4 GPUs .* sees 2. .*, or strategy.replicate.devices=2",
        ),
        (4, {}, plan_on(rows=5), r"5 rows .* among 4 GPUs, and 1 of them .*micro_batch_size=8"),
        (
            2,
            {},
            plan_on("single+full"),
            r"strategy.recompute would change .* Leave strategy.rec",
        ),
    ],
)
def test_what_is_refused(monkeypatch, gpus, options, plan, message):
    monkeypatch.setattr(data_parallel, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=message):
        data_parallel.DataParallel(**options).check(plan)


def test_what_is_not_refused(monkeypatch):
    monkeypatch.setattr(data_parallel, "device_count", lambda: 4)
    data_parallel.DataParallel().check(plan_on())
    data_parallel.DataParallel(devices=2).check(plan_on())


def test_it_is_refused_on_a_cpu_before_anything_else():
    job = job_from_keys("data_parallel", {"train.global_batch_size": 8})
    with pytest.raises(ConfigError, match="several GPUs of one process: it needs CUDA"):
        make_plan(job, 1, "cpu")


def test_the_copies_and_all_gradients_are_forecast():
    """By hand, for 3 GPUs: 2 more copies of parameters and buffers, 3 gradients in addition to
    the sum.
    """
    spans = (Span(40, "activations", 0, 8), Span(16, "gradients", 6, 10))
    passing = Timeline(spans, ((0, "forward"), (5, "backward")))
    small = profile(
        parameter_bytes=100,
        gradient_bytes=16,
        buffer_bytes=4,
        optimizer_bytes=200,
        passes={"first": passing, "later": passing},
        step=Timeline((), ((10, "step"),)),
    )
    plain = Forecast.of(small)
    turned = data_parallel.DataParallel(devices=3).estimate(plain, small, plan_on())
    resident_bytes = 100 + 4 + 200
    assert plain.peak().bytes == resident_bytes + 40 + 16
    # During the pass, copies and activations; at its end the activations are freed.
    assert turned.passes["first"].peak(turned.states).bytes == resident_bytes + 2 * 104 + max(
        56, 16 + 48
    )
    assert turned.step == plain.step


def test_it_says_what_goes_between_the_gpus_and_what_the_first_one_holds():
    priced = profile(buffer_bytes=64)
    plan = plan_on()
    scatter, back = data_parallel.DataParallel(devices=4).traffic(priced, plan)
    assert (scatter.nbytes, scatter.ranks, scatter.every) == (
        priced.parameter_bytes + 64,
        4,
        "micro_batch",
    )
    assert (back.nbytes, back.kind) == (priced.gradient_bytes, "reduce")
    assert StepVolume.stated((scatter, back), 2) == StepVolume({}, {})  # no traffic between ranks
    advice = data_parallel.DataParallel(devices=4).advise(Forecast.of(priced), priced, plan)
    assert "the first of 4 GPUs holds 45.8 MiB more than each other" in advice
    assert "BatchNorm statistics) follow the rows of the first GPU alone" in advice


def test_its_copies_make_no_loss_in_chunks() -> None:
    """The head of a copy would be the original's, and its thread does not know the targets."""
    job = job_from_keys("data_parallel", {"model.name": "gpt", "train.global_batch_size": 2})
    tokens = torch.zeros(2, 8, dtype=torch.long)
    example = MicroBatch(tokens, tokens, 16, 2)
    model = make_model("gpt", {"num_layers": 1, "width": 16, "num_heads": 2})
    task = SimpleNamespace(loss=CrossEntropy, name="language")
    arguments: Any = (task, model, example)
    chunked = choose_loss(ModelSpec.of(job.model), *arguments)
    assert isinstance(chunked, ChunkedCrossEntropy)
    plain = choose_loss(ModelSpec.of(job.model), *arguments, copies_modules=True)
    assert type(plain) is CrossEntropy
    asked = job.model.model_copy(update={"chunked_loss": True})
    with pytest.raises(ConfigError, match="model.chunked_loss=true: the head makes the loss"):
        choose_loss(ModelSpec.of(asked), *arguments, copies_modules=True)
    assert data_parallel.DataParallel().traits.copies_modules
