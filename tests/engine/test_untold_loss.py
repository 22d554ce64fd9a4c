"""Data without a task: the loss comes from the job, the data, or the targets and outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data import Data, open_data
from bigtrain.data.loader import MicroBatch
from bigtrain.engine.run_loss.infer_loss import infer_loss
from bigtrain.engine.setup import RunSetup, open_setup
from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.losses.loss import CrossEntropy, MeanLoss
from bigtrain.losses.tasks import ClassificationTask, CustomTask, UntoldTask
from bigtrain.ranks.context import RunContext


def rows() -> Tensor:
    return torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, out: int = 3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class OwnLoss(Net):
    """Returns its loss in addition to its logits."""

    def forward(self, x: Tensor) -> Any:
        logits = self.net(x)
        return {"logits": logits, "loss": logits.square().mean()}


def classes() -> Data:
    points = TensorDataset(rows(), rows().argmax(1) % 3)
    return Data(train=points, validation=points, task=None)  # type: ignore[arg-type]


def values() -> Data:
    points = TensorDataset(rows(), rows()[:, :3])
    return Data(points, points)


def own(output: Tensor, target: Tensor) -> Tensor:
    return (output.mean(1) - target).abs().mean()


def with_loss() -> Data:
    points = TensorDataset(rows(), rows()[:, 0])
    return Data(points, points, loss=own)


def with_task_and_loss() -> Data:
    points = TensorDataset(rows(), rows().argmax(1) % 3)
    return Data(points, None, ClassificationTask(3), loss=lambda o, t: F.cross_entropy(o, t) * 2)


def odd() -> Data:
    return Data(TensorDataset(rows(), rows()[:, 0]), None)


class Stream(IterableDataset):
    """Has a length, but can only be read from the beginning."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[Any]:
        return iter((row, torch.tensor(1)) for row in rows())


class NoLength(Dataset):
    def __getitem__(self, index: int) -> Any:
        return rows()[index], torch.tensor(1)


def stream() -> Data:
    return Data(Stream(), None)


def stream_to_validate() -> Data:
    return Data(TensorDataset(rows(), rows()), Stream())


def no_length() -> Data:
    return Data(NoLength(), None)  # type: ignore[arg-type]


def empty() -> Data:
    return Data(TensorDataset(rows()[:0], rows()[:0]), None)


def setup_of(data: str, *words: str, model: str = "Net") -> RunSetup:
    words_of_job = [f"model.name={__name__}:{model}", f"data.name={__name__}:{data}"]
    batch = ["train.global_batch_size=8", "train.micro_batch_size=4", "train.steps=2"]
    job = load_job(
        None, "single", [*words_of_job, *batch, "device=cpu", "memory.predict=false", *words]
    )
    return open_setup(job, make_plan(job, 1, "cpu"))


@pytest.mark.parametrize(
    ("data", "words", "model", "kind", "expected_note"),
    [
        ("classes", (), "Net", CrossEntropy, "loss: cross entropy, as data.name="),
        ("values", (), "Net", MeanLoss, "loss: mean squared error, as data.name="),
        ("odd", (), "OwnLoss", MeanLoss, "loss: the model's own (output.loss), as data.name="),
        ("with_loss", (), "Net", MeanLoss, ""),
        ("with_loss", (f"model.loss={__name__}:own",), "Net", MeanLoss, ""),
        ("values", ("model.loss=torch.nn.functional:l1_loss",), "Net", MeanLoss, ""),
    ],
)
def test_data_without_a_task_train_and_are_measured_by_the_loss(
    data, words, model, kind, expected_note
):
    parts = setup_of(data, *words, model=model)
    notes = [note for note in parts.resolved.notes if note.startswith("loss: ")]
    assert bool(notes) is bool(expected_note)
    assert all(expected_note in note for note in notes)
    assert type(parts.data.task) is CustomTask
    loss = parts.workload.loss
    assert isinstance(getattr(loss, "inner", loss), kind) or "lobal" in type(loss).__name__
    with parts.engine(RunContext.alone()) as engine:
        for batch in parts.training_steps(engine.context, 0):
            result = engine.step(batch)
            if result.step == 2:
                break
        measured = engine.evaluate(parts.validation_batches(engine.context))
        assert math.isfinite(result.loss)
        if parts.data.validation is not None:
            inputs, targets = parts.data.validation.tensors
            output = engine.model(inputs)
            plain = {"classes": F.cross_entropy, "values": F.mse_loss, "with_loss": own}[data]
            plain = F.l1_loss if any("l1_loss" in word for word in words) else plain
            assert measured == pytest.approx({"loss": float(plain(output, targets).detach())})


