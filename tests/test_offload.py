"""Optimizer state on disk or on the host: the same numbers, less memory, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import TinyLM, tokens
from parity import Record, adamw, largest_difference, sgd, train
from ranks import run_ranks
from test_prediction import peaks, text, wide
from torch import nn

import bigtrain.optim.partitioned
from bigtrain.assembly.make_plan import make_plan
from bigtrain.core.strategy import ModelFacts
from bigtrain.costs.forecast import Profile
from bigtrain.engine.engine import Engine
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.memory.timeline import MEMORY_KINDS
from bigtrain.optim.state_store import DiskStateStore
from bigtrain.ranks.context import RunContext
from bigtrain.strategies.offload import Offload

DISK = {"strategy.offload.optimizer": "disk"}
ROOT = Path(__file__).resolve().parents[1]


def train_in_small_chunks(context, *args: Any) -> Record:
    """With chunks so small that parameters are cut, and several share one."""
    bigtrain.optim.partitioned.chunk_elements = lambda *_: 64
    return train(context, *args)


ONE = {
    "fp32": {},
    "fp32, accumulating and clipped": {"train.micro_batch_size": 2, "optim.clip_norm": 0.5},
    "bf16": {"train.precision": "bf16", "train.micro_batch_size": 2, "optim.clip_norm": 0.5},
    "fp64": {"train.precision": "fp64"},
}


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("case", ONE)
def test_one_process_has_the_same_bits(case, optimizer):
    args = (TinyLM, tokens(22))
    plain = run_ranks(train, 1, *args, "single", ONE[case], 6, optimizer)[0]
    keys = {**ONE[case], **DISK}
    disk = run_ranks(train_in_small_chunks, 1, *args, "single", keys, 6, optimizer)[0]
    assert disk.losses == plain.losses
    assert largest_difference(plain, disk) == 0


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "zero1_torch", "fsdp"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_ranks_equal_one_process(world_size, strategy, precision):
    keys = {"train.precision": precision, "optim.clip_norm": 0.5, "train.micro_batch_size": 1}
    one = run_ranks(train, 1, TinyLM, tokens(22), "single", keys)[0]
    args = (TinyLM, tokens(22), strategy, {**keys, **DISK})
    for record in run_ranks(train_in_small_chunks, world_size, *args):
        assert largest_difference(one, record) < (1e-10 if precision == "fp64" else 1e-5)


class Narrow(nn.Module):
    """Some of three ranks have nothing of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.down = nn.Embedding(13, 8), nn.Linear(8, 2)
        self.up = nn.Linear(2, 13)

    def forward(self, tokens):
        return self.up(torch.relu(self.down(self.embedding(tokens))))


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_rank_without_elements_of_a_parameter_takes_part_in_its_checkpoint(precision):
    keys = {"train.precision": precision, "train.global_batch_size": 9}
    one = run_ranks(train, 3, Narrow, tokens(22), "fsdp", keys, 4, adamw)[0]
    for record in run_ranks(train, 3, Narrow, tokens(22), "fsdp", {**keys, **DISK}, 4, adamw):
        assert largest_difference(one, record) < 1e-10


def test_fp32_copies_of_bf16_parameters_live_on_disk_with_the_same_bits():
    keys = {"train.precision": "bf16", "train.micro_batch_size": 2, "optim.clip_norm": 0.5}
    args = (TinyLM, tokens(22), "zero1_torch")
    plain = run_ranks(train_in_small_chunks, 2, *args, keys, 6, adamw)
    disk = run_ranks(train_in_small_chunks, 2, *args, {**keys, **DISK}, 6, adamw)
    for mine, theirs in zip(plain, disk, strict=True):
        assert mine.losses == theirs.losses
        assert largest_difference(mine, theirs) == 0


