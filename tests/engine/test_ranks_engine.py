"""Guarantees of the engine on several ranks: initial weights, validation, gradients,
checkpoints.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.nets import ReadsItsWeights, TinyConv, TinyLM, tokens
from support.parity import sgd
from support.ranks import run_ranks
from torch import nn

from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.losses.tasks import LanguageTask
from bigtrain.ranks.hang_watch import BACKEND_GRACE_S


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def engine_on_other_mesh(context):
    """The message of an engine whose plan has a different mesh than the ranks."""
    with pytest.raises(ConfigError) as refused:
        Engine(linear, F.cross_entropy, sgd, job_from_keys("ddp", {}), context)
    return str(refused.value)


def test_ranks_that_are_connected_as_another_mesh_are_refused():
    for message in run_ranks(engine_on_other_mesh, 2, pp=2):
        assert (
            "connected as a mesh of pp=2, dp=1, tp=1, and the job plans pp=1, dp=2, tp=1" in message
        )
        assert "Use connect(pp=1, dp=2, tp=1), or give the job mesh.pp=2." in message


def timeouts_of_groups(context):
    """The timeouts in seconds of all groups, of the run and of hybrid shards."""
    before = len(dist.distributed_c10d._world.pg_map)
    with Engine(TinyLM, CrossEntropy(), sgd, job_from_keys("hybrid", {}), context):
        groups = [*dist.distributed_c10d._world.pg_map]
        backends = [group._get_backend(context.device) for group in groups]
        return len(groups) - before, {b.options._timeout.total_seconds() for b in backends}


def test_groups_of_hybrid_shards_have_the_timeout_of_the_run():
    for more, timeouts in run_ranks(timeouts_of_groups, 4, timeout=30.0):
        assert more
        assert timeouts == {30.0 + BACKEND_GRACE_S}


def first_weights(context, model):
    with Engine(model, F.cross_entropy, sgd, job_from_keys("ddp", {}), context) as engine:
        return {n: t.clone() for n, t in engine.model.state_dict().items()}, engine.blueprint.reason


@pytest.mark.parametrize("model", [TinyLM, ReadsItsWeights])
def test_all_ranks_begin_with_the_same_weights(model):
    (rank_0_weights, reason), (rank_1_weights, _) = run_ranks(first_weights, 2, model)
    assert (reason == "") == (model is TinyLM)
    assert all(torch.equal(rank_0_weights[name], rank_1_weights[name]) for name in rank_0_weights)


def test_weights_do_not_depend_on_the_number_of_ranks():
    alone = run_ranks(first_weights, 1, TinyLM)[0][0]
    among_two = run_ranks(first_weights, 2, TinyLM)[1][0]
    assert all(torch.equal(alone[name], among_two[name]) for name in alone)


def validation_figures(context, rows):
    """The figures of a validation whose rows are divided among the ranks."""
    samples = tokens(rows)
    loss = CrossEntropy()
    mine = list(range(context.rank, rows, context.world_size))
    longest = -(-rows // context.world_size)
    batches = []
    for index in mine + [0] * (longest - len(mine)):
        inputs, targets = samples.inputs[index : index + 1], samples.targets[index : index + 1]
        padding = len(batches) >= len(mine)
        batches.append(
            MicroBatch(inputs, targets, 0 if padding else loss.count(targets), 0 if padding else 1)
        )
    job = job_from_keys("ddp", {"train.precision": "fp64"})
    task = LanguageTask(13)
    with Engine(TinyLM, loss, sgd, job, context, task=task) as engine:
        return engine.evaluate(batches)


def test_validation_is_the_same_on_any_number_of_ranks():
    alone = run_ranks(validation_figures, 1, 7)[0]
    for figures in run_ranks(validation_figures, 2, 7):
        assert figures["loss"] == pytest.approx(alone["loss"], abs=1e-12)


def test_accumulation_counts_gradients_once(tmp_path):
    """Between accumulated micro-batches DDP holds one copy of the gradients instead of two."""
    peaks = {}
    for rows in (4, 1):
        gradient_sizes = run_ranks(gradient_bytes, 2, rows)
        peaks[rows] = gradient_sizes[0]
    assert peaks[1] <= peaks[4]


def gradient_bytes(context, rows):
    keys = {"train.global_batch_size": 8, "train.micro_batch_size": rows, "memory.track_steps": 5}
    with Engine(
        lambda: TinyLM(width=128), CrossEntropy(), sgd, job_from_keys("ddp", keys), context
    ) as engine:
        samples = tokens(4, ignored=False)
        for _ in range(5):
            engine.step((samples.inputs, samples.targets))
        return engine.meter.measured().peak.breakdown.gradients


def steps_after_save(context, folder, how):
    """Two steps after a save, by the engine that saved or by one that loaded the checkpoint."""
    keys = {"train.global_batch_size": 12, "train.micro_batch_size": 12 // context.world_size // 3}
    job = job_from_keys("ddp", keys)
    with Engine(TinyConv, CrossEntropy(class_dim=1), sgd, job, context) as engine:
        random = torch.Generator().manual_seed(1)
        rows = 12 // context.world_size
        images = torch.randn(12, 1, 6, 6, generator=random)[context.rank * rows :][:rows]
        batch = (images, torch.arange(rows) % 3)
        if how == "save":
            engine.step(batch)
            engine.save(folder)
        else:
            engine.load(folder / "step-1")
        losses = [engine.step(batch).loss for _ in range(2)]
        weights = [p.detach().numpy().tobytes() for p in engine.model.parameters()]
        return losses, engine.steps_done, weights


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_engine_continues_bit_for_bit_where_another_stopped(tmp_path, ranks):
    """With several micro-batches a step, which a new process must add up in the same order."""
    first = run_ranks(steps_after_save, ranks, tmp_path, "save")
    assert run_ranks(steps_after_save, ranks, tmp_path, "load") == first
