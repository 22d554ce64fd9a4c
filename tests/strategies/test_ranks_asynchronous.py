"""Asynchronous pushes: bounded staleness, a log of their order, and an exact repetition from
the log.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from support.nets import TinyLM, tokens
from support.parity import adamw
from support.peaks import assert_same_parts, peaks, text, wide_model
from support.ranks import run_ranks
from support.whole import whole_tensors
from torch.nn import functional

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data import GlobalOrder, StepLoader
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy

OPTION = "strategy.replicate."
RATE = 0.1
sgd = partial(torch.optim.SGD, lr=RATE)
STEPS = 6


def loader(rank, size, batch=8):
    samples = tokens(22)
    order = GlobalOrder(len(samples), batch, seed=3)
    shares = {"dp_rank": rank, "dp_size": size, "micro_batch_size": 8}
    return StepLoader(samples, order, count=CrossEntropy().count, **shares)


def train_worker(context, folder, keys, late=None, optimizer=sgd):
    """The initial weights, the losses and staleness of this rank, and the final weights.

    The worker `late[0]` begins its first step once the log contains `late[1]` pushes.
    """
    Path(folder).mkdir(exist_ok=True)
    context.recorder.folder = Path(folder)
    options = {"train.global_batch_size": 8, "train.precision": "fp64", **keys}
    job = job_from_keys("parameter_server_async", options)
    with Engine(TinyLM, CrossEntropy(), optimizer, job, context) as engine:
        before = whole_tensors(engine.runner.state())
        data_rank, size = engine.plan.data_rank(context.dp_rank), engine.plan.batch.dp_size
        batches, losses = loader(data_rank, size, engine.plan.batch.global_size), []
        for _, batch in zip(range(STEPS), batches, strict=False):
            if late is not None and data_rank == late[0] and not losses:
                while len(log_of(folder)) < late[1]:
                    time.sleep(0.01)
                time.sleep(0.1)  # time for more pushes, if the bound did not stop the others
            result = engine.step(batch)
            losses.append((result.loss, getattr(engine.runner, "figures", {})))
        return before, losses, whole_tensors(engine.runner.state())


def log_of(folder):
    path = Path(folder) / "pushes.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if "worker" in line]


def replay_log(before, log, workers, *, divide):
    """The weights that result from the pushes of a log, computed in one process."""
    model = TinyLM().double()
    model.load_state_dict({n.removeprefix("model."): t for n, t in before.items()})
    streams = [iter(loader(worker, workers)) for worker in range(workers)]
    versions = [{n: p.detach().clone() for n, p in model.named_parameters()}]
    for line in log:
        batch = next(streams[line["worker"]]).micro_batches[0]
        model.load_state_dict(versions[line["pulled"]], strict=False)
        out = model(batch.inputs).flatten(0, -2)
        functional.cross_entropy(out, batch.targets.flatten()).backward()
        rate = RATE / max(1, line["version"] - line["pulled"]) if divide else RATE
        newest = versions[-1]
        versions.append({n: newest[n] - rate * p.grad for n, p in model.named_parameters()})
        model.zero_grad()
    return versions[-1]


@pytest.mark.parametrize("divide", [False, True])
def test_each_push_is_applied_to_what_is_newest(tmp_path, divide):
    keys = {OPTION + "divide_rate": divide, OPTION + "staleness": 3}
    before, _, after = run_ranks(train_worker, 3, tmp_path, keys, (1, 4))[0]
    log = log_of(tmp_path)
    # The late worker misses at least four pushes. On a busy machine a worker that is three steps
    # behind when the other one pulls may be four steps ahead when that one pushes.
    assert 4 <= max(line["staleness"] for line in log) <= 2 * 3 + 1
    for name, value in replay_log(before, log, 2, divide=divide).items():
        assert torch.allclose(after[f"model.{name}"], value, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("bound", [0, 2])
def test_the_fastest_worker_waits(tmp_path, bound):
    keys = {OPTION + "staleness": bound, "train.global_batch_size": 9}
    results = run_ranks(train_worker, 4, tmp_path, keys, (0, 2 * (bound + 1)))
    clocks, stale = [0, 0, 0], {0: [], 1: [], 2: []}
    log = log_of(tmp_path)
    for number, line in enumerate(log):
        clocks[line["worker"]] += 1
        assert line["version"] == number
        assert line["staleness"] == number - line["pulled"] <= 2 * (2 * bound + 1)
        assert max(clocks) - min(clocks) <= bound + 1
        for answered in line["answers"]:
            assert clocks[answered] - min(clocks) <= bound
        stale[line["worker"]].append(line["staleness"])
    assert clocks == [STEPS] * 3
    lead = [line["worker"] for line in log[: 2 * (bound + 1)]]
    assert log[len(lead)]["worker"] == 0
    assert 0 not in lead  # the late worker; the others are as far ahead as allowed
    for worker in range(3):
        assert [figures["staleness"] for _, figures in results[1 + worker][1]] == stale[worker]
    means = [sum(line["staleness"] for line in log[n : n + 3]) / 3 for n in range(0, len(log), 3)]
    assert [figures["staleness"] for _, figures in results[0][1]] == pytest.approx(means)


def test_a_run_is_done_again_from_its_log_bit_for_bit(tmp_path):
    keys = {OPTION + "servers": 2}
    once = run_ranks(train_worker, 4, tmp_path / "once", keys, (0, 4), adamw)
    keys[OPTION + "replay"] = str(tmp_path / "once/pushes.jsonl")
    again = run_ranks(train_worker, 4, tmp_path / "again", keys, None, adamw)
    for mine, theirs in zip(once, again, strict=True):
        assert mine[1] == theirs[1]
        assert all(torch.equal(value, theirs[2][name]) for name, value in mine[2].items())
    for server in range(2):
        first_log, second_log = (
            [line for line in log_of(tmp_path / run) if line["server"] == server]
            for run in ("once", "again")
        )
        assert first_log == second_log
    wrong = {OPTION + "replay": str(tmp_path / "once")}
    with pytest.raises(
        ConfigError, match="the log of 2 workers and 2 servers, and this run has 2 workers and 1"
    ):
        make_plan(job_from_keys("parameter_server_async", wrong), 3, "cpu")
    path = tmp_path / "once/pushes.jsonl"
    path.write_text(path.read_text() * 2)  # like the log of a resumed run
    with pytest.raises(ConfigError, match="the log of a run that was resumed, which a replay"):
        make_plan(job_from_keys("parameter_server_async", {**keys, **wrong}), 4, "cpu")


def test_the_peak_of_workers_and_of_servers_is_foretold():
    results = run_ranks(peaks, 3, wide_model, text(), "parameter_server_async", {}, adamw)
    for predicted, measured, note in results:
        assert note is None
        assert_same_parts(predicted, measured)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"staleness": -1}, "strategy.replicate.staleness"),
        (
            {"replay": "nowhere.jsonl"},
            r"is not a log of pushes: No such file or directory\. Give runs/NAME",
        ),
        (
            {"replay": "nowhere.jsonl", "mode": "synchronous"},
            "has a fixed order. Set strategy.replicate.mode=asynchronous",
        ),
    ],
)
def test_what_cannot_be_is_refused(keys, message):
    options = {OPTION + key: value for key, value in keys.items()}
    with pytest.raises(ConfigError, match=message):
        make_plan(job_from_keys("parameter_server_async", options), 3, "cpu")
