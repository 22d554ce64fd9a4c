"""The functions on devices, with a fake torch module for machines without a GPU."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from support.hidden_gpus import SHOWN, hide_gpus
from support.ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from bigtrain import devices
from bigtrain.errors import ConfigError
from bigtrain.memory import meter
from bigtrain.memory.meter import MemoryMeter
from bigtrain.prediction.memory_report import MemoryReport, RankMemory
from bigtrain.ranks.context import RunContext
from bigtrain.report.tables import memory_table
from bigtrain.strategies.pipeline import local_devices

ROOT = Path(__file__).resolve().parents[1]
CPU, SECOND = torch.device("cpu"), torch.device("cuda", 1)


class MadeUp(SimpleNamespace):
    """Two GPUs; the current thread uses the second."""

    def __init__(self, **stats: int) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.stats = stats
        self.stats_reset: list[torch.device] = []

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 1

    def get_device_name(self, index: int) -> str:
        return f"Alpha {index}"

    def get_device_properties(self, device: torch.device | int) -> Any:
        index = device if isinstance(device, int) else device.index
        return SimpleNamespace(total_memory=1000 + index)

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return 700, 1001

    def memory_stats(self, _: torch.device) -> dict[str, int]:
        return self.stats

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.calls.append(("reset", device))

    def reset_accumulated_memory_stats(self, device: torch.device) -> None:
        self.stats_reset.append(device)

    def set_device(self, device: torch.device) -> None:
        self.calls.append(("set", device))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    made_up = MadeUp()
    real = torch.get_device_module
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: made_up if kind == "cuda" else real(kind)
    )
    return made_up


@pytest.mark.skipif(devices.accelerator() is not None, reason="this machine has an accelerator")
def test_without_an_accelerator_there_is_the_cpu() -> None:
    assert devices.device_count() == 0
    assert devices.device_names() == []
    assert devices.current_device("cuda") == devices.tracing_device("cuda") == CPU
    assert devices.tracing_note("cpu") is None
    note = devices.tracing_note("cuda")
    assert note is not None
    assert note.startswith("torch sees no cuda device here, so the forecast is of the CPU's")
    for nothing in (devices.synchronize, devices.set_current, devices.start_kernels):
        nothing(CPU)
    assert devices.reset_peaks(CPU) == 0
    assert devices.side_stream(CPU) is devices.generator_state(CPU) is None


def test_what_an_accelerator_tells(gpus: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.accelerator() == "cuda"
    assert devices.device_names() == ["Alpha 0", "Alpha 1"]
    assert devices.capacity_bytes(SECOND) == 1001
    assert devices.free_bytes(SECOND) == 700
    assert devices.tracing_note("cuda") is None
    devices.set_current(SECOND)
    assert gpus.calls == [("set", SECOND)]
    made: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda *size, device: made.append((size, device)))
    # With an index, and with a context.
    assert devices.tracing_device("cuda") == SECOND
    assert made == [((1,), SECOND)]
    assert devices.tracing_device("xpu") == CPU


def test_what_torch_cannot_do_for_a_kind_is_refused_by_name(gpus: MadeUp) -> None:
    with pytest.raises(ConfigError, match=r"memory\.cap: .* no set_per_process_memory_fraction"):
        devices.limit_memory(SECOND, 0.5)
    assert gpus.calls == []


def test_the_peak_is_what_tensors_requested_above_what_kernels_keep(
    gpus: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "start_kernels", lambda device: gpus.calls.append(("warm", device)))
    gpus.stats = {"requested_bytes.all.current": 64}
    memory_meter = MemoryMeter(SECOND, track_steps=0)
    assert gpus.calls == [("warm", SECOND), ("reset", SECOND)]
    assert gpus.stats_reset == [SECOND], "retries before the first step are not the run's"
    gpus.stats = {
        "requested_bytes.all.peak": 1064,
        "allocated_bytes.all.peak": 1536,
        "reserved_bytes.all.peak": 2048,
        "num_alloc_retries": 3,
    }
    assert memory_meter.peak_bytes() == 1000
    measured = memory_meter.measured()
    assert measured.peak is not None
    assert measured.peak.bytes == 1000
    assert (measured.allocated_bytes, measured.reserved_bytes) == (1536, 2048)
    assert (measured.capacity_bytes, measured.alloc_retries) == (1001, 3)
    # For a backend that does not count requests, the bytes in blocks are used.
    gpus.stats = {"allocated_bytes.all.peak": 1536}
    assert devices.allocator_peaks(SECOND).requested == 1536


def test_the_peak_of_a_process_on_several_devices_is_of_all_of_them(
    gpus: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = torch.device("cuda", 0)
    stats: dict[torch.device, dict[str, int]] = {
        first: {"requested_bytes.all.current": 64},
        SECOND: {"requested_bytes.all.current": 32},
    }
    monkeypatch.setattr(gpus, "memory_stats", stats.__getitem__)
    monkeypatch.setattr(meter, "start_kernels", lambda device: gpus.calls.append(("warm", device)))
    memory_meter = MemoryMeter(first, track_steps=0)
    context = SimpleNamespace(device=first, local_rank=0)
    assembly: Any = SimpleNamespace(context=context, meter=memory_meter)
    assert local_devices(assembly, 2) == [first, SECOND]
    assert gpus.calls == [(phase, on) for on in (first, SECOND) for phase in ("warm", "reset")]
    for device, peaks in ((first, (1064, 1536, 2048, 1)), (SECOND, (532, 1024, 2048, 2))):
        kinds = ("requested", "allocated", "reserved")
        stats[device] = {
            f"{kind}_bytes.all.peak": peak for kind, peak in zip(kinds, peaks, strict=False)
        }
        stats[device]["num_alloc_retries"] = peaks[-1]
    assert memory_meter.peak_bytes() == 1500
    measured = memory_meter.measured()
    assert measured.peak is not None
    assert measured.peak.bytes == 1500
    assert (measured.allocated_bytes, measured.reserved_bytes) == (2560, 4096)
    assert (measured.capacity_bytes, measured.alloc_retries) == (2001, 3)
    report = MemoryReport("split", "cuda", (RankMemory(0, measured, None),))
    console = Console(width=120, file=io.StringIO())
    console.print(memory_table(report))
    assert "fullest device" in console.file.getvalue()  # type: ignore[attr-defined]
    assert [device["peak_bytes"] for device in report.as_json()["ranks"][0]["devices"]] == [
        1000,
        500,
    ]


def test_segments_grow_unless_the_user_has_said_how(gpus: MadeUp) -> None:
    assert gpus.calls == []
    for variables in ({"PYTORCH_ALLOC_CONF": "x:1"}, {"PYTORCH_CUDA_ALLOC_CONF": ""}):
        environ = dict(variables)
        devices.grow_segments(environ)
        assert environ == variables
    environ = {}
    devices.grow_segments(environ)
    assert environ == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.skipif(devices.accelerator() is not None, reason="this machine has an accelerator")
def test_without_cuda_the_environment_is_left_alone() -> None:
    environ: dict[str, str] = {}
    devices.grow_segments(environ)
    assert environ == {}


def test_the_rest_asks_for_no_kind_of_device_itself() -> None:
    product_files = [
        path
        for folder in ("bigtrain", "strategies")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "devices.py"
    ]
    sources = {path: path.read_text("utf-8") for path in product_files}
    assert [path for path, text in sources.items() if "torch.cuda" in text] == []
    # If a plan is made for a kind of device that need not exist here, the code names the kind.
    assert sum(text.count('"cuda"') for text in sources.values()) <= 26


def test_programs_that_tests_start_see_no_gpu() -> None:
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR")
    code = f"import os; print([os.environ.get(name) for name in {names}])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    hidden: dict[str, str] = {}
    hide_gpus(hidden)
    assert set(hidden) == set(names)
    if os.environ.get(SHOWN) != "1":
        assert ran.stdout.strip() == str([hidden[name] for name in names])
    shown = {SHOWN: "1", "CUDA_VISIBLE_DEVICES": "2"}
    hide_gpus(shown)
    assert shown == {SHOWN: "1", "CUDA_VISIBLE_DEVICES": "2"}


def test_ranks_see_no_gpu() -> None:
    if os.environ.get(SHOWN) != "1":
        assert run_ranks(visible, 1) == [("", "")]


def visible(_context: RunContext) -> tuple[str | None, str | None]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("HIP_VISIBLE_DEVICES")


def test_starting_kernels_adds_biases_there_back_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt has a workspace per thread: a recomputed block adds biases in the
    backward thread.
    """
    threads: list[tuple[str, bool]] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.addmm.default:
                going_back = torch._C._current_graph_task_id() != -1
                threads.append((str(result.dtype), going_back))
            return result

    monkeypatch.setattr(devices, "is_accelerator", lambda _: True)
    monkeypatch.setattr(devices, "synchronize", lambda _: None)
    with Watch():  # type: ignore[no-untyped-call]
        devices.start_kernels(CPU)
    for dtype in ("torch.float32", "torch.bfloat16"):
        assert (dtype, False) in threads
        assert (dtype, True) in threads


