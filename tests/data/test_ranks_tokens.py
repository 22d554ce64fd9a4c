"""Runs on text of a tokenizer: the same numbers on every mesh, on resume, and in the forecast."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from support.tokenizers_made import chat, make_tokenizer, write_lines
from torch.utils.data import default_collate

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data import GlobalOrder
from bigtrain.data.tokens import token_text
from bigtrain.engine.setup import RunSetup, check_job, open_setup
from bigtrain.job.load import job_from_keys
from bigtrain.job.schema import Job

pytest.importorskip("transformers")

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": 300,
}
MODELS = {
    "gpt": {
        "model.name": "gpt",
        "model.args": {"num_layers": 4, "width": 32, "num_heads": 2},
        "model.chunked_loss": False,
    },
    "llama": {
        "model.name": "transformers:LlamaForCausalLM",
        "model.args": {"config": LLAMA},
    },
}
LENGTH, STEPS, BATCH = 48, 5, 8


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bigtrain"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def text(tmp_path):
    """Conversations of many lengths, one of them too long for a window."""
    turns = ("hello", "what", "is", "world")
    records = [chat(*(word * (1 + n % 5) for word in turns[: 2 + 2 * (n % 2)])) for n in range(60)]
    return str(write_lines(tmp_path / "chats.jsonl", [*records, chat("one", "two " * 60)]))


def job_of(model: str, strategy: str, text: str, tokenizer: str, packing: bool, **keys: Any) -> Job:
    return job_from_keys(
        strategy,
        {
            **MODELS[model],
            "data.path": text,
            "data.args": {
                "tokenizer": tokenizer,
                "packing": packing,
                "sequence_length": LENGTH,
                "validation_fraction": 0.2,
            },
            "optim.name": "sgd",
            "optim.lr": 0.5,
            "train.precision": "fp32",
            "train.global_batch_size": BATCH,
            "train.micro_batch_size": 2,
            "train.steps": STEPS,
            "device": "cpu",
            "memory.track_steps": 2,
            **keys,
        },
    )


def parts_of(job: Job, world_size: int) -> RunSetup:
    plan = make_plan(job, world_size, "cpu")
    return open_setup(job, plan, check_job(job))


@dataclass
class Trained:
    """What one rank saw."""

    losses: list[float]
    held_out: float
    counts: list[int]
    """Valid targets of each step on this rank."""
    made: int
    """How often this rank tokenised."""
    path: str = ""
    errors: list[int | None] = field(default_factory=list)
    """On rank 0: predicted less measured peak of every rank, in bytes."""


def train(
    context: Any, job: Job, folder: str | None = None, resume: str | None = None, stop: int = STEPS
) -> Trained:
    """Run a job; save at the end if there is a folder, begin with a checkpoint if there is one."""
    real, made = token_text.TokenText._documents, [0]

    def noted(self: Any, *args: Any) -> Any:
        made[0] += 1
        return real(self, *args)

    token_text.TokenText._documents = noted
    try:
        parts = parts_of(job, context.world_size)
    finally:
        token_text.TokenText._documents = real
    found = Trained([], 0.0, [], made[0])
    with parts.engine(context) as engine:
        if resume is not None:
            engine.load(Path(resume))
        for batch in parts.training_steps(context, engine.samples_seen):
            if engine.steps_done >= stop:
                break
            found.counts.append(sum(int(part.count) for part in batch.micro_batches))
            found.losses.append(engine.step(batch).loss)
        found.held_out = engine.evaluate(parts.validation_batches(context))["loss"]
        if folder is not None:
            found.path = str(engine.save(Path(folder)))
        memory = engine.memory()
        if memory is not None:
            found.errors = [one.error_bytes() for one in memory.ranks]
    return found


def train_all(context: Any, jobs: list[Job]) -> list[Trained]:
    return [train(context, job) for job in jobs]


def plain_loop(job: Job) -> tuple[list[float], float, list[int]]:
    """Losses, validation loss and counts of a loop in torch alone, on whole global batches."""
    parts = parts_of(job, 1)
    data, blueprint = parts.data, parts.blueprint
    model = blueprint.materialize("cpu", seed=job.train.seed).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    order, seen = GlobalOrder(len(data.train), BATCH, seed=job.train.seed), 0
    losses, counts = [], []

    def loss_of(samples: list[Any]) -> tuple[torch.Tensor, int]:
        inputs, targets = default_collate(samples)
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), int(
            (targets != -100).sum()
        )

    for _ in range(STEPS):
        _, indices = order.batch_at(seen)
        seen += len(indices)
        optimizer.zero_grad()
        loss, count = loss_of([data.train[index] for index in indices])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        counts.append(count)
    with torch.no_grad():
        held_out, _ = loss_of([data.validation[n] for n in range(len(data.validation))])
    return losses, float(held_out), counts


STRATEGIES = [
    ("gpt", "ddp", 2, {}),
    ("gpt", "1f1b", 2, {"pp": 2}),
    ("llama", "single", 1, {}),
    ("llama", "ddp", 4, {}),
    ("llama", "fsdp", 2, {}),
    ("llama", "zero2", 2, {}),
    ("llama", "zero3", 2, {}),
    ("llama", "tensor", 2, {"tp": 2}),
    ("llama", "1f1b", 2, {"pp": 2}),
    ("llama", "zero_bubble", 2, {"pp": 2}),
    ("llama", "1f1b+fsdp", 4, {"pp": 2}),
]


@pytest.mark.parametrize(("model", "strategy", "ranks", "axes"), STRATEGIES)
def test_numbers_are_those_of_a_plain_loop(model, strategy, ranks, axes, text, tokenizer):
    expected = [
        plain_loop(job_of(model, "single", text, tokenizer, packing)) for packing in (True, False)
    ]
    for file in Path(os.environ["XDG_CACHE_HOME"]).rglob("tokens-*.bin"):
        file.unlink()
    meshed = {f"mesh.{axis}": size for axis, size in axes.items()}
    jobs = [
        job_of(model, strategy, text, tokenizer, packing, **meshed) for packing in (True, False)
    ]
    flavour = "deepspeed" if strategy in ("zero2", "zero3") else "hub"
    records = run_ranks(train_all, ranks, jobs, flavour=flavour, timeout_s=300.0, **axes)
    copies = axes.get("pp", 1) * axes.get("tp", 1)
    for case, (losses, held_out, counts) in enumerate(expected):
        for record in records:
            assert record[case].losses == pytest.approx(losses, rel=2e-5), case
            assert record[case].held_out == pytest.approx(held_out, rel=2e-5), case
        each = [record[case].counts for record in records]
        assert [sum(step) / copies for step in zip(*each, strict=True)] == counts
    assert sum(record[0].made for record in records) == 1
    assert sum(record[1].made for record in records) == 0
    # Packed: the masks are in the forecast; padded: there are none in it, nor in the run.
    near = 2048 if strategy == "zero2" else 64
    for record in records[0]:
        assert all(abs(error) <= near for error in record.errors), record.errors


def test_a_resumed_run_goes_on_with_other_ranks(text, tokenizer, tmp_path):
    losses = plain_loop(job_of("gpt", "single", text, tokenizer, packing=True))[0]
    job = job_of("gpt", "ddp", text, tokenizer, packing=True)
    folder = str(tmp_path / "saved")
    began = run_ranks(train, 2, job, folder, None, 2, flavour="hub", timeout_s=300.0)
    assert began[0].losses == pytest.approx(losses[:2], rel=2e-5)
    (resumed,) = run_ranks(train, 1, job, None, began[0].path, flavour="hub", timeout_s=300.0)
    assert resumed.losses == pytest.approx(losses[2:], rel=2e-5)
