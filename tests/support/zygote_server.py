"""The server of a zygote: imports everything once, and forks a process for each request.

Run by path: zygote_server.py FOLDER LISTENER LIFE; the latter two are inherited file descriptors.
When the pipe LIFE is closed, the server ends all processes that it has started, ends itself and
removes FOLDER. It must have only one thread when it forks.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import io
import marshal
import os
import pkgutil
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

STANDARD = 3
"""The first file descriptors of a request: standard input, output and error."""
_TAKEN_BACK = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)
_READ = 1 << 16


def flavours() -> dict[str, list[str]]:
    """The imports of each flavour: those of `plain`, and what the other flavours add to them."""
    return {
        "plain": [
            "torch",
            "torch._dynamo",  # every optimizer imports it
            "torch.distributed.elastic.multiprocessing",
            "torch.distributed.launcher.api",
            "torch.testing",
            "pytest",
            *_modules("bigtrain"),
        ],
        "deepspeed": [
            "deepspeed.comm.torch",
            "deepspeed.pipe",
            "deepspeed.runtime.pipe.p2p",
            "deepspeed.runtime.zero.muon.muon_optimizer",  # torch's compiler with it
            "deepspeed.runtime.zero.partition_parameters",
            "deepspeed.runtime.zero.stage3",
            "deepspeed.runtime.zero.stage_1_and_2",
        ],
        "hub": ["transformers", "peft", "transformers.models.llama.modeling_llama"],
    }


def _modules(package: str) -> list[str]:
    """Every module of a package that can be imported without running a program."""
    where = importlib.import_module(package).__path__
    names = [module.name for module in pkgutil.walk_packages(where, f"{package}.")]
    return [name for name in names if not name.endswith("__main__")]


class _Forked(BaseException):
    """Raised in a new process, to unwind the server's frames before the program runs."""

    def __init__(self, request: dict[str, Any], files: list[int]) -> None:
        super().__init__()
        self.request = request
        self.files = files


class Server:
    """One fork server.

    Args:
        flavour: key of `flavours()`.
        listener: descriptor of a listening socket.
        life: descriptor of a pipe that nobody writes to; the server ends when it is closed.

    Raises:
        RuntimeError: an import has started a thread, which would not exist after a fork.
    """

    def __init__(self, flavour: str, listener: int, life: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in flavours()[flavour]:
                importlib.import_module(name)
        self._life = life
        self._children: dict[int, socket.socket] = {}
        self._stand_ins: dict[int, int] = {}
        self._listener = socket.socket(fileno=listener)
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = os.pipe()
        for end in (self._woken, self._wakes):
            os.set_blocking(end, False)
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            raise RuntimeError(f"{threads} threads are alive in the zygote {flavour!r}")
        gc.collect()
        gc.freeze()  # the collector must not touch pages shared with the forked processes

    def serve(self) -> None:
        """Answer requests until `life` is closed."""
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        watched: tuple[tuple[Any, Callable[[], Any]], ...] = (
            (self._listener, self._accept),
            (self._woken, self._reap),
        )
        for file, answer in watched:
            self._selector.register(file, selectors.EVENT_READ, answer)
        self._selector.register(self._life, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return self._end()
                key.data()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        files: list[int] = []
        try:
            request = marshal.loads(_receive(connection, files))
        except (OSError, EOFError):  # the client has closed the connection
            connection.close()
            return
        pid = os.fork()
        if pid == 0:
            self._leave(connection)
            raise _Forked(request, files)
        for file in files:
            os.close(file)
        self._children[pid] = connection
        if "executable" in request:
            self._stand_ins[pid] = _peer(connection)
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._signal(pid, connection)
        )
        _say(connection, b"P", pid)

    def _leave(self, connection: socket.socket) -> None:
        """In a new process: close the server's descriptors."""
        signal.set_wakeup_fd(-1)
        for number in _TAKEN_BACK:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        self._listener.close()
        connection.close()
        for child in self._children.values():
            child.close()
        for file in (self._woken, self._wakes, self._life):
            os.close(file)

    def _signal(self, pid: int, connection: socket.socket) -> None:
        """Forward signals; if the client has gone, kill its process."""
        if pid not in self._children:  # it ended in the same iteration of the loop
            return
        try:
            numbers = connection.recv(_READ) or bytes([signal.SIGKILL])
        except OSError:
            numbers = bytes([signal.SIGKILL])
        if signal.SIGKILL in numbers:
            self._selector.unregister(connection)
        for number in numbers:
            os.kill(pid, number)  # it exists: ended processes are removed from the table

    def _reap(self) -> None:
        while True:
            try:
                os.read(self._woken, _READ)
            except BlockingIOError:
                break
        for pid, connection in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if ended == 0:
                continue
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                self._mirror(pid, stopped=os.WIFSTOPPED(status))
                continue
            self._mirror(pid, stopped=False)
            self._stand_ins.pop(pid, None)
            del self._children[pid]
            if connection in self._selector.get_map():
                self._selector.unregister(connection)
            _say(connection, b"E", os.waitstatus_to_exitcode(status))
            connection.close()

    def _mirror(self, pid: int, *, stopped: bool) -> None:
        """Stop the stand-in of a stopped process, so that the stand-in's parent notices."""
        if pid in self._stand_ins:  # it exists: it waits until the process ends
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._stand_ins[pid], signal.SIGSTOP if stopped else signal.SIGCONT)

    def _end(self) -> None:
        for pid, connection in self._children.items():
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            _say(connection, b"E", os.waitstatus_to_exitcode(status))


