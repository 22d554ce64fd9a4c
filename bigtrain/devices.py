"""Functions for a rank's device that hide how CPUs and kinds of accelerators differ.

torch has a module for each kind of accelerator (`torch.get_device_module`). `KINDS` lists the
supported ones: "cuda", which is also ROCm, and "xpu". Where a kind lacks a function that a job
needs, the error names the function. No other module of bigtrain uses these modules of torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
    """Peaks of a device's caching allocator, in bytes, over the time since `reset_peaks`."""

    requested: int
    """Bytes that tensors requested."""
    allocated: int
    """Bytes of the allocated blocks: with rounded-up sizes, and with kernels' workspaces."""
    reserved: int
    """Bytes that the allocator took from the device."""
    retries: int
    """How often the allocator emptied its cache to find room."""


def accelerator() -> Kind | None:
    """Return the kind of accelerator that torch can use here; None if there is only a CPU."""
    return next((kind for kind in KINDS if _module(kind).is_available()), None)


def in_use() -> bool:
    """Whether this process has initialised an accelerator. The call initialises nothing."""
    return any(_module(kind).is_initialized() for kind in KINDS)


def is_accelerator(device: torch.device | str) -> bool:
    """Whether the device is an accelerator, which has its own memory and runs asynchronously."""
    return torch.device(device).type in KINDS


def device_count() -> int:
    """Return the number of accelerators that this process may use."""
    kind = accelerator()
    return int(_module(kind).device_count()) if kind else 0


def nccl_version() -> tuple[int, int, int]:
    """Return torch's version of NCCL as (major, minor, patch); zeros without a GPU."""
    if not torch.cuda.is_available():
        return 0, 0, 0
    version: Any = torch.cuda.nccl.version
    major, minor, patch = version()[:3]
    return int(major), int(minor), int(patch)