def begin_and_continue(context, folder, first, second, keys) -> list[float]:
    """Three steps, saved by one way and continued by the other; the losses of the last three."""
    bigtrain.optim.partitioned.chunk_elements = lambda *_: 64
    samples = tokens(8)
    mine = slice(context.rank, None, context.world_size)
    batch = samples.inputs[mine].clone(), samples.targets[mine].clone()

    def engine(strategy: str, extra: dict[str, Any]) -> Engine:
        job = job_from_keys(strategy, {"train.global_batch_size": 8, **keys, **extra})
        return Engine(TinyLM, CrossEntropy(), adamw, job, context)

    with engine(*first) as one:
        for _ in range(3):
            one.step(batch)
        path = context.broadcast_object(one.save(folder))
    with engine(*second) as other:
        other.load(path)
        return [other.step(batch).loss for _ in range(3)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("world_size", "strategy"), [(1, "single"), (2, "ddp"), (2, "zero1_torch")]
)
def test_checkpoints_go_both_ways(tmp_path, precision, world_size, strategy):
    keys = {"train.precision": precision}
    ways = {"plain": (strategy, {}), "disk": (strategy, DISK)}
    losses = {
        (a, b): run_ranks(
            begin_and_continue, world_size, tmp_path / f"{a}-{b}", ways[a], ways[b], keys
        )
        for a in ways
        for b in ways
    }
    assert len({str(found) for found in losses.values()}) == 1


CASES: dict[str, tuple[Any, ...]] = {
    "single": (1, "single", {}, adamw),
    "single, clipped, accumulating": (
        *(1, "single", {"optim.clip_norm": 1.0, "train.micro_batch_size": 8}),
        adamw,
    ),
    "single, sgd": (1, "single", {"train.micro_batch_size": 8}, sgd),
    "single, fp64": (1, "single", {"train.precision": "fp64"}, adamw),
    "ddp": (2, "ddp", {}, adamw),
    "ddp, accumulating": (2, "ddp", {"train.micro_batch_size": 8}, adamw),
    "ddp, bf16": (2, "ddp", {"train.precision": "bf16", "train.micro_batch_size": 16}, adamw),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_predicted_part_by_part(case):
    world_size, strategy, keys, optimizer = CASES[case]
    args = (wide, text(), strategy, {**keys, **DISK}, optimizer)
    for predicted, measured, note in run_ranks(peaks, world_size, *args):
        assert note is None
        assert predicted.bytes == pytest.approx(measured.bytes, rel=0.01)
        assert predicted.phase == measured.phase
        for kind in MEMORY_KINDS:
            mine, real = getattr(predicted.breakdown, kind), getattr(measured.breakdown, kind)
            assert mine == pytest.approx(real, abs=0.01 * measured.bytes), kind


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
        "predicted": engine.predicted.bytes,
        "process": measured.process_peak_bytes,
        "numbers": sum(p.numel() for p in engine.model.parameters()),
    }))
"""


def measure(keys: dict[str, Any]) -> dict[str, Any]:
    """Train 21 million parameters in a process of its own."""
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
    """The state files that this process has open, by what the system calls them."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:
            continue
    return [name for name in found if "bigtrain-test" in name]


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
            assert list(folder.iterdir()) == []  # nameless: a killed process leaves nothing
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
        ("single", offload(optimizer="cpu", path=str(tmp_path)), "nothing does.*optimizer=disk"),
        ("single", offload(optimizer="tape"), "device.*cpu.*disk"),
        ("single", offload(parameters="cpu"), "single keeps whole.*--strategy fsdp"),
        ("ddp", offload(parameters="disk"), "ddp keeps whole.*--strategy fsdp or zero3"),
        ("zero1_torch", offload(parameters="cpu"), "keeps whole parameters"),
        ("fsdp", offload(parameters="disk"), "and no further.*parameters=cpu"),
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


