"""The store through which the ranks of one launch find each other.

torchrun and deepspeed give an address. srun and mpiexec give none: on one node the ranks meet by
a file that no other launch knows, over several nodes at the first host.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from bigtrain.errors import ConfigError, LaunchError
from bigtrain.ranks.launcher_env import RankInfo, first_host, launch_key

_DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """An open store, and where rank 0's host is reached."""

    store: Store
    host: str


def master_address(placement: RankInfo, environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where rank 0 listens, or None where the ranks of one node meet by a file.

    Raises:
        ConfigError: the launcher gives no address and none can be derived.
    """
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if port is not None and not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"MASTER_PORT={port!r} is not a port. Run: export MASTER_PORT=29511")
    if placement.launcher in ("torchrun", "deepspeed", "env"):
        if host is None or port is None:
            missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
            raise ConfigError(
                f"{missing} is not set, RANK={placement.rank} and "
                f"WORLD_SIZE={placement.world_size} are. Start the ranks with torchrun, or run: "
                "export MASTER_ADDR=127.0.0.1 MASTER_PORT=29511"
            )
        return host, int(port)
    if host is not None and port is not None:
        return host, int(port)
    if placement.one_node:
        return None
    if placement.launcher == "srun":
        node_list = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
        if not (host or node_list):
            raise ConfigError(
                "SLURM_STEP_NODELIST is not set, so the first host is unknown. "
                "Run: export MASTER_ADDR=FIRST_HOST"
            )
        # One step, one port, below the range from which the kernel hands ports out.
        step = int(environ.get("SLURM_STEP_ID", "0"))
        job = int(environ.get("SLURM_JOB_ID", "0"))
        return host or first_host(node_list), int(port or 15000 + (job * 31 + step) % 15000)
    if host is None:
        flag = (
            "-x MASTER_ADDR=HOST" if placement.launcher == "openmpi" else "-genv MASTER_ADDR HOST"
        )
        raise ConfigError(
            f"mpiexec started {placement.world_size} ranks, {placement.local_world_size} of them "
            "on this node, and MASTER_ADDR is not set: over several nodes the ranks need the name "
            f"of rank 0's host. Run: mpiexec {flag} ..."
        )
    return host, int(port or _DEFAULT_PORT)


def open_rendezvous(
    placement: RankInfo, environ: Mapping[str, str], *, timeout_s: float, path: Path | None = None
) -> Rendezvous:
    """Open the store that all ranks of this launch share.

    Args:
        placement: where this process stands.
        environ: the environment of the process.
        timeout_s: seconds the ranks wait for each other.
        path: a file for the ranks of one node to meet at, whatever the launcher.

    Raises:
        ConfigError: the launcher gives no address and none can be derived.
        LaunchError: rank 0's address cannot be reached or is taken.
    """
    timeout = timedelta(seconds=timeout_s)
    if placement.world_size == 1:
        return Rendezvous(HashStore(), "127.0.0.1")
    address = master_address(placement, environ) if path is None else None
    if address is not None:
        return _rendezvous_by_address(address, placement, timeout)
    if path is None:
        path = Path(tempfile.gettempdir()) / f"bigtrain-{launch_key(environ)}"
    return Rendezvous(_rendezvous_by_file(path, placement, timeout), "127.0.0.1")


def _rendezvous_by_file(path: Path, placement: RankInfo, timeout: timedelta) -> Store:
    """Let rank 0 write in a file at which free port it listens.

    The file lives only until everyone has come: nothing is left behind, however the run ends, and
    the same launch can meet again.
    """
    rank, size, host = placement.rank, placement.world_size, "127.0.0.1"
    if rank == 0:
        store = TCPStore(host, 0, size, True, timeout, wait_for_workers=False)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        # Nobody else may have put a file or a link there, and nobody reads half a line.
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(str(store.port))
        draft.replace(path)
        try:
            store.wait([f"here/{other}" for other in range(1, size)])
        except RuntimeError as error:
            missing = [n for n in range(1, size) if not store.check([f"here/{n}"])]
            raise LaunchError(
                _not_met(placement, timeout, f"rank {missing[0]} is missing")
            ) from error
        finally:
            path.unlink(missing_ok=True)
        store.set("everyone", "here")
        return store
    end = time.monotonic() + timeout.total_seconds()
    while not path.exists():
        if time.monotonic() > end:
            raise LaunchError(_not_met(placement, timeout, "rank 0 is missing"))
        time.sleep(0.01)
    if path.lstat().st_uid != os.getuid():
        raise LaunchError(
            f"{path}, where the ranks of this node meet, belongs to another user. "
            "Run: export TMPDIR=FOLDER, the same for all ranks"
        )
    try:
        store = TCPStore(host, int(path.read_text()), size, False, timeout)
        store.set(f"here/{rank}", "")
        store.wait(["everyone"])
    except (RuntimeError, OSError) as error:
        raise LaunchError(_not_met(placement, timeout, _first_line(error))) from error
    return store


def _not_met(placement: RankInfo, timeout: timedelta, reason: str) -> str:
    return (
        f"the {placement.world_size} ranks did not all meet within {timeout.total_seconds():.0f} s "
        f"(said by rank {placement.rank}): {reason}. Look for what ended or held up the missing "
        "rank, or raise mesh.setup_timeout"
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


def _rendezvous_by_address(
    address: tuple[str, int], placement: RankInfo, timeout: timedelta
) -> Rendezvous:
    rank, size = placement.rank, placement.world_size
    host = "127.0.0.1" if placement.one_node else address[0]
    try:
        store: Store
        if placement.launcher in ("torchrun", "deepspeed", "env"):
            # torch knows whether an agent keeps the store already.
            store, _, _ = next(torch_rendezvous("env://", rank, size, timeout=timeout))
        else:
            store = TCPStore(address[0], address[1], size, rank == 0, timeout)
        store.set_timeout(timeout)
        # An agent's store outlives a connection: the second one must not read the first one's keys.
        turn = store.add(f"bigtrain/{rank}", 1)
    except (RuntimeError, OSError) as error:
        where = f"at {address[0]}:{address[1]}: {_first_line(error)}"
        raise LaunchError(_not_met(placement, timeout, where)) from error
    return Rendezvous(PrefixStore(f"bigtrain{turn}", store), host)


def hostname_resolves() -> bool:
    """Whether this host's name leads to an address of this host, which gloo takes for granted."""
    try:
        addresses = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False
