"""A moving average of the weights under every kind of strategy, compared with a plain
torch loop.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import sgd
from support.ranks import run_ranks
from support.whole import whole_tensors
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import bigtrain
from bigtrain.assembly.make_plan import make_plan
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.data.loader import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import as_loss
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import read_whole

ROWS, STEPS, DECAY = 8, 4, 0.7


class Net(nn.Module):
    """Equal blocks, a weight that is used twice, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.back, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.back.weight = self.blocks[0].weight
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(torch.tanh(self.back(self.norm(x))))


class Plain(Net):
    """Without features that depend on the distribution of rows over ranks; all layers are
    trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.first.requires_grad_(True)
        self.back.weight = nn.Parameter(self.back.weight.detach().clone())


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 5, generator=draw), torch.randint(0, 3, (ROWS,), generator=draw)


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.back.weight = self.blocks[0].weight
        self.first.requires_grad_(False)


def decay_of(step: int) -> float:
    """A decay that rises, as during a warm-up of the average."""
    return min(DECAY, step / 4)


def plain_average(make: Any, decay: Any, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The averages and the weights of a plain torch loop, by name."""
    torch.manual_seed(0)
    model = make()
    optimizer, average = sgd(model.parameters()), copy.deepcopy(model)
    for step in range(1, steps + 1):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        share = decay(step) if callable(decay) else decay
        with torch.no_grad():
            for averaged, new in zip(average.parameters(), model.parameters(), strict=True):
                averaged.mul_(share).add_(new, alpha=1 - share)
    return dict(average.state_dict()), dict(model.state_dict())


def engine_of(context: Any, strategy: str, make: Any, keys: dict[str, Any]) -> Engine:
    sizes = {"train.global_batch_size": ROWS, "train.micro_batch_size": 2, "device": "cpu"}
    job = job_from_keys(strategy, {**sizes, **keys})
    plan = make_plan(job, context.world_size, "cpu")
    loss = as_loss(F.cross_entropy)
    torch.manual_seed(0)
    inputs, targets = batch(0)
    example = example_batch((inputs[:2], targets[:2]), loss, job, plan)
    return Engine(make(), loss, sgd, job, context, example=example)


def own_rows(context: Any, step: int) -> tuple[Tensor, Tensor]:
    each = ROWS // context.dp_size
    rows = slice(context.dp_rank * each, (context.dp_rank + 1) * each)
    return tuple(t[rows] for t in batch(step))


def weights_of(engine: Engine) -> dict[str, Tensor]:
    whole = whole_tensors(engine.runner.state())
    return {n.removeprefix("model."): t for n, t in whole.items() if n.startswith("model.")}


def average_all(context: Any, strategy: str, folder: str) -> dict[str, Any]:
    """Train with an average, swap it in, evaluate, save, resume in a second engine, and
    continue.
    """
    results: dict[str, Any] = {}
    for name, make, decay in (("plain", Plain, decay_of), ("tied", Tied, DECAY)):
        path = Path(folder) / name
        with engine_of(context, strategy, make, {}) as engine:
            average = bigtrain.ema(engine, decay)
            predicted = engine.prediction.peak
            for step in (1, 2):
                engine.step(own_rows(context, step))
            report = engine.memory()
            saved = engine.save(path)
        with engine_of(context, strategy, make, {}) as engine:
            average = bigtrain.ema(engine, decay)
            engine.load(saved)
            for step in (3, 4):
                engine.step(own_rows(context, step))
            before = weights_of(engine)
            inputs, targets = own_rows(context, 9)
            rows = [MicroBatch(inputs, targets, len(targets), len(targets))]
            with average.swapped():
                swapped, measured = weights_of(engine), engine.evaluate(rows)
                exported = engine.save(path / "averaged")
                try:
                    engine.step(own_rows(context, 5))
                except BigtrainError as error:
                    refused = str(error)
            after = weights_of(engine)
            engine.step(own_rows(context, 5))
            copied = ""
            try:
                copy.deepcopy(engine.model)
            except BigtrainError as error:
                copied = str(error)
        checkpoint = Checkpoint(exported)
        read = {n: read_whole(t) for n, t in checkpoint.tensors.items() if n.startswith("model.")}
        results[name] = {
            "swapped": swapped,
            "before": before,
            "after": after,
            "exported": {n.removeprefix("model."): t for n, t in read.items()},
            "loss": measured["loss"],
            "refused": refused,
            "copied": copied,
            "peak": (predicted.bytes, report.ranks[0].measured.peak.bytes) if report else None,
        }
    return results


STRATEGIES = ["single", "fsdp", "zero2", "1f1b"]
LONGER = [
    "ddp",
    "zero1_torch",
    "tensor",
    "zero1",
    "zero3",
    "fsdp_zero2",
    "ddp+offload_disk",
    "gpipe",
    "oss",
    "fsdp+full",
]