def build_on_a_small_disk(context, free: int) -> str:
    """Rank 1 alone sees little room; every rank must say the same."""
    import bigtrain.optim.state_store

    bigtrain.optim.state_store.free_on_disk = lambda _: free if context.rank == 1 else 10**12
    keys = {"train.global_batch_size": 8, "memory.predict": False, **DISK}
    try:
        Engine(TinyLM, CrossEntropy(), adamw, job_from_keys("ddp", keys), context)
    except ConfigError as error:
        return str(error)
    return ""


def test_all_ranks_of_a_node_need_room_and_say_the_same():
    state = 8 * sum(p.numel() for p in TinyLM().parameters())
    assert run_ranks(build_on_a_small_disk, 2, 2 * state) == ["", ""]
    first, second = run_ranks(build_on_a_small_disk, 2, 2 * state - 1)
    assert first == second
    assert f"({2 * state} bytes)" in first
    assert f"({2 * state - 1} bytes)" in first
    assert "the 2 ranks" in first


def test_a_disk_that_fills_up_is_an_error_with_a_message(tmp_path, monkeypatch):
    home = DiskStateStore(RunContext.alone(), str(tmp_path))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(BigtrainError, match=r"strategy.offload.path=.*No space left"):
        home.store(torch.ones(3), None)
    home.close()


def test_what_the_disk_gives_back_is_what_it_was_given(tmp_path, monkeypatch):
    write = os.pwritev

    def half(fd: int, parts: list[memoryview], at: int) -> int:
        return write(fd, [part[: max(1, len(part) // 2)] for part in parts], at)

    monkeypatch.setattr(os, "pwritev", half)  # the system may write less than it is asked to
    home = DiskStateStore(RunContext.alone(), str(tmp_path))
    tensors = [
        torch.randn(7),
        torch.randn(3, 5, dtype=torch.float64),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(6, 4).bfloat16().t(),
        torch.randn(9)[::2],
        torch.arange(4),
    ]
    kept = [home.store(tensor, None) for tensor in tensors]
    for _ in range(2):  # loose first, then in the room of a chunk
        for tensor, one in zip(tensors, kept, strict=True):
            assert torch.equal(home.load(one), tensor)
            assert home.load(one).dtype == tensor.dtype
        home.prepare_chunk([*kept, *kept])
    assert home.load(kept[2]).is_contiguous(memory_format=torch.channels_last)
    assert home.store(tensors[0] + 1, kept[0]).offset == kept[0].offset
    assert torch.equal(home.load(kept[0]), tensors[0] + 1)
    home.close()


def test_what_gains_nothing_is_said():
    some = profile(10)
    none = Profile(4, 4, 0, 0, 0, 1, 0.0, 0)
    cases = [
        ({"optimizer": "cpu"}, "cpu", some, "moves nothing: this run is on the CPU"),
        ({"optimizer": "disk"}, "cpu", none, "keeps no state"),
        ({"optimizer": "disk", "path": "/dev/shm"}, "cpu", some, "is a tmpfs"),
        ({"optimizer": "cpu"}, "cuda", some, None),
    ]
    plan = plan_of("zero2_offload", {}, 2)  # that says so itself, and has no disk to offer
    assert plan.techniques["offload"].advise(None, some, plan) is None  # type: ignore[arg-type]
    for keys, device, about, message in cases:
        if keys.get("path") and not os.access(keys["path"], os.W_OK):
            continue
        plan = plan_of("single", offload(**keys), device=device)
        advice = plan.techniques["offload"].advise(None, about, plan)  # type: ignore[arg-type]
        assert advice is None if message is None else message in str(advice)


def test_the_host_is_where_a_cpu_run_is_already():
    plain = run_ranks(train, 1, TinyLM, tokens(22), "single", {})[0]
    record = run_ranks(train, 1, TinyLM, tokens(22), "single_offload_cpu", {})[0]
    assert record.losses == plain.losses


def test_offload_needs_no_name_and_takes_none_but_its_own():
    job = job_from_keys("single", DISK)
    assert job.strategy.offload is not None
    assert job.strategy.offload.name == "offload"
    assert isinstance(plan_of("single", DISK).techniques["offload"], Offload)
