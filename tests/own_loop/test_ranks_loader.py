"""`engine.loader`: every row once an epoch over all ranks, also when resumed by another
strategy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import UNSEEN, sgd
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import bigtrain
from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.models.blueprint import describe
from bigtrain.ranks.context import RunContext

ROWS, BATCH = 22, 8


class Rows(Dataset[Any]):
    """A dataset whose first feature is the number of the row."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        features = torch.randn(4, generator=torch.Generator().manual_seed(index))
        features[0] = index / ROWS
        return features, index % 3


def collate_pairs(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Stack samples into (inputs, targets)."""
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def seen(step: Any) -> list[int]:
    parts = [m for m in step.micro_batches if not m.padding]
    return [round(float(value) * ROWS) for m in parts for value in m.inputs[:, 0]]


def run(
    context: RunContext, strategy: str, folder: Path, first: int, last: int, workers: int
) -> tuple[list[list[int]], list[float], dict[str, float]]:
    """Run the steps from `first` to before `last`, resuming from the engine before if
    there is one.
    """
    job = job_from_keys(strategy, {"train.global_batch_size": BATCH, **UNSEEN})
    x, y = collate_pairs([Rows()[n] for n in range(BATCH // context.dp_size)])
    example = MicroBatch(x, y, len(x), len(x))
    with Engine(net, F.cross_entropy, sgd, job, context, example=example) as engine:
        loader = engine.loader(Rows(), workers=workers, collate_fn=collate_pairs)
        if first:
            engine.load(folder)
        rows, losses = [], []
        assert len(loader) == 3
        while engine.steps_done < last:
            assert loader.epoch == engine.steps_done // 3  # type: ignore[union-attr]
            for batch in loader:
                rows.append(seen(batch))
                losses.append(engine.step(batch).loss)  # type: ignore[arg-type]
                if engine.steps_done == last:
                    break
        held_out = engine.loader(Rows(), training=False)
        figures = engine.evaluate(held_out, {"rows": lambda o, _: (len(o), 1)})
        again = engine.evaluate(held_out)
        assert again["loss"] == figures["loss"]
        engine.save(folder)
        return rows, losses, figures


def plain(orders: list[list[int]]) -> list[float]:
    model = describe(net).materialize("cpu", seed=0)
    optimizer, losses = sgd(model.parameters()), []
    for rows in orders:
        x, y = collate_pairs([Rows()[n] for n in rows])
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def rows_by_step(results: list[Any], replicas: int) -> list[list[int]]:
    """The rows of each step, over all replicas."""
    firsts = results[:: len(results) // replicas] if replicas < len(results) else results
    return [sorted(n for rank in firsts for n in rank[0][s]) for s in range(len(results[0][0]))]


def test_an_epoch_goes_on_under_other_strategies_and_ranks(tmp_path: Path) -> None:
    """In one process, on two replicas and in a pipeline: the rows and losses of one plain loop."""
    turns = [("single", 1, 0, 2, 1), ("ddp", 2, 2, 4, 2), ("1f1b", 2, 4, 8, 1)]
    rows: list[list[int]] = []
    losses: list[float] = []
    for strategy, ranks, first, last, replicas in turns:
        axes = {"pp": 2} if strategy == "1f1b" else {}
        arguments = (strategy, tmp_path, first, last, 2 if strategy == "ddp" else 0)
        results = run_ranks(run, ranks, *arguments, **axes)
        rows += rows_by_step(results, replicas)
        losses += results[0][1]
        for rank in results:
            assert rank[1] == results[0][1]
    assert [len(row) for row in rows] == [8, 8, 6, 8, 8, 6, 8, 8]
    for epoch in (rows[:3], rows[3:6]):
        assert sorted(n for step in epoch for n in step) == list(range(ROWS))
    assert rows[0] != rows[3]
    assert losses == pytest.approx(plain(rows), rel=2e-5)


def test_evaluation_sees_every_row_once(tmp_path: Path) -> None:
    first, second = run_ranks(run, 2, "ddp", tmp_path, 0, 3, 0)
    assert first[2] == second[2]
    model = describe(net).materialize("cpu", seed=0)
    model.load_state_dict(bigtrain.Checkpoint(tmp_path / "step-3").model_state())
    x, y = collate_pairs([Rows()[n] for n in range(ROWS)])
    assert first[2]["loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)


def uneven(context: RunContext, strategy: str) -> list[float]:
    """torch's loader with a smaller last batch, and one that gives ranks different numbers
    of rows.
    """
    job = job_from_keys(
        strategy, {"train.global_batch_size": 8, "train.micro_batch_size": 1, **UNSEEN}
    )
    with Engine(net, F.cross_entropy, sgd, job, context) as engine:
        data = TensorDataset(*collate_pairs([Rows()[n] for n in range(ROWS)]))
        sampler = DistributedSampler(
            data, engine.context.dp_size, engine.context.dp_rank, shuffle=False
        )
        losses = [engine.step(batch).loss for batch in DataLoader(data, 4, sampler=sampler)]
        x, y = data[:3]
        mine = slice(0, 2) if context.dp_rank == 0 else slice(2, 3)
        losses.append(engine.step((x[mine], y[mine])).loss)
        return losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_torchs_own_loader_and_replicas_with_other_numbers_of_rows(strategy: str) -> None:
    first, second = run_ranks(uneven, 2, strategy)
    assert first == second
    places = [[*range(n, min(n + 8, ROWS))] for n in range(0, ROWS, 8)]
    assert first == pytest.approx(plain([*places, [0, 1, 2]]), rel=2e-5)


def stream() -> Any:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([])

    return Stream()


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (stream(), r"a Stream has no dataset\[i\] and len\(dataset\)"),
        (iter([1]), r"a list_iterator has no dataset"),
        (DataLoader(Rows()), r"got a DataLoader, and a data set is needed.*DistributedSampler"),
        ([], "has 0 samples"),
    ],
)
def test_what_is_no_data_set_is_said(dataset: Any, message: str) -> None:
    with (
        bigtrain.prepare(net, F.cross_entropy, sgd, train__global_batch_size=4) as engine,
        pytest.raises(ConfigError, match=message),
    ):
        engine.loader(dataset)


def test_samples_that_are_no_pairs_and_a_batch_of_no_size_are_said() -> None:
    with bigtrain.prepare(net, F.cross_entropy, sgd, train__global_batch_size=4) as engine:
        dicts = [{"x": torch.zeros(4), "y": 1}] * 8
        with pytest.raises(ConfigError, match="loader: got a dict with 'x', 'y'"):
            next(iter(engine.loader(dicts)))
    with (
        bigtrain.prepare(net, F.cross_entropy, sgd) as engine,
        pytest.raises(ConfigError, match=r"no key sets the batch size.*global_batch_size=64"),
    ):
        engine.loader(Rows())
