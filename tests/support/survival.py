"""A small net on two ranks that raises, is killed or sleeps when environment variables say so."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from support.programs import ROOT
from support.zygote import interpreter, surroundings

Curve = list[tuple[int, float, float]]
"""(step, loss, norm) of each logged line."""
LIMIT_S = 60.0


def _faults() -> Any:
    """The script benchmarks/faults.py, loaded as a module."""
    spec = importlib.util.spec_from_file_location("faults", ROOT / "benchmarks" / "faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = module
    spec.loader.exec_module(module)
    return module


faults = _faults()

NET = """
import os, signal, sys, time
from pathlib import Path
from torch import nn
FOLDER, RANK = Path(os.environ["FAULT_FOLDER"]), os.environ.get("RANK", "0")
LIFE = os.environ.get("BIGTRAIN_LAUNCH", "/0").rpartition("/")[2]
LIFE = os.environ.get("TORCHELASTIC_RESTART_COUNT", LIFE)
(FOLDER / f"pid-{RANK}-{LIFE}").write_text(str(os.getpid()))
if os.environ.get("FAULT_STOP_IN_SAVE") == f"{RANK}:{LIFE}":
    write = os.pwrite
    def stop_in_save(descriptor, data, at):
        if isinstance(data, memoryview):  # of a tensor
            os.kill(os.getpid(), signal.SIGSTOP)
        return write(descriptor, data, at)
    os.pwrite = stop_in_save

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(256, 24), nn.Dropout(0.1), nn.Linear(24, 256))
        self.calls = 0

    def forward(self, tokens):
        if tokens.device.type == "cpu" and self.training and not tokens.is_meta:
            self.calls += 1
            time.sleep(float(os.environ.get("FAULT_SLEEP", "0")))
            if f"{RANK}:{LIFE}:{self.calls}" in os.environ.get("FAULT_RAISE", "").split(","):
                raise ValueError("odd")
            if f"{RANK}:{LIFE}:{self.calls}" in os.environ.get("FAULT_KILL", "").split(","):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(tokens)
"""


class RunFolder:
    """A folder with a net, a text and a run named `r`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "runs" / "r"
        (folder / "net.py").write_text(NET)
        (folder / "corpus.txt").write_text("pack my box with five dozen liquor jugs. " * 200)

    def words(self, strategy: str = "ddp", **keys: Any) -> list[str]:
        """The words of a job under a strategy in this folder."""
        values = {
            "data.path": self.folder / "corpus.txt",
            "data.args.validation_samples": 8,
            "data.args.sequence_length": 16,
            "train.global_batch_size": 8,
            "train.steps": 6,
            "train.eval_every": 0,
            "checkpoint.every": 2,
            "mesh.timeout": 5,
            "memory.predict": "false",
            "memory.track_steps": 0,
            "log.dir": self.folder / "runs",
            "log.name": "r",
            **{key.replace("__", "."): value for key, value in keys.items()},
        }
        fixed = ["--strategy", strategy, "device=cpu", "model.name=net:Net", "data.name=text"]
        return [*fixed, *(f"{key}={value}" for key, value in values.items())]

    def start(
        self, command: Sequence[str], **environ: str
    ) -> AbstractContextManager[subprocess.Popen[str]]:
        """Start a command with this folder on the path and `environ` added to the variables."""
        path = f"{self.folder}{os.pathsep}{surroundings()['PYTHONPATH']}"
        every = {**surroundings(), "PYTHONPATH": path, **environ}
        process: AbstractContextManager[subprocess.Popen[str]]
        process = faults.started(command, every, self.folder)
        return process

    def bigtrain(
        self, options: Sequence[str], keys: dict[str, Any] | None = None, **environ: str
    ) -> tuple[int, str]:
        """Run `bigtrain train OPTIONS` to its end: status and output."""
        command = [interpreter(), "-m", "bigtrain", "train", *options, *self.words(**(keys or {}))]
        with self.start(command, **environ) as process:
            output, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, output

    def curve(self) -> Curve:
        """The logged (step, loss, norm) of the run."""
        curve_points: Curve = faults.curve(self.run)
        return curve_points

    def wait_for_step(self, step: int) -> None:
        """Wait until the log of the run has a step."""
        metrics = self.run / "metrics.jsonl"
        end = time.monotonic() + LIMIT_S
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
            assert time.monotonic() < end
            time.sleep(0.01)


def uninterrupted_curve(folder: Path) -> Curve:
    """The curve of a run that nothing interrupts."""
    run_folder = RunFolder(folder)
    status, output = run_folder.bigtrain(["-n", "2"])
    assert status == 0, output
    return run_folder.curve()
