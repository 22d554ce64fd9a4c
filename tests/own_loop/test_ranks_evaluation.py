"""`evaluate` and `predict` under strategies: every rank returns the figures of all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import UNSEEN, sgd
from support.ranks import RankFailure, run_ranks
from torch import Tensor, nn

from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.models.blueprint import describe
from bigtrain.ranks.context import RunContext


class Larger(nn.Module):
    """Doubles its input in evaluation mode only, so that a wrong mode changes the figures."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else 2 * x


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), Larger(), nn.ReLU(), nn.Linear(8, 3)
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) == targets).float().mean()


def top(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return outputs.max(-1).values.sum(), len(targets)


METRICS = {"accuracy": accuracy, "top": top}


def rows(number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(number, 6, generator=draw), torch.randint(3, (number,), generator=draw)


def run_evaluation(context: RunContext, strategy: str) -> dict[str, Any]:
    """Uneven batches, more on the first replica, none on the last; and outputs of each
    rank's rows.
    """
    job = job_from_keys(strategy, {"train.global_batch_size": 12, **UNSEEN})
    x, y = rows(12)
    size = 12 // context.dp_size
    example = MicroBatch(x[:size], y[:size], size, size)
    with Engine(
        net, F.cross_entropy, sgd, job, context, example=example, metrics=METRICS
    ) as engine:
        data_rank, parts = engine.plan.data_rank(context.dp_rank), engine.plan.batch.dp_size
        if data_rank is None:
            mine: list[tuple[Tensor, Tensor]] = []
            rank_rows = slice(0, 1)
        else:
            mine = [
                rows(n) for n in ((9, 2, 5) if data_rank == 0 else (4,) if data_rank == 1 else ())
            ]
            rank_rows = slice(data_rank * 12 // parts, (data_rank + 1) * 12 // parts)
        first = engine.evaluate(mine)
        engine.step((x[rank_rows], y[rank_rows]))
        second, outputs = engine.evaluate(mine), engine.predict(x[rank_rows])
        none = engine.evaluate([] if data_rank != 0 else mine[:1], {"accuracy": accuracy})
        loss = engine.step((x[rank_rows], y[rank_rows])).loss
        called = ""
        if context.pp_size > 1:
            with pytest.raises(ConfigError) as refused:
                engine.model(x)
            called = str(refused.value)
        shape = None if outputs is None else outputs.tolist()
        return {
            "first": first,
            "second": second,
            "outputs": shape,
            "none": none,
            "loss": loss,
            "called": called,
        }


def plain_figures(parts: int) -> dict[str, Any]:
    """The figures of a plain torch loop over the same rows."""
    model = describe(net).materialize("cpu", seed=0)
    optimizer = sgd(model.parameters())
    batches = [rows(n) for n in ((9, 2, 5, 4) if parts > 1 else (9, 2, 5))]
    every = tuple(torch.cat(one) for one in zip(*batches, strict=True))

    def figures(x: Tensor, y: Tensor) -> dict[str, float]:
        with torch.no_grad():
            outputs = model.eval()(x)
            figures_by_name = {
                "loss": F.cross_entropy(outputs, y).item(),
                "accuracy": accuracy(outputs, y).item(),
                "top": float(outputs.max(-1).values.mean()),
            }
        model.train()
        return figures_by_name

    x, y = rows(12)
    first = figures(*every)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return {
        "first": first,
        "second": figures(*every),
        "outputs": model.eval()(x).tolist(),
        "none": {k: v for k, v in figures(*rows(9)).items() if k != "top"},
    }


CASES = [
    *(("ddp", 2), ("fsdp", 2), ("zero2", 2), ("zero3", 2), ("1f1b", 2), ("tensor", 2), ("ddp", 3)),
    *(("zero1_torch", 2), ("oss", 2), ("interleaved_1f1b", 2), ("zbv", 2), ("hybrid", 4)),
    *(("pipeline_deepspeed", 2), ("parameter_server", 3), ("1f1b_fsdp", 4), ("zero1", 2)),
    *(("sync_sgd", 2), ("local_sgd", 2), ("dualpipev", 2), ("layer_split", 2)),
]


@pytest.mark.parametrize(("strategy", "ranks"), CASES)
def test_every_rank_has_the_figures_of_all_rows(strategy: str, ranks: int) -> None:
    axes = axes_of(strategy, ranks)
    parts = ranks // axes.get("pp", 1) // axes.get("tp", 1) - (strategy == "parameter_server")
    expected = plain_figures(parts)
    for rank, result in enumerate(run_ranks(run_evaluation, ranks, strategy, **axes)):
        for name in ("first", "second", "none"):
            if name == "first" or strategy != "local_sgd":
                assert result[name] == pytest.approx(expected[name], rel=2e-5), name
        cuts = axes.get("pp", 1) > 1
        assert ("engine.predict(inputs)" in result["called"]) == cuts
        if result["outputs"] is None:
            assert strategy == "parameter_server"
            assert rank == 0
            continue
        if strategy != "local_sgd":
            assert len(result["outputs"]) == 12 // parts
            assert all(
                any(row == pytest.approx(outputs, abs=1e-5) for outputs in expected["outputs"])
                for row in result["outputs"]
            )


def axes_of(strategy: str, ranks: int) -> dict[str, int]:
    pipelines = ("1f1b", "zbv", "dualpipev", "layer_split", "pipeline")
    if any(name in strategy for name in pipelines):
        return {"pp": 2}
    return {"tp": ranks} if strategy == "tensor" else {}


def evaluate_different_rows(context: RunContext) -> None:
    """Evaluate a pipeline whose ranks pass different numbers of rows."""
    job = job_from_keys("1f1b", {"train.global_batch_size": 12, **UNSEEN})
    x, y = rows(12)
    with Engine(
        net, F.cross_entropy, sgd, job, context, example=MicroBatch(x[:6], y[:6], 6, 6)
    ) as engine:
        engine.evaluate([rows(4 + context.rank)])


def test_other_rows_on_ranks_of_one_pipeline_are_refused_on_all() -> None:
    with pytest.raises(RankFailure, match=r"hold parts of one model, and give batches of 4 and 5"):
        run_ranks(evaluate_different_rows, 2, pp=2)


def evaluate_wrong_batch(context: RunContext) -> str:
    """The message if one rank passes a batch that is not a pair."""
    job = job_from_keys("ddp", {"train.global_batch_size": 12, **UNSEEN})
    with (
        Engine(net, F.cross_entropy, sgd, job, context) as engine,
        pytest.raises(ConfigError) as refused,
    ):
        engine.evaluate([rows(4) if context.rank else rows(4)[0]])
    return str(refused.value)


def test_a_wrong_batch_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(evaluate_wrong_batch, 2)
    assert "evaluate: got a Tensor" in first
    assert "another rank refuses its batch" in second