def driver_versions() -> dict[str, str]:
    """Return the versions of NCCL, CUDA or ROCm and cuDNN, and the first GPU's compute capability.

    The result is empty without a GPU.
    """
    if not torch.cuda.is_available():
        return {}
    versions = {"nccl": ".".join(map(str, nccl_version()))}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    if torch.version.hip is not None:
        versions["hip"] = torch.version.hip
    cudnn: Any = torch.backends.cudnn
    if cudnn.is_available():
        versions["cudnn"] = str(cudnn.version())
    versions["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
    return versions


def device_name(index: int) -> str:
    """Return the name of the accelerator with an index."""
    return str(_module(accelerator() or "cpu").get_device_name(index))


def device_identity(device: torch.device) -> str | None:
    """Return the UUID of an accelerator; None on a CPU, or if the device has none.

    An index does not identify a device: two ranks that both see index 0 may have one device or two.
    """
    if not is_accelerator(device):
        return None
    uuid = getattr(_module(device.type).get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def processors(index: int) -> int | None:
    """Return the number of a GPU's multiprocessors; None if the device does not report it.

    The tiles of a matrix product are distributed over them.

    Args:
        index: the GPU's index.
    """
    properties = _module(accelerator() or "cpu").get_device_properties(index)
    count = getattr(properties, "multi_processor_count", None)
    return None if count is None else int(count)


def device_names() -> list[str]:
    """Return the names of all accelerators, by index."""
    return [device_name(index) for index in range(device_count())]


def current_device(kind: str) -> torch.device:
    """Return this thread's device of a kind, with its index; the CPU if there is none."""
    if kind not in KINDS or accelerator() != kind:
        return torch.device("cpu")
    return torch.device(kind, _module(kind).current_device())


def tracing_device(kind: str) -> torch.device:
    """Return the device for fake tensors in forecasts of a kind: this thread's current device.

    The device has an index, so that fake tensors that are made at different times are on one
    device. It also has a context, which a backward pass on fake tensors needs and does not create.
    If this machine lacks the kind, the result is the CPU, because torch has no backward pass on
    fake tensors of a missing kind. `tensors.cuda_program` then makes CPU operators save the same
    tensors as CUDA's kernels.
    """
    device = current_device(kind)
    if device.index is not None:
        torch.empty(1, device=device)
    return device


def tracing_note(kind: str) -> str | None:
    """Return a caveat if forecasts here use other kernels than a run on this kind, else None."""
    if kind not in KINDS or accelerator() == kind:
        return None
    seen = f"torch sees no {kind} device here, so the forecast is of the CPU's kernels"
    if kind == "cuda":
        return f"{seen}, with CUDA's autocast, dropout and attention; workspaces are not included"
    return f"{seen}: those of {kind} save other tensors for the backward pass"


def set_current(device: torch.device) -> None:
    """Make a device this thread's default for tensors without an index; no effect on a CPU."""
    if is_accelerator(device):
        _module(device.type).set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work; no effect on a CPU."""
    if is_accelerator(device):
        _module(device.type).synchronize(device)


def capacity_bytes(device: torch.device) -> int:
    """Return the bytes of an accelerator's memory."""
    return int(_module(device.type).get_device_properties(device).total_memory)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of an accelerator's memory that no process has taken."""
    return int(_module(device.type).mem_get_info(device)[0])


def limit_memory(device: torch.device, share: float) -> None:
    """Limit this process to a share of an accelerator's memory.

    Args:
        device: the accelerator.
        share: the share of the device's memory, from 0 to 1.

    Raises:
        ConfigError: torch cannot limit this kind of device.
    """
    _function(device.type, "set_per_process_memory_fraction", "memory.cap")(share, device)


def multiply(device: torch.device) -> None:
    """Compute a small matrix product on a device."""
    matrix = torch.ones(2, 2, device=device)
    matrix @ matrix


def start_kernels(device: torch.device) -> None:
    """Allocate the workspaces of matrix products for the caller's thread and autograd's.

    Workspaces are not tensors of a run, and they are never freed. Each thread has one of cuBLAS
    (32 MiB on Hopper), and one of cuBLASLt, which adds biases (1 MiB). Recomputed blocks add biases
    on autograd's thread, too. The function has no effect on a CPU.
    """
    if not is_accelerator(device):
        return
    for kind in (torch.float32, torch.bfloat16):
        rows, matrix, bias = (
            torch.ones(*shape, device=device, dtype=kind, requires_grad=True)
            for shape in ((16, 16), (16, 16), (16,))
        )

        def products(rows: Tensor, matrix: Tensor = matrix, bias: Tensor = bias) -> Tensor:
            # exp saves its result, so the recomputation cannot stop before the last product.
            return torch.addmm(bias, rows @ matrix, matrix).exp()

        products(rows).sum().backward()  # type: ignore[no-untyped-call]
        again: Any = checkpoint(products, rows, use_reentrant=False, preserve_rng_state=False)
        again.sum().backward()
    synchronize(device)


def grow_segments(environ: MutableMapping[str, str]) -> None:
    """Let the allocator grow its segments instead of adding new ones, which fragments memory.

    Call it before the first tensor is on the device. It does not replace a setting of the user, and
    has no effect without CUDA. ROCm lacks expandable segments on some systems; torch warns there.

    Args:
        environ: the environment of this process, which is changed.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if accelerator() == "cuda" and not any(name in environ for name in names):
        environ[names[1]] = "expandable_segments:True"


def reset_peaks(device: torch.device) -> int:
    """Reset the peaks of `allocator_peaks`, and return the bytes that live tensors requested.

    The result is 0 on a CPU, and with a backend that does not count requested bytes.
    """
    if not is_accelerator(device):
        return 0
    _module(device.type).reset_peak_memory_stats(device)
    _module(device.type).reset_accumulated_memory_stats(device)  # with the number of retries
    return int(_module(device.type).memory_stats(device).get("requested_bytes.all.current", 0))


def allocator_peaks(device: torch.device) -> AllocatorPeaks:
    """Return the peaks of an accelerator's allocator since `reset_peaks`."""
    stats = _module(device.type).memory_stats(device)
    requested, allocated, reserved = (
        int(stats.get(f"{kind}_bytes.all.peak", 0))
        for kind in ("requested", "allocated", "reserved")
    )
    retries = int(stats.get("num_alloc_retries", 0))
    # Not every backend counts requested bytes.
    return AllocatorPeaks(requested or allocated, allocated, reserved, retries)


def empty_cache() -> None:
    """Return the allocator's cached memory to the device, for other processes."""
    kind = accelerator()
    if kind:
        _module(kind).empty_cache()


def devices_with_context() -> list[int]:
    """Return the indices of the GPUs on which this process has a CUDA context.

    A context takes about half a GiB of its GPU. The list is empty without CUDA.
    """
    if not torch.cuda.is_available():
        return []
    bindings: Any = torch._C
    has_context = bindings._cuda_hasPrimaryContext
    return [index for index in range(device_count()) if has_context(index)]


@contextmanager
def count_waits(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Count how often torch makes the host wait for the device in the block.

    Returns:
        A function that returns the count, also after the block; None if torch does not report
        waits for this kind of device.
    """
    set_mode = getattr(_module(device.type), "set_sync_debug_mode", None)
    if set_mode is None:
        yield lambda: None
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_mode("warn")
        try:
            yield lambda: sum("synchronizing" in str(each.message) for each in caught)
        finally:
            set_mode("default")


def side_stream(device: torch.device) -> Any:
    """Return a new stream, whose work runs parallel to the current stream's; None on a CPU."""
    return _module(device.type).Stream(device) if is_accelerator(device) else None


def current_stream(device: torch.device) -> Any:
    """Return the stream on which an accelerator's work is currently queued."""
    return _module(device.type).current_stream(device)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Queue the work of a `with` block on the stream."""
    context: AbstractContextManager[Any] = _module(stream.device.type).stream(stream)
    return context


def timing_event(device: torch.device) -> Any:
    """Return an event to record; its `elapsed_time` to another event is in milliseconds."""
    return _module(device.type).Event(enable_timing=True)


def generator_state(device: torch.device) -> Tensor | None:
    """Return the state of an accelerator's random generator; None on a CPU."""
    if not is_accelerator(device):
        return None
    state: Tensor = _module(device.type).get_rng_state(device)
    return state


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Set an accelerator's random generator to a state that `generator_state` returned."""
    _module(device.type).set_rng_state(state, device)


def own_generators() -> list[torch.Generator]:
    """Return the random generator of this thread's accelerator; [] if there is none.

    It is the generator that torch's functions use if they are given no other.
    """
    kind = accelerator()
    if kind is None:
        return []
    generators: Sequence[torch.Generator] = _module(kind).default_generators
    return [generators[_module(kind).current_device()]]


def generator_states(kind: str) -> list[Tensor]:
    """Return the states of the random generators of all accelerators of a kind, by index.

    One process may hold pipeline stages on several accelerators.
    """
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
