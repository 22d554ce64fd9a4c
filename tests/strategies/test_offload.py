"""Optimizer state on disk or on the host, in one process: memory, files, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.late_copies import LateCopies
from support.nets import TinyLM, tokens
from support.offloaded import DISK
from support.parity import adamw

from bigtrain.assembly.make_plan import make_plan
from bigtrain.core.strategy import ModelFacts
from bigtrain.costs.forecast import Profile
from bigtrain.engine.engine import Engine
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.optim.state_store import DiskStateStore
from bigtrain.ranks.context import RunContext
from bigtrain.strategies.offload import Offload

ROOT = Path(__file__).resolve().parents[2]


_MEASURE = """
import json, sys
import torch
from torch import nn
from bigtrain.ranks.connect import RunContext
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy

torch.set_num_threads(1)

def model():
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(20)))

def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)

keys = {"train.global_batch_size": 4, **json.loads(sys.argv[1])}
job = job_from_keys("single", keys)
context = RunContext.alone()
generator = torch.Generator().manual_seed(1)
batch = torch.randn(4, 1024, generator=generator), torch.arange(4)
with Engine(model, CrossEntropy(), adamw, job, context) as engine:
    losses = [engine.step(batch).loss for _ in range(4)]
    measured = engine.meter.measured()
    print(json.dumps({
        "losses": losses,
        "tracked": measured.peak.bytes,
        "predicted": engine.prediction.peak.bytes,
        "process": measured.process_peak_bytes,
        "numbers": sum(p.numel() for p in engine.model.parameters()),
    }))
"""


def measure(keys: dict[str, Any]) -> dict[str, Any]:
    """Train 21 million parameters in a separate process."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", _MEASURE, json.dumps(keys)]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_process_is_smaller_by_the_state(tmp_path):
    plain, disk = measure({}), measure({**DISK, "strategy.offload.path": str(tmp_path)})
    state = 8 * plain["numbers"]
    assert state > 160 * 10**6
    assert disk["losses"] == plain["losses"]
    assert plain["process"] - disk["process"] >= 0.8 * state
    assert plain["tracked"] - disk["tracked"] >= 0.9 * state
    assert disk["predicted"] == pytest.approx(disk["tracked"], rel=0.01)


def files_held() -> list[str]:
    """The state files that this process has open, as the kernel names them."""
    paths = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            paths.append(os.readlink(entry))
        except OSError:
            continue
    return [name for name in paths if "bigtrain-test" in name]


@pytest.mark.parametrize("fails", [False, True])
def test_no_file_is_left_behind(tmp_path, fails):
    folder = tmp_path / "bigtrain-test"
    folder.mkdir()
    job = job_from_keys(
        "single", {"train.global_batch_size": 4, **DISK, "strategy.offload.path": str(folder)}
    )
    samples = tokens(4, ignored=False)
    batch = samples.inputs, samples.targets

    def run() -> None:
        with Engine(TinyLM, CrossEntropy(), adamw, job, RunContext.alone()) as engine:
            engine.step(batch)
            assert len(files_held()) == 1
            assert list(folder.iterdir()) == []  # unlinked, so that a killed process leaves nothing
            if fails:
                raise RuntimeError("in the midst of it")

    if fails:
        with pytest.raises(RuntimeError, match="in the midst"):
            run()
    else:
        run()
    assert files_held() == []
    assert list(folder.iterdir()) == []


def plan_of(strategy: str, keys: dict[str, Any], world_size: int = 1, device: str = "cpu"):
    return make_plan(job_from_keys(strategy, keys), world_size, device)


def offload(**keys: Any) -> dict[str, Any]:
    return {f"strategy.offload.{key}": value for key, value in keys.items()}


def test_bad_input_is_refused_before_the_ranks_meet(tmp_path):
    file = tmp_path / "file"
    file.touch()
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("single", offload(optimizer="device"), "moves nothing.*optimizer=disk"),
        ("single", offload(optimizer="disk", path="/no/where"), "does not exist.*mkdir -p"),
        ("single", offload(optimizer="disk", path=str(file)), "is not a folder"),
        (
            "single",
            offload(optimizer="cpu", path=str(tmp_path)),
            "no option says disk",
        ),
        ("single", offload(optimizer="tape"), "device.*cpu.*disk"),
        ("single", offload(parameters="cpu"), "single keeps whole.*--strategy fsdp"),
        ("ddp", offload(parameters="disk"), "ddp keeps whole.*--strategy fsdp or zero3"),
        ("zero1_torch", offload(parameters="cpu"), "keeps whole parameters"),
        ("fsdp", offload(parameters="disk"), "host's memory only.*parameters=cpu"),
    ]
    for strategy, keys, message in cases:
        with pytest.raises(ConfigError, match=message):
            plan_of(strategy, keys, 1 if strategy == "single" else 2)


