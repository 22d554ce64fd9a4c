"""What is refused as ranks meet, and what one process has instead."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bigtrain.errors import ConfigError, LaunchError
from bigtrain.ranks.connect import connect, pick_backend, pick_device
from bigtrain.ranks.context import RunContext, resolve_mesh
from bigtrain.ranks.cpu_threads import thread_share
from bigtrain.ranks.launcher_env import SINGLE_RANK, Launcher, RankInfo
from bigtrain.ranks.rendezvous import hostname_resolves, master_address, open_rendezvous


def placed(rank: int, world: int, local: int, launcher: Launcher = "env") -> RankInfo:
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
        ((1, 0, 1), 8, r"mesh.dp=0 must be at least 1 \(or -1: what remains\)"),
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
    assert pick_device("auto", placed(3, 4, 2), {}) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="4 ranks on this node, 2 GPUs. Start 2 ranks a node"):
        pick_device("auto", placed(0, 4, 4), {})
    gpus(monkeypatch, 1)
    own = {"SLURM_GPUS_PER_TASK": "1"}
    assert pick_device("cuda", placed(3, 4, 4, "srun"), own) == torch.device("cuda", 0)
    own = {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}
    assert pick_device("cuda", placed(3, 4, 4, "srun"), own) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="2 ranks on this node, 1 GPU. Start 1 rank a node"):
        pick_device("cuda", placed(0, 2, 2), {"SLURM_TRES_PER_TASK": "cpu=4"})
    seen = r"1 GPU to be seen with CUDA_VISIBLE_DEVICES=0\. Start 1 rank a node"
    with pytest.raises(ConfigError, match=seen):
        pick_device("cuda", placed(0, 2, 2), {"CUDA_VISIBLE_DEVICES": "0"})
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
    with pytest.raises(ConfigError, match="mpi is not in this build .* use mesh.backend=gloo"):
        pick_backend("mpi", cpu)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    assert pick_backend("mpi", cpu) == "mpi"


def test_everything_is_refused_before_a_group_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(ConfigError, match="mesh.pp=2"), connect(SINGLE_RANK, pp=2):
        pass
    gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match="no GPU"), connect(placed(0, 2, 2), device="cuda"):
        pass
    with (
        pytest.raises(ConfigError, match="mesh.timeout=0 are seconds"),
        connect(SINGLE_RANK, timeout=0),
    ):
        pass


SRUN = {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "100", "SLURM_STEP_ID": "2"}


@pytest.mark.parametrize(
    ("placement", "environ", "address"),
    [
        (placed(0, 2, 2, "srun"), SRUN, None),
        (placed(0, 2, 2, "mpich"), {}, None),
        (placed(0, 4, 2, "srun"), SRUN, ("gpu07", 18102)),
        (placed(0, 4, 2, "srun"), {**SRUN, "MASTER_PORT": "1234"}, ("gpu07", 1234)),
        (placed(0, 4, 2, "openmpi"), {"MASTER_ADDR": "a"}, ("a", 29500)),
        (placed(0, 2, 2), {"MASTER_ADDR": "a", "MASTER_PORT": "5"}, ("a", 5)),
        (placed(0, 2, 2, "srun"), {"MASTER_ADDR": "a", "MASTER_PORT": "5"}, ("a", 5)),
    ],
)
def test_master_address(
    placement: RankInfo, environ: dict[str, str], address: tuple[str, int] | None
) -> None:
    assert master_address(placement, environ) == address


@pytest.mark.parametrize(
    ("placement", "environ", "message"),
    [
        (placed(0, 4, 2, "openmpi"), {}, r"4 ranks, 2 of them .*mpiexec -x MASTER_ADDR=HOST"),
        (placed(0, 4, 2, "mpich"), {}, r"mpiexec -genv MASTER_ADDR HOST"),
        (placed(0, 2, 2), {}, r"MASTER_ADDR is not set, RANK=0 and WORLD_SIZE=2 are"),
        (placed(0, 2, 2), {"MASTER_ADDR": "a"}, r"MASTER_PORT is not set"),
        (placed(0, 2, 2), {"MASTER_ADDR": "a", "MASTER_PORT": "x"}, r"MASTER_PORT='x' is not a"),
        (placed(0, 4, 2, "srun"), {}, r"SLURM_STEP_NODELIST is not set.*MASTER_ADDR=FIRST_HOST"),
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
        open_rendezvous(placed(rank, 2, 2), {}, timeout_s=0.6, path=tmp_path / "meet")
    assert list(tmp_path.iterdir()) == []


def test_an_address_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.raises(LaunchError, match=f"at 127.0.0.1:{port}: (?s:.*)raise mesh.setup_timeout"):
        open_rendezvous(placed(1, 2, 2, "srun"), environ, timeout_s=0.6)


@pytest.mark.parametrize(
    ("users", "threads"),
    [([1], 1), ([2, 2], 1), ([4, 4], 1), ([2] * 8, 4), ([3] * 3, 1), ([1, 1, 2, 2], 3)],
)
def test_thread_share(users: list[int], threads: int) -> None:
    assert thread_share(users) == threads


def test_the_name_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert hostname_resolves()
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert not hostname_resolves()


def test_gloo_takes_the_loopback_where_the_name_leads_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []
    init = dist.init_process_group

    def note(*args: object, **options: object) -> None:
        seen.append(os.environ.get("GLOO_SOCKET_IFNAME"))
        init(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(dist, "init_process_group", note)
    for name in ("localhost", "no-such-host.invalid"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        with connect(SINGLE_RANK, device="cpu", force_group=True) as context:
            context.barrier()
    assert seen == [None, "lo"]
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_alone_works_without_any_group() -> None:
    context = RunContext.alone("meta", seed=3)
    assert context.device == torch.device("meta")
    assert (context.seed, context.dp_size, context.dp_group) == (3, 1, None)
