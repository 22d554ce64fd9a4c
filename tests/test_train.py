"""The command as a user runs it: its output, its files and its refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from support.zygote import forked_cli, forked_script

from bigtrain.memory.meter import MemoryMeasurement
from bigtrain.memory.timeline import MEMORY_KINDS, Breakdown, Peak
from bigtrain.prediction.memory_report import MemoryReport, RankMemory
from bigtrain.ranks.exit_status import run_guarded
from bigtrain.report.tables import memory_notes, memory_table
from bigtrain.train import main

TRAIN = Path(__file__).parents[1] / "bigtrain" / "train.py"
SMALL = [
    "model.args.num_layers=1",
    "model.args.width=16",
    "model.args.num_heads=2",
    "data.args.sequence_length=16",
    "data.args.validation_samples=16",
    "train.global_batch_size=8",
    "train.steps=6",
    "train.eval_every=3",
]
PARTS = ["parameters", "gradients", "optimizer", "activations", "buffers", "temporary"]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return f"data.path={path}"


def run(folder, *words, ranks=0, timeout=120):
    """Run train.py by its path, from a different folder, as a launcher does."""
    if ranks:
        words = ("train", "-n", str(ranks), *words)
        return forked_cli(words, cwd=folder, timeout=timeout)
    return forked_script(TRAIN, words, cwd=folder, timeout=timeout)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run on two ranks, inspected by several tests."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "corpus.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    done = run(folder, *SMALL, f"data.path={text}", ranks=2)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_the_run_ends_with_its_memory_and_its_comparison(finished):
    _, done = finished
    for words in ("Peak memory, ddp on cpu", "rank 1", "predicted", "process", "results: runs/"):
        assert words in done.stdout
    assert "predicted peak:" in done.stdout
    assert "step 6/6  loss" in done.stdout
    assert "validation at step 3: loss" in done.stdout
    assert "for comparison, without learning: bits_per_byte" in done.stdout
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


def test_the_metrics_have_one_object_a_step_with_the_promised_keys(finished):
    folder, _ = finished
    rows = metrics(folder / "runs/gpt-ddp-1")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert {
            "step",
            "loss",
            "grad_norm",
            "lr",
            "samples_per_second",
            "tokens_per_second",
            "step_seconds",
            "peak_memory_bytes",
        } <= row.keys()
        assert row["tokens_per_second"] == pytest.approx(16 * row["samples_per_second"])
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_the_memory_file_keeps_its_contract_and_the_parts_sum(finished):
    folder, _ = finished
    memory = json.loads((folder / "runs/gpt-ddp-1/memory.json").read_text())
    assert (memory["strategy"], memory["world_size"], memory["device"]) == ("ddp", 2, "cpu")
    assert [rank["rank"] for rank in memory["ranks"]] == [0, 1]
    assert memory["peak_bytes"] == max(rank["peak_bytes"] for rank in memory["ranks"])
    for rank in memory["ranks"]:
        assert list(rank["breakdown"]) == PARTS
        assert sum(rank["breakdown"].values()) == rank["peak_bytes"]
        assert sum(rank["predicted_breakdown"].values()) == rank["predicted_peak_bytes"]
        assert rank["predicted_peak_bytes"] == pytest.approx(rank["peak_bytes"], rel=0.01)
        assert rank["phase"] in ("forward", "backward", "step")
        assert rank["process_peak_bytes"] > 0


def shown(*ranks):
    """The printed table (in a pipe) by row: the cells next to the row's name."""
    console = Console(width=100, file=io.StringIO())
    console.print(memory_table(MemoryReport("ddp", "cpu", ranks)))
    lines = console.file.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 100
    lines = [line for line in lines if line[0] in "│┃"]
    rows = [[cell.strip() for cell in line.strip("│┃").split(line[0])] for line in lines]
    return {row[0]: row[1:] for row in rows}


def measured(parts, **figures):
    return MemoryMeasurement(Peak("backward", Breakdown(**parts)), 2000, **figures)


