"""Simulate hosts on one machine: network namespaces behind a switch with a rate and a delay.

    python benchmarks/hosts.py --hosts 2 --rate 1gbit --delay 1ms -- bigtrain train KEY=VALUE
    python benchmarks/hosts.py -- torchrun --nnodes 2 --node-rank {host} --nproc-per-node 1 \
        --rdzv-backend c10d --rdzv-endpoint host0:29400 bigtrain/train.py KEY=VALUE
    python benchmarks/hosts.py --first -- deepspeed --hostfile {hostfile} --master_addr host0 \
        bigtrain/train.py KEY=VALUE
    python benchmarks/hosts.py --first -- mpirun --allow-run-as-root --host {hosts} \
        bigtrain/train.py KEY=VALUE
    python benchmarks/hosts.py --slurm -- srun -N 2 --ntasks-per-node 1 \
        python bigtrain/train.py KEY=VALUE
    python benchmarks/hosts.py --table --output benchmarks/results/hosts.json
    python benchmarks/hosts.py --remove

The command runs on every host, as one rank of `host0`, `host1`, ... by torch's variables (RANK,
WORLD_SIZE, MASTER_ADDR ...), or with --first on `host0` only, to start the others itself: `ssh` and
`pdsh` lead to the other hosts. In the command {host} is the host's number, {hosts} the names of all
hosts separated by commas, and {hostfile} a file of them in DeepSpeed's format. Each host has its
own network, name, /etc/hosts and core; files, memory and process numbers are the machine's.

Everything is removed at the end, also after Ctrl-C and after a failure; `--remove` removes the
remains of a killed process. Root is needed. `benchmarks/network_switch.py` carries the frames.
`--table` runs `benchmarks/hosts_table.py`; `--slurm` starts a Slurm over the hosts, and the command
on `host0` (`benchmarks/slurm_hosts.py`).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

from network_switch import mac_of

from bigtrain.errors import ConfigError

PREFIX = "bigtrain-host-"
"""Of the names of namespaces and folders; the number of the process that made them follows."""
TOOLS = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
SWITCH = Path(__file__).with_name("network_switch.py")
END_S = 10.0
"""Seconds that the programs of a host get to end by themselves."""
PORT = 29500
"""Of the rendezvous on host0: no other program is on that network."""
_PR_SET_PDEATHSIG = 1
_NAMESPACES = Path("/run/netns")

# Options with an argument are skipped with it. When DeepSpeed is stopped, it searches all hosts for
# programs by name: process numbers are shared, so it would find the programs of other runs.
_SSH = """#!/bin/sh
while :; do case "$1" in
  -[opliFEcmbeDLRWSJwOQIB]) shift 2;;
  -*) shift;;
  *) break;;
esac; done
number=${1#*@}; number=${number#host}; shift
case "$*" in pkill*|killall*) exit 0;; esac
exec %(enter)s %(names)s"$number" unshare --uts --mount sh -c '%(settle)s' \
  "host$number" %(hosts_file)s taskset -c $((number %% %(cores)d)) sh -c "cd $PWD && $*"
"""
_PDSH = """#!/bin/sh
while :; do case "$1" in
  -w) hosts=$2; shift 2;;
  -[fxtulR]) shift 2;;
  -*) shift;;
  *) break;;
esac; done
number=0 started= status=0
for host in $(echo "$hosts" | tr , " "); do
  ssh "$host" "$(printf %s "$*" | sed "s/%n/$number/g; s/%h/$host/g")" & started="$started $!"
  number=$((number + 1))
