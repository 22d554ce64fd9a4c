"""Processes that start with everything imported, for tests that start many processes.

Each flavour has a fork server, started on first use, that has imported the libraries and is forked
for each process: a process costs 20 ms, while an interpreter that imports torch costs seconds. In
all other respects it is a separate process: folder, variables, files, session, signals, exit
status. Tests of a real interpreter's start (its imports, time and peak memory) must not use it.

    forked_cli(["strategies"])                 # as subprocess.run([python, "-m", "bigtrain", ...])
    forked_script("train.py", ["--dry-run"])   # as subprocess.run([python, "train.py", ...])
    subprocess.Popen([interpreter(), "-m", "bigtrain", ...])  # with all that Popen can do
    zygote().call(function, arguments, files)  # a function of a module in a new process
"""

from __future__ import annotations

import array
import atexit
import contextlib
import marshal
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from support.zygote_python import SUFFIX

Flavour = Literal["plain", "deepspeed", "hub"]

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_PATIENCE_S = 5.0
_running: dict[str, Zygote] = {}


class Child:
    """A process that a zygote has started.

    Args:
        connection: to the zygote, which sends the exit status through it; closing it earlier kills
        the
            process.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._said = b""
        self._status: int | None = None
        self.pid = self._next(b"P", None)

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit status, or the negative number of the signal that ended the process.

        Raises:
            TimeoutError: the process has not ended within `timeout_s` seconds.
        """
        if self._status is None:
            self._status = self._next(b"E", timeout_s)
        return self._status

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        try:
            return self.wait(0)
        except TimeoutError:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._status is None:
            with contextlib.suppress(OSError):
                self._connection.sendall(bytes([number]))

    def close(self) -> None:
        """Kill the process if it runs, and wait for its end."""
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)
            with contextlib.suppress(RuntimeError):
                self.wait()
        self._connection.close()

    def _next(self, kind: bytes, timeout_s: float | None) -> int:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while len(self._said) < 9:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._connection], [], [], left)[0]:
                raise TimeoutError(f"process {self.pid} still runs after {timeout_s} s")
            part = self._connection.recv(9 - len(self._said))
            if not part:
                raise RuntimeError("the zygote has ended")
            self._said += part
        received, self._said = self._said, b""
        if received[:1] != kind:
            raise RuntimeError(f"the zygote says {received!r}")
        return int.from_bytes(received[1:], "little", signed=True)


class Zygote:
    """The client of one fork server.

    Args:
        flavour: libraries that the server has imported.
        folder: for sockets and logs; removed at the end.
    """

    def __init__(self, flavour: Flavour, folder: Path) -> None:
        self.flavour = flavour
        self.folder = folder
        self._address = str(folder / flavour)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen(64)
        self._process: subprocess.Popen[bytes] | None = None
        self._server: Child | None = None
        read, self._life = os.pipe()
        with (folder / f"{flavour}.log").open("wb") as log:
            if flavour == "plain":
                self._process = self._begin(read, log.fileno())
            else:
                surroundings = _environ(_plain_surroundings())
                files = [log.fileno()] * 3 + [self._listener.fileno(), read]
                request = {"kind": "serve", "flavour": flavour, "environ": surroundings}
                self._server = zygote().start(request, files)
        os.close(read)
        self._listener.close()
        program = folder / f"{flavour}{SUFFIX}"
        program.write_text(f"#!{sys.executable} -IS\n{(_HERE / 'zygote_python.py').read_text()}")
        program.chmod(0o755)
        self.python = str(program)
        """The path of an executable that accepts the command line of an interpreter."""

    def _begin(self, life: int, log: int) -> subprocess.Popen[bytes]:
        inherited = (self._listener.fileno(), life)
        command = [sys.executable, str(_HERE / "zygote_server.py"), str(self.folder)]
        return subprocess.Popen(
            [*command, *map(str, inherited)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_plain_surroundings(),
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C must reach only the tests, which then end the server
        )

    def start(self, request: Mapping[str, Any], files: Sequence[int]) -> Child:
        """Start a process.

        Args:
            request: a mapping with the fields that `run` in zygote_server.py reads.
            files: descriptors for the process: standard input, output, error, then others.
        """
        whole = {"cwd": os.getcwd(), "ignored": [], "unbuffered": False, **request}
        body = marshal.dumps(whole)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._address)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
            connection.sendmsg([len(body).to_bytes(8, "little")], rights)
            connection.sendall(body)
            return Child(connection)
        except (OSError, RuntimeError) as error:
            connection.close()
            log_text = (self.folder / f"{self.flavour}.log").read_text(errors="replace")
            raise RuntimeError(f"the zygote {self.flavour!r} has ended: {log_text}") from error

    def call(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        files: Sequence[int] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Child:
        """Call `function(*arguments, *file descriptors)` in a new process.

        Args:
            function: at the top level of a module; the process ends with it.
            arguments: pickled.
            files: descriptors that the process inherits, passed as further arguments.
            environ: all of its environment variables; the default is this process's.
        """
        request = {
            "kind": "call",
            "call": pickle.dumps((function, tuple(arguments))),
            "path": list(sys.path),
            "environ": _environ(os.environ if environ is None else environ),
        }
        return self.start(request, [0, 1, 2, *files])

    def end(self) -> None:
        """End the server and all processes that it has started."""
        os.close(self._life)
        # A server that is still importing has started no process and does not read requests.
        if self._server is not None:
            with contextlib.suppress(TimeoutError, RuntimeError):
                self._server.wait(_PATIENCE_S)
            self._server.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE_S)
            self._process.kill()
            self._process.wait()
        if self.flavour == "plain":
            shutil.rmtree(self.folder, ignore_errors=True)


