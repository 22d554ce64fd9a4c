"""Processes that begin with everything imported, for tests that start many.

A fork server a flavour, started when it is first asked for, has imported what its processes need
and is forked for each of them: a process costs 20 ms where an interpreter with torch costs
seconds. It is a process of its own in every other respect: folder, variables, files, session,
signals, exit status. What must be seen of a real interpreter's start (what is imported, how long
it takes, how much memory it needs at its peak) is not tested with these.

    forked_cli(["strategies"])                 # as subprocess.run([python, "-m", "bigtrain", ...])
    forked_script("train.py", ["--dry-run"])   # as subprocess.run([python, "train.py", ...])
    subprocess.Popen([interpreter(), "-m", "bigtrain", ...])  # with all that Popen can do
    zygote().call(function, arguments, files)  # a function of a module in a process of its own
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
        connection: to the zygote, which says there how the process ends; where it is closed
            before that, the process is killed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._said = b""
        self._status: int | None = None
        self.pid = self._next(b"P", None)

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit status, the negative number of a signal where one ended it.

        Raises:
            TimeoutError: it has not ended within so many seconds.
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
        """Send a signal, if it has not ended."""
        if self._status is None:
            with contextlib.suppress(OSError):
                self._connection.sendall(bytes([number]))

    def close(self) -> None:
        """Kill it if it runs, and wait for its end."""
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
        said, self._said = self._said, b""
        if said[:1] != kind:
            raise RuntimeError(f"the zygote says {said!r}")
        return int.from_bytes(said[1:], "little", signed=True)


class Zygote:
    """The client of one fork server.

    Args:
        flavour: what the server has imported.
        folder: for sockets and logs, removed at the end.
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
        """An executable that takes the command lines of an interpreter."""

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
            start_new_session=True,  # Ctrl-C is for the tests, which end it
        )

    def start(self, request: Mapping[str, Any], files: Sequence[int]) -> Child:
        """Start a process.

        Args:
            request: as `run` of the server reads it.
            files: descriptors that it gets: standard input, output, error, then others.
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
            said = (self.folder / f"{self.flavour}.log").read_text(errors="replace")
            raise RuntimeError(f"the zygote {self.flavour!r} has ended: {said}") from error

    def call(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        files: Sequence[int] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Child:
        """Call `function(*arguments, *file descriptors)` in a process of its own.

        Args:
            function: at the top level of a module; the process ends with it.
            arguments: pickled.
            files: descriptors that it inherits, as further arguments.
            environ: all of its variables; this process's where left out.
        """
        request = {
            "kind": "call",
            "call": pickle.dumps((function, tuple(arguments))),
            "path": list(sys.path),
            "environ": _environ(os.environ if environ is None else environ),
        }
        return self.start(request, [0, 1, 2, *files])

    def end(self) -> None:
        """End the server and all that it has started."""
        os.close(self._life)
        # One that still imports has started nothing, and listens to nobody.
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
    """The zygote of a flavour, which is started where it has not been."""
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
    """End all zygotes of this process; the next one that is asked for is a new one."""
    for flavour in reversed(list(_running)):  # the plain one came first
        _running.pop(flavour).end()


def interpreter(flavour: Flavour = "plain") -> str:
    """What stands for `sys.executable` where a process is to begin with everything imported.

    What such a process starts by its own `sys.executable`, ranks and contenders, begins so, too.
    """
    return zygote(flavour).python


def surroundings() -> dict[str, str]:
    """This process's variables, with the checkout and its tests on the path, and one thread."""
    path = f"{_ROOT}{os.pathsep}{_HERE.parent}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def forked_cli(
    words: Sequence[str],
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = 120,
    flavour: Flavour = "plain",
) -> subprocess.CompletedProcess[str]:
    """Run `python -m bigtrain WORDS` to its end, with what it prints as text.

    Args:
        words: its command line.
        cwd: its folder; this process's where left out.
        env: all of its variables; `surroundings()` where left out.
        timeout: seconds after which it is killed and TimeoutExpired is raised.
        flavour: what it has imported when it begins.
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
    """The variables with which a server imports this checkout, whichever one is installed.

    They are of no test, and with one thread on the CPU.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**kept, **one, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(_ROOT)}
