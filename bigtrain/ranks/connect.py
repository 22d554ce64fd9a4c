"""Connect this process to the other ranks: `connect` makes the `RunContext` of a run.

The context is passed as an argument and is never global. One process without a launcher has no
process group, but every method of its context works, so that callers need no second code path.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
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
from bigtrain.ranks.exit_status import is_peer_failure
from bigtrain.ranks.failure_guard import guard_alone, guard_ranks
from bigtrain.ranks.hang_watch import BACKEND_GRACE_S
from bigtrain.ranks.launcher_env import SINGLE_RANK, VISIBLE_DEVICES, RankInfo
from bigtrain.ranks.rendezvous import (
    GLOO_INTERFACE,
    Rendezvous,
    address_towards,
    gloo_interface,
    interface_addresses,
    open_rendezvous,
)
from bigtrain.recorder.exchanges import read_exchanges, start_recording, watch_messages
from bigtrain.recorder.ring import FlightRecorder
from bigtrain.versions.torch_versions import set_timeouts

_OWN_GPU_VARIABLES = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK")
"""Variables of Slurm. If one gives each rank its own GPU, a rank sees only that GPU, as index 0."""


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
    """Connect this process to the other ranks for the duration of a `with` block.

    A rank that fails inside the block ends all ranks: its exception is raised, and every other rank
    ends without a traceback and with the same exit status. `SystemExit` with 0 or 75 is not a
    failure.

    Args:
        placement: the rank of this process; see `bigtrain.ranks.launcher_env.detect_rank_info`.
        device: the kind of device; "auto" is an accelerator if there is one, else the CPU.
        backend: the backend of the process group; "auto" is torch's default for the device: nccl on
            CUDA, gloo on the CPU.
        pp: ranks on the pipeline axis.
        dp: ranks on the data axis; -1 for all remaining ranks.
        tp: ranks on the tensor axis.
        setup_timeout: seconds that the ranks wait for each other at the start.
        timeout: seconds that a collective may take afterwards.
        seed: the seed of the run, which becomes `RunContext.seed`.
        force_group: create a process group for a single process, too.
        store_path: a file through which the ranks of one node find each other, instead of the
            launcher's address.
        facts: further values that must be the same on all ranks, such as the keys of a job.

    Yields:
        The context of this rank.

    Raises:
        ConfigError: a size, the device or the backend does not fit, or one of these or of `facts`
            differs from rank 0's. No process group exists then, except if ranks share a GPU.
        LaunchError: the ranks did not find each other, or a process group exists already.
    """
    sizes = resolve_mesh(pp, dp, tp, placement.world_size)
    if min(setup_timeout, timeout) <= 0:
        raise ConfigError(
            f"mesh.setup_timeout={setup_timeout} and mesh.timeout={timeout}: both are seconds and "
            "must be above 0. Use mesh.setup_timeout=300 mesh.timeout=100"
        )
    if dist.is_initialized():
        raise LaunchError("a process group exists already. Leave the first `connect` block first.")
    rank_device = pick_device(device, placement, os.environ)
    backend_name = pick_backend(backend, rank_device)
    recorder = FlightRecorder(placement.rank, placement.world_size)
    fields: dict[str, Any] = {name: getattr(placement, name) for name in _SHARED_FIELDS}
    fields |= {"device": rank_device, "seed": seed, "recorder": recorder}
    if placement.world_size == 1 and not force_group:
        with guard_alone(recorder):
            yield RunContext(**fields, mesh=None)
        return
    meeting = open_rendezvous(placement, os.environ, timeout_s=setup_timeout, path=store_path)
    agreement = Agreement(meeting.store, placement.rank, placement.world_size)
    guard = guard_ranks(placement, meeting, recorder, timeout_s=timeout)
    with _destroyed_group(), guard, _connection_settings(placement, meeting, agreement):
        agreement.require(_connection_facts(sizes, rank_device, backend_name, seed) | dict(facts))
        mesh = _open_mesh(
            placement, meeting, rank_device, backend_name, sizes, setup_timeout, timeout
        )
        recorder.exchanges = read_exchanges
        if mesh.size(AXES.index("pp")) > 1:
            watch_messages(mesh.get_group("pp"), recorder)
        yield RunContext(**fields, mesh=mesh, agreement=agreement)


_SHARED_FIELDS = ("rank", "local_rank", "world_size", "local_world_size", "launcher")


@contextlib.contextmanager
def _connection_settings(
    placement: RankInfo, meeting: Rendezvous, agreement: Agreement
) -> Iterator[None]:
    """Set the CPU threads and gloo's interface for a connection; close the agreement at its end."""
    cores, gloo = _share_cores(placement, meeting), _set_gloo_interface(placement, meeting)
    with cores, gloo, contextlib.closing(agreement):
        yield