def test_the_table_has_the_error_of_each_part_as_a_share_of_the_peak():
    parts = {"parameters": 400, "gradients": 300, "activations": 290, "temporary": 10}
    guess = Peak(
        "backward", Breakdown(parameters=400, gradients=303, activations=250, temporary=20)
    )
    rank = RankMemory(0, measured(parts), guess)
    table = shown(rank)
    assert {name: row[2] for name, row in table.items()} == {
        "part": "error",
        "parameters": "exact",
        "gradients": "+0.3%",
        "optimizer": "exact",
        "activations": "-4.0%",
        "buffers": "exact",
        "temporary": "+1.0%",  # twice the prediction, but a small share of the peak
        "peak": "-2.7%",
        "difference": "",
        "reached in": "",
        "process": "",
        "step": "-",
    }
    assert table["peak"] == ["1000 B", "973 B", "-2.7%"]
    assert table["difference"] == ["", "-27 B", ""]
    assert sum(rank.error_bytes(kind) for kind in MEMORY_KINDS) == rank.error_bytes() == -27
    almost = Peak("backward", Breakdown(parameters=99_999, activations=1))
    table = shown(RankMemory(0, measured({"parameters": 100_000}), almost))
    assert [table[name][2] for name in ("parameters", "activations")] == ["0.0%", "0.0%"]
    assert (table["peak"][2], table["difference"][1]) == ("exact", "0 B")


def test_the_table_of_two_large_ranks_fits_a_hundred_columns():
    parts = dict.fromkeys(MEMORY_KINDS, 123_456 * 2**20)
    ranks = [
        RankMemory(n, measured(parts, reserved_bytes=7), Peak("evaluate", Breakdown()))
        for n in (1022, 1023)
    ]
    table = shown(*ranks)
    assert table["parameters"] == ["120.56 GiB", "0 B", "-14.3%"] * 2
    assert table["peak"] == ["843.94 GiB", "0 B", "-100.0%"] * 2
    assert table["difference"][1] == "-843.94 GiB"


def test_without_a_prediction_there_is_no_error():
    rank = RankMemory(0, measured({"parameters": 5}), None, "memory.predict is off")
    table = shown(rank)
    assert table["peak"] == ["5 B", "-", "-"]
    assert table["difference"] == ["", "", ""]
    notes = memory_notes(MemoryReport("ddp", "cpu", (rank,)))
    assert "no prediction: memory.predict is off" in notes
    assert not any(note.startswith("error:") for note in notes)
    untracked = RankMemory(0, MemoryMeasurement(None, 7), Peak("step", Breakdown(parameters=5)))
    assert shown(untracked)["peak"] == ["-", "5 B", "-"]


def test_the_saved_job_and_plan_can_be_fed_back_in(finished, tmp_path):
    folder, _ = finished
    saved = folder / "runs/gpt-ddp-1"
    first = metrics(saved)
    again = run(tmp_path, "--config", str(saved / "config.yaml"), "log.dir=again", ranks=2)
    assert again.returncode == 0, again.stderr
    assert [r["loss"] for r in metrics(tmp_path / "again/gpt-ddp-1")] == [r["loss"] for r in first]
    plan = yaml.safe_load((saved / "plan.yaml").read_text())
    assert plan["mesh"] == {"pp": 1, "dp": 2, "tp": 1}
    assert plan["predicted"]["peak_bytes"] == sum(plan["predicted"]["breakdown"].values())
    shown = run(
        tmp_path,
        "--config",
        str(saved / "config.yaml"),
        "--plan",
        str(saved / "plan.yaml"),
        "--dry-run",
    )
    assert shown.returncode == 2  # the plan is for two ranks, and one is started
    assert "mesh.pp=1 * mesh.dp=2 * mesh.tp=1 = 2, and there are 1 rank" in shown.stderr


