"""Records of runs that correct the predictions of later runs, and the safety margin from them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support.residual_files import entry, on_cpu
from support.zygote import forked_cli

from bigtrain.assembly.make_plan import make_plan
from bigtrain.job.load import job_from_keys
from bigtrain.machine import cache as cache_module
from bigtrain.machine import rate_cache
from bigtrain.machine.busy import CpuUse
from bigtrain.machine.rates import MeasuredRates
from bigtrain.machine.residuals import (
    DEFAULT_MARGIN,
    MAX_ENTRIES,
    MIN_RUNS,
    RESIDUALS,
    StepRecord,
    hardware_key,
    record_residuals,
    safety_margin,
    step_uncertainty,
)
from bigtrain.memory.meter import MemoryMeasurement
from bigtrain.memory.timeline import Breakdown, Peak
from bigtrain.prediction.memory_report import (
    MemoryReport,
    RankMemory,
    StepForecast,
    StepMeasurement,
    engine_of,
)
from bigtrain.report.tables import memory_notes

MODEL = """
from torch import nn
from torch._subclasses import FakeTensor


class Net(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.breaks, self.calls = breaks, 0

    def forward(self, tokens):
        self.calls += not isinstance(tokens, FakeTensor)
        if self.breaks and self.calls > 2:
            raise RuntimeError("the seventh seal")
        return self.head(self.embedding(tokens))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bigtrain"


_LINK = {
    "latency": 1e-4,
    "bytes": 1e9,
    "curve": [[1e3, 1e-4], [1e6, 1e-3]],
    "after_work": [],
    "work": 0.0,
    "issue": 0.0,
}
RATES = MeasuredRates(
    device="cpu",
    flops={"fp32": 1e11, "bf16": 1e11},
    copy_bytes=1e10,
    disk_write_bytes=1e9,
    disk_read_bytes=1e9,
    to_device_bytes=None,
    link_ranks=2,
    link_latency=1e-4,
    link_bytes=1e9,
    link_kinds={"all_reduce": _LINK, "broadcast": _LINK},
)


def stored_entries(key=None):
    """The stored records of a device, by default of this CPU."""
    return json.loads(RESIDUALS.path.read_text())[key or hardware_key("cpu")]


def test_without_runs_the_stated_defaults_apply():
    for engine, margin in (("torch", 0.005), ("deepspeed", 0.05), ("fairscale", 0.05)):
        safety = on_cpu(engine)
        assert (safety.margin, safety.non_tensor_bytes, safety.runs, safety.ranks) == (
            margin,
            0,
            0,
            0,
        )
    assert on_cpu("torch").explanation == (
        "margin 0.5 %: the default of torch, as fewer than 20 ranks (0) have run on this device"
    )
    assert on_cpu("another").margin == max(DEFAULT_MARGIN.values())


@pytest.mark.parametrize(
    ("tracked", "margin", "line"),
    [
        ([1100] * 19, 0.005, "margin 0.5 %: the default of torch, as fewer than 20 ranks (19)"),
        ([1100] * 20, 0.1, "margin 10.0 %: 99 % of 20 ranks on this device needed no more"),
        # Up to 100 ranks it is the highest of all.
        ([1000] * 99 + [1200], 0.2, "margin 20.0 %: 99 % of 100 ranks"),
        # Of 101 ranks one may be above, which is 1%; of 201 two.
        ([1000] * 100 + [1200], 0.0, "margin 0.0 %: 99 % of 101 ranks"),
        ([1000] * 99 + [1030, 1200], 0.03, "margin 3.0 %: 99 % of 101 ranks"),
        ([1000] * 198 + [1010, 1030, 1200], 0.01, "margin 1.0 %: 99 % of 201 ranks"),
        # A quantile between two ranks is the higher one: 0.99 * 101 = 99.99.
        ([1000] * 100 + [1030, 1200], 0.03, "margin 3.0 %: 99 % of 102 ranks"),
        # A measurement below the prediction counts as 0.
        ([10] * 30, 0.0, "margin 0.0 %: 99 % of 30 ranks"),
    ],
)
def test_the_margin_is_a_quantile_from_twenty_ranks_on(tracked, margin, line):
    record_residuals(entry(size) for size in reversed(tracked))
    safety = on_cpu("torch")
    assert safety.margin == pytest.approx(margin, abs=1e-12)
    assert safety.explanation.startswith(line)
    assert safety.ranks == len(tracked)


def test_the_line_rounds_up():
    record_residuals([entry(100_101, predicted_bytes=100_000)] * 20)
    assert on_cpu("torch").explanation.startswith("margin 0.2 %")


def test_runs_are_told_apart_by_their_end():
    for run in range(3):
        record_residuals([entry(when=f"2030-01-01T00:00:0{run}")] * 4)
    margin = on_cpu("torch")
    assert (margin.runs, margin.ranks) == (3, 12)


def test_bytes_beside_the_tensors_are_the_same_quantile():
    record_residuals([entry(1000, process_bytes=size) for size in (1500, 1700, None, 400)])
    assert on_cpu("torch").non_tensor_bytes == 700
    record_residuals([entry(1000, process_bytes=1600)] * 98)
    assert on_cpu("torch").non_tensor_bytes == 600  # of the 101 ranks with this figure


def test_engines_and_devices_are_kept_apart():
    record_residuals([entry(1100)] * 20 + [entry(1300, engine="deepspeed")] * 20)
    assert on_cpu("torch").margin == pytest.approx(0.1)
    assert on_cpu("deepspeed").margin == pytest.approx(0.3)
    assert on_cpu("fairscale").margin == 0.05
    assert safety_margin("torch", device_key="another").ranks == 0
    record_residuals([entry(1400, device="cuda")] * 20)
    assert safety_margin("torch", device_key=hardware_key("cuda")).margin == pytest.approx(0.4)
    assert on_cpu("torch").margin == pytest.approx(0.1)


def test_a_device_is_its_hardware_and_torch(monkeypatch):
    first = hardware_key("cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert hardware_key("cpu") == first
    monkeypatch.setattr(cache_module.torch, "__version__", "0.1")
    assert hardware_key("cpu") != first
    monkeypatch.setattr(cache_module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cache_module.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cache_module.torch.cuda, "get_device_name", lambda _: "Alpha")
    two = hardware_key("cuda")
    assert json.loads(two) == {"device": "cuda", "names": ["Alpha"], "torch": "0.1"}
    record_residuals([entry(1100, device="cuda")] * 20)
    assert safety_margin("torch").margin == pytest.approx(0.1)


def test_the_newest_five_hundred_of_a_device_are_kept():
    record_residuals([entry(device="cuda")])
    record_residuals([entry(2000)] * 100)
    record_residuals([entry(1000)] * (MAX_ENTRIES - 1))
    assert [e["tracked_bytes"] for e in stored_entries()] == [2000] + [1000] * (MAX_ENTRIES - 1)
    record_residuals([entry(1234)] * 2)
    assert len(stored_entries()) == MAX_ENTRIES == 500
    assert [e["tracked_bytes"] for e in stored_entries()[-3:]] == [1000, 1234, 1234]
    assert len(stored_entries(hardware_key("cuda"))) == 1
    record_residuals(entry(size) for size in range(1, 701))
    assert [e["tracked_bytes"] for e in stored_entries()] == list(range(201, 701))


@pytest.mark.parametrize(
    "text", ['{"half of a fi', "[1, 2]", "", '{"a": 5}', "[" * 100_000, "\x00\x01"]
)
def test_a_damaged_file_is_begun_anew(cache, text):
    cache.mkdir(parents=True)
    RESIDUALS.path.write_text(text)
    assert on_cpu("torch").ranks == 0
    record_residuals([entry()])
    assert on_cpu("torch").ranks == 1
    RESIDUALS.path.write_bytes(b"\xff\xfe{}")
    assert on_cpu("torch").ranks == 0


def test_what_is_no_entry_does_not_count(cache):
    good = asdict(entry())
    wrong = [
        {**good, "predicted_bytes": 0},
        {**good, "tracked_bytes": -1},
        {**good, "tracked_bytes": "7"},
        {**good, "tracked_bytes": True},
        {**good, "tracked_bytes": None},
        {**good, "process_bytes": 1.5},
        {**good, "when": 5},
        {k: v for k, v in good.items() if k != "when"},
        7,
    ]
    cache.mkdir(parents=True)
    RESIDUALS.path.write_text(json.dumps({hardware_key("cpu"): [*wrong, good], "other": 5}))
    assert on_cpu("torch").ranks == 1


def test_a_folder_that_takes_no_files_hurts_nobody(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for unusable in (tmp_path / "file", Path("/proc/nothing")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(unusable))
        record_residuals([entry()])
        assert on_cpu("torch").ranks == 0


def test_a_full_disk_leaves_what_was_there(cache, monkeypatch):
    record_residuals([entry(1100)])
    before = RESIDUALS.path.read_text()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        record_residuals([entry(1200)])
    assert RESIDUALS.path.read_text() == before
    assert sorted(p.name for p in cache.iterdir()) == ["residuals.json", "residuals.lock"]


def test_a_file_that_cannot_be_read_is_not_replaced(cache):
    (cache / "residuals.json").mkdir(parents=True)  # reading a folder fails, even for the superuser
    record_residuals([entry()])
    assert on_cpu("torch").ranks == 0
    assert RESIDUALS.path.is_dir()


def test_a_lock_that_others_keep_is_waited_for_and_given_up(cache, monkeypatch):
    record_residuals([entry()])
    monkeypatch.setattr(cache_module, "LOCK_TIMEOUT_S", 0.1)
    with (cache / "residuals.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        record_residuals([entry()])
        assert len(stored_entries()) == 1
    record_residuals([entry()])
    assert len(stored_entries()) == 2


def test_without_locks_the_last_writer_wins(monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    locks = SimpleNamespace(flock=none, LOCK_EX=fcntl.LOCK_EX, LOCK_NB=fcntl.LOCK_NB)
    monkeypatch.setattr(cache_module, "fcntl", locks)
    record_residuals([entry()])
    record_residuals([entry()])
    assert len(stored_entries()) == 2


@pytest.mark.parametrize(
    ("strategy", "engine"),
    [
        ("ddp", "torch"),
        ("zero1_torch", "torch"),
        ("1f1b", "torch"),
        ("zero2", "deepspeed"),
        ("oss", "fairscale"),
    ],
)
def test_the_engine_is_whose_implementation_runs(strategy, engine):
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    plan = make_plan(job_from_keys(strategy, {"train.global_batch_size": 8}), 2, "cpu")
    assert engine_of(plan) == engine


def test_a_technique_of_ones_own_says_nothing_about_bigtrains():
    plan = make_plan(job_from_keys("single", {"train.global_batch_size": 8}), 1, "cpu")
    strategy_class = type("Own", (type(plan.techniques["replicate"]),), {"__module__": "mymodule"})
    assert (
        engine_of(replace(plan, techniques={**plan.techniques, "replicate": strategy_class()}))
        is None
    )


def test_a_report_gives_entries_for_ranks_with_both_figures():
    peak, more = Peak("step", Breakdown(parameters=900)), Peak("step", Breakdown(gradients=1000))
    nothing = Peak("forward", Breakdown())
    ranks = (
        RankMemory(0, MemoryMeasurement(more, 2000), peak),
        RankMemory(1, MemoryMeasurement(more, None), None, "memory.predict is off"),
        RankMemory(2, MemoryMeasurement(None, 2000), peak),  # memory.track_steps=0
        RankMemory(3, MemoryMeasurement(more, 2000, reserved_bytes=1500), peak),
        RankMemory(4, MemoryMeasurement(more, 2000), nothing),
        RankMemory(5, MemoryMeasurement(peak, None), peak),
    )
    residuals = MemoryReport("ddp", "cpu", ranks).residuals("torch", "bf16")
    assert [e.process_bytes for e in residuals] == [2000, 1500, None]
    assert [e.non_tensor_bytes for e in residuals] == [1000, 500, None]
    assert [e.residual for e in residuals] == pytest.approx([1 / 9, 1 / 9, 0])
    assert {(e.engine, e.strategy, e.device, e.precision) for e in residuals} == {
        ("torch", "ddp", "cpu", "bf16")
    }
    assert len({e.when for e in residuals}) == 1


def step_entry(ratio=1.0, **other):
    """A record of a run whose step took a second."""
    values = {"when": "2030", "engine": "torch", "strategy": "ddp", "device": "cpu"}
    values |= {"basis": "blocks", "ranks": 2, "measured_seconds": 1.0}
    return StepRecord(**{**values, "predicted_seconds": ratio, **other})


def test_seconds_are_kept_by_engine_and_by_what_they_go_by():
    assert step_uncertainty("torch", "blocks", "cpu") == (
        "how far off is not known: no earlier runs of torch by timed blocks on this device"
    )
    record_residuals([step_entry(0.9), step_entry(0.5, basis="rates"), entry()])
    record_residuals([step_entry(0.7, engine="deepspeed"), step_entry(0.8), step_entry(0.6)])
    assert step_uncertainty("torch", "blocks", "cpu") == (
        "3 earlier runs of torch by timed blocks: predicted 0.80 of the measured (median); "
        f"a ± is shown after {MIN_RUNS} runs"
    )
    assert step_uncertainty("torch", "rates", "cpu").startswith("1 earlier run of torch by rates")
    assert on_cpu("torch").ranks == 1  # records of bytes stay in the same file


def test_the_uncertainty_of_seconds_is_a_quantile_from_ten_runs_on():
    record_residuals(
        step_entry(ratio) for ratio in (0.9, 1.1, 0.95, 1.0, 1.05, 0.8, 1.3, *[1.0] * 3)
    )
    text = step_uncertainty("torch", "blocks", "cpu")
    assert text == (
        "± 30.0 %, the error of 90% of 10 earlier runs of torch by timed blocks; "
        "predicted 1.00 of the measured (median)"
    )
    record_residuals(step_entry() for _ in range(1))
    assert step_uncertainty("torch", "blocks", "cpu").startswith("± 20.0 %")


@pytest.mark.parametrize(
    ("machine", "predicted", "kept_seconds"),
    [(8.5, 0.8, 0.8), (20.0, 0.8, None), (None, 0.8, 0.8), (8.5, None, None)],
)
def test_a_run_on_a_busy_machine_says_nothing_of_seconds(
    monkeypatch, machine, predicted, kept_seconds
):
    monkeypatch.setattr("bigtrain.machine.busy.usable_cores", lambda: 2)
    steps = StepMeasurement(5, 1.0, CpuUse("here", 5.0, 4.2, machine))
    ranks = [RankMemory(n, MemoryMeasurement(None, None), None, None, steps) for n in (0, 1)]
    report = MemoryReport("ddp", "cpu", tuple(ranks), StepForecast(predicted, basis="blocks"))
    residual = report.step_residual("torch")
    assert (residual and residual.predicted_seconds) == kept_seconds
    assert report.as_json()["step"]["busy"] == (machine == 20.0)
    notes = " ".join(memory_notes(report))
    assert ("other programs used the machine" in notes) == (machine == 20.0)
    assert ("no predicted seconds: nothing was forecast" in notes) == (predicted is None)


def train(folder, *words, ranks=1):
    """Train a small model for three steps; return the records that are left afterwards."""
    text = folder / "corpus.txt"
    text.write_text("how vexingly quick daft zebras jump. " * 100)
    (folder / "net.py").write_text(MODEL)
    size = ["data.args.sequence_length=16", "data.args.validation_samples=8"]
    steps = ["train.global_batch_size=8", "train.steps=3", "checkpoint.at_end=false"]
    job_words = ["model.name=net:Net", "device=cpu", f"data.path={text}", "log.name=run"]
    command = ["train", "-n", str(ranks), *job_words, *size, *steps, *words]
    done = forked_cli(command, cwd=folder)
    return done, stored_entries() if RESIDUALS.path.exists() else []


def test_a_run_on_two_ranks_leaves_two_entries(tmp_path):
    done, entries = train(tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    memory = json.loads((tmp_path / "runs/run/memory.json").read_text())
    assert len(entries) == 2
    ends = {values.pop("when") for values in entries}
    assert len(ends) == 1
    for rank, values in zip(memory["ranks"], entries, strict=True):
        assert values == {
            "engine": "torch",
            "strategy": "ddp",
            "device": "cpu",
            "precision": "fp32",
            "predicted_bytes": rank["predicted_peak_bytes"],
            "tracked_bytes": rank["peak_bytes"],
            "process_bytes": rank["process_peak_bytes"],
        }
    assert memory["step"]["measured_seconds"] is None  # memory was tracked in all three steps
    assert "predicted step: none (the rates of this machine are not known" in done.stdout
    assert "memory was tracked in every step" in done.stdout
    rate_cache._store(RATES)
    done, entries = train(tmp_path, "log.name=again", "memory.track_steps=1", ranks=2)
    assert done.returncode == 0, done.stderr
    assert len(entries) == 4
    assert (on_cpu("torch").runs, on_cpu("torch").ranks) == (2, 4)
    folder = tmp_path / "runs/again"
    step = json.loads((folder / "memory.json").read_text())["step"]
    first, *other_lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert step["measured_steps"] == 2
    assert step["measured_seconds"] == pytest.approx(
        sum(s["step_seconds"] for s in other_lines) / 2
    )
    assert step["predicted_seconds"] == first["predicted_step_seconds"] > 0
    assert not any("predicted_step_seconds" in entry for entry in other_lines)
    plan = yaml.safe_load((folder / "plan.yaml").read_text())
    assert plan["predicted"]["step_seconds"] == step["predicted_seconds"]
    assert "by the rates of this machine" in done.stdout
    stored = json.loads(RESIDUALS.path.read_text())
    seconds = [entry for key in stored if "step_seconds" in key for entry in stored[key]]
    expected = [] if step["busy"] else [step["measured_seconds"]]
    assert [entry["measured_seconds"] for entry in seconds] == expected


def test_a_run_that_fails_leaves_none(tmp_path):
    done, entries = train(tmp_path, "model.args.breaks=true")
    assert done.returncode == 1
    assert "the seventh seal" in done.stderr
    assert entries == []


def test_a_run_is_not_hurt_by_a_cache_that_takes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    done, entries = train(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/run/memory.json").exists()
    assert "residuals" not in done.stdout + done.stderr
    assert entries == []
