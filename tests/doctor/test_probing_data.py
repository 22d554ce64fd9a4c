"""The data source of checks: its samples, and what it does at one of them."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch

from bigtrain.data.synthetic import SyntheticSource
from bigtrain.devices import count_waits, devices_with_context
from bigtrain.doctor.probing_data import FOLDER, language


def test_samples_are_those_of_synthetic_data() -> None:
    plain = SyntheticSource(kind="language", vocabulary=50).open(seed=3, sequence_length=6).train
    acting = language("report", 100, vocabulary=50, seed=3, sequence_length=6).train
    assert len(acting) == len(plain)
    for index in (0, 7):
        for a, b in zip(acting[index], plain[index], strict=True):
            assert torch.equal(a, b)


def test_the_act_happens_once_at_the_chosen_sample(monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    samples = language("pause", 3, seconds=15.0).train
    for number in range(5):
        samples[0]
        assert slept == ([15.0] if number >= 2 else [])


@pytest.mark.parametrize(("rank", "killed"), [("0", False), ("1", True)])
def test_only_rank_1_ends_itself(monkeypatch, rank: str, killed: bool) -> None:
    monkeypatch.setenv("RANK", rank)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    language("die", 1).train[0]
    assert sent == ([(os.getpid(), signal.SIGKILL)] if killed else [])


def test_a_rank_reports_the_gpus_that_it_has_taken_up(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    language("report", 1).train[0]
    assert json.loads((tmp_path / "gpus-1.json").read_text()) == devices_with_context()


def test_a_cpu_has_no_waits_and_no_contexts() -> None:
    with count_waits(torch.device("cpu")) as waits:
        torch.ones(3).sum().item()
    assert waits() is None
    if not torch.cuda.is_available():
        assert devices_with_context() == []