def _connection_facts(
    sizes: tuple[int, int, int], device: torch.device, backend: str, seed: int
) -> dict[str, str]:
    """Return the values that must be the same on all ranks before they can connect."""
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

    Args:
        wanted: the kind of device; "auto" is an accelerator if there is one, else the CPU.
        placement: the rank of this process.
        environ: the environment of the process.

    Raises:
        ConfigError: the kind is unknown, there is no such device, or this node has fewer devices
            than ranks.
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
    """Whether a variable of Slurm gives each rank its own GPU; SLURM_TRES_PER_TASK may not."""
    if value is None:
        return False
    return name != "SLURM_TRES_PER_TASK" or "gres/gpu" in value or "gres:gpu" in value


def _hidden_by(environ: Mapping[str, str]) -> str:
    """Return text with the set variables that may hide other GPUs; empty if none is set."""
    variables = [f"{name}={environ[name]}" for name in VISIBLE_DEVICES if name in environ]
    return f" visible with {' '.join(variables)}" if variables else ""


def pick_backend(wanted: Literal["auto", "gloo", "nccl", "mpi"], device: torch.device) -> str:
    """Return the backend of the process group; "auto" is torch's default for the device.

    Raises:
        ConfigError: the backend is unknown, not in this build of torch, or does not support the
            device.
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
        reason = "mpiexec can start the ranks without it. " if wanted == "mpi" else ""
        raise ConfigError(
            f"mesh.backend={wanted} is not in this build of torch {torch.__version__}. "
            f"{reason}Use mesh.backend={fallback}"
        )
    return wanted


def _is_of_device(backend: str) -> bool:
    """Whether the backend sends only tensors of an accelerator, and not those of the CPU."""
    return backend not in ("gloo", "mpi")


def _with_host(backend: str, device: torch.device) -> str:
    """Return the backend, with gloo for CPU tensors if the device's backend cannot send them."""
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
    """Create the process group and the mesh, wait for all ranks, and then shorten the timeouts."""
    set_current(device)
    # MPI knows its ranks and needs no store.
    joining: dict[str, Any] = {"timeout": timedelta(seconds=setup_timeout)}
    if backend != "mpi":
        joining |= {
            "store": meeting.store,
            "rank": placement.rank,
            "world_size": placement.world_size,
        }
    if backend == "nccl" and sizes[0] == 1:
        # With a device id, init_process_group creates the communicator. Stages must not share it:
        # their sends and receives would use its one stream, in both directions. On an XPU torch
        # could then make no group of gloo alone, which background exchanges need.
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
        # `hang_watch` ends a run that hangs. The backend's timeout is for the case that it fails.
        set_timeouts([dist.group.WORLD, *mesh.get_all_groups()], timeout + BACKEND_GRACE_S)
    return mesh