def test_what_tells_one_gpu_from_another(gpus: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.device_identity(CPU) is None
    # This device reports neither
    assert devices.device_identity(SECOND) is devices.processors(1) is None
    properties = SimpleNamespace(uuid="GPU-7", multi_processor_count=132)
    monkeypatch.setattr(gpus, "get_device_properties", lambda _: properties, raising=False)
    assert (devices.device_identity(SECOND), devices.processors(1)) == ("GPU-7", 132)


@pytest.mark.skipif(devices.accelerator() is not None, reason="this machine has an accelerator")
def test_without_a_gpu_there_are_no_versions_of_its_parts() -> None:
    assert devices.driver_versions() == {}


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_dropout_of_a_slice_draws_from_the_generator_of_the_rank_alone(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Numbers of a stream of the rank; afterwards the common streams go on, and other devices' do
    not change.
    """
    from bigtrain.slicing.rules.norms import rank_random

    generators = [torch.Generator().manual_seed(n) for n in range(2)]
    made_up = SimpleNamespace(
        is_available=lambda: True, current_device=lambda: 1, default_generators=generators
    )
    real = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda k: made_up if k == kind else real(k))
    monkeypatch.setattr(devices, "KINDS", (kind,))
    group: Any = SimpleNamespace(group=object(), rank=1)
    torch.manual_seed(3)
    before = [generator.get_state() for generator in generators]
    drawn = []
    for seed in (3, 3):
        torch.manual_seed(seed)
        with rank_random(group):
            drawn.append((torch.rand(3), torch.rand(3, generator=generators[1])))
            assert torch.equal(generators[0].get_state(), before[0])
        drawn.append((torch.rand(3), torch.zeros(0)))
    assert all(torch.equal(g.get_state(), b) for g, b in zip(generators, before, strict=True))
    assert torch.equal(drawn[0][0], drawn[0][1])  # one seed for the host and for the device
    for (first, on_device), (again, again_on_device) in zip(drawn[:2], drawn[2:], strict=True):
        assert torch.equal(first, again)
        assert torch.equal(on_device, again_on_device)
    torch.manual_seed(3)
    torch.randint(1 << 62, ())  # the seed
    assert torch.equal(torch.rand(3), drawn[1][0])
