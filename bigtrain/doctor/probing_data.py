"""A data source for checks: it pauses, ends a rank, or reports the GPUs that a rank has taken up.

A check names it as `data.name`, so that the act happens inside an ordinary run, between two steps.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from bigtrain.data.source import Data
from bigtrain.data.synthetic import RandomSamples, SyntheticSource
from bigtrain.devices import devices_with_context

Act = Literal["pause", "die", "report"]
FOLDER = "BIGTRAIN_CHECK_FOLDER"
"""The environment variable with the folder into which `report` writes."""


def language(
    act: Act,
    at: int,
    *,
    seconds: float = 0.0,
    vocabulary: int = 256,
    seed: int = 0,
    sequence_length: int | None = None,
) -> Data:
    """Return the tokens of the source `synthetic`, with an act at one sample.

    Args:
        act: `pause`: the rank sleeps. `die`: rank 1 kills itself. `report`: the rank writes
            `gpus-RANK.json`, the indices of the GPUs on which its process has a context.
        at: the sample at which the act happens, counted in the samples that the rank reads.
        seconds: the length of the pause.
        vocabulary: the number of different tokens.
        seed: the run's seed.
        sequence_length: the tokens of a sample.
    """
    data = SyntheticSource(kind="language", vocabulary=vocabulary).open(
        seed=seed, sequence_length=sequence_length
    )
    return Data(train=_Acting(data.train, act, at, seconds), validation=None, task=data.task)


class _Acting:
    """Samples that are counted as they are read."""

    deterministic = True

    def __init__(self, samples: RandomSamples | Any, act: Act, at: int, seconds: float) -> None:
        self._samples, self._act, self._at, self._seconds = samples, act, at, seconds
        self._reads = 0

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._reads += 1
        if self._reads == self._at:
            self._do()
        sample: tuple[Tensor, Tensor] = self._samples[index]
        return sample

    def _do(self) -> None:
        rank = int(os.environ.get("RANK", "0"))
        if self._act == "pause":
            time.sleep(self._seconds)
        elif self._act == "die" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._act == "report":
            path = Path(os.environ[FOLDER]) / f"gpus-{rank}.json"
            path.write_text(json.dumps(devices_with_context()), "utf-8")
