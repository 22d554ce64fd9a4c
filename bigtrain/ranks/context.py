"""The context of one process: its rank, device, mesh and seed, and exchanges between all ranks."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import reduce
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.ranks.agreement import Agreement
from bigtrain.ranks.launcher_env import Launcher
from bigtrain.ranks.restart import note_spare_ranks
from bigtrain.recorder.lost_ranks import LostRanks
from bigtrain.recorder.ring import FlightRecorder
from bigtrain.recorder.root_exchange import RootExchange
from bigtrain.versions.torch_versions import set_timeouts

Axis = Literal["pp", "dp", "tp"]
AXES: tuple[Axis, ...] = ("dp", "pp", "tp")
"""The axes of the mesh, the last varying fastest: ranks that exchange most are neighbours."""
_LONG_TIMEOUT_S = 6 * 3600.0
"""Seconds that ranks wait while another rank may be downloading or writing to a slow disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """The rank, device, mesh and seed of this process, and exchanges between the ranks.

    Methods that exchange are collective: all ranks, or all ranks of the axis, call them in the same
    order.
    """

    rank: int
    """Number of this process among all ranks, from 0."""
    local_rank: int
    """Number of this process among the ranks of its node, from 0."""
    world_size: int
    """Ranks of the run."""
    local_world_size: int
    """Ranks on this node."""
    device: torch.device
    """The device of this rank."""
    mesh: DeviceMesh | None
    """The ranks as axes dp, pp, tp; None for one process without a process group."""
    seed: int
    """The seed of the run, the same on all ranks."""
    launcher: Launcher
    """The program that started the ranks; see `RankInfo.launcher`."""
    background_group: dist.ProcessGroup | None = None
    """A group of all ranks for the exchanges of another thread; see `for_background`."""
    recorder: FlightRecorder = field(default_factory=FlightRecorder, compare=False, repr=False)
    """The last events of this rank, for the report on a run that hangs or dies."""
    agreement: Agreement = field(default_factory=Agreement, compare=False, repr=False)
    """Compares the jobs that the ranks were started with."""

    @classmethod
    def alone(cls, device: torch.device | str = "cpu", seed: int = 0) -> RunContext:
        """Return the context of a single process without a process group.

        Args:
            device: the device of the process.
            seed: the seed of the run.
        """
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
        """Whether this rank is rank 0, which writes and prints for all ranks."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """Index of this rank on the dp axis, from 0."""
        return self._index("dp")

    @property
    def dp_size(self) -> int:
        """Number of ranks on the dp axis."""
        return self._size("dp")

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks on this rank's dp axis; None without a process group."""
        return self.group("dp")

    @property
    def pp_rank(self) -> int:
        """Index of this rank in its pipeline, from 0."""
        return self._index("pp")

    @property
    def pp_size(self) -> int:
        """Number of ranks of one pipeline."""
        return self._size("pp")

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that hold the stages of one model; None without a process group."""
        return self.group("pp")

    @property
    def tp_rank(self) -> int:
        """Index of this rank among the ranks that hold slices of the same layers, from 0."""
        return self._index("tp")

    @property
    def tp_size(self) -> int:
        """Number of ranks that hold slices of the same layers."""
        return self._size("tp")

    def _index(self, axis: Axis) -> int:
        return 0 if self.mesh is None else int(self.mesh.get_local_rank(axis))

    def _size(self, axis: Axis) -> int:
        return 1 if self.mesh is None else int(self.mesh.size(AXES.index(axis)))

    def group(self, axis: Axis | None = None) -> dist.ProcessGroup | None:
        """Return the group of one axis, or of all ranks; None without a process group."""
        if self.mesh is None:
            return None
        if axis is None:
            return self.background_group or dist.group.WORLD
        return self.mesh.get_group(axis)

    def for_background(self) -> RunContext:
        """Return a context of the same ranks for the exchanges of another thread. Collective.

        Its device is the CPU. Its group is a gloo group with a timeout of hours. Exchanges along an
        axis must not use this context: they would use the run's own group.
        """
        if self.mesh is None:
            return self
        group = self.lost_ranks.background_group or self._new_long_group()
        return replace(self, device=torch.device("cpu"), background_group=group)

    def _new_long_group(self) -> dist.ProcessGroup:
        """Create a group of all ranks whose exchanges may take hours. Collective."""
        new_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_LONG_TIMEOUT_S))
        group = cast("dist.ProcessGroup", new_group)  # every rank is in it
        self.recorder.traffic.leave_out(group)
        return group

    def new_group(self, axis: Axis) -> dist.ProcessGroup | None:
        """Create another group of the ranks on this rank's axis. Collective over all ranks.

        A thread that exchanges tensors needs a group that no other thread uses. NCCL runs the
        exchanges of a group in the order of the calls, which two threads do not keep. And torch
        adds an exchange to the batch of messages that another thread has begun in the same group.

        Returns:
            The group, with the timeout of the axis; None without a process group.
        """
        if self.mesh is None:
            return None
        lines = self.mesh.mesh.movedim(AXES.index(axis), -1).reshape(-1, self._size(axis))
        groups = {tuple(line): dist.new_group(line) for line in lines.tolist()}
        group = cast("dist.ProcessGroup", groups[tuple(self.ranks_of(axis))])
        timeout = _timeout_of(self.group(axis), self.device)
        if timeout is not None:
            set_timeouts([group], timeout)
        if is_accelerator(self.device):  # NCCL's first exchange needs all ranks of the group
            dist.all_reduce(torch.zeros((), device=self.device), group=group)
        return group

    @contextlib.contextmanager
    def timeout_for_new_groups(self) -> Iterator[None]:
        """Give the run's timeout to all groups that are made inside a `with` block.

        Libraries make groups of their own, as for hybrid shards, with torch's timeout of 10 or 30
        minutes. Without this a rank that hangs in such a group is noticed only after that time.
        """
        before = set(dist.distributed_c10d._world.pg_map) if self.mesh is not None else set()
        yield
        timeout = None if self.mesh is None else _timeout_of(self.group(), self.device)
        if timeout is None:
            return
        new = [group for group in dist.distributed_c10d._world.pg_map if group not in before]
        longest = {g: max(_timeout_of(g, kind) or 0.0 for kind in g._device_types) for g in new}
        # A group whose exchanges may take hours keeps its own timeout.
        set_timeouts([group for group in new if longest[group] < _LONG_TIMEOUT_S], timeout)

    @property
    def lost_ranks(self) -> LostRanks:
        """The ranks that the run may lose, and the lost ranks, as far as this rank knows."""
        return self.recorder.lost_ranks

    def tolerate_losses(self, spare: Sequence[int], names: Sequence[str]) -> None:
        """Let the run continue when spare ranks are lost, one or several. Collective.

        Exchanges of this class between all ranks, or on the dp axis, then use `RootExchange`. For a
        lost rank, gathered objects contain None, gathered numbers and rows contain zeros, and sums
        leave the rank out. Exchanges on other axes still need all their ranks.

        The context needs a process group. The dp axis has to contain all ranks of the run if
        exchanges on it are used.

        Args:
            spare: the ranks that may be lost. Rank 0 must not be among them, because it has the
                hub, the store and the log.
            names: the names of all ranks, for messages.
        """
        self.lost_ranks.group = self._new_long_group()
        self.lost_ranks.background_group = self._new_long_group()
        self.barrier()  # ends all exchanges that need every rank
        self.lost_ranks.allow(spare, names, tells=self.is_main)
        if self.is_main:
            note_spare_ranks(os.environ, spare)

    def require_all(self) -> None:
        """Undo `tolerate_losses`: every rank is needed again. All ranks must call this."""
        self.lost_ranks.allow((), self.lost_ranks.names, tells=self.is_main)

    def agreed_lost_ranks(self) -> tuple[int, ...]:
        """Return the ranks lost so far, the same on all ranks. Collective if ranks may be lost."""
        root = self._root_exchange()
        return () if root is None else tuple(root.broadcast(self.lost_ranks.lost))

    def _root_exchange(
        self, axis: Axis | None = None, *, may_take_hours: bool = False
    ) -> RootExchange | None:
        """Return the exchange that survives the loss of ranks; None if all ranks are needed."""
        group, lost_ranks = self.background_group or self.lost_ranks.group, self.lost_ranks
        if not lost_ranks.spare or axis not in (None, "dp"):
            return None
        watched = self.background_group is None and not (
            may_take_hours or lost_ranks.long_exchanges
        )
        return RootExchange(group, self.recorder, self.world_size, watched)

    @contextlib.contextmanager
    def long_timeout(self) -> Iterator[None]:
        """Let exchanges between all ranks take hours, for the duration of a `with` block."""
        if self.mesh is None or self.background_group is not None:
            yield
            return
        with long_timeout(self.device), self.lost_ranks.long_timeout():
            yield

    def ranks_of(self, axis: Axis) -> list[int]:
        """Return the ranks that share the axis with this rank, including itself, in order."""
        group = self.group(axis)
        return [self.rank] if group is None else dist.get_process_group_ranks(group)

    def barrier(self) -> None:
        """Wait for all ranks, even while one of them downloads or writes a checkpoint. Collective.

        `mesh.timeout` does not apply here. A rank that fails or is lost still ends the wait: it
        ends all ranks, unless it is one that the run may lose.
        """
        root = self._root_exchange(may_take_hours=True)
        if root is not None:
            root.all_gather(None)
        elif self.mesh is not None:
            devices = [self.device.index] if is_accelerator(self.device) else None
            with long_timeout(self.device):
                dist.barrier(device_ids=devices)

    def all_reduce_sum(self, tensor: torch.Tensor, axis: Axis | None = None) -> torch.Tensor:
        """Return the sum over one axis, or over all ranks. Collective.

        Args:
            tensor: a tensor on this rank's device, of the same shape on every rank. It does not
                change.
            axis: the mesh axis to sum over; None for all ranks.
        """
        total = tensor.detach().clone()
        root = self._root_exchange(axis)
        if root is not None:
            parts: list[torch.Tensor] = [p for p in root.all_gather(total) if p is not None]
            return reduce(torch.add, parts)
        if self.mesh is not None:
            with self.recorder.traffic.aside():
                dist.all_reduce(total, group=self.group(axis))
        return total

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Return all ranks' objects in the order of ranks on rank 0, None elsewhere. Collective."""
        if self.mesh is None:
            return [value]
        root = self._root_exchange()
        if root is not None:
            return root.gather(value)
        gathered = [None] * self.world_size if self.is_main else None
        with self.recorder.traffic.aside():
            dist.gather_object(value, gathered, group=self.group())
        return gathered

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's object in the order of ranks, on every rank. Collective."""
        if self.mesh is None:
            return [value]
        root = self._root_exchange()
        if root is not None:
            return root.all_gather(value)
        everyone: list[Any] = [None] * self.world_size
        with self.recorder.traffic.aside():
            dist.all_gather_object(everyone, value, group=self.group())
        return everyone

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's object on every rank. Collective; other ranks' arguments are ignored."""
        if self.mesh is None:
            return value
        root = self._root_exchange()
        if root is not None:
            return root.broadcast(value)
        box = [value if self.is_main else None]
        with self.recorder.traffic.aside():  # from host to host, as all other objects
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"), group=self.group())
        return box[0]

    def all_gather_numbers(self, number: float, axis: Axis | None = None) -> list[float]:
        """Return every rank's number in the order of ranks, on every rank. Collective.

        Numbers are sent from host to host, so that the call does not wait for an accelerator.

        Args:
            number: this rank's number; exact as a float64.
            axis: the mesh axis to gather over; None for all ranks.
        """
        return [row[0] for row in self.all_gather_rows([number], axis)]

    def all_gather_rows(
        self, numbers: Sequence[float], axis: Axis | None = None
    ) -> list[list[float]]:
        """Return every rank's numbers, with one row for each rank; see `all_gather_numbers`.

        Args:
            numbers: this rank's numbers, equally many on every rank; each exact as a float64.
            axis: the mesh axis to gather over; None for all ranks.
        """
        return self._rows(numbers, axis, waits=True)()

    def begin_rows(self, numbers: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Begin to gather every rank's numbers, and return a function that waits for the rows.

        This call is collective; the returned function is not. If the run may lose ranks, the call
        itself waits.

        Args:
            numbers: see `all_gather_rows`.
        """
        return self._rows(numbers, None, waits=False)

    def _rows(
        self, numbers: Sequence[float], axis: Axis | None, *, waits: bool
    ) -> Callable[[], list[list[float]]]:
        if self.mesh is None:
            return lambda: [[float(number) for number in numbers]]
        root = self._root_exchange(axis)
        if root is not None:
            rows = root.all_gather([float(number) for number in numbers])
            return lambda: [row or [0.0] * len(numbers) for row in rows]
        size = self.world_size if axis is None else self._size(axis)
        mine = torch.tensor(numbers, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(size)]
        with self.recorder.traffic.aside():
            work = dist.all_gather(everyone, mine, group=self.group(axis), async_op=not waits)

        def gathered() -> list[list[float]]:
            if work is not None:
                work.wait()
            return [row.tolist() for row in everyone]

        return gathered


