"""Running out of memory, under a cap and on one of two ranks: the message, remedies, and
recovery.
"""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch
from support.zygote import forked_cli

from bigtrain.engine import out_of_memory, remedies
from bigtrain.engine.out_of_memory import predict_out_of_memory, predict_save_beyond
from bigtrain.errors import ConfigError, OutOfMemoryError
from bigtrain.job.load import load_job
from bigtrain.job.schema import CheckpointConfig
from bigtrain.machine.residuals import PeakRecord, record_residuals
from bigtrain.memory.added_bytes import StatePeak
from bigtrain.memory.cap import is_out_of_memory, requested_bytes
from bigtrain.memory.host_memory import host_memory_line
from bigtrain.memory.timeline import Breakdown, Peak
from bigtrain.prediction.memory_report import FullestRank
from bigtrain.units import GIB, MIB

# 2 blocks of width 128 with 128 tokens: about 90 MiB with micro-batches of 32, most of it
# activations.
GPT = [
    *("model.args.num_layers=2", "model.args.width=128", "model.args.num_heads=4"),
    *("model.args.vocab_size=256", "model.args.sequence_length=128", "data.name=synthetic"),
    *("data.args.kind=language", "data.args.vocabulary=256", "train.global_batch_size=32"),
    *("train.steps=3", "train.eval_every=0", "checkpoint.at_end=false", "model.chunked_loss=false"),
]


ON_CPU, ON_GPU = (
    SimpleNamespace(plan=SimpleNamespace(device_type=kind)) for kind in ("cpu", "cuda")
)


@pytest.mark.parametrize(
    ("words", "fix"),
    [({}, "more ranks with --strategy fsdp"), ({"asynchronous": True}, "asynchronous=false")],
)
def test_a_save_that_will_not_fit_is_said_before(words, fix):
    save, config = StatePeak(3 * MIB), CheckpointConfig(**words)
    (line,) = predict_save_beyond(save, 2 * MIB, config)
    assert "a save, 3.0 MiB, is more than the 2.0 MiB" in line
    assert fix in line
    assert predict_save_beyond(save, 3 * MIB, config) == []
    assert predict_save_beyond(save, 2 * MIB, CheckpointConfig(at_end=False)) == []


def bigtrain(folder, *words):
    return forked_cli(words, cwd=folder, timeout=240)


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.alone  # the search for remedies has a time limit
def test_capped_run_explains_itself_and_what_it_names_fits(tmp_path):
    train = ("train", "-n", "1", "--strategy", "single", "--cap", "60MiB", *GPT)
    done = bigtrain(tmp_path, *train)
    assert done.returncode == 1, done.stderr
    text = done.stderr
    assert "rank 0 ran out of memory in the" in text
    assert "memory.cap=60.0MiB" in text
    assert "peak so far: " in text
    assert "activations" in text
    assert "The largest part is " in text
    assert "Traceback" not in text
    remedies = text.split("is predicted to fit:\n")[1].splitlines()
    words = [line.split("  (predicted")[0].split() for line in remedies if "(predicted" in line]
    assert 2 <= len(words) <= 3
    for number, change in enumerate(words):
        again = bigtrain(tmp_path, *train, *change, f"log.name=fits-{number}")
        assert again.returncode == 0, (change, again.stderr)


def test_dry_run_says_beforehand_what_does_not_fit_and_what_would(tmp_path):
    words = ("--strategy", "single", "--dry-run", *GPT)
    done = bigtrain(tmp_path, "train", *words, "--cap", "60MiB")
    assert done.returncode == 0, done.stderr
    assert "is more than the 60.0 MiB that a rank may use" in done.stdout
    assert "train.micro_batch_size=" in done.stdout.split("is predicted to fit:")[1]
    roomy = bigtrain(tmp_path, "train", *words, "--cap", "4GiB")
    assert "predicted to fit" not in roomy.stdout


