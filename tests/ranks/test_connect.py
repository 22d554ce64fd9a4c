"""Refusals while ranks connect, and the context of a single process."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.cluster import free_port

from bigtrain.errors import ConfigError, LaunchError
from bigtrain.ranks import connect as ranks_connect
from bigtrain.ranks.connect import _open_mesh, connect, pick_backend, pick_device, thread_share
from bigtrain.ranks.context import RunContext, resolve_mesh
from bigtrain.ranks.launcher_env import SINGLE_RANK, Launcher, RankInfo
from bigtrain.ranks.rendezvous import (
    SECRET_VARIABLE,
    Rendezvous,
    _silence,
    address_towards,
    gloo_interface,
    interface_addresses,
    master_address,
    open_rendezvous,
)


def rank_info(rank: int, world: int, local: int, launcher: Launcher = "env") -> RankInfo:
    """The placement of a rank, with `local` ranks on each node."""
    return RankInfo(
        rank=rank,
        local_rank=rank % local,
        world_size=world,
        local_world_size=local,
        launcher=launcher,
    )


@pytest.mark.parametrize(
    ("sizes", "world", "resolved"),
    [
        ((1, -1, 1), 1, (1, 1, 1)),
        ((1, -1, 1), 8, (1, 8, 1)),
        ((2, -1, 2), 8, (2, 2, 2)),
        ((4, 2, 1), 8, (4, 2, 1)),
    ],
)
def test_resolve_mesh(
    sizes: tuple[int, int, int], world: int, resolved: tuple[int, int, int]
) -> None:
    assert resolve_mesh(*sizes, world) == resolved


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ((3, 1, 1), 8, r"mesh.pp=3 \* mesh.dp=1 \* mesh.tp=1 = 3, and there are 8 ranks. Start 3"),
        ((2, 2, 1), 1, r"= 4, and there are 1 rank. Start 4 ranks\.$"),
        ((2, 3, 1), 8, r"= 6, .* Start 6 ranks, or use mesh.dp=4 or mesh.dp=-1\.$"),
        (
            (3, -1, 1),
            8,
            r"mesh.pp=3 \* mesh.tp=1 = 3 does not divide the 8 ranks. Start 9 ranks, or choose",
        ),
        ((2, -1, 1), 1, r"does not divide the 1 ranks?. Start 2 ranks"),
        ((0, -1, 1), 8, r"mesh.pp=0 must be at least 1\. Use mesh.pp=1"),
        ((1, 0, 1), 8, r"mesh.dp=0 must be at least 1 \(or -1 for the remaining ranks\)"),
        ((1, -1, -1), 8, r"mesh.tp=-1 must be at least 1\."),
    ],
)
def test_resolve_mesh_refuses(sizes: tuple[int, int, int], world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_mesh(*sizes, world)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_pick_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    assert pick_device("auto", SINGLE_RANK, {}) == torch.device("cpu")
    with pytest.raises(ConfigError, match="device=cuda, and torch sees no GPU here. Use device="):
        pick_device("cuda", SINGLE_RANK, {})
    gpus(monkeypatch, 2)
    assert pick_device("cpu", SINGLE_RANK, {}) == torch.device("cpu")
    assert pick_device("auto", rank_info(3, 4, 2), {}) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="4 ranks on this node, 2 GPUs. Start 2 ranks a node"):
        pick_device("auto", rank_info(0, 4, 4), {})
    gpus(monkeypatch, 1)
    gpu_variables = {"SLURM_GPUS_PER_TASK": "1"}
    assert pick_device("cuda", rank_info(3, 4, 4, "srun"), gpu_variables) == torch.device("cuda", 0)
    gpu_variables = {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}
    assert pick_device("cuda", rank_info(3, 4, 4, "srun"), gpu_variables) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="2 ranks on this node, 1 GPU. Start 1 rank a node"):
        pick_device("cuda", rank_info(0, 2, 2), {"SLURM_TRES_PER_TASK": "cpu=4"})
    seen = r"1 GPU visible with CUDA_VISIBLE_DEVICES=0\. Start 1 rank a node"
    with pytest.raises(ConfigError, match=seen):
        pick_device("cuda", rank_info(0, 2, 2), {"CUDA_VISIBLE_DEVICES": "0"})
    with pytest.raises(ConfigError, match="device='gpu' is not known"):
        pick_device("gpu", SINGLE_RANK, {})  # type: ignore[arg-type]


def test_pick_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert pick_backend("auto", cpu) == "gloo"
    assert pick_backend("auto", cuda) == "nccl"
    with pytest.raises(ConfigError, match="mesh.backend=nccl needs CUDA .* the device is cpu"):
        pick_backend("nccl", cpu)
    with pytest.raises(ConfigError, match="mesh.backend='ucc' is not known"):
        pick_backend("ucc", cpu)  # type: ignore[arg-type]
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    with pytest.raises(ConfigError, match="mpi is not in this build .* Use mesh.backend=gloo"):
        pick_backend("mpi", cpu)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    assert pick_backend("mpi", cpu) == "mpi"


def test_everything_is_refused_before_a_group_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(ConfigError, match="mesh.pp=2"), connect(SINGLE_RANK, pp=2):
        pass
    gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match="no GPU"), connect(rank_info(0, 2, 2), device="cuda"):
        pass
    with (
        pytest.raises(ConfigError, match="mesh.timeout=0: both are seconds"),
        connect(SINGLE_RANK, timeout=0),
    ):
        pass


SRUN = {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "100", "SLURM_STEP_ID": "2"}


@pytest.mark.parametrize(
    ("placement", "environ", "address"),
    [
        (rank_info(0, 2, 2, "srun"), SRUN, None),
        (rank_info(0, 2, 2, "mpich"), {}, None),
        (rank_info(0, 4, 2, "srun"), SRUN, ("gpu07", 18102)),
        (rank_info(0, 4, 2, "srun"), {**SRUN, "MASTER_PORT": "1234"}, ("gpu07", 1234)),
        (rank_info(0, 4, 2, "openmpi"), {"MASTER_ADDR": "a"}, ("a", 29500)),
        (rank_info(0, 2, 2), {"MASTER_ADDR": "a", "MASTER_PORT": "5"}, ("a", 5)),
        (rank_info(0, 2, 2, "srun"), {"MASTER_ADDR": "a", "MASTER_PORT": "5"}, ("a", 5)),
    ],
)
def test_master_address(
    placement: RankInfo, environ: dict[str, str], address: tuple[str, int] | None
) -> None:
    assert master_address(placement, environ) == address


@pytest.mark.parametrize(
    ("placement", "environ", "message"),
    [
        (rank_info(0, 4, 2, "openmpi"), {}, r"4 ranks, 2 of them .*mpiexec -x MASTER_ADDR=HOST"),
        (rank_info(0, 4, 2, "mpich"), {}, r"mpiexec -genv MASTER_ADDR HOST"),
        (rank_info(0, 2, 2), {}, r"MASTER_ADDR is not set, but RANK=0 and WORLD_SIZE=2 are"),
        (rank_info(0, 2, 2), {"MASTER_ADDR": "a"}, r"MASTER_PORT is not set"),
        (rank_info(0, 2, 2), {"MASTER_ADDR": "a", "MASTER_PORT": "x"}, r"MASTER_PORT='x' is not a"),
        (rank_info(0, 4, 2, "srun"), {}, r"SLURM_STEP_NODELIST is not set.*MASTER_ADDR=FIRST_HOST"),
    ],
)
def test_master_address_refuses(placement: RankInfo, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        master_address(placement, environ)


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_a_rank_that_never_comes_is_named(tmp_path: Path, rank: int, missing: int) -> None:
    with pytest.raises(
        LaunchError, match=f"the 2 ranks did not all meet within 1 s .*rank {missing} is missing"
    ):
        open_rendezvous(rank_info(rank, 2, 2), {}, timeout_s=0.6, path=tmp_path / "meet")
    assert list(tmp_path.iterdir()) == []


def test_an_address_where_nobody_listens() -> None:
    port = free_port()
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.raises(LaunchError, match=f"at 127.0.0.1:{port}: (?s:.*)raise mesh.setup_timeout"):
        open_rendezvous(rank_info(1, 2, 2, "srun"), environ, timeout_s=0.6)


@pytest.mark.parametrize(
    ("users", "threads"),
    [([1], 1), ([2, 2], 1), ([4, 4], 1), ([2] * 8, 4), ([3] * 3, 1), ([1, 1, 2, 2], 3)],
)
def test_thread_share(users: list[int], threads: int) -> None:
    assert thread_share(users) == threads


def test_gloo_takes_the_loopback_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    init = dist.init_process_group

    def note(*args: object, **options: object) -> None:
        seen.append(os.environ.get("GLOO_SOCKET_IFNAME"))
        init(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(dist, "init_process_group", note)
    with connect(SINGLE_RANK, device="cpu", force_group=True) as context:
        context.barrier()
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"  # also for groups that are made later
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    name = next(name for _, name in socket.if_nameindex())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    with connect(SINGLE_RANK, device="cpu", force_group=True) as context:
        context.barrier()
    assert seen == ["lo", name]


@pytest.mark.parametrize(("backend", "kind"), [("nccl", "cuda"), ("xccl", "xpu")])
def test_only_nccl_is_told_the_device(
    backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a group with another device, torch cannot make a group of gloo alone.
    seen: list[dict[str, object]] = []

    def note(*_: object, **options: object) -> None:
        seen.append(options)
        raise ValueError("seen")

    monkeypatch.setattr(dist, "init_process_group", note)
    for name in ("set_current", "start_recording", "_tell_device"):
        monkeypatch.setattr(f"bigtrain.ranks.connect.{name}", lambda *_: None)
    meeting = SimpleNamespace(store=None)
    with pytest.raises(ValueError, match="seen"):
        _open_mesh(SINGLE_RANK, meeting, torch.device(kind, 0), backend, (1, 1, 1), 5, 5)  # type: ignore[arg-type]
    assert ("device_id" in seen[0]) is (backend == "nccl")


def connect_both(
    environ: dict[str, str], *variables: dict[str, str], path: Path | None = None
) -> list[Rendezvous]:
    """Two ranks of one node that connect, in threads."""
    with ThreadPoolExecutor() as pool:
        meetings = [
            pool.submit(
                open_rendezvous,
                rank_info(rank, 2, 2),
                {**environ, **(variables[rank] if variables else {})},
                timeout_s=5,
                path=path,
            )
            for rank in range(2)
        ]
        return [meeting.result() for meeting in meetings]


def listening() -> set[tuple[str, str]]:
    """Sockets on which this process listens, each with its address in the kernel's table."""
    inodes = {link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                sockets.add((fields[9], fields[1].partition(":")[0]))
    return sockets


def test_on_one_node_everything_listens_on_the_loopback(tmp_path: Path) -> None:
    before = listening()
    address = {"MASTER_ADDR": "some-host", "MASTER_PORT": str(free_port())}
    for meet in (lambda: connect_both({}, path=tmp_path / "meet"), lambda: connect_both(address)):
        connections = meet()
        assert [listening_address for _, listening_address in listening() - before] == ["0100007F"]
        assert {meeting.host for meeting in connections} == {"127.0.0.1"}
        del connections


def test_the_secret_of_a_file_or_of_the_environment_is_not_in_the_store(tmp_path: Path) -> None:
    rank_0, two = connect_both({}, path=tmp_path / "meet")
    assert rank_0.secret == two.secret
    assert len(rank_0.secret) == 32
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    rank_0, two = connect_both({**address, SECRET_VARIABLE: "long words"})
    assert rank_0.secret == two.secret == "long words"
    assert b"long words" not in rank_0.store.get("secret")


def test_ranks_with_other_secrets_are_refused() -> None:
    for variables, words in (
        (({SECRET_VARIABLE: "a"}, {}), "is not set, and rank 0 has one"),
        (({}, {SECRET_VARIABLE: "a"}), "is set, and rank 0 has none"),
        (({SECRET_VARIABLE: "a"}, {SECRET_VARIABLE: "b"}), "is another one than on rank 0"),
    ):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with pytest.raises(LaunchError, match=f"BIGTRAIN_SECRET {words} .*Export the same"):
            connect_both(address, *variables)


def test_silence_is_told_from_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert _silence(("127.0.0.1", port)) == "something listens there and does not answer"
    assert _silence(("127.0.0.1", port)).startswith("nothing listens there (")


def test_a_silent_listener_at_the_address_does_not_hold_a_rank_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        began = time.monotonic()
        with pytest.raises(LaunchError, match="did not all meet within 1 s"):
            open_rendezvous(rank_info(1, 2, 2), environ, timeout_s=0.6)
        assert time.monotonic() - began < 20


def test_alone_works_without_any_group() -> None:
    context = RunContext.alone("meta", seed=3)
    assert context.device == torch.device("meta")
    assert (context.seed, context.dp_size, context.dp_group) == (3, 1, None)


def connection_error(
    monkeypatch, identities: dict[int, str | None], rank: int, message: str
) -> Exception:
    """The error of a rank if the backend could not connect ranks with these devices."""
    meeting = Rendezvous(dist.HashStore(), "localhost")
    device = torch.device("cuda", 0)
    for other_rank, identity in identities.items():
        monkeypatch.setattr(
            ranks_connect, "device_identity", lambda _, variables=identity: variables
        )
        ranks_connect._tell_device(rank_info(other_rank, len(identities), 4), meeting, device)
    monkeypatch.setattr(ranks_connect, "device_identity", lambda _: identities[rank])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    placement = rank_info(rank, len(identities), 4)
    return ranks_connect._why_not_connected(
        RuntimeError(message), placement, meeting, device, 300.0
    )


INVALID = "NCCL error in: NCCLUtils.cpp:93, invalid usage"


def test_ranks_that_share_a_gpu_are_named_where_nccl_says_invalid_usage_alone(monkeypatch) -> None:
    for rank, pair in ((0, "0 and 2"), (2, "0 and 2")):
        error = connection_error(monkeypatch, {0: "GPU-a", 1: "GPU-b", 2: "GPU-a"}, rank, INVALID)
        assert isinstance(error, ConfigError)
        assert f"ranks {pair} have the same GPU: cuda:0 of both is one device" in str(error)
        assert "visible with CUDA_VISIBLE_DEVICES=0" in str(error)
        assert "mesh.backend=gloo" in str(error)
    # A rank that shares its GPU with no other does not blame itself.
    error = connection_error(monkeypatch, {0: "GPU-a", 1: "GPU-b", 2: "GPU-a"}, 1, INVALID)
    assert isinstance(error, LaunchError)
    assert "NCCL_DEBUG=WARN" in str(error)
    assert "within" not in str(error)


@pytest.mark.parametrize("identities", [{0: None, 1: None}, {0: "GPU-a", 1: "GPU-b"}])
def test_a_rank_that_did_not_come_in_time_is_told_from_that(monkeypatch, identities) -> None:
    error = connection_error(monkeypatch, identities, 0, "wait timeout after 300000ms")
    assert isinstance(error, LaunchError)
    assert "rank 0 of 2 could not connect to the others within 300 s: wait timeout" in str(error)
    assert "raise mesh.setup_timeout" in str(error)


def test_a_rank_of_several_nodes_that_reaches_no_other_is_told_the_variable(monkeypatch) -> None:
    """gloo takes the address of the host's name, which is 127.0.1.1 on Debian."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    many = dict.fromkeys(range(8), "GPU-a") | {0: "GPU-b"}
    error = connection_error(monkeypatch, many, 0, "wait timeout after 300000ms")
    assert "gloo's interface is that of the host's name. For another: export GLOO_SO" in str(error)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "docker0")
    error = connection_error(monkeypatch, many, 0, "wait timeout after 300000ms")
    assert "gloo's interface is docker0. For another: export GLOO_SOCKET_IFNAME=et" in str(error)


@pytest.mark.parametrize(
    ("variable", "own_address", "interface"),
    [
        (None, "10.0.0.7", "eth0"),  # the route to rank 0
        (None, "192.168.9.7", "ib0"),
        (None, "127.0.1.1", None),  # rank 0's own node, whose name is that of the loopback
        (None, "172.17.0.1", None),  # no interface has it
        (None, None, None),
        ("ib0", "10.0.0.7", "ib0"),
        ("=ib0", "10.0.0.7", "ib0"),
        ("^docker0,lo", "10.0.0.7", "eth0"),  # a pattern of NCCL, which gloo does not know
        ("eth", "192.168.9.7", "ib0"),
        ("lo", "10.0.0.7", "eth0"),  # it reaches no other node
    ],
)
def test_gloo_takes_the_interface_of_nccl_or_of_the_route(variable, own_address, interface) -> None:
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "192.168.9.7"}
    environ = {} if variable is None else {"NCCL_SOCKET_IFNAME": variable}
    assert gloo_interface(environ, own_address, addresses) == interface


def test_the_address_towards_a_host_is_that_of_an_interface() -> None:
    addresses = interface_addresses()
    assert addresses["lo"] == address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no-such-host.invalid") is None
    for address in addresses.values():  # the node of rank 0 reaches itself from its own address
        assert address_towards(address) == address


def test_the_first_that_stages_exchange_is_of_all_of_them(monkeypatch) -> None:
    """NCCL makes a communicator for it, while tied parameters concern only two stages of three."""
    asked: list[tuple[object, torch.device]] = []

    def all_reduce(tensor: torch.Tensor, group: object) -> None:
        asked.append((group, tensor.device))

    class Mesh:
        def __init__(self, pp: int) -> None:
            self._pp = pp

        def size(self, _axis: int) -> int:
            return self._pp

        def get_group(self, axis: str) -> str:
            return f"group of {axis}"

    monkeypatch.setattr(ranks_connect.dist, "all_reduce", all_reduce)
    cpu = torch.device("cpu")
    for pp, on_gpu, expected in ((3, True, 1), (1, True, 0), (3, False, 0)):
        asked.clear()
        monkeypatch.setattr(ranks_connect, "is_accelerator", lambda _, sizes=on_gpu: sizes)
        ranks_connect._open_stages_group(Mesh(pp), cpu)  # type: ignore[arg-type]
        assert asked == [("group of pp", cpu)] * expected
