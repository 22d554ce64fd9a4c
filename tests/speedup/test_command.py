"""`bigtrain speedup` as a user runs it, on two ranks of the smallest model."""

from __future__ import annotations

import json

import pytest
from support.zygote import forked_cli

WORDS = [
    *("model.name=lenet", "data.name=synthetic", "data.args.kind=classification"),
    *("data.args.input_shape=[1,32,32]", "train.global_batch_size=16"),
]


def test_two_ranks_are_measured_predicted_and_solved_for(tmp_path):
    words = ("-n", "2", "--steps", "2", "--cluster", "cpu", "--picture", "s.svg", "--json")
    done = forked_cli(["speedup", *words, *WORDS], cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "runs" / "speedup-1" / "speedup.json").read_text())
    assert document["batch"] == 8
    first, more = document["rows"]
    measured = first["measured"]
    assert measured["seconds"] == pytest.approx(measured["compute"] + measured["exposed"])
    assert measured["speedup"] == pytest.approx(2 * document["alone_seconds"] / measured["seconds"])
    epochs = document["alone_epoch_seconds"] / measured["epoch_seconds"]
    assert epochs == pytest.approx(measured["speedup"])
    assert measured["pays"] == (measured["speedup"] > 1)
    assert 0 < measured["latency"] <= measured["whole"]
    assert first["predicted"]["exposed"] > 0
    assert (more["ranks"], more["measured"]) == (4, None)
    assert "cluster cpu is one node of 2 devices" in more["reason"]
    assert set(document["pays_from"]["ddp here"]) == {"batch", "bandwidth"}
    assert "ddp, measured" in (tmp_path / "s.svg").read_text()
