"""The device that a rank computes on: everything that is not the same on a CPU and elsewhere.

torch has a module for each kind of accelerator (`torch.get_device_module`). Those with all that is
needed here are in `KINDS`: "cuda", to which ROCm answers, too, and "xpu". What one of them lacks is
refused in one line, by name. Nothing else of bigtrain asks a kind's module itself.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bigtrain.errors import ConfigError

Kind = Literal["cuda", "xpu"]
KINDS: tuple[Kind, ...] = ("cuda", "xpu")


@dataclass(frozen=True)
class AllocatorPeaks:
    """What a device's allocator has counted since `reset_peaks`, in bytes."""

    requested: int
    """By tensors, as they asked for it."""
    allocated: int
    """In blocks: rounded up, and with workspaces of kernels."""
    reserved: int
    """Taken from the device."""
    retries: int
    """How often the cache was emptied because nothing fitted."""


def accelerator() -> Kind | None:
    """The kind that torch sees at work here; None where there is but a CPU."""
    return next((kind for kind in KINDS if _module(kind).is_available()), None)


def in_use() -> bool:
    """Whether this process has begun to use an accelerator; to ask begins nothing."""
    return any(_module(kind).is_initialized() for kind in KINDS)


def is_accelerator(device: torch.device | str) -> bool:
    """Whether it has memory of its own, and computes beside the host."""
    return torch.device(device).type in KINDS


def device_count() -> int:
    """Accelerators of this machine that this process may use."""
    kind = accelerator()
    return int(_module(kind).device_count()) if kind else 0


def nccl_version() -> tuple[int, int, int]:
    """The version of NCCL that this torch talks to GPUs with; zeros where it sees no GPU."""
    if not torch.cuda.is_available():
        return 0, 0, 0
    version: Any = torch.cuda.nccl.version
    major, minor, patch = version()[:3]
    return int(major), int(minor), int(patch)


def driver_versions() -> dict[str, str]:
    """Of what is between torch and the GPUs, and what the first of them can; empty without any."""
    if not torch.cuda.is_available():
        return {}
    found = {"nccl": ".".join(map(str, nccl_version()))}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.version.hip is not None:
        found["hip"] = torch.version.hip
    cudnn: Any = torch.backends.cudnn
    if cudnn.is_available():
        found["cudnn"] = str(cudnn.version())
    found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
    return found


def device_name(index: int) -> str:
    """What one of them is called."""
    return str(_module(accelerator() or "cpu").get_device_name(index))