def test_plain_ddp_does_not_fit_and_sharding_and_recomputing_do(tmp_path):
    # 4 blocks of width 256: 3.2 million parameters, whose states under DDP take 51 MB.
    model = [*GPT, "model.args.width=256", "model.args.num_layers=4", "train.global_batch_size=4"]
    model += ["model.args.sequence_length=32"]
    outcome = {}
    for strategy in ("ddp", "fsdp"):
        done = bigtrain(tmp_path, "train", "-n", "2", "--strategy", strategy, "--cap=52MiB", *model)
        outcome[strategy] = (done.returncode, done.stderr)
    assert outcome["ddp"][0] == 1, outcome["ddp"]
    assert "ran out of memory" in outcome["ddp"][1]
    assert outcome["fsdp"][0] == 0, outcome["fsdp"]


def test_run_that_adapts_ends_with_the_losses_of_one_that_had_room(tmp_path):
    free = bigtrain(tmp_path, "train", "-n", "2", "--strategy", "ddp", *GPT, "log.name=free")
    assert free.returncode == 0, free.stderr
    words = ("memory.on_oom=adapt", "memory.cap=40MiB", "log.name=tight")
    tight = bigtrain(tmp_path, "train", "-n", "2", "--strategy", "ddp", *GPT, *words)
    assert tight.returncode == 0, tight.stderr
    assert "memory.on_oom=adapt: continues from the beginning with micro-batch" in tight.stdout
    assert "accumulation" in tight.stdout
    one, two = losses(tmp_path / "runs/free"), losses(tmp_path / "runs/tight")
    assert len(one) == len(two) == 3
    assert two == pytest.approx(one, abs=1e-5)
    config = (tmp_path / "runs/tight/config.yaml").read_text()
    assert "micro_batch_size: 16" not in config
    assert "global_batch_size: 32" in config


def test_all_ranks_stop_where_one_has_no_memory(tmp_path):
    words = [
        "model.name=support.odd_strategies:Greedy",
        "data.name=synthetic",
        "memory.predict=false",
    ]
    words += ["data.args.kind=classification", "data.args.input_shape=[1,8,8]", "train.steps=50"]
    words += ["train.global_batch_size=4", "checkpoint.at_end=false", "optim.name=sgd"]
    began = time.monotonic()
    done = bigtrain(tmp_path, "train", "-n", "2", "--strategy", "ddp", *words)
    assert done.returncode == 1
    assert time.monotonic() - began < 60
    assert "rank 1 ran out of memory in the forward pass of step 3" in done.stderr
    assert "4.00 PiB" in done.stderr or "TiB would exceed" in done.stderr
    assert done.stderr.count("ran out of memory") == 1


def test_the_explanation_comes_before_the_others_give_up(tmp_path):
    """The other rank gives up after two seconds, and the search would take longer."""
    words = ["model.name=support.odd_strategies:Greedy", "data.name=synthetic", "mesh.timeout=2"]
    words += ["data.args.kind=classification", "data.args.input_shape=[1,8,8]", "train.steps=50"]
    words += ["train.global_batch_size=4", "checkpoint.at_end=false", "memory.cap=100MiB"]
    done = bigtrain(tmp_path, "train", "-n", "2", "--strategy", "ddp", *words)
    assert done.returncode == 1
    said = done.stderr.index("rank 1 ran out of memory in the forward pass of step 3")
    assert said < done.stderr.index("rank 1 failed in the forward pass")
    assert done.stderr.count("ran out of memory") == 1
    assert "never came" not in done.stderr
    assert "waits for" not in done.stderr


