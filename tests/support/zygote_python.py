"""A stand-in for the interpreter that starts with everything imported.

A copy of this file, with a first line that makes it executable, is next to the socket of each
zygote. SOCKET-python [-u] (-m MODULE | -c CODE | SCRIPT) WORDS... requests the process from the
zygote, forwards signals to it, and exits with its status. If it does not know the command line or a
variable, it executes the real interpreter. It imports only built-in modules, so it starts in 10 ms.
"""

import _signal as signal
import _socket as socket
import marshal
import os
import sys

SUFFIX = "-python"
PASSED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# Variables that the interpreter reads at its start, too late for a forked process.
TOO_LATE = (
    b"PYTHONDEVMODE",
    b"PYTHONFAULTHANDLER",
    b"PYTHONHASHSEED",
    b"PYTHONHOME",
    b"PYTHONIOENCODING",
    b"PYTHONOPTIMIZE",
    b"PYTHONWARNINGS",
    b"TORCH_CPP_LOG_LEVEL",
)


def main() -> int:
    """Run the command line in a forked process; return its exit status."""
    program, *orig = sys.argv
    python = sys.executable
    words = list(orig)
    unbuffered = bool(words) and words[0] == "-u"
    del words[: int(unbuffered)]
    if not words or any(name in os.environb for name in TOO_LATE):
        os.execv(python, [python, *orig])
    kind = words.pop(0)
    if kind in ("-m", "-c") and words:
        what = words.pop(0)
    elif not kind.startswith("-"):
        kind, what = "script", kind
    else:
        os.execv(python, [python, *orig])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(program.removesuffix(SUFFIX))
    request = {
        "kind": kind,
        "what": what,
        "words": words,
        "orig": orig,
        "unbuffered": unbuffered,
        "executable": program,
        "cwd": os.getcwd(),
        "environ": dict(os.environb),
        "ignored": [n for n in PASSED if signal.getsignal(n) == signal.SIG_IGN],
    }
    body = marshal.dumps(request)
    standard = b"".join(n.to_bytes(4, sys.byteorder) for n in (0, 1, 2))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, standard)]
    connection.sendmsg([len(body).to_bytes(8, "little")], rights)
    for number in PASSED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda n, _: connection.send(bytes([n])))
    begin = 0
    while begin < len(body):
        begin += connection.send(body[begin:])
    received = b""
    while len(received) < 18:
        part = connection.recv(18 - len(received))
        if not part:
            return 1
        received += part
    return int.from_bytes(received[10:], "little", signed=True)


if __name__ == "__main__":
    status = main()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != 9 else None
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)
