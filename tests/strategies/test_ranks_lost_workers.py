"""A worker is killed: the others continue, with the numbers that follow from the log of pushes."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from support.nets import TinyConv, TinyLM, tokens
from support.parity import adamw
from support.ranks import RankFailure, run_ranks
from support.whole import whole_tensors
from torch.nn import functional

from bigtrain.assembly.make_plan import make_plan
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.data import GlobalOrder, StepLoader
from bigtrain.engine.engine import Engine
from bigtrain.engine.resume import save_or_explain
from bigtrain.engine.setup import open_setup
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys, load_job
from bigtrain.losses.loss import CrossEntropy
from bigtrain.strategies.parameter_server.asynchronous import AsyncPulledUpdate
from bigtrain.strategies.parameter_server.shards import Messages

RATE, STEPS, WORKERS = 0.1, 8, 3
OPTION = "strategy.replicate."
sgd = partial(torch.optim.SGD, lr=RATE)


def kill_this_rank():
    """Kill this rank's process."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_a_push(after):
    """Kill this rank after it has sent this many tensors of its next push."""
    begin_push, send = AsyncPulledUpdate.begin_push, Messages.send
    left = [after]

    def count(self, tensor, place):
        send(self, tensor, place)
        left[0] -= 1
        if not left[0]:
            self.finish()
            kill_this_rank()

    def push(self, gradients):
        Messages.send = count
        begin_push(self, gradients)

    AsyncPulledUpdate.begin_push = push


def loader(worker):
    samples = tokens(24)
    order = GlobalOrder(len(samples), 3 * WORKERS, seed=3)
    shares = {"dp_rank": worker, "dp_size": WORKERS, "micro_batch_size": 3}
    return StepLoader(samples, order, count=CrossEntropy().count, **shares)


def train_worker(context, folder, keys, victim, at, when):
    """The initial weights, this rank's losses and the path of its save; one worker dies."""
    folder = Path(folder)
    context.recorder.folder = folder
    options = {"train.global_batch_size": 3 * WORKERS, "train.precision": "fp64", **keys}
    job = job_from_keys("parameter_server_async", options)
    with Engine(TinyLM, CrossEntropy(), sgd, job, context) as engine:
        before = whole_tensors(engine.runner.state())
        worker, losses = engine.plan.data_rank(context.dp_rank), []
        for number, batch in zip(range(STEPS), loader(worker), strict=False):
            if worker == victim and number == at:
                if when == "computing":
                    kill_this_rank()
                kill_in_a_push(after=3)
            losses.append(engine.step(batch).loss)
        return before, losses, engine.save(folder / "checkpoints"), context.lost_ranks.lost


def log_of(folder):
    return [json.loads(line) for line in (folder / "pushes.jsonl").read_text().splitlines()]


def replay_log(before, log):
    """The weights that result from the pushes of a log, computed in one process."""
    model = TinyLM().double()
    model.load_state_dict({n.removeprefix("model."): t for n, t in before.items()})
    streams = [iter(loader(worker)) for worker in range(WORKERS)]
    versions = [{n: p.detach().clone() for n, p in model.named_parameters()}]
    for line in log:
        batch = next(streams[line["worker"]]).micro_batches[0]
        model.load_state_dict(versions[line["pulled"]], strict=False)
        out = model(batch.inputs).flatten(0, -2)
        functional.cross_entropy(out, batch.targets.flatten()).backward()
        newest = versions[-1]
        versions.append({n: newest[n] - RATE * p.grad for n, p in model.named_parameters()})
        model.zero_grad()
    return versions[-1]


