"""A small net on two ranks: it is told from outside when to raise, to be killed, to take time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.zygote import interpreter, surroundings

Curve = list[tuple[int, float, float]]
"""Step, loss and norm of each line."""
LIMIT_S = 60.0

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


class Place:
    """A folder with a net, a text and a run, `r`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "runs" / "r"
        (folder / "net.py").write_text(NET)
        (folder / "corpus.txt").write_text("pack my box with five dozen liquor jugs. " * 200)

    def words(self, **keys: Any) -> list[str]:
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
        fixed = ["--strategy", "ddp", "device=cpu", "model.name=net:Net", "data.name=text"]
        return [*fixed, *(f"{key}={value}" for key, value in values.items())]

    @contextlib.contextmanager
    def start(self, command: Sequence[str], **environ: str) -> Iterator[subprocess.Popen[str]]:
        path = f"{self.folder}{os.pathsep}{surroundings()['PYTHONPATH']}"
        process = subprocess.Popen(
            command,
            env={**surroundings(), "PYTHONPATH": path, "FAULT_FOLDER": str(self.folder), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                for file in self.folder.glob("pid-*"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(file.read_text()), signal.SIGKILL)
                process.communicate()

    def bigtrain(
        self, options: Sequence[str], keys: dict[str, Any] | None = None, **environ: str
    ) -> tuple[int, str]:
        """Run `bigtrain train OPTIONS` to its end: status and output."""
        command = [interpreter(), "-m", "bigtrain", "train", *options, *self.words(**(keys or {}))]
        with self.start(command, **environ) as process:
            said, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, said

    def curve(self) -> Curve:
        rows = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]

    def wait_for_step(self, step: int) -> None:
        metrics = self.run / "metrics.jsonl"
        end = time.monotonic() + LIMIT_S
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
            assert time.monotonic() < end
            time.sleep(0.01)


def uninterrupted(folder: Path) -> Curve:
    """The curve of a run that nothing happens to."""
    place = Place(folder)
    status, said = place.bigtrain(["-n", "2"])
    assert status == 0, said
    return place.curve()
