"""Check that runs which lose a rank at a random moment give the numbers of an undisturbed run.

    python benchmarks/faults.py [--runs 0..99] [--output benchmarks/results/faults.json]
    python benchmarks/faults.py --damage 1000 --seed 1    damages of checkpoints: see damages.py

A small model trains under several strategies by `bigtrain train -n N --restarts 2`, with a
checkpoint every second step; in half of the runs it is written while training continues. In each
run one rank is killed (SIGKILL), stopped for good (SIGSTOP) or told to save and end (SIGTERM) at a
random moment, or it dies while it writes a checkpoint, before a random one of the system calls for
that. The checks: the losses and norms of all steps equal those of the run without a fault, bit for
bit, each step once; and a checkpoint that `latest` named at the time of the fault is not lost. The
model's own module (faulty_net.py), which every rank imports, counts the calls: bigtrain has no code
for it.

Run N depends only on N and the seed, so runs can be done in several parts, or one of them again:
`--runs 17..17`. New runs are added to those of the file.

Processes are forked with their imports done (tests/support/zygote.py). The process that stands for
a rank before its launcher is stopped and killed with it. `--real` starts real interpreters.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEPS = 12
KINDS = ("SIGKILL", "SIGSTOP", "SIGTERM", "write")
STRATEGIES = {"ddp": 2, "fsdp": 2, "zero2": 2, "1f1b": 2, "1f1b_fsdp": 4}
"""With the ranks of each."""
LIMIT_S = 120.0
"""Seconds until a run counts as one that hangs; five times that where interpreters import all."""
_STEP_S = 0.1
"""About what a step takes, while others run."""


@dataclass(frozen=True)
class Setting:
    """The strategy of a run, and how it writes checkpoints."""

    strategy: str = "ddp"
    asynchronous: bool = False
    """Whether checkpoints are written beside training."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the run."""
        return STRATEGIES[self.strategy]


@dataclass(frozen=True)
class Fault:
    """The kind of fault of a run, and its time."""

    kind: str
    rank: int
    step: int = 0
    """After this many steps, or as soon as the rank has begun; and so many seconds."""
    delay_s: float = 0.0
    call: int = 0
    """Of kind `write`: before this call of the rank."""


@dataclass(frozen=True)
class FaultOutcome:
    """The result of a run with a fault."""

    number: int
    setting: Setting
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


@dataclass(frozen=True)
class Reference:
    """The run without a fault."""

    curve: list[tuple[int, float, float]]
    calls: list[int]
    """What each rank calls in the run's checkpoints."""


