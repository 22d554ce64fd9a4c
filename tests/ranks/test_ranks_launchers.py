"""Real launchers: the placement that every rank gets, and the output when a rank fails."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from support.cluster import find, free_port, slurm
from support.programs import HELLO, ROOT, Finished, environment, finish, run, start
from support.zygote import interpreter

from bigtrain.ranks.launcher_env import first_host

pytestmark = pytest.mark.launcher

LAUNCHERS = ["torchrun", "deepspeed", "srun", "openmpi", "mpich", "start_ranks"]
# All ranks must have ended within this many seconds after they have met and one has failed.
GONE_S = 30.0
LOST = r"bigtrain: rank 0 lost rank 1: it ended without a message \(killed by the system\?"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm") / "run") as variables:
        yield variables


def launch(
    request: pytest.FixtureRequest, launcher: str, *arguments: str, real: bool = False
) -> Finished:
    """Run hello.py on two ranks of this node.

    Launchers that are written in Python, and their ranks, are forked with their imports done; with
    `real` they are the installed programs, as the other launchers always are.
    """
    script = [HELLO, *arguments]
    python = [sys.executable, *script]
    if launcher == "torchrun":
        return run([*torchrun("--nproc-per-node", "2", real=real), *script])
    if launcher == "deepspeed":
        options = ["--num_accelerators", "2", "--master_port", str(free_port())]
        return run([*deepspeed(real=real), *options, *script])
    if launcher == "srun":
        variables = request.getfixturevalue("cluster")
        return run([find("srun"), "-n2", "--overcommit", *python], variables)
    if launcher == "openmpi":
        # A container may have only root, and a small machine only one core.
        options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
        return run([find("mpiexec.openmpi"), *options, *python])
    if launcher == "mpich":
        return run([find("mpiexec.hydra"), "-n", "2", *python])
    starts = sys.executable if real else interpreter()
    return run([starts, str(ROOT / "tests/support/scripts/start.py"), "2", *arguments])


def deepspeed(*, real: bool) -> list[str]:
    return [find("deepspeed")] if real else [interpreter("deepspeed"), find("deepspeed")]


def torchrun(*options: str, real: bool) -> list[str]:
    program = [sys.executable if real else interpreter(), "-m", "torch.distributed.run"]
    return [*program, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *options]


# Those that train (test_ranks_train_launchers.py) also connect.
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_ranks_find_each_other(request: pytest.FixtureRequest, launcher: str) -> None:
    finished = launch(request, launcher, real=True)
    assert finished.status == 0, finished.output
    seen = {"start_ranks": "bigtrain"}.get(launcher, launcher)
    for number, rank in enumerate(finished.ranks):
        assert (rank["rank"], rank["local_rank"]) == (number, number)
        assert (rank["world_size"], rank["local_world_size"]) == (2, 2)
        assert (rank["launcher"], rank["total"]) == (seen, 3)
    assert "Warning" not in finished.output.replace("[WARNING]", "")
    finished.assert_all_gone()


@pytest.mark.parametrize(
    ("launcher", "behaviour"), [*product(LAUNCHERS, ["collective", "sleep", "compute"])]
)
def test_one_failure_ends_all(
    request: pytest.FixtureRequest, launcher: str, behaviour: str
) -> None:
    failing = "0" if behaviour == "compute" else "1"
    finished = launch(request, launcher, "--fail", "raise", "--on", failing, "--others", behaviour)
    finished.assert_all_gone()
    assert finished.status == 1
    assert finished.seconds_together < GONE_S
    # torchrun adds its traceback, and shows the rank's inside its summary.
    shown = finished.output.split("Traceback (most recent call last):\n")[1:]
    assert f"Deliberate: rank {failing} fails on purpose" in shown[-1], finished.output
    rank_tracebacks = [part for part in shown if "torch/distributed/launcher" not in part]
    assert len(rank_tracebacks) == (2 if launcher == "torchrun" else 1), finished.output
    assert "closed by peer" not in finished.output
    assert "lost rank" not in finished.output


@pytest.mark.parametrize(
    ("launcher", "behaviour"),
    [*product(LAUNCHERS, ["sleep", "collective"])],
)
def test_a_killed_rank_ends_all(
    request: pytest.FixtureRequest, launcher: str, behaviour: str
) -> None:
    finished = launch(request, launcher, "--fail", "kill", "--others", behaviour)
    finished.assert_all_gone()
    assert finished.status != 0
    assert finished.seconds_together < GONE_S
    assert "closed by peer" not in finished.output
    # If the launcher is faster than the surviving rank, it reports the killed rank itself.
    reported = re.search(LOST, finished.output) or re.search("[Ss]ignal 9|SIGKILL", finished.output)
    assert reported, finished.output
    if launcher == "srun":
        assert re.search(LOST, finished.output), finished.output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_users_fault_is_said_once(request: pytest.FixtureRequest, launcher: str) -> None:
    finished = launch(request, launcher, "--early")
    assert finished.output.count("bigtrain: train.steps=0 is too few. Use train.steps=1") == 1
    # torchrun's exit status is only 0 or 1.
    assert finished.status == (1 if launcher == "torchrun" else 2)


def test_the_users_fault_found_by_one_rank(request: pytest.FixtureRequest) -> None:
    finished = launch(request, "start_ranks", "--fail", "config")
    assert finished.output.count("bigtrain: train.steps=0 found by rank 1. Use train.") == 1
    assert "Traceback" not in finished.output
    assert finished.status == 2


def test_the_same_failure_everywhere_is_shown_once(request: pytest.FixtureRequest) -> None:
    finished = launch(request, "mpich", "--fail", "everywhere")
    assert finished.output.count("Traceback") == 1
    assert finished.status == 1


@pytest.mark.parametrize(("how", "status"), [("exit7", 1), ("exit75", 75)])
def test_exit_statuses(request: pytest.FixtureRequest, how: str, status: int) -> None:
    # The others exit by themselves after a regular end, and are ended after an irregular one.
    behaviour = "nothing" if how == "exit75" else "sleep"
    finished = launch(request, "start_ranks", "--fail", how, "--others", behaviour)
    assert finished.status == status
    assert "Traceback" not in finished.output
    finished.assert_all_gone()


def test_a_killed_rank_in_one_line(request: pytest.FixtureRequest) -> None:
    finished = launch(request, "start_ranks", "--fail", "kill", "--others", "sleep")
    last = finished.output.splitlines()[-1]
    assert last.startswith("bigtrain: rank 1 was killed (signal 9): host memory ran out? (host ")
    assert last.endswith("free now) See the kernel's log: dmesg | tail")
    assert finished.status == 1


@pytest.mark.parametrize(
    ("signal_name", "status", "behaviour"),
    [
        ("SIGINT", 130, "sleep"),
        ("SIGTERM", 143, "collective"),
        ("SIGINT", 130, "collective"),
        ("SIGTERM", 143, "sleep"),
    ],
)
def test_a_stop_ends_all_quietly(signal_name: str, status: int, behaviour: str) -> None:
    import signal

    command = [sys.executable, str(ROOT / "tests/support/scripts/start.py"), "2"]
    process = start([*command, "--fail", "nothing", "--others", behaviour, "--linger"])
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(getattr(signal, signal_name))
    finished = finish(process)
    assert finished.output == ""
    whole = Finished(finished.status, first, finished.ended)
    whole.assert_all_gone()
    assert whole.status == status
    assert whole.seconds_together < GONE_S


def test_several_connections_in_one_launch(request: pytest.FixtureRequest) -> None:
    for launcher in ("mpich", "torchrun", "deepspeed"):
        finished = launch(request, launcher, "--times", "3")
        assert finished.status == 0, finished.output
        assert finished.output.count('[{"rank": 0') == 3


def test_hydra_says_where_rank_0_is_over_several_hosts() -> None:
    """Two names of this machine, each with a separate proxy, are two hosts for mpiexec."""
    hosts = ["-launcher", "fork", "-hosts", "localhost,127.0.0.1", "-ppn", "1", "-n", "2"]
    finished = run([find("mpiexec.hydra"), *hosts, sys.executable, HELLO, "--times", "2"])
    assert finished.status == 0, finished.output
    assert finished.output.count('[{"rank": 0') == 2
    assert finished.output.count('"local_world_size": 1, "launcher": "mpich", "total": 3') == 4


def test_two_launches_at_once_do_not_meet() -> None:
    command = [find("mpiexec.hydra"), "-n", "2", sys.executable, HELLO]
    processes = [start(command) for _ in range(2)]
    for process in processes:
        finished = finish(process)
        assert finished.status == 0
        assert [rank["rank"] for rank in finished.ranks] == [0, 1]


def test_wrapper_scripts_do_not_part_the_ranks() -> None:
    command = [find("mpiexec.hydra"), "-n", "2", "bash", "-c", f"{sys.executable} {HELLO}; exit $?"]
    finished = run(command)
    assert finished.status == 0
    assert len(finished.ranks) == 2


@pytest.mark.parametrize("how", ["uneven", "ok", "fail", "guarded"])
def test_a_connection_that_is_held_open_to_the_end(how: str) -> None:
    script = str(ROOT / "tests/support/scripts/held_open.py")
    began = time.monotonic()
    finished = run([find("mpiexec.hydra"), "-n", "2", sys.executable, script, how])
    assert time.monotonic() - began < 120, "the failing rank did not end the sleeping one"
    assert "lost rank" not in finished.output
    if how == "fail":
        assert finished.status != 0
        assert finished.output.count("Traceback") == 1
        assert "[rank1]: ValueError: odd" in finished.output
    elif how == "guarded":
        assert (finished.status, finished.output) == (2, "bigtrain: odd\n")
    else:
        assert (finished.status, finished.output) == (0, "")


@pytest.mark.parametrize("failure", [[], ["--fail", "raise", "--others", "sleep"]])
def test_torchrun_on_two_nodes(failure: list[str]) -> None:
    port = str(free_port())
    agents = []
    for node in ("0", "1"):
        options = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", node]
        address = ["--master-addr", "127.0.0.1", "--master-port", port]
        program = [interpreter(), "-m", "torch.distributed.run"]
        agents.append(start([*program, *options, *address, HELLO, *failure]))
    first, second = (finish(agent) for agent in agents)
    first.assert_all_gone()
    assert first.seconds_together < GONE_S
    if failure:
        assert (first.status, second.status) == (1, 1)
        assert "Deliberate: rank 1 fails on purpose" in second.output
        assert "Deliberate" not in first.output
    else:
        assert (first.status, second.status) == (0, 0)
        assert [rank["local_world_size"] for rank in first.ranks] == [1, 1]


def test_plain_deepspeed() -> None:
    finished = run([*deepspeed(real=False), "--master_port", str(free_port()), HELLO])
    assert finished.status == 0, finished.output
    assert {rank["launcher"] for rank in finished.ranks} == {"deepspeed"}


def test_a_batch_script_is_one_process(cluster: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "output"
    options = ["-W", "-n2", "--overcommit", "-o", str(output)]
    wrapped = f"{sys.executable} {HELLO}"
    run([find("sbatch"), *options, "--wrap", wrapped], cluster)
    (rank,) = Finished(0, output.read_text(), 0.0).ranks
    assert (rank["world_size"], rank["launcher"]) == (1, "python")


def test_the_first_host_is_slurms(cluster: dict[str, str]) -> None:
    for node_list in ("gpu[07-09,12],login", "login,gpu[1-2]"):
        shown = subprocess.run(
            [find("scontrol"), "show", "hostnames", node_list],
            env=environment(cluster),
            capture_output=True,
            text=True,
            check=True,
        )
        assert shown.stdout.split()[0] == first_host(node_list)


def test_a_missing_program_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    words = "no-such-program is missing. Run: apt-get install no-such-program"
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=words):
        find("no-such-program")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=words):
        find("no-such-program")
