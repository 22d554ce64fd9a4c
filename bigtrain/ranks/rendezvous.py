"""The store through which the ranks of one launch find each other.

torchrun and deepspeed set an address. srun and mpiexec set none. On one node the ranks then meet
through a file that no other launch uses. On several nodes they meet at the first host of the job,
or at the address that rank 0 shares through Hydra.

On one node all sockets listen on the loopback. On several nodes the network between them must be
trusted, because torch's store and gloo do not authenticate their peers. bigtrain's hub, through
which a rank can end the other ranks, accepts only peers that know BIGTRAIN_SECRET, if it is set.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from bigtrain.errors import ConfigError, LaunchError
from bigtrain.ranks.launcher_env import RankInfo, first_host, launch_key
from bigtrain.ranks.pmi import share_value, shared_by_hydra

_DEFAULT_PORT = 29500


SECRET_VARIABLE = "BIGTRAIN_SECRET"
"""The environment variable of an optional secret that all ranks of a run share."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: reads the address of an interface
_PROBE_S = 2.0
_ANSWER_S = 5.0
"""Seconds to wait beyond the store's timeout.

A store that is connected to another program ignores its own timeout.
"""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The open store of a launch, and the address of rank 0's host."""

    store: Store
    """The store that all ranks of the launch share."""
    host: str
    """The host of rank 0, as this rank reaches it."""
    secret: str = ""
    """A secret that only this launch's ranks know, and that is not in the store; may be empty."""