def _open_stages_group(mesh: DeviceMesh, device: torch.device) -> None:
    """Do a first exchange between all stages, in which NCCL creates a communicator. Collective.

    All ranks of a group must take part in the exchange in which NCCL creates its communicator. A
    batch of messages between stages, or an exchange of tied parameters, involves only some of them.
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
    """Return the error to raise if a backend could not connect the ranks.

    Args:
        error: the backend's error.
        placement: this rank's placement.
        meeting: the rendezvous; its store contains what each rank's `_tell_device` wrote.
        device: this rank's device.
        waited_s: seconds that the ranks had to connect.
    """
    shared = _sharing_ranks(placement, meeting, device)
    first_line = str(error).splitlines()[0]
    if shared is not None:
        return ConfigError(
            f"ranks {shared[0]} and {shared[1]} have the same GPU: {device} of both is one device"
            f"{_hidden_by(os.environ)}. Give each rank another GPU, start fewer ranks, or set "
            f"mesh.backend=gloo, with which ranks can share one. The backend's error: {first_line}"
        )
    who = f"rank {placement.rank} of {placement.world_size}"
    if "invalid usage" in first_line:  # NCCL refuses a setting at once with these words
        return LaunchError(
            f"{who} could not connect to the others: {first_line} Run again with NCCL_DEBUG=WARN, "
            "which prints the cause, or set mesh.backend=gloo"
        )
    interfaces = ""
    if not placement.one_node:
        used = os.environ.get(GLOO_INTERFACE, "that of the host's name")
        interfaces = (
            f". The nodes must reach each other: gloo's interface is {used}. For another: "
            f"export {GLOO_INTERFACE}=eth0 NCCL_SOCKET_IFNAME=eth0"
        )
    return LaunchError(
        f"{who} could not connect to the others within {waited_s:.0f} s: {first_line} "
        f"Check that all ranks started, or raise mesh.setup_timeout{interfaces}"
    )


def _tell_device(placement: RankInfo, meeting: Rendezvous, device: torch.device) -> None:
    """Write the identity of this rank's accelerator to the store."""
    meeting.store.set(f"device/{placement.rank}", device_identity(device) or "")


def _sharing_ranks(
    placement: RankInfo, meeting: Rendezvous, device: torch.device
) -> tuple[int, int] | None:
    """Return this rank and another rank with the same accelerator, ascending; None if unknown."""
    identity = device_identity(device)
    others = [rank for rank in range(placement.world_size) if rank != placement.rank]
    with contextlib.suppress(RuntimeError, OSError):  # rank 0, which has the store, may have ended
        for rank in others if identity else []:
            key = f"device/{rank}"
            if meeting.store.check([key]) and meeting.store.get(key).decode() == identity:
                return min(rank, placement.rank), max(rank, placement.rank)
    return None


@contextlib.contextmanager
def _destroyed_group() -> Iterator[None]:
    """Destroy the process group at the end of the block, even an incomplete one."""
    try:
        yield
    except BaseException:
        if sys.is_finalizing():
            raise
        # After a failure, destroying an NCCL group may wait for kernels that never end.
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
def _set_gloo_interface(placement: RankInfo, meeting: Rendezvous) -> Iterator[None]:
    """Let gloo use the loopback on one node, and on several the interface to the node of rank 0.

    By default gloo uses the address of the host's name. That address may be unreachable
    (containers, laptops, the 127.0.1.1 of Debian), or open to other machines.
    """
    if placement.one_node:
        interface: str | None = "lo" if sys.platform == "linux" else "lo0"
    else:
        interface = gloo_interface(os.environ, address_towards(meeting.host), interface_addresses())
    if GLOO_INTERFACE in os.environ or interface is None:
        yield
        return
    os.environ[GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[GLOO_INTERFACE]


@contextlib.contextmanager
def _share_cores(placement: RankInfo, meeting: Rendezvous) -> Iterator[None]:
    """Give each rank its share of the node's cores, unless OMP_NUM_THREADS is set.

    mpiexec and srun may have bound each rank to separate cores, or all ranks to the same cores: a
    core that n ranks may use counts as 1/n for each of them.
    """
    ranks = placement.local_world_size
    if "OMP_NUM_THREADS" in os.environ or ranks == 1 or not hasattr(os, "sched_getaffinity"):
        yield
        return
    prefix = f"cores/{os.uname().nodename}"
    mine = os.sched_getaffinity(0)
    meeting.store.set(f"{prefix}/{placement.local_rank}", ",".join(map(str, sorted(mine))))
    users = dict.fromkeys(mine, 0)
    for rank in range(ranks):
        for core in meeting.store.get(f"{prefix}/{rank}").decode().split(","):
            if int(core) in users:
                users[int(core)] += 1
    before = torch.get_num_threads()
    torch.set_num_threads(thread_share(list(users.values())))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_share(users: list[int]) -> int:
    """Return the number of CPU threads for one rank, at least 1.

    Args:
        users: for each core that this rank may use, the number of the node's ranks that may use it.
    """
    # The small addend makes up for rounding: the sum of shares may be 0.999... instead of 1.
    return max(1, math.floor(sum(1 / number for number in users) + 1e-9))