def test_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path or mode == os.F_OK)
    with pytest.raises(ConfigError, match=r"is not writable.*chmod u\+wx"):
        plan_of("single", offload(optimizer="disk", path=str(tmp_path)))


def profile(elements: int) -> Profile:
    return Profile(4 * elements, 4 * elements, 0, 8 * elements, 0, elements, 2.0, 0)


def test_a_model_too_large_for_the_disk_or_the_host_is_refused_with_the_numbers(tmp_path):
    disk = plan_of("single", offload(optimizer="disk", path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"has .* free \(\d+ bytes\).*takes 7275.96 TiB"):
        disk.techniques["offload"].check_model(ModelFacts(profile(10**15)), disk)
    disk.techniques["offload"].check_model(ModelFacts(profile(1000)), disk)
    host = plan_of("single", offload(optimizer="cpu"), device="cuda")
    with pytest.raises(ConfigError, match=r"memory free \(\d+ .*optimizer=disk"):
        host.techniques["offload"].check_model(ModelFacts(profile(10**15)), host)
    sharded = plan_of("zero1_torch", offload(optimizer="disk", path=str(tmp_path)), 4)
    assert sharded.state_ranks == 4


def test_a_disk_that_fills_up_is_an_error_with_a_message(tmp_path, monkeypatch):
    home = DiskStateStore(RunContext.alone(), str(tmp_path))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(BigtrainError, match=r"strategy.offload.path=.*No space left"):
        home.store(torch.ones(3), None)
    home.close()


@pytest.mark.parametrize("late", [False, True])
def test_what_the_disk_gives_back_is_what_it_was_given(tmp_path, monkeypatch, late):
    write = os.pwritev

    def half(fd: int, parts: list[memoryview], at: int) -> int:
        return write(fd, [part[: max(1, len(part) // 2)] for part in parts], at)

    monkeypatch.setattr(os, "pwritev", half)  # the kernel may write fewer bytes than requested
    monkeypatch.setattr("bigtrain.tensors.transfer.BOUNCE_BYTES", 24)
    home = DiskStateStore(RunContext.alone(), str(tmp_path), LateCopies() if late else None)
    tensors = [
        torch.randn(7),
        torch.randn(3, 5, dtype=torch.float64),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(6, 4).bfloat16().t(),
        torch.randn(9)[::2],
        torch.arange(4),
    ]
    stored = [home.store(tensor, None) for tensor in tensors]
    for _ in range(2):  # first one by one, then in the space of a chunk
        for tensor, stored_tensor in zip(tensors, stored, strict=True):
            assert torch.equal(home.load(stored_tensor), tensor)
            assert home.load(stored_tensor).dtype == tensor.dtype
        home.prepare_chunk([*stored, *stored])
    assert home.load(stored[2]).is_contiguous(memory_format=torch.channels_last)
    assert home.store(tensors[0] + 1, stored[0]).offset == stored[0].offset
    assert torch.equal(home.load(stored[0]), tensors[0] + 1)
    home.close()


def test_what_gains_nothing_is_said():
    some = profile(10)
    none = Profile(4, 4, 0, 0, 0, 1, 0.0, 0)
    cases = [
        ({"optimizer": "cpu"}, "cpu", some, "moves nothing: this run is on the CPU"),
        ({"optimizer": "disk"}, "cpu", none, "keeps no state"),
        ({"optimizer": "disk", "path": "/dev/shm"}, "cpu", some, "is a tmpfs"),
        ({"optimizer": "cpu"}, "cuda", some, None),
        ({"optimizer": "disk", "activations": "disk"}, "cpu", none, None),
    ]
    plan = plan_of("zero2_offload", {}, 2)  # it reports this itself, and cannot use a disk
    assert plan.techniques["offload"].advise(None, some, plan) is None  # type: ignore[arg-type]
    for keys, device, about, message in cases:
        if keys.get("path") and not os.access(keys["path"], os.W_OK):
            continue
        plan = plan_of("single", offload(**keys), device=device)
        advice = plan.techniques["offload"].advise(None, about, plan)  # type: ignore[arg-type]
        assert advice is None if message is None else message in str(advice)


def test_offload_needs_no_name_and_takes_none_but_its_own():
    job = job_from_keys("single", DISK)
    assert job.strategy.offload is not None
    assert job.strategy.offload.name == "offload"
    assert isinstance(plan_of("single", DISK).techniques["offload"], Offload)


@pytest.mark.parametrize(
    ("device", "storage_place"), [("cpu", "disk"), ("cuda", "cpu"), ("xpu", "cpu")]
)
def test_what_is_on_an_accelerator_goes_to_the_host_first(device, storage_place):
    (variant,) = Offload().variants(SimpleNamespace(device_type=device))
    assert variant.options == {"optimizer": storage_place}