class FaultRuns:
    """Runs of one job, each in its own folder; several threads may use it.

    Args:
        folder: for all of them.
        interpreter: the one for a strategy.
        environ: its variables.
        limit_s: seconds until a run counts as one that hangs.
    """

    def __init__(
        self,
        folder: Path,
        interpreter: Callable[[str], str],
        environ: Mapping[str, str],
        limit_s: float = LIMIT_S,
    ) -> None:
        self._folder, self._interpreter, self._limit_s = folder, interpreter, limit_s
        shutil.copy(Path(__file__).with_name("faulty_net.py"), folder)
        path = f"{folder}{os.pathsep}{environ.get('PYTHONPATH', '')}"
        self._environ = {**environ, "PYTHONPATH": path}
        self._references: dict[Setting, Reference] = {}
        self._locks = {
            Setting(name, beside): threading.Lock()
            for name in STRATEGIES
            for beside in (False, True)
        }

    def reference(self, setting: Setting) -> Reference:
        """Return the run without a fault, which is done once.

        Raises:
            RuntimeError: it fails.
        """
        with self._locks[setting]:
            if setting not in self._references:
                self._references[setting] = self._reference(setting)
        return self._references[setting]

    def _reference(self, setting: Setting) -> Reference:
        place = self._folder / f"{setting.strategy}-{setting.asynchronous}"
        with self._run(place, setting, {}) as process:
            said, _ = process.communicate(timeout=self._limit_s)
        if process.returncode:
            raise RuntimeError(f"the run without a fault failed:\n{said}")
        ranks = range(setting.num_ranks)
        calls = [place / f"calls-{rank}" for rank in ranks]
        counts = [int(path.read_text()) if path.exists() else 0 for path in calls]
        return Reference(curve(place / "runs" / "r"), counts)

    def drawn(self, number: int, seed: int) -> FaultOutcome:
        """Return the run with this number: its setting and its fault."""
        setting = Setting(
            list(STRATEGIES)[number % len(STRATEGIES)], bool((number + number // 20) % 2)
        )
        kind, draws = KINDS[number % len(KINDS)], random.Random(f"{seed}:{number}")
        rank, delay_s = draws.randrange(setting.num_ranks), draws.uniform(0.0, _STEP_S)
        if kind == "write":
            calls = self.reference(setting).calls
            rank = draws.choice([rank for rank, count in enumerate(calls) if count])
            return self.one(number, setting, Fault(kind, rank, call=draws.randint(1, calls[rank])))
        # SIGTERM outside of the steps ends a run at once. If a rank is stopped before its run has
        # a folder, the others wait for as long as a run may wait at all.
        first, last = {"SIGKILL": (0, STEPS), "SIGSTOP": (1, STEPS)}.get(kind, (1, STEPS - 2))
        return self.one(number, setting, Fault(kind, rank, draws.randint(first, last), delay_s))

    def one(self, number: int, setting: Setting, fault: Fault) -> FaultOutcome:
        """Run with this fault; return the result."""
        expected = self.reference(setting).curve
        place = self._folder / f"run-{number}"
        environ = {"FAULT_CALL": f"{fault.rank}:{fault.call}"} if fault.kind == "write" else {}
        began = time.monotonic()
        latest, came, said, problem = "none", True, "", None
        with self._run(place, setting, environ) as process:
            try:
                if fault.kind != "write":
                    came = _wait_for(place, fault, process, self._limit_s)
                    time.sleep(fault.delay_s)
                    latest = _latest(place)
                    came = came and process.poll() is None and _strike(place, fault)
                said, _ = process.communicate(timeout=self._limit_s)
            except subprocess.TimeoutExpired:
                problem = f"not done after {self._limit_s:.0f} s"
        status = process.returncode
        if fault.kind == "write":
            came = (place / "fault").exists()
            latest = (place / "fault").read_text().strip() if came else latest
        if problem is None and status == 75:  # as a scheduler would
            with self._run(place, setting, {}, ["--resume", "auto"]) as process:
                more, _ = process.communicate(timeout=self._limit_s)
            said, status = said + more, process.returncode
        steps = [int(n) for n in re.findall(r"continues after step (\d+)", said)]
        begun = steps[0] if steps else (0 if "from the beginning" in said else None)
        problem = problem or _problem(place, expected, status, said, latest, begun)
        seconds = round(time.monotonic() - began, 2)
        return FaultOutcome(number, setting, fault, problem, came, latest, begun, seconds)

    @contextlib.contextmanager
    def _run(
        self,
        place: Path,
        setting: Setting,
        environ: Mapping[str, str],
        more: Sequence[str] = (),
    ) -> Iterator[subprocess.Popen[str]]:
        place.mkdir(exist_ok=True)
        command = [self._interpreter(setting.strategy), "-m", "bigtrain", "train", "--restarts=2"]
        command += ["-n", str(setting.num_ranks), *_words(setting), f"log.dir={place / 'runs'}"]
        with started([*command, *more], {**self._environ, **environ}, place) as process:
            yield process


@contextlib.contextmanager
def started(
    command: Sequence[str], environ: Mapping[str, str], folder: Path
) -> Iterator[subprocess.Popen[str]]:
    """Start a launcher; end it with its ranks at the end of the block.

    Args:
        command: of the launcher.
        environ: all of its variables.
        folder: where each rank's model writes its process number, as `pid-RANK-LIFE`.
    """
    process = subprocess.Popen(
        command,
        env={**environ, "FAULT_FOLDER": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            for path in folder.glob("pid-*"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.read_text()), signal.SIGKILL)
            process.communicate()


def curve(run: Path) -> list[tuple[int, float, float]]:
    """Return step, loss and norm of each line that a run has written."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def _words(setting: Setting) -> list[str]:
    rows = 8 // setting.num_ranks
    if "1f1b" in setting.strategy:
        rows = 2
    return [
        *("--strategy", setting.strategy, "device=cpu", "log.name=r"),
        *("model.name=faulty_net:Net", "data.name=faulty_net:points"),
        *("train.global_batch_size=8", f"train.micro_batch_size={rows}", f"train.steps={STEPS}"),
        *("train.eval_every=0", "checkpoint.every=2", "checkpoint.keep=3", "mesh.timeout=4"),
        f"checkpoint.asynchronous={str(setting.asynchronous).lower()}",
        *("memory.predict=false", "memory.track_steps=0"),
    ]


def _problem(
    folder: Path,
    expected: list[tuple[int, float, float]],
    status: int,
    errors: str,
    latest: str,
    begun: int | None,
) -> str | None:
    if status:
        return f"exit status {status}: {errors[-1500:]}"
    measured = curve(folder / "runs" / "r")
    if measured != expected:
        wrong = [n for n, (a, b) in enumerate(zip(measured, expected, strict=False)) if a != b]
        first = wrong[0] if wrong else min(len(measured), len(expected))
        pair = [rows[first : first + 1] for rows in (measured, expected)]
        return (
            f"{len(measured)} steps, not those of the run without a fault from line {first + 1}: "
            f"{pair[0]} and {pair[1]}"
        )
    announced = int(latest.removeprefix("step-")) if latest.startswith("step-") else 0
    if begun is not None and begun < announced:
        return f"{latest} was announced, and the run went on after step {begun}"
    return None


def _latest(folder: Path) -> str:
    try:
        return (folder / "runs" / "r" / "checkpoints" / "latest").read_text().strip()
    except OSError:
        return "none"


def _wait_for(folder: Path, fault: Fault, process: subprocess.Popen[str], limit_s: float) -> bool:
    """Wait until the fault's step is done; return False if the run ended before."""
    metrics, begun = folder / "runs" / "r" / "metrics.jsonl", folder / f"pid-{fault.rank}-0"
    end = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < end:
        if begun.exists() and begun.read_text():
            done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if done >= fault.step:
                return True
        time.sleep(0.002)
    return False


def _strike(folder: Path, fault: Fault) -> bool:
    """Send the signal; return False if the rank has already ended."""
    pid = int((folder / f"pid-{fault.rank}-0").read_text())
    try:
        os.kill(pid, getattr(signal, fault.kind))
    except ProcessLookupError:
        return False
    return True


def forked_interpreters() -> Callable[[str], str]:
    """Return the programs that stand for an interpreter with its imports done, by strategy."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    zygotes = importlib.import_module("support.zygote")
    kinds = {"zero2": "deepspeed"}
    made = {name: zygotes.interpreter(kinds.get(name, "plain")) for name in STRATEGIES}
    return made.__getitem__


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", default="0..99", metavar="A..B", help="their numbers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--real", action="store_true", help="start real interpreters, which import everything"
    )
    parser.add_argument("--at-once", type=int, default=2, metavar="K", help="runs at a time")
    parser.add_argument("--output", type=Path, help="new runs are added to those of this seed")
    parser.add_argument("--damage", type=int, metavar="N", help="damage N checkpoints, run nothing")
    options = parser.parse_args()
    if options.damage is not None:
        return damage(options.damage, options.seed, options.output)

    from harness import surroundings

    first, _, last = options.runs.partition("..")
    numbers = range(int(first), int(last or first) + 1)
    python = "real" if options.real else "forked"
    commit = surroundings()["commit"]  # other ranks may write further checkpoints meanwhile
    outcomes = runs_of(options.output, options.seed, python)
    make = (lambda _: sys.executable) if options.real else forked_interpreters()
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryDirectory(prefix="bigtrain-faults-") as name,
        ThreadPoolExecutor(options.at_once) as threads,
    ):
        runs = FaultRuns(Path(name), make, environ, (5 if options.real else 1) * LIMIT_S)
        for done in as_completed(threads.submit(runs.drawn, n, options.seed) for n in numbers):
            outcome = done.result()
            outcomes[outcome.number] = {**asdict(outcome), "commit": commit}
            verdict = outcome.problem or ("held" if outcome.came else "held, came too late")
            print(
                outcome.number, outcome.setting, outcome.fault, verdict, outcome.seconds, flush=True
            )
            every = [outcomes[number] for number in sorted(outcomes)]
            keep_runs(options.output, options.seed, python, every)
    print(table(list(outcomes.values())))
    return 1 if any(outcome["problem"] for outcome in outcomes.values()) else 0


def damage(number: int, seed: int, output: Path | None) -> int:
    """Damage a number of checkpoints; return the exit status."""
    from damages import damage_all
    from harness import keep

    document = damage_all(number, seed)
    keep(output, document)
    for kind, row in document["by_kind"].items():
        print(f"{kind:12} {row['damages']:5} damages, {row['failed']} failed")
    print(f"{number} damages, {document['failed']} loaded or not said, {document['seconds']} s")
    return 1 if document["failed"] else 0


def runs_of(path: Path | None, seed: int, python: str) -> dict[int, Any]:
    """Return the runs of a file by number, if they have the same seed and interpreter."""
    if path is None or not path.exists():
        return {}
    document = json.loads(path.read_text())
    if (document.get("seed"), document.get("python")) != (seed, python):
        return {}
    return {outcome["number"]: outcome for outcome in document["outcomes"]}


def keep_runs(
    path: Path | None, seed: int, python: str, outcomes: Sequence[Mapping[str, Any]]
) -> None:
    """Write the file with all runs so far."""
    from harness import keep

    document = {
        "python": python,
        "seed": seed,
        "runs": len(outcomes),
        "came": sum(outcome["came"] for outcome in outcomes),
        "failed": sum(outcome["problem"] is not None for outcome in outcomes),
        "by_setting": {" ".join(key): row for key, row in _rows(outcomes).items()},
        "outcomes": list(outcomes),
    }
    keep(path, document)


def _rows(outcomes: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, str]]:
    """Return, by setting and kind, the runs that passed, of those that the fault reached."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for strategy in STRATEGIES:
        for asynchronous, word in ((False, "at once"), (True, "beside")):
            row = {}
            for kind in KINDS:
                outcomes_of_kind = [
                    o
                    for o in outcomes
                    if o["setting"] == {"strategy": strategy, "asynchronous": asynchronous}
                    and o["fault"]["kind"] == kind
                ]
                passed = sum(o["came"] and o["problem"] is None for o in outcomes_of_kind)
                row[kind] = (
                    f"{passed} of {sum(o['came'] or bool(o['problem']) for o in outcomes_of_kind)}"
                )
            rows[strategy, word] = row
    return rows


def table(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of the runs that passed, by setting and kind."""
    lines = [
        f"| strategy | saved | {' | '.join(KINDS)} |",
        "| --- | --- |" + " ---: |" * len(KINDS),
    ]
    for (strategy, word), row in _rows(outcomes).items():
        lines.append(f"| `{strategy}` | {word} | {' | '.join(row[kind] for kind in KINDS)} |")
    failed = sum(outcome["problem"] is not None for outcome in outcomes)
    came = sum(outcome["came"] for outcome in outcomes)
    return "\n".join([*lines, f"{len(outcomes)} runs, {came} hit, {failed} did not hold"])


if __name__ == "__main__":
    sys.exit(main())
