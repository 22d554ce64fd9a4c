"""A process forked from a zygote behaves like a new interpreter in everything a test can
observe.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.zygote import Zygote, forked_cli, forked_script, interpreter

# The output and the exit status of each program must be the same under both interpreters.
PROGRAMS = {
    "arguments": "import sys; print(sys.argv, sys.orig_argv[1:], sys.path[:2], __name__)",
    "files": "import os; print(os.getcwd(), sorted(os.listdir('/proc/self/fd')))",
    "standard input": "import sys; print(sys.stdin.read(), end='')",
    "streams": "import sys; print([(s.encoding, s.errors, s.line_buffering, s.write_through) "
    "for s in (sys.stdout, sys.stderr)])",
    "variables": "import os; print(os.environ.get('A'), os.environ.get('TERM'), len(os.environ))",
    # A shell sets `_`, whose value may be the path that `run_both` shortens in one of the two.
    "variables of C": "import subprocess; print(sorted(v for v in "
    "subprocess.check_output(['env']).split() if not v.startswith(b'_=')))",
    "signals": "import signal; print([(n, str(signal.getsignal(n)).split(' at ')[0]) "
    "for n in signal.valid_signals()], signal.set_wakeup_fd(-1))",
    "masks": "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    "umask": "import os; print(os.umask(0))",
    "limits": "import resource as r; print([r.getrlimit(n) for n in (r.RLIMIT_AS, r.RLIMIT_DATA, "
    "r.RLIMIT_STACK, r.RLIMIT_NPROC)])",
    "threads": "import torch, threading; print(torch.get_num_threads(), threading.enumerate()[1:])",
    "exit status": "import sys; print('said'); sys.exit(7)",
    "exit with words": "import sys; sys.exit('words')",
    "exit with too much": "import sys; sys.exit(258)",
    "traceback": "def f():\n    1 / 0\n\ntry:\n    f()\nexcept ZeroDivisionError as e:\n    "
    "raise ValueError('late') from e",
    "own excepthook": "import sys; sys.excepthook = lambda *a: print(a[:2]); raise ValueError(1)",
    "interrupted": "raise KeyboardInterrupt",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "ended by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "last words": "import atexit; atexit.register(print, 'bye'); print('hello')",
    "last words after an error": "import atexit; atexit.register(print, 'bye'); raise ValueError",
    "a thread goes on": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), "
    "print('done'))).start(); print('main')",
    "not flushed": "import os; print('lost'); os._exit(3)",
    "-u not flushed": "import os; print('not lost'); os._exit(3)",
    "-u streams": "import sys; print([(s.encoding, s.errors, s.line_buffering, s.write_through) "
    "for s in (sys.stdout, sys.stderr)], end='')",
    "children": "import os, subprocess, sys; print(subprocess.run([sys.executable, '-c', "
    "'import os, sys; print(os.environ[\"A\"]); sys.exit(5)']))",
    "another life": "import os, sys\nif 'B' not in os.environ:\n    os.environ['B'] = 'again'\n    "
    "os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])\nprint(os.environ['B'])",
    "pickled": "import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A)) is A)",
}


def run_both(
    words: list[str], folder: Path, standard_input: str = ""
) -> list[tuple[int, str, str]]:
    """(status, output, errors) of a real interpreter and of a forked process."""
    env = {**os.environ, "A": "a", "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONUNBUFFERED", None)
    results: list[tuple[int, str, str]] = []
    for python in (sys.executable, interpreter()):
        done = subprocess.run(
            [python, *words],
            cwd=folder,
            env=env,
            input=standard_input,
            capture_output=True,
            text=True,
        )
        texts = [text.replace(python, "python") for text in (done.stdout, done.stderr)]
        results.append((done.returncode, *texts))
    return results


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_does_what_an_interpreter_does(program: str, tmp_path: Path) -> None:
    unbuffered = ["-u"] if program.startswith("-u") else []
    real, forked = run_both([*unbuffered, "-c", PROGRAMS[program]], tmp_path, "given")
    assert forked == real


@pytest.mark.parametrize("form", ["script", "-u script", "module", "package", "not there"])
def test_it_runs_what_an_interpreter_runs(form: str, tmp_path: Path) -> None:
    code = "import sys\nprint(__name__, __package__, __file__, __spec__, sys.argv, sys.path[0])\n"
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.py").write_text(code)
    script = tmp_path / "pack" / "script.py"
    script.write_text(f"{code}sys.stdout.write('x')\nraise ValueError('at the end')\n")
    words = {
        "script": [str(script), "--a", "b"],
        "-u script": ["-u", str(script)],
        "module": ["-m", "pack.script", "b"],
        "package": ["-m", "pack", "b"],
        "not there": ["-m", "bigtrain.not_there"],
    }
    real, forked = run_both(words[form], tmp_path)
    # The loader's memory address differs.
    assert [part.split(" at 0x")[0] for part in map(str, forked)] == [
        part.split(" at 0x")[0] for part in map(str, real)
    ]


def test_its_path_begins_with_what_pythonpath_names(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("print('found')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([interpreter(), "-c", "import only_here"], env=env, capture_output=True)
    assert done.stdout == b"found\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_a_signal_reaches_it(number: int) -> None:
    code = "import os, sys, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    with subprocess.Popen(
        [interpreter(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(10) == -number
    end = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


def test_an_ignored_signal_stays_ignored() -> None:
    shell = f"trap '' INT; exec {interpreter()} -c 'import signal; print(signal.getsignal(2))'"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"  # SIG_IGN


def test_the_command_line_and_a_script(tmp_path: Path) -> None:
    done = forked_cli(["no-such-command"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no 'no-such-command'" in done.stderr
    (tmp_path / "script.py").write_text("import os, sys; print(sys.argv[1:], os.environ['A'])")
    done = forked_script(tmp_path / "script.py", ["x"], cwd=tmp_path, env={"A": "b"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "['x'] b\n", "")
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        forked_script(tmp_path / "sleeps.py", [], timeout=0.5)


def test_every_process_draws_its_own_random_numbers() -> None:
    code = "import numpy, random, torch; print(random.random(), numpy.random.rand(), torch.rand(1))"
    words = [interpreter(), "-c", code]
    outputs = [
        subprocess.run(words, capture_output=True, text=True).stdout.split() for _ in range(2)
    ]
    assert all(
        first_number != second_number for first_number, second_number in zip(*outputs, strict=True)
    )


def test_a_flavour_has_its_library() -> None:
    code = "import sys; print([n for n in ('torch', 'deepspeed', 'fairscale') if n in sys.modules])"
    for python, expected in (
        (interpreter(), "['torch']\n"),
        (interpreter("deepspeed"), "['torch', 'deepspeed']\n"),
    ):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (expected, "")


def test_nothing_of_it_is_left() -> None:
    new_zygote = Zygote("plain", Path(tempfile.mkdtemp()))  # a socket's path is short
    child = new_zygote.call(time.sleep, [60])
    assert child.poll() is None
    with pytest.raises(TimeoutError, match=f"process {child.pid} still runs after 0.1 s"):
        child.wait(0.1)
    new_zygote.end()
    assert not Path(f"/proc/{child.pid}").exists()
    assert not new_zygote.folder.exists()
    assert child.wait() == -signal.SIGKILL
    child.close()


def test_what_stands_for_a_process_is_stopped_with_it() -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([interpreter(), "-c", program], stdout=subprocess.PIPE) as stand_in:
        assert stand_in.stdout is not None
        pid = int(stand_in.stdout.readline())
        for number, expected in ((signal.SIGSTOP, "T"), (signal.SIGCONT, "S")):
            os.kill(pid, number)
            end = time.monotonic() + 10
            stat = Path(f"/proc/{stand_in.pid}/stat")
            while stat.read_text().rpartition(")")[2].split()[0] != expected:
                assert time.monotonic() < end
                time.sleep(0.005)
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        assert stand_in.wait(10) == -signal.SIGKILL