def zygote(flavour: Flavour = "plain") -> Zygote:
    """The zygote of a flavour, started on first use."""
    if flavour not in _running:
        if not _running:
            atexit.register(end_zygotes)
        if flavour == "plain":
            folder = Path(tempfile.mkdtemp(prefix="bigtrain-zygote-"))
        else:
            folder = zygote().folder
        _running[flavour] = Zygote(flavour, folder)
    return _running[flavour]


def end_zygotes() -> None:
    """End all zygotes of this process; a later call of `zygote` starts a new one."""
    for flavour in reversed(list(_running)):  # the plain one was started first
        _running.pop(flavour).end()


def interpreter(flavour: Flavour = "plain") -> str:
    """A program to use instead of `sys.executable` for a process with everything imported.

    Processes that such a process starts by its `sys.executable` (ranks, contenders) are forked,
    too.
    """
    return zygote(flavour).python


def surroundings() -> dict[str, str]:
    """Return this process's environment variables, changed for a child process.

    `PYTHONPATH` is replaced by the checkout and its tests; `OMP_NUM_THREADS` is 1.
    """
    path = f"{_ROOT}{os.pathsep}{_HERE.parent}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def forked_cli(
    words: Sequence[str],
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = 120,
    flavour: Flavour = "plain",
) -> subprocess.CompletedProcess[str]:
    """Run `python -m bigtrain WORDS` to its end and capture its output as text.

    Args:
        words: the command line.
        cwd: its current folder; the default is this process's.
        env: all of its environment variables; the default is `surroundings()`.
        timeout: seconds after which it is killed and TimeoutExpired is raised.
        flavour: libraries it has imported when it starts.
    """
    return _run([interpreter(flavour), "-m", "bigtrain", *words], cwd, env, timeout)


def forked_script(
    path: str | os.PathLike[str],
    words: Sequence[str],
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = 120,
    flavour: Flavour = "plain",
) -> subprocess.CompletedProcess[str]:
    """Run `python PATH WORDS` to its end, as `forked_cli` does."""
    return _run([interpreter(flavour), str(path), *words], cwd, env, timeout)


def _run(
    command: list[str],
    cwd: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    timeout: float | None,
) -> subprocess.CompletedProcess[str]:
    env = surroundings() if env is None else env
    return subprocess.run(
        command, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True
    )


def _environ(environ: Mapping[str, str]) -> dict[bytes, bytes]:
    return {os.fsencode(name): os.fsencode(value) for name, value in environ.items()}


def _plain_surroundings() -> dict[str, str]:
    """The variables with which a server imports this checkout, even if another one is installed.

    They contain nothing of a test, and limit the CPU threads to one.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    thread_limits = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
    )
    return {**variables, **thread_limits, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(_ROOT)}
