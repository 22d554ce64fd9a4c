"""Servers and workers compute the same as one process, need the predicted memory, and save
everything.
"""

from __future__ import annotations

import time

import pytest
import torch
from support.continued import continue_run
from support.nets import TinyLM, tokens
from support.parity import Record, adamw, largest_difference, sgd, train
from support.peaks import assert_same_parts, peaks, text, wide_model
from support.ranks import run_ranks
from support.whole import assert_same_tensors

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.engine.setup import open_setup
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys, load_job
from bigtrain.losses.loss import CrossEntropy
from bigtrain.prediction.predict import predict
from bigtrain.units import format_bytes

FP64 = {"train.precision": "fp64", "optim.clip_norm": 0.5}


@pytest.fixture(scope="module")
def expected() -> Record:
    return run_ranks(train, 1, TinyLM, tokens(22), "single", FP64)[0]


@pytest.mark.parametrize(("ranks", "servers"), [(3, 1), (3, 2), (4, 2)])
def test_it_equals_one_process_in_float64(expected, ranks, servers):
    keys = {**FP64, "strategy.replicate.servers": servers, "train.micro_batch_size": 2}
    for record in run_ranks(train, ranks, TinyLM, tokens(22), "parameter_server", keys):
        assert largest_difference(expected, record) < 1e-14


def test_the_losses_of_adamw_in_fp32_are_those_of_one_process():
    single = run_ranks(train, 1, TinyLM, tokens(22), "single", {}, 6, adamw)[0]
    for record in run_ranks(train, 3, TinyLM, tokens(22), "parameter_server", {}, 6, adamw):
        assert record.losses == pytest.approx(single.losses, abs=1e-6)


@pytest.mark.parametrize(
    ("servers", "keys", "optimizer"),
    [(1, {"optim.clip_norm": 1.0}, sgd), (2, {"train.micro_batch_size": 8}, adamw)],
)
def test_the_peak_of_workers_and_of_servers_is_foretold(servers, keys, optimizer):
    keys = {**keys, "strategy.replicate.servers": servers}
    results = run_ranks(peaks, 4, wide_model, text(), "parameter_server", keys, optimizer)
    for rank, (predicted, measured, note) in enumerate(results):
        assert note is None
        assert_same_parts(predicted, measured)
        serves = rank < servers
        assert (measured.breakdown.optimizer > 0) is serves
        assert (measured.breakdown.activations == 0) is serves


def test_checkpoints_go_to_ddp_and_back(tmp_path):
    def run(strategy, ranks, folder, load=None):
        results = run_ranks(continue_run, ranks, strategy, tmp_path / folder, adamw, load)
        return results[0]

    path, losses = run("parameter_server", 3, "server")
    again, same = run("parameter_server", 3, "again", path)
    assert same == losses
    assert_same_tensors(path, again)
    whole, theirs = run("ddp", 2, "ddp", path)
    assert theirs == pytest.approx(losses, abs=1e-6)
    assert_same_tensors(path, whole)
    back, back_losses = run("parameter_server", 3, "back", whole)
    assert back_losses == losses
    assert_same_tensors(path, back)


@pytest.mark.parametrize(
    ("beside", "keys", "message"),
    [
        (
            "",
            {"strategy.replicate.servers": 3},
            "servers=3 of 2 ranks leaves no worker. Set strategy.replicate.servers=1, or start 4",
        ),
        ("", {"strategy.replicate.servers": 0}, "servers"),
        ("+offload_disk", {}, "offload.optimizer=disk would move them"),
        ("+1f1b", {"mesh.pp": 1}, "both own the training step. Keep one of them"),
        ("+layer_split_devices", {}, "serves whole models, and strategy.cut makes stages"),
        ("", {"optim.release_gradients": True}, "=true: strategy parameter_server keeps all"),
    ],
)
def test_what_cannot_be_is_refused(beside, keys, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(job_from_keys(f"parameter_server{beside}", keys), 2, "cpu")


def test_a_dry_run_says_what_each_role_needs():
    job = load_job("default", "parameter_server", ["model.args.num_layers=1"])
    setup = open_setup(job, make_plan(job, 3, "cpu"))
    prediction = predict(setup.resolved, setup.workload)
    peaks_of_roles = [
        predict(setup.resolved, setup.workload, 0, dp_rank).own_peak.bytes for dp_rank in (2, 0)
    ]
    worker, server = map(format_bytes, peaks_of_roles)
    text = f"a worker is predicted to need {worker}, the server {server}"
    assert text in prediction.advice
    assert prediction.peak.bytes == max(peaks_of_roles)


def test_one_rank_is_not_enough():
    with pytest.raises(
        ConfigError, match="and there is 1 rank. Start 2 with `bigtrain train -n 2`"
    ):
        make_plan(job_from_keys("parameter_server", {}), 1, "cpu")


class Slow(TinyLM):
    """Sleeps in evaluation mode."""

    def forward(self, tokens):
        if not self.training and tokens.device.type != "meta":
            time.sleep(4)
        return super().forward(tokens)


def validated(context, strategy):
    job = job_from_keys(strategy, {"train.global_batch_size": 4, "memory.predict": False})
    rows = torch.arange(12).view(2, 6) % 13
    with Engine(Slow, CrossEntropy(), sgd, job, context) as engine:
        engine.step((rows, rows))
        return engine.evaluate([MicroBatch(rows, rows, 12, 2)])


@pytest.mark.parametrize("strategy", ["parameter_server", "parameter_server_async"])
def test_servers_wait_for_as_long_as_workers_validate(strategy):
    figures = run_ranks(validated, 3, strategy, timeout=1.5)
    assert figures[0] == figures[1] == figures[2] != {}