def master_address(placement: RankInfo, environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of rank 0, or None if the ranks of one node meet through a file.

    Args:
        placement: the rank of this process.
        environ: the environment of the process.

    Raises:
        ConfigError: the port is wrong, or the launcher sets no address and none can be derived.
    """
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if port is not None and not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"MASTER_PORT={port!r} is not a port. Run: export MASTER_PORT=29511")
    if placement.launcher in ("torchrun", "deepspeed", "env"):
        if host is None or port is None:
            missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
            raise ConfigError(
                f"{missing} is not set, but RANK={placement.rank} and "
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
        # Job steps get different ports, so that two steps on one host do not collide. The ports are
        # below the range of the kernel's ephemeral ports.
        step = int(environ.get("SLURM_STEP_ID", "0"))
        job = int(environ.get("SLURM_JOB_ID", "0"))
        return host or first_host(node_list), int(port or 15000 + (job * 31 + step) % 15000)
    if host is None:
        flag = (
            "-x MASTER_ADDR=HOST" if placement.launcher == "openmpi" else "-genv MASTER_ADDR HOST"
        )
        raise ConfigError(
            f"mpiexec started {placement.world_size} ranks, {placement.local_world_size} of them "
            "on this node, and MASTER_ADDR is not set: on several nodes the ranks need the name "
            f"of rank 0's host. Run: mpiexec {flag} ..."
        )
    return host, int(port or _DEFAULT_PORT)


def open_rendezvous(
    placement: RankInfo, environ: Mapping[str, str], *, timeout_s: float, path: Path | None = None
) -> Rendezvous:
    """Open the store that all ranks of this launch share.

    Args:
        placement: the rank of this process.
        environ: the environment of the process.
        timeout_s: seconds that the ranks wait for each other.
        path: a file through which the ranks of one node meet; None to use the launcher's address,
            Hydra, or a temporary file.

    Raises:
        ConfigError: the launcher sets no address and none can be derived.
        LaunchError: the ranks did not meet in time, rank 0's address is in use, or the ranks have
            different secrets.
    """
    timeout = timedelta(seconds=timeout_s)
    if placement.world_size == 1:
        return Rendezvous(HashStore(), "127.0.0.1")
    user_secret = environ.get(SECRET_VARIABLE, "")
    by_hydra = path is None and _asks_hydra(placement, environ)
    address = None if by_hydra or path is not None else master_address(placement, environ)
    if by_hydra:
        meeting = _rendezvous_by_hydra(placement, timeout, environ)
    elif address is not None:
        meeting = _rendezvous_by_address(address, placement, timeout, environ)
    else:
        if path is None:
            path = Path(tempfile.gettempdir()) / f"bigtrain-{launch_key(environ)}"
        store, secret = _rendezvous_by_file(path, placement, timeout)
        meeting = Rendezvous(store, "127.0.0.1", secret)
    _compare_secrets(meeting.store, placement.rank, user_secret)
    return replace(meeting, secret=user_secret or meeting.secret)


def _local_store(port: int, size: int, timeout: timedelta, *, wait: bool = True) -> TCPStore:
    """Return a store that listens only on the loopback; torch's default is all interfaces."""
    options: dict[str, Any] = {"wait_for_workers": wait, "multi_tenant": True}
    try:
        server = socket.create_server(("127.0.0.1", port))
    except OSError:  # this process listens there already, for a connection that is closing
        return TCPStore("127.0.0.1", port, size, True, timeout, **options)
    taken = server.getsockname()[1]
    options["master_listen_fd"] = server.detach()
    return TCPStore("127.0.0.1", taken, size, True, timeout, **options)


def _rendezvous_by_file(path: Path, placement: RankInfo, timeout: timedelta) -> tuple[Store, str]:
    """Meet through a file, to which rank 0 writes its port and a secret; return store and secret.

    Rank 0 removes the file when all ranks have connected, or after the timeout. So nothing remains,
    however the run ends, and the same launch can meet again.
    """
    rank, size, host = placement.rank, placement.world_size, "127.0.0.1"
    if rank == 0:
        store, secret = _local_store(0, size, timeout, wait=False), secrets.token_hex(16)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        # O_EXCL refuses a file or link of another user. The rename lets readers see a whole line.
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(f"{store.port} {secret}")
        draft.replace(path)
        try:
            store.wait([f"here/{peer}" for peer in range(1, size)])
        except RuntimeError as error:
            missing = [n for n in range(1, size) if not store.check([f"here/{n}"])]
            raise LaunchError(
                _not_met(placement, timeout, f"rank {missing[0]} is missing")
            ) from error
        finally:
            path.unlink(missing_ok=True)
        store.set("everyone", "here")
        return store, secret
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
        port, secret = path.read_text().split()
        store = TCPStore(host, int(port), size, False, timeout)
        store.set(f"here/{rank}", "")
        store.wait(["everyone"])
    except (RuntimeError, OSError, ValueError) as error:
        raise LaunchError(_not_met(placement, timeout, _first_line(error))) from error
    return store, secret


def _not_met(placement: RankInfo, timeout: timedelta, reason: str) -> str:
    return (
        f"the {placement.world_size} ranks did not all meet within {timeout.total_seconds():.0f} s "
        f"(reported by rank {placement.rank}): {reason}. Check why the missing rank ended or is "
        "late, or raise mesh.setup_timeout"
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


def _asks_hydra(placement: RankInfo, environ: Mapping[str, str]) -> bool:
    """Whether the address of rank 0 has to be shared through MPICH's process manager."""
    several = placement.launcher == "mpich" and not placement.one_node
    return several and "MASTER_ADDR" not in environ and shared_by_hydra(environ)


_BY_HYDRA: list[Rendezvous] = []
"""The rendezvous of this process through Hydra, after it was opened."""


def _rendezvous_by_hydra(
    placement: RankInfo, timeout: timedelta, environ: Mapping[str, str]
) -> Rendezvous:
    """Meet at a free port of rank 0, whose address is shared through Hydra.

    Hydra answers a process only once, so the store is saved for later connections.
    """
    rank, size = placement.rank, placement.world_size
    try:
        if rank and not _BY_HYDRA:
            addresses, _, port_words = share_value(None, environ).rpartition(":")
            host = _reachable(addresses.split(","), int(port_words), timeout)
            client = TCPStore(host, int(port_words), size, False, timeout)
            _BY_HYDRA.append(Rendezvous(client, host))
        elif not _BY_HYDRA:
            server = socket.create_server(("", 0))
            port = server.getsockname()[1]
            share_value(f"{','.join(_own_addresses())}:{port}", environ)
            master = TCPStore(
                "127.0.0.1", port, size, True, timeout, master_listen_fd=server.detach()
            )
            _BY_HYDRA.append(Rendezvous(master, "127.0.0.1"))
        store, host = _BY_HYDRA[0].store, _BY_HYDRA[0].host
        store.set_timeout(timeout)
        return Rendezvous(PrefixStore(f"bigtrain{store.add(f'bigtrain/{rank}', 1)}", store), host)
    except (RuntimeError, OSError) as error:
        raise LaunchError(_not_met(placement, timeout, _first_line(error))) from error


def _own_addresses() -> list[str]:
    """Return the IPv4 addresses of this host, the loopback last."""
    addresses = interface_addresses().values()
    return sorted(addresses, key=lambda address: address.startswith("127."))


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface of this host that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def address_towards(host: str) -> str | None:
    """Return the IPv4 address that this host uses to reach another; None without a route to it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # nothing is sent
        address: str = probe.getsockname()[0]
        return address
    return None


def gloo_interface(
    environ: Mapping[str, str], own_address: str | None, addresses: Mapping[str, str]
) -> str | None:
    """Return the interface for gloo's exchanges between nodes; None for gloo's default.

    If `NCCL_SOCKET_IFNAME` is the name of an interface, gloo uses this interface, too. Otherwise
    gloo uses the interface of the route to the node of rank 0. The loopback reaches no other node,
    so it is never the result.

    Args:
        environ: the environment, with `NCCL_SOCKET_IFNAME` if that is set.
        own_address: the address from which this host reaches the node of rank 0.
        addresses: the address of each interface of this host.
    """
    named = environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if not addresses.get(named, "127.").startswith("127."):
        return named
    if own_address is None or own_address.startswith("127."):
        return None
    return next((name for name, address in addresses.items() if address == own_address), None)


def _reachable(addresses: Sequence[str], port: int, timeout: timedelta) -> str:
    """Return the first of rank 0's addresses at which it answers.

    Raises:
        OSError: rank 0 does not answer at any address within the timeout.
    """
    until = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < until:
        for address in addresses:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((address, port), timeout=_PROBE_S),
            ):
                return address
        time.sleep(0.1)
    raise OSError(f"rank 0 cannot be reached at {' or '.join(addresses)}, port {port}")


def _rendezvous_by_address(
    address: tuple[str, int],
    placement: RankInfo,
    timeout: timedelta,
    environ: Mapping[str, str],
) -> Rendezvous:
    rank, size = placement.rank, placement.world_size
    host = "127.0.0.1" if placement.one_node else address[0]

    def meet() -> Store:
        store: Store
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent has the store
            store, _, _ = next(torch_rendezvous("env://", rank, size, timeout=timeout))
        elif placement.one_node and rank == 0:
            store = _local_store(address[1], size, timeout)
        else:
            store = TCPStore(host, address[1], size, rank == 0, timeout)
        store.set_timeout(timeout)
        # An agent's store outlives a connection, whose keys the next connection must not read.
        number = store.add(f"bigtrain/{rank}", 1)
        return PrefixStore(f"bigtrain{number}", store)

    try:
        store = _within(timeout.total_seconds() + _ANSWER_S, meet, (host, address[1]))
    except (RuntimeError, OSError) as error:
        reason = f"at {host}:{address[1]}: {_first_line(error)}"
        raise LaunchError(_not_met(placement, timeout, reason)) from error
    return Rendezvous(store, host)


def _within(seconds: float, meet: Callable[[], Store], address: tuple[str, int]) -> Store:
    """Return the store; raise `OSError` if nothing listens at the address, or nothing answers."""
    done: Future[Store] = Future()

    def run() -> None:
        try:
            done.set_result(meet())
        except BaseException as error:
            done.set_exception(error)

    # No pool is used: at its end a program waits for a pool's threads, and this one may never end.
    threading.Thread(target=run, name="bigtrain-meet", daemon=True).start()
    try:
        return done.result(seconds)
    except FutureTimeout:
        raise OSError(_silence(address)) from None


def _silence(address: tuple[str, int]) -> str:
    """Return why there was no answer. torch keeps trying, and does not report the reason."""
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError as error:
        return f"nothing listens there ({error.strerror or error})"
    return "something listens there and does not answer"


def _compare_secrets(store: Store, rank: int, secret: str) -> None:
    """Refuse ranks with different secrets.

    Raises:
        LaunchError: this rank and rank 0 have different secrets, or only one of them has a secret.
    """
    mark = hmac.digest(secret.encode(), b"bigtrain", "sha256").hex()[:8] if secret else "none"
    if rank == 0:
        store.set("secret", mark)
        return
    theirs = store.get("secret").decode()
    if theirs != mark:
        difference = "another one than on rank 0"
        difference = "not set, and rank 0 has one" if mark == "none" else difference
        difference = "set, and rank 0 has none" if theirs == "none" else difference
        raise LaunchError(
            f"{SECRET_VARIABLE} is {difference} (reported by rank {rank}). Export the same value "
            "on all nodes, or on none"
        )
