"""Scripts like Horovod's public examples: their figures equal those of a plain loop."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.programs import ROOT, run
from support.zygote import interpreter
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

SCRIPTS = ROOT / "tests" / "support" / "scripts"
RANKS = 2
START = """
import sys
from pathlib import Path
from bigtrain.ranks.launch import start_ranks
sys.exit(start_ranks(2, sys.argv[2:], Path(sys.argv[1])))
"""


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(name: str, *words: str) -> str:
    """The output of a script on two ranks."""
    command = [interpreter(), "-c", START, str(SCRIPTS / f"{name}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


class PlainLoop:
    """One model per rank in a single process: gradients are averaged by hand, buffers are not."""

    def __init__(self, make: type[nn.Module], lr: float, **options: float) -> None:
        torch.manual_seed(0)  # rank 0's seed, as all ranks have its weights
        first = make()
        self.models = [make() for _ in range(RANKS)]
        for model in self.models:
            model.load_state_dict(first.state_dict())
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=lr, **options) for model in self.models
        ]

    def step(self) -> None:
        for parameters in zip(*[model.parameters() for model in self.models], strict=True):
            mean = sum(parameter.grad for parameter in parameters) / RANKS
            for parameter in parameters:
                parameter.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def loaders(dataset, batch: int, epoch: int) -> list[DataLoader]:
    made = []
    for rank in range(RANKS):
        sampler = DistributedSampler(dataset, num_replicas=RANKS, rank=rank)
        sampler.set_epoch(epoch)
        made.append(DataLoader(dataset, batch_size=batch, sampler=sampler))
    return made


def test_epochs_of_digits(tmp_path):
    pytest.importorskip("sklearn")
    digits = script("hvd_digits")
    loop = PlainLoop(digits.Net, 0.02 * RANKS, momentum=0.5)
    train, test = digits.digits()
    expected = []
    for epoch in range(digits.EPOCHS):
        for batches in zip(*loaders(train, digits.BATCH // 2, epoch), strict=True):
            for model, (data, target) in zip(loop.models, batches, strict=True):
                functional.nll_loss(model(data), target).backward()
            loop.step()
        images, labels = test.tensors
        with torch.no_grad():
            output = loop.models[0](images)
        right = output.argmax(1).eq(labels).double().mean().item()
        expected.append([functional.nll_loss(output, labels).item(), right])
    assert expected[-1][0] < expected[0][0]
    for factor, compression in (("1.0", "none"), ("2.0", "fp16")):
        run_script("hvd_digits", str(tmp_path / "figures"), factor, compression)
        figures = json.loads((tmp_path / "figures").read_text())
        losses = [abs(got[0] - wanted[0]) for got, wanted in zip(figures, expected, strict=True)]
        if compression == "none":
            assert max(losses) < 1e-10
            assert [got[1] for got in figures] == pytest.approx([wanted[1] for wanted in expected])
        else:
            assert 1e-10 < max(losses) < 1e-2


def test_images_with_several_passes_and_a_resume(tmp_path):
    images = script("hvd_images")
    run_script("hvd_images", str(tmp_path), "2")
    run_script("hvd_images", str(tmp_path), "3")  # continues from the second epoch's checkpoint
    figures = [json.loads((tmp_path / f"figures-{n}.json").read_text()) for n in (0, 2)]
    loop = PlainLoop(images.resnet, images.BASE_LR, momentum=0.9, weight_decay=5e-5)
    train, held_out = images.images(44, 1), images.images(16, 2)
    expected = []
    for epoch in range(3):
        if epoch == 2:  # the checkpoint has rank 0's statistics, which all ranks load
            loop.models[1].load_state_dict(loop.models[0].state_dict())
        losses, held_losses = [], []
        parts = loaders(train, images.BATCH * images.PASSES, epoch)
        for number, batches in enumerate(zip(*parts, strict=True)):
            for model, optimizer, (data, target) in zip(
                loop.models, loop.optimizers, batches, strict=True
            ):
                model.train()
                optimizer.param_groups[0]["lr"] = images.rate(epoch, number, len(parts[0]), RANKS)
                passes = math.ceil(len(data) / images.BATCH)
                for data_part, target_part in zip(
                    data.split(images.BATCH), target.split(images.BATCH), strict=True
                ):
                    loss = functional.cross_entropy(model(data_part), target_part)
                    losses.append(loss.item())
                    (loss / passes).backward()
            loop.step()
        for model, batches in zip(loop.models, loaders(held_out, images.BATCH, 0), strict=True):
            model.eval()
            for data, target in batches:
                with torch.no_grad():
                    held_losses.append(functional.cross_entropy(model(data), target).item())
        expected.append([sum(losses) / len(losses), sum(held_losses) / len(held_losses)])
    for got, wanted in zip([*figures[0], *figures[1]], expected, strict=True):
        assert got == pytest.approx(wanted, rel=0, abs=1e-10)


def test_a_synthetic_benchmark(tmp_path):
    synthetic = script("hvd_synthetic")
    output = run_script("hvd_synthetic", str(tmp_path / "losses"))
    assert output.count("img/sec") == synthetic.ITERATIONS
    assert "Number of ranks: 2" in output
    loop = PlainLoop(synthetic.net, synthetic.LR * RANKS)
    losses = []
    for _ in range(synthetic.ITERATIONS * synthetic.STEPS):
        for rank, model in enumerate(loop.models):
            data, target = synthetic.batch(rank)
            loss = functional.cross_entropy(model(data), target)
            losses += [loss.item()] if rank == 0 else []
            loss.backward()
        loop.step()
    assert json.loads((tmp_path / "losses").read_text()) == pytest.approx(losses, rel=0, abs=1e-10)


def elastic_steps(elastic: ModuleType) -> tuple[list[float], list[list[float]]]:
    """The losses of rank 0 and the final weights of a plain loop without a fault."""
    import random

    loop = PlainLoop(elastic.net, elastic.LR, momentum=0.9)
    inputs, labels = elastic.samples().tensors
    losses = []
    for epoch in range(elastic.EPOCHS):
        order = list(range(len(inputs)))
        random.Random(3 + epoch).shuffle(order)
        shards = [order[rank::RANKS] for rank in range(RANKS)]
        for first in range(0, len(shards[0]), elastic.BATCH):
            for rank, model in enumerate(loop.models):
                rows = shards[rank][first : first + elastic.BATCH]
                loss = functional.cross_entropy(model(inputs[rows]), labels[rows])
                losses += [loss.item()] if rank == 0 else []
                loss.backward()
            loop.step()
    return losses, [p.tolist() for p in loop.models[0].parameters()]


def assert_figures(folder: Path, resets: list[int], life: int) -> None:
    """Assert that the figures of a killed run equal those of a plain loop."""
    losses, weights = elastic_steps(script("hvd_elastic"))
    figures = json.loads((folder / "figures.json").read_text())
    assert (figures["life"], figures["resets"]) == (life, resets)
    assert figures["losses"] == pytest.approx(losses, rel=0, abs=1e-12)
    for got, wanted in zip(figures["weights"], weights, strict=True):
        assert torch.allclose(torch.tensor(got), torch.tensor(wanted), rtol=0, atol=1e-12)


@pytest.mark.launcher
def test_torchrun_starts_an_elastic_script_again_at_its_last_commit(tmp_path):
    """Rank 1 is killed after step 5, and the last commit was at step 4."""
    line = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node={RANKS} "
    line += f"--max-restarts=1 {SCRIPTS / 'hvd_elastic.py'} {tmp_path} 5"
    done = run(["sh", "-c", f"cd {tmp_path} && exec {line}"])
    assert done.status == 0, done.output
    assert_figures(tmp_path, [4], 1)
    assert not (tmp_path / "runs").exists(), "a successful run must remove its commits"


def test_a_later_launch_goes_on_where_a_folder_for_commits_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("BIGTRAIN_ELASTIC", str(tmp_path / "commits"))
    command = [interpreter(), "-c", START, str(SCRIPTS / "hvd_elastic.py"), str(tmp_path), "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    assert not (tmp_path / "figures.json").exists()
    run_script("hvd_elastic", str(tmp_path), "0")
    assert_figures(tmp_path, [6], 0)
