"""`bigtrain check`: a limit on the predicted peak for continuous integration, and what grew."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bigtrain import cli
from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.job.load import load_job
from bigtrain.prediction.predict import forecast_rank

WORDS = [
    "model.args={num_layers: 2, width: 32, num_heads: 2, sequence_length: 16}",
    "data.name=synthetic",
    "data.args={kind: language}",
    "train.global_batch_size=8",
]


READS_VALUES = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 10)

    def forward(self, x):
        return self.layer(torch.from_numpy(x.detach().numpy()))
"""


def check(*words: str) -> int:
    return cli.main(["check", "-n", "2", "--strategy", "fsdp", *words])


def test_the_limit_is_compared_with_the_peak_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check(*WORDS, "--save", "forecast.json") == 0
    saved = json.loads(Path("forecast.json").read_text())
    job = load_job(None, "fsdp", WORDS)
    setup = open_setup(job, make_plan(job, 2, "cpu"))
    forecast = forecast_rank(setup.resolved, setup.workload).forecast
    assert forecast is not None
    assert saved["peak_bytes"] == forecast.peak().bytes == sum(saved["breakdown"].values())
    parameters = sum(p.numel() for p in setup.workload.model.parameters())
    assert sum(saved["modules"].values()) >= 4 * parameters
    capsys.readouterr()
    assert check(*WORDS, "--peak", str(saved["peak_bytes"])) == 0
    line = capsys.readouterr().out
    assert line.startswith("fsdp on 2 ranks of cpu: predicted peak ")
    assert ", 0 B below --peak" in line
    assert check(*WORDS, "--peak", str(saved["peak_bytes"] - 1)) == 1
    assert ", 1 B above --peak" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "forecast.json"]  # no run has left a folder


def test_what_grew_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check(*WORDS, "--save", "forecast.json") == 0
    assert check(*WORDS, "--against", "forecast.json") == 0
    assert "nothing has changed since the earlier forecast" in capsys.readouterr().out
    wider = [WORDS[0].replace("width: 32", "width: 64"), *WORDS[1:], "optim.name=sgd"]
    assert check(*wider, "--against", "forecast.json") == 1
    said = capsys.readouterr().err
    assert re.search(r"above the earlier \d", said)
    assert re.search(r"^since the earlier forecast: \+.* at the peak$", said, re.MULTILINE)
    assert re.search(r"^  activations +\+", said, re.MULTILINE)
    assert "  model.args.width: 32 -> 64" in said
    assert "  optim.name: the default -> sgd" in said
    assert re.search(r"^  blocks\.0\.\S+: \+.* of tensors$", said, re.MULTILINE)
    assert check(*wider, "--against", "forecast.json", "--peak", "1GiB") == 0
    assert check(*wider, "--against", "forecast.json", "--json") == 1
    document = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    assert (document["fits"], document["strategy"]) == (False, "fsdp")
    assert document["growth"][0].startswith("since the earlier forecast")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no limit to check. Add --peak SIZE, such as --peak 22GiB"),
        (["--peak", "much"], "'much' is not a size in bytes"),
        (["--peak", "1GiB", "-n", "0"], "-n 0: at least 1 is needed"),
        (["--against", "none.json"], "--against: none.json cannot be read: "),
        (["--against", "other.json"], "it is no forecast of this version"),
        (["--against", "short.json"], "ranks is missing, or is not what a forecast has"),
        (["--against", "text.json"], "peak_bytes is missing, or is not what a forecast has"),
        (["--save", "no/folder.json"], "Give a file in a folder that exists"),
        (
            ["--peak", "1GiB", "model.name=reads:Net", "data.args={input_shape: [4]}"],
            "check: there is no prediction to compare: ",
        ),
        (["--peak", "1GiB", "strategy=ddp"], "Write --strategy ddp"),
        (["--peak", "1GiB", "model.name=gtp"], "unknown model 'gtp'"),
    ],
)
def test_wrong_input_is_refused_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text('{"format": 99}')
    forecast = {"format": 1, "strategy": "ddp", "ranks": 1, "device": "cpu", "phase": "forward"}
    forecast |= {"peak_bytes": "large", "breakdown": {}, "modules": {}, "keys": {}}
    Path("text.json").write_text(json.dumps(forecast))
    Path("reads.py").write_text(READS_VALUES)
    Path("short.json").write_text('{"format": 1, "strategy": "ddp"}')
    base = WORDS if "model.name=reads:Net" not in words else WORDS[1:2] + WORDS[3:]
    try:
        status = cli.main(["check", *base, *words])
    except SystemExit as error:  # of the reader of options
        status = int(str(error.code))
    assert status == 2
    assert message in capsys.readouterr().err