done
for one in $started; do wait "$one" || status=$?; done
exit $status
"""
# Without a name server, as that network has none: each look-up would wait for seconds.
_SETTLE = (
    'echo "$0" >/proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && '
    '{ mount --bind /dev/null /etc/resolv.conf; shift; exec "$@"; }'
)


class World:
    """Hosts with their own network, which exist inside the `with` block.

    Args:
        hosts: how many.
        rate: bits a second of each host's link, each way.
        delay: seconds from one host to another.

    Raises:
        ConfigError: this machine, or this user, cannot make namespaces.
    """

    def __init__(self, hosts: int, rate: float, delay: float) -> None:
        _check_able()
        if hosts < 2:
            raise ConfigError(f"--hosts {hosts}: a network has at least 2. Use --hosts 2")
        self.hosts, self.rate, self.delay = hosts, rate, delay
        self.names = [f"{PREFIX}{os.getpid()}-{number}" for number in range(hosts)]
        self.folder = Path()
        """What belongs to the hosts: names, programs, a Slurm's files."""
        self._switch: subprocess.Popen[str] | None = None
        self._cores = sorted(os.sched_getaffinity(0))

    def __enter__(self) -> World:
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._remove()

    @property
    def hostfile(self) -> Path:
        """The hosts in DeepSpeed's format, with a slot on each."""
        return self.folder / "hostfile"

    def words(self, command: Sequence[str], host: int) -> list[str]:
        """Return a command with its {names} replaced."""
        known = {
            "{host}": str(host),
            "{hosts}": ",".join(f"host{n}" for n in range(self.hosts)),
            "{hostfile}": str(self.hostfile),
        }
        filled = []
        for word_of_command in command:
            word = word_of_command
            for key, value in known.items():
                word = word.replace(key, value)
            filled.append(word)
        return filled

    def start(
        self,
        host: int,
        command: Sequence[str],
        environ: Mapping[str, str] | None = None,
        output: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program on a host.

        Args:
            host: its number.
            command: its words.
            environ: added to this process's variables.
            output: a file's descriptor for all that it prints; left out, this process's own.
        """
        core = self._cores[host % len(self._cores)]
        enter = ["nsenter", f"--net={_NAMESPACES / self.names[host]}", "unshare", "--uts"]
        namespace = ["--mount", "sh", "-c", _SETTLE, f"host{host}", str(self.folder / "hosts")]
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"

        def settle() -> None:
            os.sched_setaffinity(0, {core})
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        return subprocess.Popen(
            [*enter, *namespace, *self.words(command, host)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PATH": path, **(environ or {})},
            preexec_fn=settle,
            start_new_session=True,
        )

    def run(
        self,
        command: Sequence[str],
        *,
        first: bool = False,
        limit_s: float | None = None,
        output: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> int:
        """Run a command on every host, or on the first; return the worst exit status.

        Where one fails the others are ended. After `limit_s` seconds all are, and it is 124. The
        ranks find each other by torch's variables, or by what `environ` has in their place.
        """
        places = range(1 if first else self.hosts)
        meeting = {"MASTER_ADDR": "host0", "MASTER_PORT": str(PORT)} if environ is None else environ
        environs = [meeting if first else {**meeting, **self._rank(n)} for n in places]
        running = [self.start(n, command, environs[n], output) for n in places]
        deadline = None if limit_s is None else time.monotonic() + limit_s
        try:
            while any(program.poll() is None for program in running):
                if any(program.poll() not in (None, 0) for program in running):
                    break
                if deadline is not None and time.monotonic() > deadline:
                    return 124
                time.sleep(0.05)
        finally:
            self.end_programs(running)
        return max((abs(program.returncode or 0) for program in running), default=0)

    def end_programs(self, started: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        """End all programs on the hosts, first by SIGTERM, then by SIGKILL."""
        if any(program.poll() not in (None, 0) for program in started):
            self._wait(END_S)  # the other hosts notice it themselves
        for number in (signal.SIGTERM, signal.SIGKILL):
            pids = [
                program.pid for program in started if program.poll() is None
            ]  # perhaps not on the host yet
            for pid in {*pids, *self._programs()}:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            self._wait(END_S)
        for program in started:
            program.wait(END_S)

    def _wait(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while self._programs() and time.monotonic() < end:
            time.sleep(0.05)

    def _rank(self, host: int) -> dict[str, str]:
        return {
            **{"RANK": str(host), "WORLD_SIZE": str(self.hosts)},
            **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        }

    def _make(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        command = [sys.executable, str(SWITCH), str(self.rate), str(self.delay), *self.names]
        self._switch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self._switch.stdout is None or self._switch.stdout.readline() != "ready\n":
            raise ConfigError(
                "the network could not be made: see above. Is there /dev/net/tun? modprobe tun"
            )
        lines = ["127.0.0.1 localhost"]
        for number, name in enumerate(self.names):
            address = f"10.77.{number // 250}.{number % 250 + 1}"
            mac = ":".join(f"{byte:02x}" for byte in mac_of(number))
            lines.append(f"{address} host{number}")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "address", mac)
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "addr", "add", f"{address}/16", "dev", "eth0")
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        slots = "".join(f"host{number} slots=1\n" for number in range(self.hosts))
        self.hostfile.write_text(slots)
        programs = self.folder / "bin"
        programs.mkdir()
        values = {
            "enter": "nsenter",
            "names": f"--net={_NAMESPACES}/{self.names[0].rpartition('-')[0]}-",
            "settle": _SETTLE,
            "hosts_file": shlex.quote(str(self.folder / "hosts")),
            "cores": len(self._cores),
        }
        for name, text in {"ssh": _SSH % values, "pdsh": _PDSH}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)

    def _programs(self) -> list[int]:
        return [pid for name in self.names for pid in _pids(name)]

    def _remove(self) -> None:
        try:
            self.end_programs()
        finally:
            if self._switch is not None:
                self._switch.kill()
                self._switch.wait()
            for name in self.names:
                _forget(name)
            shutil.rmtree(self.folder, ignore_errors=True)


def remove_leftovers() -> list[str]:
    """Remove namespaces and folders of ended processes; end programs there; return the names."""
    places = (_NAMESPACES, Path(tempfile.gettempdir()))
    leftovers = [path for parent in places for path in sorted(parent.glob(f"{PREFIX}*"))]
    gone = [
        path
        for path in leftovers
        if not Path("/proc", path.name.removeprefix(PREFIX).partition("-")[0]).exists()
    ]
    for path in gone:
        if path.parent != _NAMESPACES:
            shutil.rmtree(path, ignore_errors=True)
            continue
        for pid in _pids(path.name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _forget(path.name)
    return [path.name for path in gone]


def _pids(name: str) -> list[int]:
    if not (_NAMESPACES / name).exists():
        return []
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def _forget(name: str) -> None:
    if (_NAMESPACES / name).exists():
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip() or f"status {done.returncode}"
        raise ConfigError(f"ip {' '.join(words)}: {reason}. Can this machine make namespaces?")


def _check_able() -> None:
    if os.geteuid() != 0:
        raise ConfigError(
            "hosts.py makes network namespaces, which only root may. Use "
            f"sudo {sys.executable} benchmarks/hosts.py"
        )
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise ConfigError(f"hosts.py needs {tool}. Run: apt-get install {package}")
    if not Path("/dev/net/tun").exists():
        raise ConfigError("hosts.py needs /dev/net/tun. Run: modprobe tun")


_RATES = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
_TIMES = {"ms": 1e-3, "us": 1e-6, "s": 1.0}


def parse_rate(text: str) -> float:
    """Return the bits per second of '1gbit', '100mbit'.

    Raises:
        ConfigError: it is none.
    """
    return _parse("--rate", text, _RATES, "100mbit or 1gbit", least=1e3)


def parse_delay(text: str) -> float:
    """Return the seconds of '1ms', '50us', '0ms'.

    Raises:
        ConfigError: it is none.
    """
    return _parse("--delay", text, _TIMES, "1ms or 50us", least=0.0)


def _parse(option: str, text: str, units: Mapping[str, float], example: str, least: float) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if match is None or match[2] not in units or float(match[1]) * units[match[2]] < least:
        raise ConfigError(f"{option} {text}: a number and a unit are needed. Write {example}")
    return float(match[1]) * units[match[2]]


def main() -> int:
    """Run one command on simulated hosts, or the table; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument(
        "--rate", default="1gbit", help="of each link in each direction (default 1gbit)"
    )
    parser.add_argument("--delay", default="1ms", help="from host to host (default 1ms)")
    parser.add_argument("--first", action="store_true", help="run it on host0 only")
    parser.add_argument("--slurm", action="store_true", help="on host0, in a Slurm of the hosts")
    parser.add_argument(
        "--remove", action="store_true", help="remove the remains of killed processes"
    )
    parser.add_argument("--table", action="store_true", help="measure strategies on two links")
    parser.add_argument("--steps", type=int, default=8, help="of --table: timed steps")
    parser.add_argument("--cluster", help="of --table: figures of this machine (default: measure)")
    parser.add_argument("--output", type=Path, help="of --table: a JSON file")
    parser.add_argument("command", nargs="*", help="after --")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        if options.remove:
            _check_able()
            print(f"removed: {', '.join(remove_leftovers()) or 'there was nothing'}")
            return 0
        if options.table:
            from hosts_table import make_table

            return make_table(options.hosts, options.steps, options.output, options.cluster)
        if not options.command:
            raise ConfigError("hosts.py: no command. Write it after --, or use --table or --remove")
        rate, delay = parse_rate(options.rate), parse_delay(options.delay)
        with World(options.hosts, rate, delay) as world:
            if options.slurm:
                from slurm_hosts import start_slurm

                return world.run(options.command, first=True, environ=start_slurm(world))
            return world.run(options.command, first=options.first)
    except ConfigError as error:
        print(f"hosts.py: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def _stop(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