def device_identity(device: torch.device) -> str | None:
    """What tells one accelerator from all others, however it is numbered; None where nothing does.

    Its UUID: two ranks may each call theirs 0 and mean two, or one.
    """
    if not is_accelerator(device):
        return None
    uuid = getattr(_module(device.type).get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def processors(index: int) -> int | None:
    """Multiprocessors of a GPU, among which it shares out a product's tiles; None unless it tells.

    Args:
        index: of the GPU.
    """
    properties = _module(accelerator() or "cpu").get_device_properties(index)
    count = getattr(properties, "multi_processor_count", None)
    return None if count is None else int(count)


def device_names() -> list[str]:
    """What they are called, in the order of their indices."""
    return [device_name(index) for index in range(device_count())]


def current_device(kind: str) -> torch.device:
    """The one of a kind that this thread uses, with its index; the CPU where there is none."""
    if kind not in KINDS or accelerator() != kind:
        return torch.device("cpu")
    return torch.device(kind, _module(kind).current_device())


def tracing_device(kind: str) -> torch.device:
    """Where fake tensors of a run on this kind of device are: the one that this thread uses.

    With an index, so that they go together with those of a later moment; with a context, which a
    backward pass on fakes needs and does not make. Where there is none of the kind, the CPU: torch
    has no backward pass on fakes for it there; `tensors.cuda_program` has them keep what CUDA's do.
    """
    device = current_device(kind)
    if device.index is not None:
        torch.empty(1, device=device)
    return device


def tracing_note(kind: str) -> str | None:
    """What is to be said of forecasts that are not made by the kernels of the run."""
    if kind not in KINDS or accelerator() == kind:
        return None
    seen = f"torch sees no {kind} device here, so the forecast is of the CPU's kernels"
    if kind == "cuda":
        return f"{seen}, with CUDA's autocast, dropout and attention; workspaces are not in it"
    return f"{seen}: those of {kind} keep other things for the backward pass"


def set_current(device: torch.device) -> None:
    """From now on this thread's tensors without an index go there; nothing on a CPU."""
    if is_accelerator(device):
        _module(device.type).set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until it has computed all that it was told; nothing on a CPU."""
    if is_accelerator(device):
        _module(device.type).synchronize(device)


def capacity_bytes(device: torch.device) -> int:
    """All of an accelerator's memory."""
    return int(_module(device.type).get_device_properties(device).total_memory)


def free_bytes(device: torch.device) -> int:
    """What of an accelerator's memory nobody has taken."""
    return int(_module(device.type).mem_get_info(device)[0])


def limit_memory(device: torch.device, share: float) -> None:
    """Let this process have so much of an accelerator's memory, from now on.

    Raises:
        ConfigError: torch cannot limit this kind.
    """
    _function(device.type, "set_per_process_memory_fraction", "memory.cap")(share, device)


def start_kernels(device: torch.device) -> None:
    """Have the workspaces of products made that the caller's thread and autograd's keep.

    They are no tensors of a run, and stay for as long as the process does: cuBLAS has one for each
    thread (32 MiB on Hopper), and cuBLASLt, which adds biases, one of its own (1 MiB). Blocks that
    are computed again add biases on autograd's thread, too.
    """
    if not is_accelerator(device):
        return
    for kind in (torch.float32, torch.bfloat16):
        rows, matrix, bias = (
            torch.ones(*shape, device=device, dtype=kind, requires_grad=True)
            for shape in ((16, 16), (16, 16), (16,))
        )

        def products(rows: Tensor, matrix: Tensor = matrix, bias: Tensor = bias) -> Tensor:
            # What exp gives is kept: without it the second pass would end before the last product.
            # What exp gives is kept: without it the second pass would end before the last product.
            return torch.addmm(bias, rows @ matrix, matrix).exp()

        products(rows).sum().backward()  # type: ignore[no-untyped-call]
        again: Any = checkpoint(products, rows, use_reentrant=False, preserve_rng_state=False)
        again.sum().backward()
    synchronize(device)


def grow_segments(environ: MutableMapping[str, str]) -> None:
    """Let the allocator grow what it has of a device instead of taking more that fits nothing else.

    To be called before a tensor is on the device. It leaves the user's own settings as they are,
    and does nothing without CUDA; ROCm has no such segments everywhere, and says so itself.

    Args:
        environ: of this process.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if accelerator() == "cuda" and not any(name in environ for name in names):
        environ[names[1]] = "expandable_segments:True"


def reset_peaks(device: torch.device) -> int:
    """`allocator_peaks` count from now on; the bytes that are requested already, 0 on a CPU."""
    if not is_accelerator(device):
        return 0
    _module(device.type).reset_peak_memory_stats(device)
    return int(_module(device.type).memory_stats(device).get("requested_bytes.all.current", 0))


def allocator_peaks(device: torch.device) -> AllocatorPeaks:
    """Of an accelerator."""
    stats = _module(device.type).memory_stats(device)
    requested, allocated, reserved = (
        int(stats.get(f"{kind}_bytes.all.peak", 0))
        for kind in ("requested", "allocated", "reserved")
    )
    # A backend may count no requests.
    retries = int(stats.get("num_alloc_retries", 0))
    return AllocatorPeaks(requested or allocated, allocated, reserved, retries)


def empty_cache() -> None:
    """Give what the allocator keeps back to the device, so that others may have it."""
    kind = accelerator()
    if kind:
        _module(kind).empty_cache()


def side_stream(device: torch.device) -> Any:
    """A stream beside the one that computes; None on a CPU, which has no other."""
    return _module(device.type).Stream(device) if is_accelerator(device) else None


def current_stream(device: torch.device) -> Any:
    """The stream on which an accelerator computes what it is told now."""
    return _module(device.type).current_stream(device)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """What is told to the stream's device inside goes there."""
    context: AbstractContextManager[Any] = _module(stream.device.type).stream(stream)
    return context


def timing_event(device: torch.device) -> Any:
    """A moment of an accelerator's time: record it, later ask for `elapsed_time` to another."""
    return _module(device.type).Event(enable_timing=True)


def generator_state(device: torch.device) -> Tensor | None:
    """Of an accelerator's generator; None on a CPU."""
    if not is_accelerator(device):
        return None
    state: Tensor = _module(device.type).get_rng_state(device)
    return state


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Put back what `generator_state` took."""
    _module(device.type).set_rng_state(state, device)


def generator_states(kind: str) -> list[Tensor]:
    """Of all accelerators that this process sees, by index: stages may lie on several."""
    return [_module(kind).get_rng_state(torch.device(kind, i)) for i in range(device_count())]


def _module(kind: str) -> Any:
    return torch.get_device_module(kind)


def _function(kind: str, name: str, key: str) -> Any:
    function = getattr(_module(kind), name, None)
    if function is None:
        raise ConfigError(
            f"{key}: torch {torch.__version__} has no {name} for {kind}. Leave it out."
        )
    return function
