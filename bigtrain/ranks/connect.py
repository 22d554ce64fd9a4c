"""What this process is among the others: `connect` makes a `RunContext`, everything else gets it.

The context is passed, never global. One process without a launcher has no process group at all,
and every method still works, so nothing above needs a second path for it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import bigtrain
from bigtrain.devices import (
    KINDS,
    Kind,
    accelerator,
    device_count,
    device_identity,
    is_accelerator,
    set_current,
)
from bigtrain.errors import ConfigError, LaunchError
from bigtrain.ranks.agreement import Agreement, Facts
from bigtrain.ranks.context import AXES, RunContext, resolve_mesh
from bigtrain.ranks.cpu_threads import share_cores
from bigtrain.ranks.exit_status import is_peer_failure
from bigtrain.ranks.failure_guard import guard_alone, guard_ranks
from bigtrain.ranks.hang_watch import BACKEND_GRACE_S
from bigtrain.ranks.launcher_env import SINGLE_RANK, RankInfo
from bigtrain.ranks.rendezvous import Rendezvous, open_rendezvous
from bigtrain.recorder.exchanges import read_exchanges, start_recording, watch_messages
from bigtrain.recorder.ring import FlightRecorder
from bigtrain.versions.torch_versions import set_timeouts

# Set where every rank has its own view of the GPUs: it then sees one, and that is number 0.
_OWN_GPU_VARIABLES = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""What a launcher hides GPUs by."""


@contextlib.contextmanager
def connect(
    placement: RankInfo = SINGLE_RANK,
    *,
    device: Literal["auto", "cpu"] | Kind = "auto",
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto",
    pp: int = 1,
    dp: int = -1,
    tp: int = 1,
    setup_timeout: float = 300.0,
    timeout: float = 100.0,
    seed: int = 0,
    force_group: bool = False,
    store_path: Path | None = None,
    facts: Facts = MappingProxyType({}),
) -> Iterator[RunContext]:
    """Join the other ranks for the length of a `with` block.

    A rank that fails inside the block ends all ranks: its exception goes on its way, every other
    rank ends without a traceback, with the same exit status. Leaving by `SystemExit` with 0 or 75
    is a way to finish, not a failure.

    Args:
        placement: where this process stands; see `bigtrain.ranks.launcher_env.detect_rank_info`.
        device: "auto" is CUDA where there is any.
        backend: "auto" is torch's own for the device: nccl on CUDA, gloo on the CPU.
        pp: ranks on the pipeline axis.
        dp: ranks on the data axis; -1 for what remains.
        tp: ranks on the tensor axis.
        setup_timeout: seconds the ranks wait for each other at the start.
        timeout: seconds a collective may take afterwards.
        seed: the seed of the run, passed on in the context.
        force_group: make a process group for one process, too.
        store_path: a file for the ranks of one node to meet in, instead of the launcher's address.
        facts: what else has to be the same on all ranks, such as the keys of a job.

    Raises:
        ConfigError: sizes, device or backend do not fit, or a rank was started with others, or
            with other facts, than rank 0; before any process group exists.
        LaunchError: the ranks did not find each other.
    """
    sizes = resolve_mesh(pp, dp, tp, placement.world_size)
    if min(setup_timeout, timeout) <= 0:
        raise ConfigError(
            f"mesh.setup_timeout={setup_timeout} and mesh.timeout={timeout} are seconds and must "
            "be above 0. Use mesh.setup_timeout=300 mesh.timeout=100"
        )
    if dist.is_initialized():
        raise LaunchError("a process group exists already. Leave the first `connect` block first.")
    rank_device = pick_device(device, placement, os.environ)
    backend_name = pick_backend(backend, rank_device)
    recorder = FlightRecorder(placement.rank, placement.world_size)
    known: dict[str, Any] = {name: getattr(placement, name) for name in _SHARED_FIELDS}
    known |= {"device": rank_device, "seed": seed, "recorder": recorder}
    if placement.world_size == 1 and not force_group:
        with guard_alone(recorder):
            yield RunContext(**known, mesh=None)
        return
    meeting = open_rendezvous(placement, os.environ, timeout_s=setup_timeout, path=store_path)
    agreement = Agreement(meeting.store, placement.rank, placement.world_size)
    guard = guard_ranks(placement, meeting, recorder, timeout_s=timeout)
    with _only_group(), guard, _for_a_connection(placement, meeting, agreement):
        own_facts = _own_facts(sizes, rank_device, backend_name, seed)
        agreement.require({**own_facts, **facts})
        mesh = _open_mesh(
            placement, meeting, rank_device, backend_name, sizes, setup_timeout, timeout
        )
        recorder.exchanges = read_exchanges
        if mesh.size(AXES.index("pp")) > 1:
            watch_messages(mesh.get_group("pp"), recorder)
        yield RunContext(**known, mesh=mesh, agreement=agreement)


