"""Every optimizer trains, resumes, and needs the predicted memory, on one rank and on several."""

from __future__ import annotations

import pytest
from support.nets import TinyLM, tokens
from support.ranks import run_ranks

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data import GlobalOrder, StepLoader
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.optim.factory import optimizer_factory

ADAFACTOR = {"optim.name": "adafactor"}
LOW = {"train.precision": "bf16", "optim.master_weights": False}


def train(context, strategy, keys, folder, model=TinyLM, steps=4):
    """Losses of a run, losses after loading its checkpoint, and both peaks of rank 0."""
    job = job_from_keys(strategy, {"train.global_batch_size": 8, "optim.lr": 1e-2, **keys})
    samples, loss, made = tokens(40), CrossEntropy(), optimizer_factory(job.optim, 1)
    rows = make_plan(job, context.world_size, "cpu").batch.micro_size

    def loader(size, seen=0, **ranks):
        order = GlobalOrder(len(samples), size, seed=3)
        loader_options = {"micro_batch_size": rows, "samples_seen": seen, **ranks}
        return StepLoader(samples, order, count=loss.count, **loader_options)

    example = next(iter(loader(rows))).micro_batches[0]
    losses, ranks = [], {"dp_rank": context.dp_rank, "dp_size": context.dp_size}
    for begin in (0, steps // 2):
        with Engine(model, loss, made, job, context, example=example) as engine:
            if begin:
                engine.load(folder / f"step-{begin}")
            for batch in loader(8, engine.samples_seen, **ranks):
                losses.append(engine.step(batch).loss)
                if engine.steps_done == steps // 2:
                    engine.save(folder)
                if engine.steps_done == steps:
                    break
            peaks = (engine.meter.measured().peak, engine.prediction.peak)
    return losses[:steps], losses[steps:], peaks


def wide():
    """A model with matrices large enough for 4- and 8-bit state."""
    return TinyLM(width=64)


RUNS = {
    "adafactor": ADAFACTOR,
    "adam": {"optim.name": "adam", "optim.eps": 1e-6},
    "nesterov": {"optim.name": "sgd", "optim.momentum": 0.9, "optim.nesterov": True},
    "bf16 state": {"optim.state": "bf16"},
    "8 bits": {"optim.name": "adamw_8bit"},
    "4 bits": {"optim.name": "adamw_4bit"},
    "bf16 parameters": {**LOW, "optim.state": "bf16"},
    "loop": {"optim.implementation": "loop"},
}


@pytest.mark.parametrize("case", RUNS)
def test_a_resumed_run_goes_on_and_the_memory_is_foretold(case, tmp_path):
    result = run_ranks(train, 1, "single", RUNS[case], tmp_path, wide)[0]
    losses, again, (measured, predicted) = result
    assert losses[2:] == again
    assert losses[-1] < losses[0]
    # The forecast omits the tables of the codes: 4 KiB for a run.
    assert abs(measured.bytes - predicted.bytes) <= 4096
    assert measured.breakdown.optimizer == predicted.breakdown.optimizer


SHARED = {
    "adafactor under ddp": ("ddp", 2, ADAFACTOR, 1e-5),
    "bf16 state on shards": ("fsdp", 2, {"optim.state": "bf16"}, 1e-3),
    "bf16 state on pieces": ("zero1_torch", 2, {"optim.state": "bf16"}, 1e-3),
    "bf16 state in tied stages": ("1f1b", 2, {"optim.state": "bf16"}, 1e-3),
    "bf16 parameters under ddp": ("ddp", 2, LOW, 5e-3),
    "8 bits under ddp": ("ddp", 2, {"optim.name": "adamw_8bit"}, 1e-4),
    "adafactor under oss": ("oss", 2, ADAFACTOR, 1e-5),
    "8 bits under sharded_ddp": ("sharded_ddp", 2, {"optim.name": "adamw_8bit"}, 1e-4),
}


@pytest.mark.parametrize("case", SHARED)
def test_ranks_have_the_losses_of_one_process(case, tmp_path):
    strategy, ranks, keys, tolerance = SHARED[case]
    pp = 2 if strategy == "1f1b" else 1
    single = run_ranks(train, 1, "single", keys, tmp_path / "one", wide)[0]
    for losses, again, _ in run_ranks(train, ranks, strategy, keys, tmp_path / "all", wide, pp=pp):
        assert losses == pytest.approx(single[0], abs=tolerance)
        assert losses[2:] == again
