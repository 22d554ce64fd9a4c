"""Models whose linear layers DeepSpeed's AutoTP slices compute what one process computes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deepspeed_files import written
from support.parity import UNSEEN, Record, adamw, largest_difference, sgd, train
from support.peaks import peaks, settled
from support.ranks import run_ranks
from support.zygote import forked_cli
from torch import Tensor, nn
from torch.nn import functional as F

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import lay_slices
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.checkpoint.state_differences import compare_states
from bigtrain.core.workload import Workload
from bigtrain.data.loader import MicroBatch
from bigtrain.data.source import Samples, TensorSamples
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.ranks.context import RunContext
from bigtrain.slicing.state import ModelSlices

WORDS, WIDTH = 29, 24
SIZES: dict[str, Any] = {"num_layers": 2, "width": 24, "num_heads": 4, "vocab_size": WORDS}


def gpt(*, tied: bool = True, dropout: float = 0.0) -> nn.Module:
    return GPT(GPTConfig(**SIZES, sequence_length=6, tie_embeddings=tied, dropout=dropout))


MODELS = {"tied": gpt, "untied": partial(gpt, tied=False)}


def samples() -> Samples:
    """14 of them, of which some have few valid targets or none."""
    numbers = torch.Generator().manual_seed(4)
    words = torch.randint(WORDS, (14, 7), generator=numbers)
    inputs, targets = words[:, :-1].contiguous(), words[:, 1:].contiguous()
    share = torch.linspace(0, 1.2, 14)[:, None]
    targets[torch.rand(14, 6, generator=numbers) < share] = -100
    return TensorSamples(inputs, targets)


def trained(context: RunContext, strategy: str, keys: dict[str, Any]) -> dict[str, Record]:
    """Three steps of each model; batches of eight rows, and of the six that are left."""
    keys = {"train.micro_batch_size": 2, "optim.clip_norm": 0.5, **keys}
    return {
        name: train(context, make, samples(), strategy, keys, 3)
        for name, make in {**MODELS, "own": Net}.items()
    }


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 1": (2, {}),
    "stage 2": (2, {"strategy.replicate.stage": 2}),
    "stage 1, beside replicas": (4, {}),
    "stage 2, beside replicas": (4, {"strategy.replicate.stage": 2}),
    "over four": (4, {"mesh.tp": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_slices_of_autotp_equal_one_process(case: str) -> None:
    """Losses, norms before clipping, gradients, weights; and every rank has the same."""
    ranks, keys = CASES[case]
    keys = {"mesh.tp": 2, **keys}
    (one,) = run_ranks(trained, 1, "single", {}, timeout_s=100)
    found = run_ranks(trained, ranks, "autotp", keys, timeout_s=200, tp=keys["mesh.tp"])
    for records in found:
        for name, record in records.items():
            assert largest_difference(one[name], record) < 1e-5, name


class Attention(nn.Module):
    """Heads that AutoTP does not know of, where they are not called as it expects."""

    def __init__(self, heads_as: str, scale_as: str, dropout: float) -> None:
        super().__init__()
        setattr(self, heads_as, 4)
        setattr(self, scale_as, WIDTH)
        self.names = heads_as, scale_as
        self.dropout = dropout
        self.parts = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, places, WIDTH) to the same."""
        heads, scale = (getattr(self, name) for name in self.names)
        made = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.parts(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(*made, dropout_p=self.dropout)
        return self.out(mixed.transpose(1, 2).flatten(-2)) * (scale / WIDTH)


class Net(nn.Module):
    """A table of words, one attention, and an MLP over places in place of features if asked."""

    def __init__(
        self, heads: str = "num_heads", scale: str = "scale", dropout: float = 0.0, way: str = ""
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mix = Attention(heads, scale, dropout)
        places = 6 if way == "turned" else WIDTH
        self.expand, self.reduce = nn.Linear(places, 16), nn.Linear(16, places)
        self.head = nn.Linear(WIDTH, WORDS)
        self.way = way

    def forward(self, words: Tensor) -> Tensor:
        """(rows, places) to (rows, places, WORDS)."""
        x = self.words(words)
        x = x + self.mix(x)
        turned = x.transpose(1, 2) if self.way == "turned" else x
        hidden = F.gelu(self.expand(turned))
        if self.way == "reshaped":
            hidden = hidden.view(-1, 16).view(*x.shape[:2], 16)
        made = self.reduce(hidden)
        return self.head(x + (made.transpose(1, 2) if self.way == "turned" else made))


def laid(model: Callable[[], nn.Module], ranks: int = 2, **keys: Any) -> ModelSlices | None:
    """The slices that are chosen for it, without ranks."""
    job = job_from_keys("autotp", {"train.global_batch_size": 8, "mesh.tp": ranks, **keys})
    plan = make_plan(job, ranks, "cpu")
    words = torch.zeros(2, 6, dtype=torch.int64)
    example = MicroBatch(words, words, 12, 2)
    with torch.device("meta"):
        made = model()
    return lay_slices(plan, Workload(made, example, CrossEntropy(), sgd))


def test_it_slices_pairs_of_linear_layers_and_no_more() -> None:
    found = laid(Net)
    assert found is not None
    modules = {name.rpartition(".")[0] for name in found.by_name}
    assert modules == {"mix.parts", "mix.out", "expand", "reduce"}
    assert set(found.lines) == set(found.by_name)
    kept = laid(Net, **{"strategy.slice.keep": ["mix"]})
    assert kept is not None
    assert {name.rpartition(".")[0] for name in kept.by_name} == {"expand", "reduce"}


OF_SIZES = {
    "a name that AutoTP leaves alone": (
        partial(Net, heads="heads"),
        r"mix makes \[2, 6, 4, 3\] of a rank's widths .* is \[2, 6, 2, 6\]: .*keep=\[mix\]",
    ),
    "a name that AutoTP changes": (
        partial(Net, scale="hidden_size"),
        r"mix calls .*mul.* with \[0\.5\] with a rank's widths, and .*\[1\.0\] with whole ones",
    ),
    "a size in the code": (
        partial(Net, way="reshaped"),
        r"the model fails with a rank's widths \(RuntimeError: .*Use --strategy tensor",
    ),
    "random numbers": (
        partial(Net, dropout=0.1),
        r"mix draws random numbers for a rank's part, .*dropout.*keep=\[mix\]",
    ),
    "a turned tensor": (
        partial(Net, way="turned"),
        r"expand is given a tensor that is not contiguous, .*ColumnParallel\.backward .*"
        r"keep=\[expand\]', or use --strategy tensor",
    ),
}


@pytest.mark.parametrize("case", OF_SIZES)
def test_code_that_does_something_else_with_a_ranks_widths_is_refused(case: str) -> None:
    model, words = OF_SIZES[case]
    with pytest.raises(ConfigError, match=words):
        laid(model)


def test_what_is_refused_runs_where_it_is_kept_whole() -> None:
    found = laid(partial(Net, heads="heads"), **{"strategy.slice.keep": ["mix"]})
    assert found is not None
    assert "expand.weight" in found.by_name


def test_a_model_without_pairs_of_linear_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no linear layers .*mesh\.tp=2.*--strategy tensor"):
        laid(lambda: nn.Sequential(nn.Embedding(WORDS, 8), nn.Conv1d(6, 6, 1)))


REFUSED = {
    "one rank": (1, {}, r"mesh\.tp=1\. Start 2 ranks"),
    "stage 3": (2, {"strategy.replicate.stage": 3}, r"stage 3\. Use --strategy autotp"),
    "a file": (2, {"strategy.replicate.config": "ds.json"}, r"config=ds\.json: .*Leave the file"),
    "a cut": (
        4,
        {"strategy.cut": {"name": "pipeline", "schedule": "1f1b", "engine": "deepspeed"}},
        r"mesh\.pp=2\) cuts it\. Use --strategy 1f1b\+tensor",
    ),
    "engine": (2, {"strategy.replicate.engine": "torch"}, r"on torch, stage 1\. Use --strat"),
    "bf16": (2, {"train.precision": "bf16"}, r"train\.precision=bf16\. Use .*=fp32"),
    "compile": (2, {"train.compile": "blocks"}, r"train\.compile=blocks\. Use train\.compile=none"),
    "offload": (2, {"strategy.offload.optimizer": "cpu"}, r"offload\. Leave strategy\.offload"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_go_with_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    ranks, keys, words = REFUSED[case]
    tp = min(ranks, 2)
    job = job_from_keys("autotp", {"train.global_batch_size": 8, "mesh.tp": tp, **keys})
    with pytest.raises(ConfigError, match=words):
        make_plan(job, ranks, "cpu")


def continued(
    context: RunContext, strategy: str, keys: dict[str, Any], folder: Path, load: Path | None
) -> tuple[Path, list[float]]:
    """A step, or what was saved after one; a checkpoint of it, and the losses of two more."""
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **UNSEEN, **keys})
    words = torch.randint(WORDS, (8, 7), generator=torch.Generator().manual_seed(7))
    rows, place = 8 // context.dp_size, context.dp_rank
    own = words[place * rows : (place + 1) * rows]
    batch = own[:, :-1].contiguous(), own[:, 1:].contiguous()
    example = MicroBatch(*batch, batch[1].numel(), rows)
    with Engine(gpt, CrossEntropy(), adamw, job, context, example=example) as engine:
        if load is None:
            engine.step(batch)
        else:
            engine.load(load)
        path = engine.save(folder)
        losses = [engine.step(batch).loss for _ in range(2)]
        engine.saver.wait()
        return path, losses


def test_a_checkpoint_has_whole_tensors_and_goes_on_under_others(tmp_path: Path) -> None:
    keys = {"mesh.tp": 2}
    begun = run_ranks(continued, 4, "autotp", keys, tmp_path / "a", None, tp=2, timeout_s=100)
    path, losses = begun[0]
    shapes = {n: tuple(t.shape) for n, t in Checkpoint(path).tensors.items()}
    assert shapes["model.blocks.0.attention.qkv.weight"] == (3 * WIDTH, WIDTH)
    assert shapes["optimizer.blocks.0.mlp.output.weight.exp_avg"] == (WIDTH, 4 * WIDTH)
    _, of_ddp = run_ranks(continued, 2, "ddp", {}, tmp_path / "b", path, timeout_s=100)[0]
    assert of_ddp == pytest.approx(losses, rel=1e-5)
    one, losses = run_ranks(continued, 1, "single", {}, tmp_path / "c", None, timeout_s=100)[0]
    args = (continued, 2, "autotp", keys, tmp_path / "d", one)
    for again, found in run_ranks(*args, tp=2, timeout_s=100):
        assert found == pytest.approx(losses, rel=1e-5)
        assert all(far.relative == 0 for far in compare_states(Checkpoint(again), Checkpoint(one)))


FORECAST: dict[str, tuple[int, str, dict[str, Any]]] = {
    "alone": (2, "autotp", {"optim.clip_norm": 1.0}),
    "stage 2, beside replicas": (4, "autotp", {"strategy.replicate.stage": 2}),
    "recomputed": (2, "autotp+full", {"train.micro_batch_size": 2}),
}


def large_gpt() -> nn.Module:
    return GPT(GPTConfig(num_layers=3, width=64, num_heads=4, vocab_size=257, sequence_length=32))


def forecast(context: RunContext, cases: list[str]) -> Any:
    words = torch.arange(4 * 33).view(4, 33) * 7 % 257
    batch = words[:, :-1].contiguous(), words[:, 1:].contiguous()
    return {
        case: peaks(context, large_gpt, batch, strategy, {"mesh.tp": 2, **keys}, adamw)
        for case, (_, strategy, keys) in FORECAST.items()
        if case in cases
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_peak_is_that_of_our_own_slices_under_zero(ranks: int) -> None:
    """Two kilobytes, in buffers and temporaries, are off."""
    cases = [case for case, (wanted, *_) in FORECAST.items() if wanted == ranks]
    rows = settled(
        lambda: run_ranks(forecast, ranks, cases, tp=2, timeout_s=150),
        lambda found: any(row[1].bytes > 1.001 * row[0].bytes for row in found.values()),
    )
    for found in rows:
        for case, (predicted, measured, note) in found.items():
            assert note is None, case
            assert predicted.bytes == pytest.approx(measured.bytes, rel=0.001), case


APART = """
import torch.nn as nn
import torch.nn.functional as F


class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.num_heads = 4
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 32)

    def forward(self, words):
        x = self.words(words)
        made = [layer(x) for layer in (self.query, self.key, self.value)]
        made = [part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in made]
        mixed = F.scaled_dot_product_attention(*made)
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(-2)))
"""
OURS = ["model.args.num_layers=2", "model.args.width=64", "model.args.sequence_length=32"]
THEIRS = ["model.name=apart:Apart", "data.name=synthetic"]
THEIRS += ["data.args={kind: language, vocabulary: 64, length: 16}"]


@pytest.mark.parametrize("model", [OURS, THEIRS], ids=["gpt", "queries, keys and values apart"])
def test_what_a_step_sends_is_what_was_stated(tmp_path: Path, model: list[str]) -> None:
    (tmp_path / "apart.py").write_text(APART)
    words = ["device=cpu", "mesh.tp=2", "train.steps=3", "train.global_batch_size=4", *model]
    done = forked_cli(["train", "-n", "4", "--strategy", "autotp", *words], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"│ sent .* exact", done.stdout), done.stdout