_SHARED_FIELDS = ("rank", "local_rank", "world_size", "local_world_size", "launcher")


@contextlib.contextmanager
def _for_a_connection(
    placement: RankInfo, meeting: Rendezvous, agreement: Agreement
) -> Iterator[None]:
    """What lasts as long as the ranks are connected, beside the guard and the groups."""
    cores, gloo = share_cores(placement, meeting), _local_gloo(placement)
    with cores, gloo, contextlib.closing(agreement):
        yield


def _own_facts(
    sizes: tuple[int, int, int], device: torch.device, backend: str, seed: int
) -> dict[str, str]:
    """What has to be the same on all ranks before they can join."""
    return {
        **{"mesh.pp": str(sizes[0]), "mesh.dp": str(sizes[1]), "mesh.tp": str(sizes[2])},
        "device": device.type,
        "mesh.backend": backend,
        "train.seed": str(seed),
        "version of torch": importlib.metadata.version("torch"),
        "version of bigtrain": bigtrain.__version__,
    }


def pick_device(
    wanted: Literal["auto", "cpu"] | Kind, placement: RankInfo, environ: Mapping[str, str]
) -> torch.device:
    """Return the device of this rank.

    Raises:
        ConfigError: there is no GPU, or fewer than ranks on this node.
    """
    if wanted not in ("auto", "cpu", *KINDS):
        kinds = ", ".join(("auto", "cpu", *KINDS))
        raise ConfigError(f"device={wanted!r} is not known. Use device={kinds}")
    kind = accelerator()
    if wanted == "cpu" or (wanted == "auto" and kind is None):
        return torch.device("cpu")
    if kind is None or wanted not in ("auto", kind):
        here = f"no {wanted} device" if kind else "no GPU"
        raise ConfigError(
            f"device={wanted}, and torch sees {here} here. Use device=cpu or device=auto"
        )
    count, ranks = device_count(), placement.local_world_size
    if count == 1 and any(_is_own(name, environ.get(name)) for name in _OWN_GPU_VARIABLES):
        return torch.device(kind, 0)
    if count < ranks:
        raise ConfigError(
            f"device={wanted} needs one GPU for each rank: {ranks} ranks on this node, {count} "
            f"GPU{'s' if count > 1 else ''}{_hidden_by(environ)}. Start {count} "
            f"rank{'s' if count > 1 else ''} a node, or use device=cpu"
        )
    return torch.device(kind, placement.local_rank)


def _is_own(name: str, value: str | None) -> bool:
    """Whether a variable of Slurm says that a rank has GPUs of its own: of resources some do."""
    if value is None:
        return False
    return name != "SLURM_TRES_PER_TASK" or "gres/gpu" in value or "gres:gpu" in value


def _hidden_by(environ: Mapping[str, str]) -> str:
    """What keeps others from sight, in words."""
    found = [f"{name}={environ[name]}" for name in _VISIBLE if name in environ]
    return f" to be seen with {' '.join(found)}" if found else ""


def pick_backend(wanted: Literal["auto", "gloo", "nccl", "mpi"], device: torch.device) -> str:
    """Return the backend of the process group; "auto" is torch's own for the device.

    Raises:
        ConfigError: this torch has not got it, or it does not serve the device.
    """
    if wanted not in ("auto", "gloo", "nccl", "mpi"):
        raise ConfigError(f"mesh.backend={wanted!r} is not known. Use mesh.backend=auto")
    if wanted == "auto":
        return str(dist.get_default_backend_for_device(device))
    if wanted == "nccl" and device.type != "cuda":
        raise ConfigError(
            f"mesh.backend=nccl needs CUDA tensors, and the device is {device.type}. "
            "Use mesh.backend=gloo or mesh.backend=auto"
        )
    present = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
    }
    if not present[wanted]():
        fallback = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        raise ConfigError(
            f"mesh.backend={wanted} is not in this build of torch {torch.__version__}. "
            f"mpiexec can start the ranks all the same: use mesh.backend={fallback}"
        )
    return wanted


def _is_of_device(backend: str) -> bool:
    """Whether it sends an accelerator's tensors and no others."""
    return backend not in ("gloo", "mpi")


def _with_host(backend: str, device: torch.device) -> str:
    """With gloo for what goes from host to host, where the device's own cannot send that."""
    return f"cpu:gloo,{device.type}:{backend}" if _is_of_device(backend) else backend


