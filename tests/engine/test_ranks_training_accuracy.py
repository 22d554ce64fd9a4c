"""The accuracy on a training batch equals that of a plain loop for any number of ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.ranks import run_ranks

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job

STEPS = 6
KEYS = (
    *("data.name=digits", "model.name=lenet", "device=cpu", "memory.predict=false"),
    *("train.steps=8", "train.global_batch_size=24", "optim.name=sgd", "optim.lr=0.2"),
    *("optim.warmup_steps=0", "optim.schedule=constant", "optim.clip_norm=null"),
    *("optim.weight_decay=0", "train.precision=fp32", "log.accuracy=true"),
)


def shares(context, strategy, words=()):
    """`top1` of each step of a run that validates between its steps."""
    job = load_job(None, strategy, [*KEYS, *words])
    parts = open_setup(job, make_plan(job, context.world_size, "cpu"))
    with parts.engine(context) as engine:
        accuracies = []
        for batch in itertools.islice(parts.training_steps(context, 0), STEPS):
            accuracies.append(engine.step(batch).top1)
            if parts.data.validation is not None:
                engine.evaluate(itertools.islice(parts.validation_batches(context), 1))
    return accuracies


def by_plain_loop():
    """`top1` of each step of a plain torch loop on the whole global batch."""
    job = load_job(None, "single", KEYS)
    parts = open_setup(job, make_plan(job, 1, "cpu"))
    model = parts.blueprint.twin().materialize("cpu", seed=job.train.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    accuracies = []
    for _, step in zip(range(STEPS), _whole_batches(parts), strict=False):
        (batch,) = step.micro_batches
        logits = model(batch.inputs)
        accuracies.append(float((logits.argmax(1) == batch.targets).double().mean()))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, batch.targets).backward()
        optimizer.step()
    return accuracies


def _whole_batches(parts):
    from bigtrain.data import StepLoader

    loss = parts.workload.loss
    return StepLoader(parts.data.train, parts.order, count=loss.count, micro_batch_size=24)


@pytest.fixture(scope="module")
def plain():
    torch.set_num_threads(1)
    return by_plain_loop()


TWO = {
    "ddp+accumulation_4": (),
    "fsdp": ("train.micro_batch_size=4",),
    "zero1": (),
    "1f1b": ("train.accumulation_steps=6",),
    "gpipe": ("train.accumulation_steps=3", "strategy.cut.checkpoint=except_last"),
    "pipeline_deepspeed": ("train.accumulation_steps=4",),
}


@pytest.mark.parametrize("strategy", ["single", "single+full"])
def test_one_rank_counts_what_a_plain_loop_counts(strategy, plain):
    assert run_ranks(shares, 1, strategy, ("train.check_first_steps=2",))[0] == plain
    assert len(set(plain)) > 2


@pytest.mark.parametrize("strategy", TWO)
def test_ranks_micro_batches_and_stages_count_the_global_batch(strategy, plain):
    stages = 2 if any(word in strategy for word in ("1f1b", "gpipe", "pipeline")) else 1
    accuracies = run_ranks(shares, 2, strategy, TWO[strategy], pp=stages)
    assert accuracies[0] == accuracies[1]
    assert accuracies[0] == pytest.approx(
        plain, abs=1 / 24 + 1e-9
    )  # a tie may be decided either way
    assert sum(a != b for a, b in zip(accuracies[0], plain, strict=True)) <= 1


def test_a_job_without_it_has_no_such_figure():
    assert run_ranks(shares, 1, "single", ("log.accuracy=false",))[0] == [None] * STEPS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data.name=text", "model.name=gpt"), "model.chunked_loss=true has another loss"),
        (
            ("data.name=text", "model.name=gpt", "model.chunked_loss=false"),
            "data.name=text has another loss",
        ),
        (("model.loss=torch.nn.functional:cross_entropy",), "model.loss=torch.nn.functional:cr"),
    ],
)
def test_where_it_cannot_be_counted_it_is_refused(words, message):
    job = load_job(None, "single", [*KEYS, *words])
    with pytest.raises(ConfigError, match=f"log.accuracy=true .*{message}.*log.accuracy=false"):
        open_setup(job, make_plan(job, 1, "cpu"))