@pytest.mark.parametrize("when", ["computing", "pushing"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_the_others_make_all_their_steps(tmp_path, when, staleness, capfd):
    keys, victim, at = {OPTION + "staleness": staleness}, 1, 3
    results = run_ranks(train_worker, 4, tmp_path, keys, victim, at, when, killed=[1 + victim])
    assert results[1 + victim] is None
    lines = log_of(tmp_path)
    log, lost = [one for one in lines if "pulled" in one], [one for one in lines if "lost" in one]
    pushes = [sum(line["worker"] == worker for line in log) for worker in range(WORKERS)]
    assert pushes == [STEPS, at, STEPS]
    assert [line["lost"] for line in lost] == [victim]
    before, losses, path, known = results[0]
    assert known == (1 + victim,)
    assert len(losses) == STEPS
    saved = Checkpoint(path)
    assert int(saved.meta["step"]) == STEPS
    for name, value in replay_log(before, log).items():
        assert torch.allclose(saved.read(f"model.{name}"), value, rtol=0, atol=1e-12), name
    assert [state is None for state in saved.meta["random"]] == [False, False, True, False]
    errors = capfd.readouterr().err
    assert errors.count("bigtrain: ") == 1
    assert "bigtrain: worker 1 (rank 2) was lost in step " in errors
    assert "2 of 3 workers continue without its samples" in errors
    job = job_from_keys("parameter_server_async", {OPTION + "replay": str(tmp_path)})
    with pytest.raises(ConfigError, match="a run that lost a worker, which a replay cannot repeat"):
        make_plan(job, 4, "cpu")


def test_two_servers_lose_two_of_three_workers_and_the_run_goes_on(tmp_path):
    """In different steps; the second in the middle of a push, which one server has received
    completely.
    """
    keys = {OPTION + "servers": 2}
    results = run_ranks(lose_two, 5, tmp_path, keys, killed=[2, 4])
    assert [result is None for result in results] == [False, False, True, False, True]
    lines = log_of(tmp_path)
    for server in range(2):
        pushes = [line for line in lines if line["server"] == server and "pulled" in line]
        assert sum(line["worker"] == 1 for line in pushes) == STEPS
        assert {line["lost"] for line in lines if line["server"] == server and "lost" in line} == {
            0,
            2,
        }
    assert {name.partition(".")[0] for name in Checkpoint(results[0]).names} == {"model"}


def lose_two(context, folder, keys):
    victim = {2: 0, 4: 2}.get(context.rank)
    when = "computing" if context.rank == 2 else "pushing"
    return train_worker(context, folder, keys, victim, context.rank - 1, when)[2]


def test_without_any_worker_the_run_ends(tmp_path):
    with pytest.raises(RankFailure, match="every worker was lost, and servers compute nothing"):
        run_ranks(
            train_worker, 2, tmp_path, {"train.global_batch_size": 3}, 0, 2, "computing", killed=[1]
        )


@pytest.mark.parametrize("fault", ["raise", "kill the server"])
def test_what_is_no_loss_of_a_worker_ends_the_run(tmp_path, fault):
    rank, message = (2, "ValueError: odd") if fault == "raise" else (0, "exit status -9")
    with pytest.raises(RankFailure, match=message) as failure:
        run_ranks(fail_in_a_step, 3, tmp_path, rank, fault)
    assert failure.value.rank == rank


def fail_in_a_step(context, folder, rank, fault):
    job = job_from_keys("parameter_server_async", {"train.global_batch_size": 6})
    with Engine(TinyLM, CrossEntropy(), sgd, job, context) as engine:
        for number, batch in zip(range(50), loader(0), strict=False):
            if context.rank == rank and number == 2:
                if fault == "raise":
                    raise ValueError("odd")
                kill_this_rank()
            engine.step(batch)


def save_without_a_worker(context, folder, beside):
    """A save during which the worker that writes the buffers dies."""
    keys = {"train.global_batch_size": 6, "checkpoint.asynchronous": beside}
    job = job_from_keys("parameter_server_async", keys)
    with Engine(TinyConv, CrossEntropy(), adamw, job, context) as engine:
        rows = torch.randn(2, 1, 8, 8), torch.randint(0, 3, (2,))
        for _ in range(2):
            engine.step(rows)
        engine.saver.reserve(Path(folder) / "checkpoints")
        if context.rank == 1:
            os.pwrite = lambda *_: kill_this_rank()
        message = save_or_explain(engine, Path(folder), last=True)
        return message, {k: t.values().clone() for k, t in engine.runner.state().items()}


@pytest.mark.parametrize("beside", [False, True])
def test_a_worker_that_dies_in_a_save_is_done_without(tmp_path, beside):
    results = run_ranks(save_without_a_worker, 4, tmp_path, beside, killed=[1])
    assert [result is None for result in results] == [False, True, False, False]
    assert [result[0] for result in results if result] == [[], [], []]
    saved = Checkpoint(tmp_path / "checkpoints" / "step-2")
    # The samples of the next worker.
    assert torch.equal(
        saved.read("model.norm.running_mean"), results[2][1]["model.norm.running_mean"]
    )
    assert torch.equal(saved.read("model.conv.weight").view(-1), results[0][1]["model.conv.weight"])
    assert "optimizer.conv.weight.exp_avg" in saved.names


def validation_shares(context):
    """The validation samples of this rank, before a rank is lost and after."""
    words = ["model.name=lenet", "data.name=digits", "train.global_batch_size=6"]
    job = load_job(None, "parameter_server_async", words)
    parts = open_setup(job, make_plan(job, context.world_size, "cpu"))
    context.tolerate_losses([1, 2, 3], ["server 0", "worker 0", "worker 1", "worker 2"])
    before = sum(batch.count for batch in parts.validation_batches(context))
    context.barrier()
    if context.rank == 2:
        kill_this_rank()
    context.lost_ranks.confirm(2)
    return before, sum(batch.count for batch in parts.validation_batches(context))


def test_those_left_share_the_validation_samples():
    results = run_ranks(validation_shares, 4, killed=[2])
    assert [result and result[0] for result in results] == [0, 120, None, 120]
    assert [result and result[1] for result in results] == [0, 180, None, 180]
