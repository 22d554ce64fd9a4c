"""Runs on fake tensors that forked processes make before they are needed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from dataclasses import replace

import pytest

from bigtrain.job.load import load_job
from bigtrain.machine.cluster import load_cluster
from bigtrain.memory.cap import Limit
from bigtrain.planner.ask import PlannedAnswer, Question, ask
from bigtrain.prediction.fake_runs import ahead
from bigtrain.prediction.fake_runs.ahead import RunsAhead, on_idle_cores, one_core
from bigtrain.units import MIB

pytestmark = pytest.mark.skipif(bool(ahead.device_names()), reason="torch sees a GPU")


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "usable_cores", lambda: 2)


def children() -> int:
    return len(multiprocessing.active_children())


def idle_cores() -> int:
    cores = ahead._idle_cores.get()
    assert cores is not None
    return cores.get_value()


def test_an_announced_run_is_made_by_another_process():
    with on_idle_cores():
        runs = RunsAhead()
        runs.announce("a", os.getpid)
        assert runs.take("a") not in (None, os.getpid())
        assert runs.take("a") is None
        assert idle_cores() == 1


def test_without_an_idle_core_a_run_waits_for_one():
    with on_idle_cores():
        runs = RunsAhead()
        with one_core():
            runs.announce("a", os.getpid)
            runs.announce("b", os.getpid)
            assert runs.take("a") is None
        assert runs.take("not announced") is None  # starts the waiting one
        assert runs.take("b") is not None


def test_outside_of_the_context_nothing_is_forked():
    runs = RunsAhead()
    runs.announce("a", os.getpid)
    assert runs.take("a") is None
    with one_core():
        assert children() == 0


def fail() -> None:
    raise ValueError


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def return_a_function():
    return lambda: None


@pytest.mark.parametrize("run", [fail, be_killed, return_a_function])
def test_a_run_that_fails_there_has_to_be_made_here(run, capfd):
    with on_idle_cores():
        runs = RunsAhead()
        runs.announce("a", run)
        assert runs.take("a") is None
        assert idle_cores() == 1
        runs.announce("b", os.getpid)
        assert runs.take("b") is not None
    assert capfd.readouterr() == ("", "")


def test_a_process_that_never_ends_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(ahead, "LONGEST_WAIT", 0.1)
    with on_idle_cores():
        runs = RunsAhead()
        runs.announce("a", signal.pause)
        assert runs.take("a") is None
        assert children() == 0
        assert idle_cores() == 1


def test_stopping_ends_the_processes():
    with on_idle_cores():
        runs = RunsAhead()
        runs.announce("a", signal.pause)
        runs.announce("b", os.getpid)
        assert children() == 1
        runs.stop()
        assert children() == 0
        assert idle_cores() == 1
        assert runs.take("b") is None


SHAPE = {"vocab_size": 512, "sequence_length": 64, "num_layers": 4, "width": 128, "num_heads": 8}
QUESTIONS = {
    "one device": {"devices": 1},
    "slices": {"devices": 2, "tp": 2},
    "split backward passes": {"devices": 2, "pp": 2},
}


def answer_to(devices: int, pp: int | None = None, tp: int | None = None) -> PlannedAnswer:
    words = [
        *("model.name=gpt", f"model.args={json.dumps(SHAPE)}", "data.name=synthetic"),
        *("data.args={kind: language, vocabulary: 512}", "train.precision=bf16"),
        "train.global_batch_size=16",
    ]
    question = Question(
        job=load_job(None, "single", words),
        cluster=load_cluster("a100-node"),
        devices=devices,
        memory=Limit(40 * MIB, 0),
        global_batch_size=16,
        margins={"torch": 0.0},
    )
    return ask(replace(question, pp=pp, tp=tp))


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_plans_found_are_the_same(name, monkeypatch):
    alone = answer_to(**QUESTIONS[name])
    taken = []
    result_of = ahead._result

    def counted(child):
        taken.append(result_of(child))
        return taken[-1]

    monkeypatch.setattr(ahead, "_result", counted)
    with on_idle_cores():
        together = answer_to(**QUESTIONS[name])
        assert children() == 0
        assert idle_cores() == 1
    assert taken
    assert None not in taken
    for found in ("best", "front"):
        plans, others = (getattr(a.result, found) for a in (alone, together))
        assert [(p.label, p.peak, p.seconds) for p in plans] == [
            (p.label, p.peak, p.seconds) for p in others
        ]
    assert alone.result.evaluated == together.result.evaluated
