"""What this process is among the others: `connect` makes a `RunContext`, everything else gets it.

The context is passed, never global. One process without a launcher has no process group at all,
and every method still works, so nothing above needs a second path for it.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bigtrain.environment import SINGLE, Launcher, Placement
from bigtrain.errors import ConfigError, LaunchError
from bigtrain.failures import is_echo
from bigtrain.guard import guard
from bigtrain.rendezvous import Meeting, meet, name_resolves_here
from bigtrain.threads import share_cores

Axis = Literal["pp", "dp", "tp"]
# From the slowest to the fastest: the ranks of one pipeline, which talk most, stand side by side.
AXES: tuple[Axis, ...] = ("dp", "pp", "tp")

# How long the ranks wait where one of them may be downloading or writing to a slow disk.
_PATIENCE_S = 6 * 3600.0
# Set where every rank has its own view of the GPUs: it then sees one, and that is number 0.
_OWN_GPU_VARIABLES = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """Who this process is: numbers, device, mesh, seed; and the few exchanges that all ranks do.

    Every method is collective: all ranks call it, in the same order.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    mesh: DeviceMesh | None
    """The ranks as axes dp, pp, tp; None for one process without a process group."""
    seed: int
    launcher: Launcher

    @classmethod
    def alone(cls, device: torch.device | str = "cpu", seed: int = 0) -> RunContext:
        """Return the context of one process without a group, where no run is to be joined."""
        return cls(
            rank=0,
            local_rank=0,
            world_size=1,
            local_world_size=1,
            device=torch.device(device),
            mesh=None,
            seed=seed,
            launcher="python",
        )

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and prints for all: rank 0."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """Place of this rank on the dp axis, from 0."""
        return self._place("dp")

    @property
    def dp_size(self) -> int:
        """Ranks on the dp axis."""
        return self._size("dp")

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that hold the same parameters; None without a process group."""
        return self.group("dp")

    @property
    def pp_rank(self) -> int:
        """Place of this rank in its pipeline, from 0."""
        return self._place("pp")

    @property
    def pp_size(self) -> int:
        """Ranks of one pipeline."""
        return self._size("pp")

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that hold the parts of one model; None without a process group."""
        return self.group("pp")

    def _place(self, axis: Axis) -> int:
        return 0 if self.mesh is None else int(self.mesh.get_local_rank(axis))

    def _size(self, axis: Axis) -> int:
        return 1 if self.mesh is None else int(self.mesh.size(AXES.index(axis)))

    def group(self, axis: Axis | None = None) -> dist.ProcessGroup | None:
        """Return the group of one axis, or of all ranks; None without a process group."""
        if self.mesh is None:
            return None
        return dist.group.WORLD if axis is None else self.mesh.get_group(axis)

    def ranks_of(self, axis: Axis) -> list[int]:
        """The ranks with which this one shares the axis, itself included, in order."""
        group = self.group(axis)
        return [self.rank] if group is None else dist.get_process_group_ranks(group)

    def barrier(self) -> None:
        """Wait for all ranks, for as long as one of them downloads or writes a checkpoint.

        `mesh.timeout` does not count here. A rank that fails or is lost ends the wait all the
        same: it ends all ranks.
        """
        if self.mesh is not None:
            devices = [self.device.index] if self.device.type == "cuda" else None
            with _patience(self.device):
                dist.barrier(device_ids=devices)

    def all_reduce_sum(self, tensor: torch.Tensor, axis: Axis | None = None) -> torch.Tensor:
        """Return the sum over one axis, or over all ranks; the argument is left as it is.

        Args:
            tensor: on this rank's device, of the same shape on every rank.
            axis: the mesh axis to sum over; all ranks when left out.
        """
        total = tensor.detach().clone()
        if self.mesh is not None:
            dist.all_reduce(total, group=self.group(axis))
        return total

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Return every rank's object in the order of ranks on rank 0, None elsewhere."""
        if self.mesh is None:
            return [value]
        gathered = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, gathered)
        return gathered

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's object on every rank; what the others give is not looked at."""
        if self.mesh is None:
            return value
        box = [value if self.is_main else None]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def all_gather_numbers(self, number: float, axis: Axis | None = None) -> list[float]:
        """Return every rank's number in the order of ranks, on every rank.

        Args:
            number: this rank's; exact as a float64.
            axis: the mesh axis to gather over; all ranks when left out.
        """
        if self.mesh is None:
            return [float(number)]
        size = self.world_size if axis is None else self._size(axis)
        mine = torch.tensor([number], dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(everyone, mine, group=self.group(axis))
        return [float(value) for value in torch.cat(everyone).tolist()]


def resolve_mesh(pp: int, dp: int, tp: int, world_size: int) -> tuple[int, int, int]:
    """Return the mesh with `dp=-1` filled in, as (pp, dp, tp).

    Args:
        pp: ranks on the pipeline axis.
        dp: ranks on the data axis; -1 for what remains.
        tp: ranks on the tensor axis.
        world_size: ranks of the run.

    Raises:
        ConfigError: a size is not positive, or the sizes do not multiply to the world.
    """
    for name, size in (("pp", pp), ("tp", tp), ("dp", dp)):
        if size < 1 and not (name == "dp" and size == -1):
            rest = " (or -1: what remains)" if name == "dp" else ""
            raise ConfigError(
                f"mesh.{name}={size} must be at least 1{rest}. Use mesh.{name}=1, or leave it out."
            )
    fixed = pp * tp
    if dp == -1 and world_size % fixed == 0:
        return pp, world_size // fixed, tp
    if pp * dp * tp == world_size:
        return pp, dp, tp
    if dp == -1:
        equation = f"mesh.pp={pp} * mesh.tp={tp} = {fixed} does not divide the {world_size} ranks"
        needed = math.ceil(world_size / fixed) * fixed
        fix = f"Start {needed} ranks, or choose pp and tp that divide {world_size}."
    else:
        product = pp * dp * tp
        equation = (
            f"mesh.pp={pp} * mesh.dp={dp} * mesh.tp={tp} = {product}, and there are "
            f"{world_size} rank{'s' if world_size > 1 else ''}"
        )
        fix = f"Start {product} ranks"
        if world_size % fixed == 0:
            fix += f", or use mesh.dp={world_size // fixed} or mesh.dp=-1"
        fix += "."
    raise ConfigError(f"{equation}. {fix}")


@contextlib.contextmanager
def connect(
    placement: Placement = SINGLE,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto",
    pp: int = 1,
    dp: int = -1,
    tp: int = 1,
    setup_timeout: float = 300.0,
    timeout: float = 100.0,
    seed: int = 0,
    force_group: bool = False,
    store_path: Path | None = None,
) -> Iterator[RunContext]:
    """Join the other ranks for the length of a `with` block.

    A rank that fails inside the block ends all ranks: its exception goes on its way, every other
    rank ends without a traceback, with the same exit status. Leaving by `SystemExit` with 0 or 75
    is a way to finish, not a failure.

    Args:
        placement: where this process stands; see `bigtrain.environment.detect`.
        device: "auto" is CUDA where there is any.
        backend: "auto" is nccl on CUDA and gloo on the CPU.
        pp: ranks on the pipeline axis.
        dp: ranks on the data axis; -1 for what remains.
        tp: ranks on the tensor axis.
        setup_timeout: seconds the ranks wait for each other at the start.
        timeout: seconds a collective may take afterwards.
        seed: the seed of the run, passed on in the context.
        force_group: make a process group for one process, too.
        store_path: a file for the ranks of one node to meet in, instead of the launcher's address.

    Raises:
        ConfigError: sizes, device or backend do not fit; before any process group exists.
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
    where = pick_device(device, placement, os.environ)
    chosen = pick_backend(backend, where)
    numbers = {name: getattr(placement, name) for name in _SHARED_FIELDS}
    if placement.world_size == 1 and not force_group:
        yield RunContext(**numbers, device=where, mesh=None, seed=seed)
        return
    meeting = meet(placement, os.environ, timeout_s=setup_timeout, path=store_path)
    with _only_group(), guard(placement, meeting), share_cores(placement, meeting):
        mesh = _open_mesh(placement, meeting, where, chosen, sizes, setup_timeout, timeout)
        yield RunContext(**numbers, device=where, mesh=mesh, seed=seed)


_SHARED_FIELDS = ("rank", "local_rank", "world_size", "local_world_size", "launcher")


def pick_device(
    wanted: Literal["auto", "cpu", "cuda"], placement: Placement, environ: Mapping[str, str]
) -> torch.device:
    """Return the device of this rank.

    Raises:
        ConfigError: there is no GPU, or fewer than ranks on this node.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={wanted!r} is not known. Use device=auto, cpu or cuda")
    available = torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError("device=cuda, and torch sees no GPU here. Use device=cpu or device=auto")
    count, ranks = torch.cuda.device_count(), placement.local_world_size
    if count == 1 and any(name in environ for name in _OWN_GPU_VARIABLES):
        return torch.device("cuda", 0)
    if count < ranks:
        raise ConfigError(
            f"device={wanted} needs one GPU for each rank: {ranks} ranks on this node, {count} "
            f"GPU{'s' if count > 1 else ''}. Start {count} rank{'s' if count > 1 else ''} a node, "
            "or use device=cpu"
        )
    return torch.device("cuda", placement.local_rank)


def pick_backend(
    wanted: Literal["auto", "gloo", "nccl", "mpi"], device: torch.device
) -> Literal["gloo", "nccl", "mpi"]:
    """Return the backend of the process group.

    Raises:
        ConfigError: this torch has not got it, or it does not serve the device.
    """
    if wanted not in ("auto", "gloo", "nccl", "mpi"):
        raise ConfigError(f"mesh.backend={wanted!r} is not known. Use mesh.backend=auto")
    if wanted == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
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


def _open_mesh(
    placement: Placement,
    meeting: Meeting,
    device: torch.device,
    backend: Literal["gloo", "nccl", "mpi"],
    sizes: tuple[int, int, int],
    setup_timeout: float,
    timeout: float,
) -> DeviceMesh:
    """Make the process group and the mesh, wait for everyone, then shorten the timeouts."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # MPI knows its ranks and brings its own means of meeting.
    joining: dict[str, Any] = {"timeout": timedelta(seconds=setup_timeout)}
    if backend != "mpi":
        joining |= {
            "store": meeting.store,
            "rank": placement.rank,
            "world_size": placement.world_size,
        }
    if backend == "nccl":
        joining["device_id"] = device
    try:
        with _local_gloo(placement):
            dist.init_process_group(backend, **joining)
            shape = tuple(dict(zip(("pp", "dp", "tp"), sizes, strict=True))[a] for a in AXES)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    except (RuntimeError, OSError) as error:
        if not is_echo(error):
            raise
        raise LaunchError(
            f"rank {placement.rank} of {placement.world_size} could not connect to the others "
            f"within {setup_timeout:.0f} s: {str(error).splitlines()[0]} "
            "Check that all ranks started, or raise mesh.setup_timeout"
        ) from error
    if backend != "mpi":
        _set_timeouts([dist.group.WORLD, *mesh.get_all_groups()], timeout)
    return mesh


@contextlib.contextmanager
def _patience(device: torch.device) -> Iterator[None]:
    """Let the collectives of all ranks wait for hours, for the length of a `with` block."""
    world = dist.distributed_c10d._get_default_group()
    options = getattr(world._get_backend(device), "options", None)
    before = getattr(options, "_timeout", None)
    if before is None:  # MPI has no timeouts
        yield
        return
    _set_timeouts([world], max(_PATIENCE_S, before.total_seconds()))
    try:
        yield
    finally:
        _set_timeouts([world], before.total_seconds())


def _set_timeouts(groups: list[dist.ProcessGroup | None], timeout: float) -> None:
    """Set how long a collective may take; the public name came with torch 2.15."""
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in groups:
        change(timedelta(seconds=timeout), group)


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
def _local_gloo(placement: Placement) -> Iterator[None]:
    """Let gloo use the loopback where this host's own name leads nowhere (containers, laptops)."""
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ or not placement.one_node or name_resolves_here():
        yield
        return
    os.environ[name] = "lo" if sys.platform == "linux" else "lo0"
    try:
        yield
    finally:
        del os.environ[name]