def test_adapting_is_for_the_command_alone():
    from bigtrain.engine.prepare import prepare

    with pytest.raises(ConfigError, match=r"memory\.on_oom=adapt starts the program again"):
        prepare(
            torch.nn.Linear,
            torch.nn.functional.cross_entropy,
            torch.optim.SGD,
            memory__on_oom="adapt",
        )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 4000 bytes. Error code 12 (Cannot allocate memory)"
        ),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_errors_that_say_that_memory_ran_out(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory"),
        OSError(2, "No such file"),
        OutOfMemoryError("said already"),
    ],
)
def test_other_errors_are_left_alone(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_search_that_was_cut_short_says_so(monkeypatch, seconds):
    monkeypatch.setattr(out_of_memory, "REMEDY_TIMEOUT_S", seconds)
    monkeypatch.setattr(
        remedies, "_kinds_of_change", lambda *_: [lambda: iter([["strategy=fsdp"]])]
    )
    small = Peak("forward", Breakdown(parameters=MIB))
    subject = SimpleNamespace(peak=lambda _: small, resolved=ON_CPU)
    needed = Peak("forward", Breakdown(parameters=200 * MIB))
    fullest = FullestRank.among({0: needed})
    said = "\n".join(predict_out_of_memory(subject, fullest, 100 * MIB))
    assert ("reached its time limit: others may fit, too" in said) == (seconds == 0)
    assert ("strategy=fsdp" in said) == (seconds > 0)


def test_on_a_gpu_what_fits_leaves_room_for_workspaces_and_segments(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(remedies, "_kinds_of_change", lambda *_: [lambda: iter([["a=1"], ["a=2"]])])
    peaks = {"a=1": 700 * MIB, "a=2": 600 * MIB}

    def said(needed, on, limit=GIB):
        subject = SimpleNamespace(
            peak=lambda words: Peak("forward", Breakdown(parameters=peaks[words[0]])), resolved=on
        )
        peak = Peak("forward", Breakdown(parameters=needed))
        return "\n".join(predict_out_of_memory(subject, FullestRank.among({0: peak}), limit))

    assert not said(768 * MIB, ON_GPU)
    assert not said(GIB, ON_CPU)
    text = said(769 * MIB, ON_GPU)
    assert "of which 256.0 MiB are for workspaces" in text
    assert "a=1  (predicted peak 700.0 MiB)" in text
    assert "a=2" in said(GIB, ON_GPU, limit=950 * MIB)
    assert "a=1" in said(GIB + 1, ON_CPU, limit=950 * MIB)
    # The workspaces that ranks have shown on the device replace the assumed ones.
    seen = {"tracked_bytes": 1000 * MIB, "process_bytes": 1100 * MIB, "predicted_bytes": 1000 * MIB}
    words = {"engine": "torch", "strategy": "ddp", "device": "cuda", "precision": "bf16"}
    record_residuals([PeakRecord(when="2026-01-01T00:00:00+00:00", **words, **seen)])
    assert not said(924 * MIB, ON_GPU)
    assert "of which 100.0 MiB are for workspaces" in said(925 * MIB, ON_GPU)
    assert "a=1" in said(GIB, ON_GPU, limit=950 * MIB)


def test_how_much_was_asked_for():
    assert requested_bytes(RuntimeError("you tried to allocate 4000 bytes. Error")) == 4000
    assert requested_bytes(RuntimeError("Tried to allocate 20.50 MiB. GPU 0")) == int(20.5 * 2**20)
    assert requested_bytes(MemoryError()) is None


def test_cap_is_a_size():
    with pytest.raises(ConfigError, match=r"'lots' is not a size"):
        load_job("digits", None, ["memory.cap=lots"])
    with pytest.raises(ConfigError, match=r"memory\.cap"):
        load_job("digits", None, ["memory.cap=0"])


def test_host_memory_in_words():
    assert "free now" in host_memory_line()


def test_micro_batches_are_not_halved_where_the_smallest_does_not_fit(monkeypatch):
    tried: list[str] = []

    def search(smallest):
        tried.clear()
        peaks = {"8": 900, "4": 500, "2": 300, "1": smallest, "full": 90}

        def peak(words):
            tried.append(words[0])
            return Peak("forward", Breakdown(parameters=peaks[words[0]] * MIB))

        ways = [
            lambda: remedies._EachLess([["8"], ["4"], ["2"], ["1"]]),
            lambda: iter([["full"]]),
        ]
        monkeypatch.setattr(remedies, "_kinds_of_change", lambda *_: ways)
        found = remedies.RemedySearch()
        found.run(SimpleNamespace(peak=peak, resolved=ON_CPU), 400 * MIB, 60.0)
        assert found.complete
        return [remedy.words[0] for remedy in found.remedies]

    assert search(smallest=450) == ["full"]
    assert tried == ["1", "full"]
    assert search(smallest=200) == ["2", "full"]  # the largest micro-batch that fits
    assert tried == ["1", "8", "4", "2", "full"]