def resolve_mesh(pp: int, dp: int, tp: int, world_size: int) -> tuple[int, int, int]:
    """Return the sizes of the mesh as (pp, dp, tp), with `dp=-1` replaced by a number.

    Args:
        pp: ranks on the pipeline axis.
        dp: ranks on the data axis; -1 for all remaining ranks.
        tp: ranks on the tensor axis.
        world_size: ranks of the run.

    Raises:
        ConfigError: a size is not positive, or the product of sizes is not the number of ranks.
    """
    for name, size in (("pp", pp), ("tp", tp), ("dp", dp)):
        if size < 1 and not (name == "dp" and size == -1):
            rest = " (or -1 for the remaining ranks)" if name == "dp" else ""
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
def long_timeout(device: torch.device) -> Iterator[None]:
    """Let collectives of the default group take hours, for the duration of a `with` block.

    Args:
        device: the device whose backend's timeout changes.
    """
    world = dist.distributed_c10d._get_default_group()
    before = _timeout_of(world, device)
    if before is None:
        yield
        return
    set_timeouts([world], max(_LONG_TIMEOUT_S, before))
    try:
        yield
    finally:
        set_timeouts([world], before)


def _timeout_of(group: Any, device: torch.device) -> float | None:
    """Return the seconds after which an exchange of the group fails; None if never, as for MPI."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return None if timeout is None else float(timeout.total_seconds())