def test_a_dry_run_says_what_would_happen_and_does_nothing(tmp_path, corpus):
    done = run(tmp_path, *SMALL, corpus, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "predicted peak:" in done.stdout
    assert "global batch 8 = micro-batch 8 x accumulation 1 x dp 1" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_several_ranks_says_it_once(tmp_path, corpus):
    done = run(tmp_path, *SMALL, corpus, "--dry-run", ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("predicted peak:") == 1
    assert done.stdout.count("accumulation 1 x dp 2") == 1


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, corpus):
    words = [*SMALL, corpus, "model.args.dropout=0.1", "checkpoint.every=3", "log.name=whole"]
    assert run(tmp_path, *words, ranks=2).returncode == 0
    whole = {r["step"]: r["loss"] for r in metrics(tmp_path / "runs/whole")}
    resumed = run(
        tmp_path, *words, "log.name=third", "--resume", "runs/whole/checkpoints/step-3", ranks=2
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "continues after step 3" in resumed.stdout
    tail = {r["step"]: r["loss"] for r in metrics(tmp_path / "runs/third")}
    assert tail == {step: whole[step] for step in (4, 5, 6)}
    final = [
        json.loads((tmp_path / f"runs/{n}/checkpoints/step-6/manifest.json").read_text())["files"]
        for n in ("whole", "third")
    ]
    for files in final:
        del files["state.json"]
    assert final[0] == final[1]  # weights and optimizer state are equal, byte by byte


def test_another_number_of_ranks_continues_the_same_sequence(tmp_path, corpus):
    words = [*SMALL, corpus, "train.precision=fp64", "checkpoint.every=3", "log.name=two"]
    assert run(tmp_path, *words, ranks=2).returncode == 0
    continued = run(tmp_path, *words, "log.name=one", "--resume", "runs/two/checkpoints/step-3")
    assert continued.returncode == 0, continued.stderr
    losses = {r["step"]: r["loss"] for r in metrics(tmp_path / "runs/two")}
    for row in metrics(tmp_path / "runs/one"):
        assert row["loss"] == pytest.approx(losses[row["step"]], abs=1e-10)


def test_a_finished_run_resumed_does_nothing_more(tmp_path, corpus):
    words = [*SMALL, corpus, "log.name=r", "train.steps=2"]
    assert run(tmp_path, *words).returncode == 0
    lost = run(tmp_path, *words)
    assert lost.returncode == 2
    assert "log.name=r: runs/r already has a run. Use --resume auto" in lost.stderr
    memory = (tmp_path / "runs/r/memory.json").read_text()
    again = run(tmp_path, *words, "--resume", "auto")
    assert again.returncode == 0, again.stderr
    assert "no steps remained" in again.stdout
    assert [row["step"] for row in metrics(tmp_path / "runs/r")] == [1, 2]
    assert (tmp_path / "runs/r/memory.json").read_text() == memory
    with (tmp_path / "runs/r/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "los')  # the machine crashed while writing
    longer = run(tmp_path, *words, "train.steps=3", "--resume", "auto")
    assert longer.returncode == 0, longer.stderr
    assert [row["step"] for row in metrics(tmp_path / "runs/r")] == [1, 2, 3]
    assert run(tmp_path, *words, "log.name=s").returncode == 0
    mixed = run(tmp_path, *words, "log.name=s", "--resume", "runs/r")
    assert mixed.returncode == 2
    assert "runs/s already has a run, and checkpoint.resume=runs/r is no" in mixed.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategy", "zeroo"], r"--strategy: unknown 'zeroo'"),
        (["optim.lrr=1"], "unknown key optim.lrr, did you mean optim.lr?"),
        (["train.steps=many"], "train.steps: needs a whole number"),
        (["data.path=/nowhere/at/all"], "data.path: /nowhere/at/all does not exist"),
        (["train.global_batch_size=8", "train.micro_batch_size=3"], "is not a multiple of"),
        (["device=cuda"], "device=cuda"),
        (["model.name=nothere.module:Net"], "model.name=nothere.module:Net"),
        (["train.global_batch_size=100000000"], "is more than the"),
        (["train.sync_batchnorm=true"], "train.sync_batchnorm=true needs CUDA"),
        (
            ["model.name=resnet18"],
            "model.name=resnet18 is for classification, and data.name=text is",
        ),
        (["data.name=digits"], "model.name=gpt is for language, and data.name=digits is classif"),
        (["mesh.tp=2"], "mesh.tp=2"),
        (["--resume", "nowhere"], "checkpoint.resume: there is no checkpoint at 'nowhere'"),
        (["strategy.replicate=zeroo"], "strategy.replicate: unknown 'zeroo'"),
        (["strategy.slice=autotp"], r"strategy.slice: autotp was removed. Use --strategy tensor"),
        (["strategy.replicate.bucket=1"], "strategy.replicate.bucket, did you mean bucket_size?"),
    ],
)
def test_wrong_input_ends_with_two_lines_at_most_and_status_2(
    tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.distributed, "init_process_group", None)  # must not be reached
    assert run_guarded(lambda: main(words)) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.startswith("bigtrain: ")
    assert len(errors.splitlines()) <= 2
    assert not list(tmp_path.iterdir())


def test_an_empty_data_set_and_too_many_ranks_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    done = run(tmp_path, "data.path=empty.txt")
    assert done.returncode == 2
    assert "data.path" in done.stderr
    (tmp_path / "short.txt").write_text("x" * 40)
    words = ["data.path=short.txt", "data.args.sequence_length=30"]
    done = run(tmp_path, *words, "data.args.validation_fraction=0", ranks=2)
    assert done.returncode == 2
    assert "1 training samples are fewer than the 2 ranks" in done.stderr
    assert done.stderr.count("bigtrain:") == 1
    assert "Traceback" not in done.stderr


def test_the_arguments_of_launchers_are_ignored(tmp_path, corpus):
    words = ["--local_rank", "0", "--deepspeed", "--deepspeed_config", "x.json", "--local-rank=0"]
    done = run(tmp_path, *words, *SMALL, corpus, "train.steps=1")
    assert done.returncode == 0, done.stderr


BROKEN = """
import os
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, how="raise"):
        super().__init__()
        self.how = how
        self.embedding = nn.Embedding(256, 4)
        self.head = nn.Linear(4, 256)
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        out = self.head(self.embedding(tokens))
        if os.environ.get("RANK") == "1" and not isinstance(tokens, torch._subclasses.FakeTensor):
            if self.how == "raise" and self.calls > 2:
                raise RuntimeError("the seventh seal")
            if self.how == "nan" and self.calls > 2:
                out = out * float("nan")
        return out
"""


def test_a_crash_in_one_rank_ends_all_with_its_traceback_last(tmp_path, corpus):
    (tmp_path / "broken.py").write_text(BROKEN)
    done = run(tmp_path, "model.name=broken:Net", corpus, *SMALL[3:], ranks=2, timeout=60)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert lines[-1] == "RuntimeError: the seventh seal"
    assert done.stderr.count("Traceback") == 1


def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path, corpus):
    (tmp_path / "broken.py").write_text(BROKEN)
    words = ["model.name=broken:Net", "model.args.how=nan", corpus, *SMALL[3:]]
    done = run(tmp_path, *words, ranks=2, timeout=60)
    assert done.returncode == 1
    assert "step 3: the loss of rank 1 is nan; the optimizer was not stepped" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_be_described_is_built_whole_and_said_so(tmp_path):
    (tmp_path / "whole.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embedding = nn.Embedding(256, 4)\n"
        "        self.head = nn.Linear(4, 256)\n"
        "        self.scale = float(self.head.weight.abs().max())\n"
        "    def forward(self, tokens):\n"
        "        return self.head(self.embedding(tokens)) / self.scale\n"
    )
    (tmp_path / "corpus.txt").write_text("abc" * 2000)
    words = ["model.name=whole:Net", "data.path=corpus.txt", *SMALL[3:]]
    done = run(tmp_path, *words, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "the model was built whole on rank 0 and sent to the others" in done.stdout


def test_tensorboard_files_are_written_when_asked_for(tmp_path, corpus):
    done = run(tmp_path, *SMALL, corpus, "log.tensorboard=true", "log.name=b", "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "runs/b/tensorboard").glob("events.out.tfevents.*"))


def test_the_best_state_of_a_validation_is_kept_beside_the_newest(tmp_path, corpus):
    words = [*SMALL, corpus, "train.eval_every=1", "checkpoint.best=loss", "checkpoint.keep=1"]
    words += ["log.name=best", "optim.lr=5", "optim.warmup_steps=0", "train.steps=2"]
    words += ["optim.schedule=constant"]
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/best"
    figures = {}
    for line in (folder / "validation.jsonl").read_text().splitlines():
        row = json.loads(line)
        figures[row["step"]] = row["loss"]
    lowest = min(figures, key=lambda step: figures[step])
    assert lowest == 1  # at this rate the model does not learn
    assert (folder / "checkpoints/best").read_text() == f"step-{lowest}"
    assert (folder / "checkpoints/latest").read_text() == "step-2"
    steps_saved = {path.name for path in (folder / "checkpoints").glob("step-*")}
    assert steps_saved == {f"step-{lowest}", "step-2"}
    meta = json.loads((folder / f"checkpoints/step-{lowest}/state.json").read_text())
    assert meta["validation"]["loss"] == figures[lowest]
    from_best = run(tmp_path, *words, "log.name=two", "--resume", str(folder / "checkpoints/best"))
    assert f"continues after step {lowest} from" in from_best.stdout
    again = run(tmp_path, *words, "train.steps=3", "--resume", "auto")
    assert again.returncode == 0, again.stderr
    (line,) = (folder / "validation.jsonl").read_text().splitlines()[len(figures) :]
    best = 3 if json.loads(line)["loss"] < figures[lowest] else lowest
    assert (folder / "checkpoints/best").read_text() == f"step-{best}"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("checkpoint.best=top1", "gives loss, bits_per_byte. Use checkpoint.best=bits_per_byte."),
        ("checkpoint.snapshot_bytes=-1", "checkpoint.snapshot_bytes"),
        ("checkpoint.asynchronous=maybe", "checkpoint.asynchronous"),
    ],
)
def test_wrong_words_about_checkpoints_are_refused(tmp_path, corpus, word, message):
    done = run(tmp_path, *SMALL, corpus, word)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
