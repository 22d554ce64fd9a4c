"""Runs that lose a rank at a random moment end with the numbers of one that does not.

    python benchmarks/faults.py [--runs 100] [--seed 0] [--output benchmarks/results/faults.json]

A small model trains on two ranks under `bigtrain train -n 2 --restarts 2`, with a checkpoint every
second step. In each run one rank is killed (SIGKILL), stopped for good (SIGSTOP) or told to save
and end (SIGTERM) at a random moment, or it dies in a checkpoint, before any of the calls by which
that is written. Held are: the losses and norms of all steps are those of the run without a fault,
bit for bit, each step once; and a checkpoint that `latest` named when the fault came is not lost.
The calls are counted by the model's own module, which every rank imports: nothing of bigtrain
knows of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEPS = 12
KINDS = ("SIGKILL", "SIGSTOP", "SIGTERM", "write")
LIMIT_S = 120.0
"""Seconds until a run counts as one that hangs."""

MODULE = '''
"""A net, and calls that end its process."""

import os
import signal
import sys
from pathlib import Path

from torch import nn

_FOLDER = Path(os.environ["FAULT_FOLDER"])
_RANK = os.environ.get("RANK", "0")
_LIFE = os.environ.get("BIGTRAIN_LAUNCH", "/0").rpartition("/")[2]
_CALLS = ("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
_count = 0


def _counted(call):
    def counting(*arguments, **named):
        global _count
        frame, files = sys._getframe(1), []
        while frame is not None and len(files) < 8:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        if any("/bigtrain/checkpoint/" in file for file in files):
            _count += 1
            if f"{_RANK}:{_count}" == os.environ.get("FAULT_CALL") and _LIFE == "0":
                latest = _FOLDER / "runs" / "r" / "checkpoints" / "latest"
                said = latest.read_bytes() if latest.exists() else b""
                (_FOLDER / "fault").write_bytes(said or b"none")
                os.kill(os.getpid(), signal.SIGKILL)
            (_FOLDER / f"calls-{_RANK}").write_text(str(_count))
        return call(*arguments, **named)

    return counting


for name in _CALLS:
    setattr(os, name, _counted(getattr(os, name)))
(_FOLDER / f"pid-{_RANK}-{_LIFE}").write_text(str(os.getpid()))


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(256, 24), nn.Dropout(0.1), nn.Linear(24, 256))
'''


@dataclass(frozen=True)
class Fault:
    """What happens to a run, and when."""

    kind: str
    rank: int
    step: int = 0
    """After this many steps, and so many seconds."""
    delay_s: float = 0.0
    call: int = 0
    """Of kind `write`: before this call of the rank."""


@dataclass(frozen=True)
class FaultOutcome:
    """How a run with a fault ended."""

    fault: Fault
    problem: str | None
    """None where everything held."""
    came: bool
    """Whether the run was still going on when the fault was to come."""
    latest: str
    """What `latest` said when the fault came."""
    continued_from: int | None
    """The step of the checkpoint that the run went on from."""
    seconds: float


class FaultRuns:
    """Runs of one job, in a folder of their own each.

    Args:
        folder: for all of them.
        python: an interpreter.
        environ: its variables.
        words: further words of the job.
    """

    def __init__(
        self, folder: Path, python: str, environ: Mapping[str, str], words: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        self._python = python
        (folder / "faulty_net.py").write_text(MODULE)
        (folder / "corpus.txt").write_text("pack my box with five dozen liquor jugs. " * 200)
        path = f"{folder}{os.pathsep}{environ.get('PYTHONPATH', '')}"
        self._environ = {**environ, "PYTHONPATH": path}
        self._words = [*_words(folder), *words]
        self.expected: list[tuple[int, float, float]] = []
        self.calls = [0, 0]
        """What each rank calls in a run's checkpoints."""

    def reference(self) -> None:
        """The run that nothing happens to.

        Raises:
            RuntimeError: it fails.
        """
        place = self._folder / "reference"
        with self._run(place, {}) as process:
            said, _ = process.communicate(timeout=LIMIT_S)
        if process.returncode:
            raise RuntimeError(f"the run without a fault failed:\n{said}")
        self.expected = _curve(place)
        self.calls = [int((place / f"calls-{rank}").read_text()) for rank in (0, 1)]

    def drawn(self, number: int, kind: str, draws: random.Random) -> FaultOutcome:
        """A run with a fault of this kind, at a moment that is drawn."""
        rank = draws.randrange(2)
        if kind == "write":
            return self.one(number, Fault(kind, rank, call=1 + draws.randrange(self.calls[rank])))
        step, delay_s = 1 + draws.randrange(STEPS - 2), draws.uniform(0.0, 0.1)
        return self.one(number, Fault(kind, rank, step, delay_s))

    def one(self, number: int, fault: Fault) -> FaultOutcome:
        """A run with this fault."""
        place = self._folder / f"run-{number}"
        environ = {"FAULT_CALL": f"{fault.rank}:{fault.call}"} if fault.kind == "write" else {}
        began = time.monotonic()
        latest, came, said, problem = "none", True, "", None
        with self._run(place, environ) as process:
            try:
                if fault.kind != "write":
                    came = _wait_for(place, fault.step, process)
                    time.sleep(fault.delay_s)
                    latest = _latest(place)
                    came = came and _strike(place, fault)
                said, _ = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                problem = f"not done after {LIMIT_S:.0f} s"
        status = process.returncode
        if fault.kind == "write":
            came = (place / "fault").exists()
            latest = (place / "fault").read_text().strip() if came else latest
        if problem is None and status == 75:  # as a scheduler would
            with self._run(place, {}, ["--resume", "auto"]) as process:
                more, _ = process.communicate(timeout=LIMIT_S)
            said, status = said + more, process.returncode
        steps = [int(n) for n in re.findall(r"continues after step (\d+)", said)]
        begun = steps[0] if steps else (0 if "from the beginning" in said else None)
        problem = problem or self._problem(place, status, said, latest, begun)
        seconds = time.monotonic() - began
        return FaultOutcome(fault, problem, came, latest, begun, round(seconds, 2))

    def _problem(
        self, place: Path, status: int, said: str, latest: str, begun: int | None
    ) -> str | None:
        if status:
            return f"exit status {status}: {said[-1500:]}"
        found = _curve(place)
        if found != self.expected:
            wrong = [
                n for n, (a, b) in enumerate(zip(found, self.expected, strict=False)) if a != b
            ]
            first = wrong[0] if wrong else min(len(found), len(self.expected))
            return f"{len(found)} steps, not those of the run without a fault from line {first + 1}"
        announced = int(latest.removeprefix("step-")) if latest.startswith("step-") else 0
        if begun is not None and begun < announced:
            return f"{latest} was announced, and the run went on after step {begun}"
        return None

    @contextlib.contextmanager
    def _run(
        self, place: Path, environ: Mapping[str, str], more: Sequence[str] = ()
    ) -> Iterator[subprocess.Popen[str]]:
        place.mkdir(exist_ok=True)
        started = [self._python, "-m", "bigtrain", "train", "-n", "2", "--restarts", "2"]
        process = subprocess.Popen(
            [*started, *self._words, f"log.dir={place / 'runs'}", "log.name=r", *more],
            env={**self._environ, **environ, "FAULT_FOLDER": str(place)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                for pid in _pids(place):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.communicate()


def _words(folder: Path) -> list[str]:
    return [
        *("--strategy", "ddp", "device=cpu", "model.name=faulty_net:Net", "data.name=text"),
        *(f"data.path={folder / 'corpus.txt'}", "data.args.sequence_length=16"),
        *("data.args.validation_samples=8", "train.global_batch_size=8", f"train.steps={STEPS}"),
        *("train.eval_every=0", "checkpoint.every=2", "checkpoint.keep=3", "mesh.timeout=4"),
        *("memory.predict=false", "memory.track_steps=0"),
    ]


def _curve(place: Path) -> list[tuple[int, float, float]]:
    lines = (place / "runs" / "r" / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"], row["grad_norm"]) for row in map(json.loads, lines)]


def _latest(place: Path) -> str:
    try:
        return (place / "runs" / "r" / "checkpoints" / "latest").read_text().strip()
    except OSError:
        return "none"


def _pids(place: Path, life: str = "*") -> list[int]:
    return [int(path.read_text()) for path in sorted(place.glob(f"pid-*-{life}"))]


def _wait_for(place: Path, step: int, process: subprocess.Popen[str]) -> bool:
    """Wait until so many steps are done; false where the run ended before."""
    metrics = place / "runs" / "r" / "metrics.jsonl"
    end = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < end:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= step:
            return True
        time.sleep(0.002)
    return False


def _strike(place: Path, fault: Fault) -> bool:
    """Send the signal; false where the rank has ended by then."""
    pid = int((place / f"pid-{fault.rank}-0").read_text())
    try:
        os.kill(pid, getattr(signal, fault.kind))
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="an interpreter (or what stands for it, tests/support/zygote.py)",
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    from harness import keep, surroundings

    draws = random.Random(options.seed)
    outcomes: list[FaultOutcome] = []
    found: dict[str, Any] = summary([], options.seed, [])
    commit = surroundings()["commit"]  # others may go on committing meanwhile
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="bigtrain-faults-") as name:
        runs = FaultRuns(Path(name), options.python, environ)
        runs.reference()
        for number in range(options.runs):
            outcome = runs.drawn(number, KINDS[number % len(KINDS)], draws)
            outcomes.append(outcome)
            held = outcome.problem or "held"
            print(number, outcome.fault, held, f"{outcome.seconds:.1f} s", flush=True)
            found = {"commit": commit, **summary(outcomes, options.seed, runs.calls)}
            keep(options.output, {"python": Path(options.python).name, **found})
    print(json.dumps({name: found[name] for name in ("runs", "failed", "by_kind")}, indent=1))
    return 1 if found["failed"] else 0


def summary(outcomes: Sequence[FaultOutcome], seed: int, calls: Sequence[int]) -> dict[str, Any]:
    """What is kept of the runs."""
    by_kind = {}
    for kind in KINDS:
        of_kind = [o for o in outcomes if o.fault.kind == kind]
        counts = Counter("failed" if o.problem else "held" for o in of_kind)
        by_kind[kind] = {**counts, "came": sum(o.came for o in of_kind)}
    return {
        "runs": len(outcomes),
        "failed": sum(o.problem is not None for o in outcomes),
        "seed": seed,
        "write_calls_of_ranks": list(calls),
        "by_kind": by_kind,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


if __name__ == "__main__":
    sys.exit(main())