@pytest.mark.parametrize("strategy", [*STRATEGIES, *LONGER])
def test_an_average_is_that_of_a_plain_loop(strategy, tmp_path):
    axes = {"1f1b": {"pp": 2}, "gpipe": {"pp": 2}, "tensor": {"tp": 2}}.get(strategy, {})
    ranks = 1 if strategy == "single" else 2
    (results, *_) = run_ranks(average_all, ranks, strategy, str(tmp_path), timeout_s=120, **axes)
    for name, make, decay in (("plain", Plain, decay_of), ("tied", Tied, DECAY)):
        average, weights = plain_average(make, decay, STEPS)
        plain = results[name]
        for key, expected in (("swapped", average), ("exported", average), ("before", weights)):
            assert plain[key].keys() == expected.keys(), key
            for tensor, values in expected.items():
                torch.testing.assert_close(plain[key][tensor], values, rtol=2e-5, atol=2e-6)
        assert all(torch.equal(plain["after"][n], t) for n, t in plain["before"].items())
        model = make()
        model.load_state_dict(average)
        inputs, targets = batch(9)
        expected_loss = float(F.cross_entropy(model.eval()(inputs), targets).detach())
        assert plain["loss"] == pytest.approx(expected_loss, rel=1e-5)
        assert "would train the average" in plain["refused"]
        whole = ("single", "ddp", "ddp+offload_disk", "zero1_torch", "oss", "tensor")
        if strategy in whole:
            assert plain["copied"] == ""
        else:
            assert "bigtrain.ema(engine, decay=0.999)" in plain["copied"]


def resumed_elsewhere(context: Any, strategy: str, saved: str) -> dict[str, Tensor]:
    with engine_of(context, strategy, Plain, {}) as engine:
        average = bigtrain.ema(engine, DECAY)
        engine.load(Path(saved))
        with average.swapped():
            return weights_of(engine)


def test_an_average_goes_on_under_another_strategy_and_begins_anew_where_there_is_none(tmp_path):
    with engine_of(RunContext.alone(), "single", Plain, {}) as engine:
        without = engine.save(tmp_path / "without")
        average = bigtrain.ema(engine, DECAY)
        for step in range(1, STEPS + 1):
            engine.step(batch(step))
        saved = engine.save(tmp_path / "with")
        with average.swapped():
            expected = weights_of(engine)
        begun = weights_of(engine)
    with engine_of(RunContext.alone(), "single", Plain, {}) as engine:
        engine.load(saved)  # the checkpoint has no average, only weights and optimizer
        assert all(torch.equal(begun[name], t) for name, t in weights_of(engine).items())
        engine.step(batch(5))
        average = bigtrain.ema(engine, DECAY)
        engine.load(without)
        with average.swapped():
            fresh = weights_of(engine)
        assert all(torch.equal(fresh[name], t) for name, t in weights_of(engine).items())
    for strategy, axes in (("fsdp", {}), ("1f1b", {"pp": 2})):
        (weights, _) = run_ranks(resumed_elsewhere, 2, strategy, str(saved), **axes)
        for name, values in expected.items():
            torch.testing.assert_close(weights[name], values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("decay", [1.0, -0.1, 2])
def test_a_decay_that_is_none_is_refused(decay):
    with (
        engine_of(RunContext.alone(), "single", Plain, {}) as engine,
        pytest.raises(ConfigError, match=rf"ema: decay={decay} needs .* Use decay=0.999"),
    ):
        bigtrain.ema(engine, decay)


def test_a_second_average_is_refused_and_the_first_is_in_the_forecast():
    with engine_of(RunContext.alone(), "single", Plain, {}) as engine:
        before = engine.prediction.peak.breakdown.optimizer
        average = bigtrain.ema(engine, DECAY)
        assert average.nbytes == sum(p.nbytes for p in engine.model.parameters())
        assert engine.prediction.peak.breakdown.optimizer == before + average.nbytes
        with pytest.raises(ConfigError, match="already has an average"):
            bigtrain.ema(engine, DECAY)
        for step in range(3):
            engine.step(batch(step))
        (rank,) = engine.memory().ranks
        assert rank.measured.peak.breakdown.optimizer == engine.prediction.peak.breakdown.optimizer


def ema_refusal(context: Any, strategy: str) -> str:
    with engine_of(context, strategy, Plain, {}) as engine:
        try:
            bigtrain.ema(engine, DECAY)
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["local_sgd", "parameter_server_async"])
def test_where_the_ranks_have_no_one_model_it_is_refused(strategy):
    for message in run_ranks(ema_refusal, 2, strategy):
        assert f"ema: under strategy {strategy} the ranks do not have the same model" in message


def test_torchs_own_average_works_where_the_model_is_whole():
    with engine_of(RunContext.alone(), "single", Plain, {}) as engine:
        AveragedModel(engine.model)
