"""The text of a run for users: warnings once, user errors without a traceback, names of parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.zygote import forked_cli

from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.memory.meter import MemoryMeasurement
from bigtrain.memory.timeline import Breakdown, Peak
from bigtrain.prediction.memory_report import MemoryReport, RankMemory
from bigtrain.report.tables import memory_notes
from bigtrain.units import signed_share

SMALL = [
    "model.args.num_layers=2",
    "model.args.num_heads=2",
    "data.args.sequence_length=16",
    "data.args.validation_samples=16",
    "train.global_batch_size=8",
    "log.name=run",
]
NET = """
import logging, warnings
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(256, 8), nn.Linear(8, 256))
        warnings.warn("this is deprecated", FutureWarning, stacklevel=1)
        logging.getLogger("transformers").warning("some weights were not used")
        logging.getLogger("transformers").error("a real error")
"""


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return f"data.path={path}"


@pytest.mark.parametrize("strategy", ["single", "1f1b"])
def test_the_state_of_a_resumed_run_is_the_optimizers(
    strategy: str, tmp_path: Path, corpus: str
) -> None:
    ranks = "1" if strategy == "single" else "2"
    words = ["train", "-n", ranks, "--strategy", strategy, "model.args.width=32", *SMALL, corpus]
    first = forked_cli([*words, "train.steps=2"], cwd=tmp_path, timeout=120)
    assert first.returncode == 0, first.stderr
    again = forked_cli([*words, "train.steps=3", "--resume", "auto"], cwd=tmp_path, timeout=120)
    assert again.returncode == 0, again.stderr
    memory = json.loads((tmp_path / "runs/run/memory.json").read_text())
    for rank in memory["ranks"]:
        measured, predicted = rank["breakdown"], rank["predicted_breakdown"]
        assert measured["optimizer"] == predicted["optimizer"] > 0
        assert rank["peak_bytes"] == pytest.approx(rank["predicted_peak_bytes"], rel=0.01)
        assert rank["resume_peak_bytes"] == pytest.approx(
            rank["predicted_resume_peak_bytes"], rel=0.1
        )
    lines = (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]

    # A different width under the same name: an error of the user.
    wide = [word.replace("width=32", "width=64") for word in words]
    saved = tmp_path / "runs/run/checkpoints/step-3"
    wide = [word.replace("log.name=run", "log.name=wide") for word in wide]
    wrong = forked_cli([*wide, "--resume", str(saved)], cwd=tmp_path, timeout=120)
    assert wrong.returncode == 2, wrong.stderr
    assert "flight_recorder" not in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert wrong.stderr.count("bigtrain: ") == 1


@pytest.mark.parametrize("ranks", [1, 3])
def test_warnings_are_said_once_and_errors_by_each(
    ranks: int, tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "warns.py").write_text(NET)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    words = ["train", "-n", str(ranks), "model.name=warns:Net", "data.name=text", corpus]
    words += ["data.args.sequence_length=16", "train.steps=1", "train.global_batch_size=6"]
    done = forked_cli(words, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    alone = forked_cli([*words[:2], "1", *words[3:]], cwd=tmp_path, timeout=120)
    for message in ("this is deprecated", "some weights were not used"):
        assert done.stderr.count(message) == alone.stderr.count(message) >= 1
    assert done.stderr.count("a real error") == ranks * alone.stderr.count("a real error")


def test_a_process_below_its_tensors_is_explained() -> None:
    def notes(process: int, reserved: int | None = None) -> str:
        measured = MemoryMeasurement(
            Peak("backward", Breakdown(parameters=100)), process, reserved_bytes=reserved
        )
        return "\n".join(memory_notes(MemoryReport("ddp", "cpu", (RankMemory(0, measured, None),))))

    words = "it is below the peak if tensors use memory that the process had before"
    assert words in notes(99)
    assert words not in notes(100)
    assert words not in notes(5, reserved=200)  # a GPU's tensors are not in the process's memory


@pytest.mark.parametrize(
    ("share", "digits", "words"),
    [
        (-0.00001, 2, "0.00%"),
        (0.0, 2, "0.00%"),
        (-0.0012, 2, "-0.12%"),
        (0.25, 1, "+25.0%"),
        (-0.0004, 1, "0.0%"),
        (None, 1, "-"),
    ],
)
def test_a_difference_has_no_negative_zero(share: float | None, digits: int, words: str) -> None:
    assert signed_share(share, digits) == words


@pytest.mark.parametrize(
    ("words", "source"),
    [
        (["optim.name=sgd", "optim.nesterov=true"], ""),
        (["optim.state=bf16", "optim.name=sgd"], ""),
        (["train.epochs=2", "train.steps=3"], ""),
    ],
)
def test_a_contradiction_of_ones_own_words_is_not_blamed_on_a_preset(
    words: list[str], source: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_job(None, None, words)
    assert str(refused.value).startswith(source)
    assert "jobs/default.yaml" not in str(refused.value)


def test_a_contradiction_in_ones_own_file_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("optim:\n  name: sgd\n  nesterov: true\n")
    with pytest.raises(ConfigError, match=r"job\.yaml:[23]: optim: .*nesterov"):
        load_job(str(path))