def _open_mesh(
    placement: RankInfo,
    meeting: Rendezvous,
    device: torch.device,
    backend: str,
    sizes: tuple[int, int, int],
    setup_timeout: float,
    timeout: float,
) -> DeviceMesh:
    """Make the process group and the mesh, wait for everyone, then shorten the timeouts."""
    set_current(device)
    # MPI knows its ranks and brings its own means of meeting.
    joining: dict[str, Any] = {"timeout": timedelta(seconds=setup_timeout)}
    if backend != "mpi":
        joining |= {
            "store": meeting.store,
            "rank": placement.rank,
            "world_size": placement.world_size,
        }
    if _is_of_device(backend) and sizes[0] == 1:
        # A communicator from the start on. Stages go without: what they send and receive would
        # share its one stream, in both directions.
        joining["device_id"] = device
    start_recording()
    if _is_of_device(backend):
        _tell_device(placement, meeting, device)
    try:
        dist.init_process_group(_with_host(backend, device), **joining)
        shape = tuple(dict(zip(("pp", "dp", "tp"), sizes, strict=True))[a] for a in AXES)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
        dist.barrier(device_ids=[device.index] if is_accelerator(device) else None)
        _open_stages_group(mesh, device)
    except (RuntimeError, OSError) as error:
        if not is_peer_failure(error):
            raise
        raise _why_not_connected(error, placement, meeting, device, setup_timeout) from error
    if backend != "mpi":
        # The watch of this rank ends a run that hangs; the backend does where that fails.
        set_timeouts([dist.group.WORLD, *mesh.get_all_groups()], timeout + BACKEND_GRACE_S)
    return mesh


def _open_stages_group(mesh: DeviceMesh, device: torch.device) -> None:
    """Let all stages exchange something first, where messages may be what comes then. Collective.

    NCCL makes a group's communicator with the first exchange, for which all of its ranks have to
    come; messages that begin together, and those of tied parameters, are of a few of them.
    """
    if mesh.size(AXES.index("pp")) > 1 and is_accelerator(device):
        dist.all_reduce(torch.zeros((), device=device), group=mesh.get_group("pp"))


def _why_not_connected(
    error: BaseException,
    placement: RankInfo,
    meeting: Rendezvous,
    device: torch.device,
    waited_s: float,
) -> ConfigError | LaunchError:
    """What to say where a backend could not connect the ranks.

    Args:
        error: the backend's own.
        placement: of this rank.
        meeting: with what `_tell_device` of each rank has put down.
        device: of this rank.
        waited_s: as long as the ranks had.
    """
    shared = _sharing_ranks(placement, meeting, device)
    first_line = str(error).splitlines()[0]
    if shared is not None:
        return ConfigError(
            f"ranks {shared[0]} and {shared[1]} have the same GPU: {device} of both is one device"
            f"{_hidden_by(os.environ)}. Give each rank one of its own, start fewer ranks, or set "
            f"mesh.backend=gloo, by which ranks may share one. The backend said: {first_line}"
        )
    who = f"rank {placement.rank} of {placement.world_size}"
    if "invalid usage" in first_line:  # NCCL's word for what it refuses at once
        return LaunchError(
            f"{who} could not connect to the others: {first_line} Run again with NCCL_DEBUG=WARN, "
            "which says what is wrong, or set mesh.backend=gloo"
        )
    return LaunchError(
        f"{who} could not connect to the others within {waited_s:.0f} s: {first_line} "
        "Check that all ranks started, or raise mesh.setup_timeout"
    )


def _tell_device(placement: RankInfo, meeting: Rendezvous, device: torch.device) -> None:
    """Put down which accelerator a rank has, by what tells it from all others."""
    meeting.store.set(f"device/{placement.rank}", device_identity(device) or "")


def _sharing_ranks(
    placement: RankInfo, meeting: Rendezvous, device: torch.device
) -> tuple[int, int] | None:
    """Two ranks that have one accelerator, of which this is one; None where none are known."""
    own = device_identity(device)
    others = [rank for rank in range(placement.world_size) if rank != placement.rank]
    with contextlib.suppress(RuntimeError, OSError):  # rank 0 may be gone, and the store with it
        for rank in others if own else []:
            key = f"device/{rank}"
            if meeting.store.check([key]) and meeting.store.get(key).decode() == own:
                return min(rank, placement.rank), max(rank, placement.rank)
    return None


@contextlib.contextmanager
def _only_group() -> Iterator[None]:
    """Destroy the process group at the end, also one that was only half made."""
    try:
        yield
    except BaseException:
        if sys.is_finalizing():
            raise
        # After a failure NCCL may wait for kernels that never end; gloo has nothing to wait for.
        if dist.is_initialized() and dist.get_backend() == "gloo":
            _destroy()
        raise
    _destroy()


def _destroy() -> None:
    if dist.is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.destroy_process_group()


@contextlib.contextmanager
def _local_gloo(placement: RankInfo) -> Iterator[None]:
    """Let gloo use the loopback on one node, where by itself it takes what the host's name says.

    That may lead nowhere (containers, laptops), or where others can connect.
    """
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ or not placement.one_node:
        yield
        return
    os.environ[name] = "lo" if sys.platform == "linux" else "lo0"
    try:
        yield
    finally:
        del os.environ[name]