def test_the_loss_of_the_data_goes_before_the_tasks():
    with_task, without_task = setup_of("with_task_and_loss"), setup_of("classes")
    assert isinstance(with_task.data.task, ClassificationTask)
    losses = []
    for parts in (with_task, without_task):
        with parts.engine(RunContext.alone()) as engine:
            losses.append(engine.step(next(iter(parts.training_steps(engine.context, 0)))).loss)
    assert losses[0] == pytest.approx(2 * losses[1])


def example(targets: Any) -> MicroBatch:
    return MicroBatch(rows()[:4], targets, 4, 4)


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x[:, :3, None, None].expand(-1, -1, 5, 6)


class Sized(Image):
    """Reads a value, which a fake tensor does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.sum())


@pytest.mark.parametrize(
    ("model", "targets", "class_dim"),
    [
        (Net(), torch.zeros(4, dtype=torch.long), -1),
        (Net(), torch.zeros(4, dtype=torch.uint8), -1),
        (Image(), torch.zeros(4, 5, 6, dtype=torch.long), 1),
    ],
)
def test_whole_numbers_are_classes_along_the_dim_that_is_left(model, targets, class_dim):
    loss, note = infer_loss("mine:data", model, example(targets))
    assert loss == CrossEntropy(class_dim=class_dim)
    assert note.startswith("loss: cross entropy, as data.name=mine:data names no task and no loss")


@pytest.mark.parametrize(
    ("model", "targets", "message"),
    [
        (Net(), torch.zeros(4), r"targets \(4,\) of float32, outputs \(4, 3\) do not determine"),
        (Net(1), torch.zeros(4), r"outputs \(4, 1\) do not determine"),
        (Net(), torch.zeros(4, 3, dtype=torch.long), "do not determine"),
        (Net(), torch.zeros(4, dtype=torch.bool), "of bool"),
        (
            Net(),
            {"a": torch.zeros(4)},
            "targets are a dict, the output a Tensor, which do not determine",
        ),
        (Sized(), torch.zeros(4), "the model does not run on fake tensors, so its output"),
    ],
)
def test_what_tells_no_loss_is_refused_with_both_ways_out(model, targets, message):
    with pytest.raises(ConfigError, match=message) as raised:
        infer_loss("mine:data", model, example(targets))
    assert "Give Data(..., loss=...)" in str(raised.value)
    assert "model.loss=package.module:function" in str(raised.value)


def test_a_task_that_nobody_settled_refuses_to_be_trained_with():
    data = classes()
    assert isinstance(data.task, UntoldTask)
    with pytest.raises(ConfigError, match=r"name no task. Give Data\(..., task=...\)"):
        data.task.loss()(torch.ones(2), torch.ones(2))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("stream", r"gives a Stream in train, which has no __getitem__: samples are drawn by"),
        ("stream_to_validate", "gives a Stream in validation, which has no __getitem__"),
        ("no_length", "gives a NoLength in train, which has no __len__"),
        ("empty", r"length 0\), at least 1 is needed. Check the function's files\.$"),
    ],
)
def test_samples_that_cannot_be_drawn_by_number_are_one_line(data, message):
    with pytest.raises(ConfigError, match=message):
        open_data(f"{__name__}:{data}", None, {}, seed=0)


def test_a_path_is_pointed_to_only_where_there_is_one():
    with pytest.raises(ConfigError, match=r"Check data.path=here\.$"):
        open_data(f"{__name__}:empty", "here", {}, seed=0)


@pytest.mark.parametrize(
    ("words", "neutral"),
    [
        ((), True),
        (("optim.lr=0.01",), False),
        (("optim.name=sgd",), False),
        (("train.steps=5",), True),
    ],
)
def test_a_model_of_ones_own_without_a_job_gets_neutral_defaults(words, neutral):
    job = load_job(None, None, [f"model.name={__name__}:Net", *words])
    settings = job.optim.model_copy(update={"lr": 1e-3, "name": "adamw"})
    plain = {"weight_decay": 0.0, "warmup_steps": 0, "schedule": "constant", "clip_norm": None}
    assert {key: getattr(settings, key) for key in plain} == plain
    assert (job.optim == settings) is neutral
    parts = setup_of("classes", *(word for word in words if word.startswith("optim")))
    notes = [note for note in parts.resolved.notes if note.startswith("optim: ")]
    assert bool(notes) is neutral
    assert all(note.startswith("optim: adamw, lr 0.001 constant, no warm-up") for note in notes)


def test_what_a_job_says_of_the_optimizer_stays(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(f"model: {{name: '{__name__}:Net'}}\noptim: {{warmup_steps: 7}}\n")
    assert load_job(str(path)).optim.warmup_steps == 7
    assert load_job("default", None, [f"model.name={__name__}:Net"]).optim.warmup_steps == 20
    assert load_job(None, None, ["model.name=gpt-10m"]).optim.warmup_steps == 20