def _say(connection: socket.socket, kind: bytes, number: int) -> None:
    try:
        connection.sendall(kind + number.to_bytes(8, "little", signed=True))
    except OSError:
        return


def _peer(connection: socket.socket) -> int:
    """The id of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], sys.byteorder)


def _receive(connection: socket.socket, files: list[int]) -> bytes:
    """Receive one request and return its bytes. Its file descriptors are appended to `files`.

    A message of eight bytes has the request's length; the descriptors come with it as ancillary
    data. The request follows.

    Raises:
        EOFError: the client has closed the connection.
    """
    room = socket.CMSG_SPACE(8 * array.array("i").itemsize)
    head, ancillary, _, _ = connection.recvmsg(8, room)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files += array.array("i", data[: len(data) - len(data) % 4])
    length = int.from_bytes(head, "little")
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(length - len(parts))
        if not part:
            raise EOFError
        parts += part
    if not head:
        raise EOFError
    return bytes(parts)


def run(request: dict[str, Any], files: list[int]) -> NoReturn:
    """In a new process: set folder, variables and streams, then run the request and exit."""
    os.setsid()  # signals to its process group must not reach the server
    for number, file in enumerate(files[:STANDARD]):
        os.dup2(file, number)
        os.close(file)
    for file in files[STANDARD:]:
        os.set_inheritable(file, False)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(request["cwd"])
    os.environb.clear()
    os.environb.update(request["environ"])
    _seed()
    _streams(unbuffered=request["unbuffered"])
    if request["kind"] == "serve":
        main(request["flavour"], *files[STANDARD:])
    if request["kind"] == "call":
        import pickle

        sys.path[:] = request["path"]
        function, arguments = pickle.loads(request["call"])
        status = _status_of(lambda: function(*arguments, *files[STANDARD:]))
    else:
        status = _status_of(_program(request))
    _farewell(status)


def _seed() -> None:
    """Seed the random generators anew, and set the number of threads from the variables."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4), "little"))
    torch.seed()
    num_threads = os.environ.get("OMP_NUM_THREADS", "")
    wanted = int(num_threads) if num_threads.isdigit() else len(os.sched_getaffinity(0))
    if wanted != torch.get_num_threads():  # setting it starts threads even if the number is equal
        torch.set_num_threads(wanted)


def _streams(*, unbuffered: bool) -> None:
    """Reopen standard streams as the interpreter does; the objects stay, as libraries refer to
    them.
    """
    unbuffered = unbuffered or bool(os.environ.get("PYTHONUNBUFFERED"))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        line = unbuffered or name == "stderr" or os.isatty(stream.fileno())
        stream.reconfigure(line_buffering=line)
        if unbuffered:
            raw = io.FileIO(stream.fileno(), "w", closefd=False)
            new = io.TextIOWrapper(
                raw,  # type: ignore[arg-type]
                encoding=stream.encoding,
                errors=stream.errors,
                write_through=True,
            )
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)


def _program(request: dict[str, Any]) -> Callable[[], Any]:
    """The program of a command line: -m MODULE, -c CODE or a script."""
    kind, what, words = request["kind"], request["what"], request["words"]
    sys.executable = request["executable"]
    sys.orig_argv = [sys.executable, *request["orig"]]
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    search_path = [path for path in known if path]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.path_importer_cache.clear()
    # This checkout comes first on the path, so that its modules are imported here; below it takes
    # the position of an installed one.
    sys.path.append(sys.path.pop(0))
    if kind == "-m":
        sys.argv = ["-m", *words]
        sys.path[:0] = [os.getcwd(), *search_path]
        if not hasattr(sys.modules.get(what), "__path__"):
            sys.modules.pop(what, None)  # it is run as __main__ and must not count as imported
        return lambda: runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    if kind == "-c":
        sys.argv = ["-c", *words]
        sys.path[:0] = ["", *search_path]
        return lambda: exec(compile(what, "<string>", "exec"), module.__dict__)
    sys.argv = [what, *words]
    sys.path[:0] = [os.path.dirname(os.path.realpath(what)), *search_path]
    module.__dict__.update(__file__=what, __cached__=None, __package__=None)
    return lambda: exec(compile(Path(what).read_bytes(), what, "exec"), module.__dict__)


def _status_of(program: Callable[[], Any]) -> int:
    """Run something to its end as the interpreter runs `__main__`, and return the exit status."""
    try:
        program()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _farewell(status: int) -> NoReturn:
    """Shut down as the interpreter does, except for the destruction of modules."""
    import atexit
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                status = status or 120
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status)


def main(flavour: str, listener: int, life: int, folder: str | None = None) -> NoReturn:
    """Serve; in every forked process, run the request."""
    try:
        Server(flavour, listener, life).serve()
    except _Forked as forked:
        request, files = forked.request, forked.files
    else:
        if folder is not None:  # the process that made it may have ended
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    run(request, files)


if __name__ == "__main__":
    # The folder of the running script must not be on the path of the program.
    del sys.path[0]
    main("plain", int(sys.argv[2]), int(sys.argv[3]), sys.argv[1])
