"""Hosts in network namespaces: delivery of frames, launchers over the hosts, and cleanup."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.cluster import find

ROOT = Path(__file__).parents[1]
HOSTS = ROOT / "benchmarks" / "hosts.py"
sys.path.insert(0, str(HOSTS.parent))

import hosts  # noqa: E402
from network_switch import HEADER_BYTES, MOST_WAITING_S, Port, Wires, mac_of  # noqa: E402

from bigtrain.errors import ConfigError  # noqa: E402

sys.path.remove(str(HOSTS.parent))
LENET = [
    *("model.name=lenet", "data.name=synthetic", "data.args.kind=classification"),
    *("data.args.input_shape=[1,32,32]", "train.global_batch_size=8", "train.steps=2"),
    *("memory.predict=false", "memory.track_steps=0", "checkpoint.at_end=false"),
]


@pytest.fixture
def as_root():
    """Require root and iproute2: fail in CI without them, skip elsewhere."""
    missing = [tool for tool in hosts.TOOLS if shutil.which(tool) is None]
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"{missing[0]} is missing. Run: apt-get install {hosts.TOOLS[missing[0]]}")
    if missing or os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        pytest.skip("network namespaces need root, iproute2 and /dev/net/tun")


def start_hosts(*words: str) -> subprocess.Popen[str]:
    """Start hosts.py with these words."""
    command = [sys.executable, str(HOSTS), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def left_of(process: subprocess.Popen[str]) -> list[str]:
    places = (Path("/run/netns"), Path(tempfile.gettempdir()))
    return [
        path.name for folder in places for path in folder.glob(f"{hosts.PREFIX}{process.pid}-*")
    ]


def frame(to: int, size: int) -> bytes:
    return bytes(HEADER_BYTES) + mac_of(to) + bytes(size - 6)


def test_frames_take_their_bits_and_the_delay():
    ports = [Port(n, mac_of(n)) for n in range(3)]
    links = Wires(ports, rate=8e6, delay=0.25)  # a byte takes a microsecond
    links.take(ports[0], frame(1, 1000), 0.0)
    links.take(ports[0], frame(1, 1000), 0.0)  # queued behind the first frame
    links.take(ports[2], frame(1, 1000), 0.0)  # from another port, over the same link
    assert links.next_arrival() == pytest.approx(0.251)
    assert links.arrived(0.2509) == []
    assert [port.fd for port, _ in links.arrived(0.2511)] == [1]
    assert len(links.arrived(0.2521)) == 1
    assert len(links.arrived(0.2531)) == 1
    links.take(ports[1], frame(9, 1000), 1.0)  # an unknown address: sent to all other ports
    assert sorted(port.fd for port, _ in links.arrived(2.0)) == [0, 2]


def test_who_has_much_to_send_waits():
    ports = [Port(n, mac_of(n)) for n in range(2)]
    links = Wires(ports, rate=8e6, delay=0.0)
    links.take(ports[0], frame(1, round(MOST_WAITING_S * 1e6) + 1000), 0.0)
    assert not links.takes(ports[0], 0.0)
    assert links.takes(ports[0], 0.002)
    assert links.takes(ports[1], 0.0)  # the opposite direction is free


def test_rates_and_delays_are_read():
    assert hosts.parse_rate("1gbit") == 1e9
    assert hosts.parse_rate("2.5mbit") == 2.5e6
    assert hosts.parse_delay("50us") == pytest.approx(5e-5)
    assert hosts.parse_delay("0ms") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "fast", "--", "true"], "--rate fast: a number and a unit .* 100mbit or 1gbit"),
        (["--delay", "1", "--", "true"], "--delay 1: a number and a unit are needed. Write 1ms"),
        (["--hosts", "1", "--", "true"], "--hosts 1: a network has at least 2. Use --hosts 2"),
        ([], "no command. Write it after --, or use --table or --remove"),
    ],
)
def test_bad_words_are_refused(words, message, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["hosts.py", *words])
    monkeypatch.setattr(hosts, "_check_able", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert hosts.main() == 2
    assert re.search(message, capfd.readouterr().err)


def test_without_root_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="which only root may. Use sudo .*hosts.py"):
        hosts.World(2, 1e9, 0.0)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="hosts.py needs ip. Run: apt-get install iproute2"):
        hosts.World(2, 1e9, 0.0)


def test_hosts_know_each_other_and_nothing_is_left(as_root):
    script = 'hostname; ssh host1 "hostname; echo of $RANK"; pdsh -w host0,host1 echo %h is %n'
    process = start_hosts("--first", "--", "sh", "-c", script)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert lines[:2] == ["host0", "host1"]
    assert sorted(lines[3:]) == ["host0 is 0", "host1 is 1"]
    assert left_of(process) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_nothing(as_root, number):
    process = start_hosts("--", "sh", "-c", "echo up; sleep 60")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert left_of(process) == []


def test_what_a_killed_process_leaves_is_removed(as_root):
    with start_hosts("--", "sh", "-c", "echo up; sleep 60 & sleep 60") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()
        process.wait()
        assert len(left_of(process)) == 3
        out, _ = start_hosts("--remove").communicate(timeout=60)
    assert f"{hosts.PREFIX}{process.pid}-0" in out
    assert left_of(process) == []


OF_TORCHRUN = ["--nnodes", "2", "--node-rank", "{host}", "--nproc-per-node", "1"]
OF_TORCHRUN += ["--rdzv-backend", "static", "--master-addr", "host0"]
OF_DEEPSPEED = ["--master_addr", "host0"]
LAUNCHERS = {
    "torchrun": ["--", sys.executable, "-m", "torch.distributed.run", *OF_TORCHRUN],
    "deepspeed": [
        "--first",
        "--",
        str(Path(sys.executable).with_name("deepspeed")),
        "--hostfile",
        "{hostfile}",
        "--master_addr",
        "host0",
    ],
    "srun": ["--slurm", "--", "srun", "-N", "2", "--ntasks-per-node", "1", sys.executable],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_train_over_two_hosts(as_root, tmp_path, launcher):
    for program in ("munged", "slurmctld", "slurmd", "srun") if launcher == "srun" else ():
        find(program)
    train = [str(ROOT / "bigtrain" / "train.py"), *LENET, f"log.dir={tmp_path}", "log.name=run"]
    process = start_hosts("--delay", "1ms", "--rate", "100mbit", *LAUNCHERS[launcher], *train)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    steps = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == 2
    assert left_of(process) == []
