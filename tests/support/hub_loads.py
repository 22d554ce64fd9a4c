"""Host memory of a rank while it loads a model of the Hub."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import sgd
from torch import Tensor

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.materialize import Materializer
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.job.load import job_from_keys
from bigtrain.job.schema import ModelConfig
from bigtrain.losses.loss import as_loss
from bigtrain.memory.allocator import release_free_memory, return_large_blocks
from bigtrain.memory.host_memory import proc_status_bytes
from bigtrain.models.saved_parts import SavedParts
from bigtrain.models.spec import ModelSpec
from bigtrain.tensors.shards import local_tensor


class AnonymousPeak(threading.Thread):
    """The highest RssAnon of this process from the first value of a model to the last.

    Pages of mapped files do not count in it. A thread samples it, about every millisecond. The
    engine's other work (the check of a cut, buffers of wrappers and optimizers) is left out.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._before, self._highest = -1, 0
        self._ended = threading.Event()
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> AnonymousPeak:
        gc.collect()
        for owner, name in ((Materializer, "__call__"), (SavedParts, "copy")):
            self._patches.setattr(owner, name, self._noting(getattr(owner, name)))
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.undo()
        self._ended.set()
        self.join()

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if self._before < 0:
                release_free_memory()  # otherwise values go where freed memory was
                self._before = self._highest = self._now()
            result = function(*args, **kwargs)
            self._sample()
            self.peak_bytes = self._highest - self._before
            return result

        return noting

    def run(self) -> None:
        while not self._ended.wait(0.001):
            self._sample()

    def _sample(self) -> None:
        self._highest = max(self._highest, self._now())

    def _now(self) -> int:
        return proc_status_bytes("RssAnon") or 0


def of_logits(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), targets.flatten())


def load(context: Any, strategy: str, folder: Path) -> dict[str, int]:
    """The bytes that a rank holds after it has loaded a model, and its peak while it did.

    Returns:
        share_bytes: parameters and buffers of this rank.
        largest_bytes: the largest tensor of the whole model.
        model_bytes: all of its parameters.
        peak_bytes: added to the process's anonymous memory from its first value to the last.
    """
    keys = {"train.global_batch_size": 4, "train.micro_batch_size": 1, "device": "cpu"}
    job = job_from_keys(strategy, {**keys, "memory.predict": False, "memory.track_steps": 0})
    plan = make_plan(job, context.world_size, "cpu")
    blueprint = ModelSpec.of(ModelConfig(name=f"hf:{folder}")).describe(
        num_classes=None, sequence_length=None
    )
    sizes = [parameter.nbytes for parameter in blueprint.model.parameters()]
    loss, ids = as_loss(of_logits), torch.ones(1, 8, dtype=torch.long)
    example = example_batch((ids, ids), loss, job, plan)
    return_large_blocks(1 << 20)
    with AnonymousPeak() as anonymous:
        engine = Engine(blueprint, loss, sgd, job, context, example=example)
    with engine:
        roots = engine.runner.roots
        held = {
            id(tensor): local_tensor(tensor).nbytes
            for root in roots
            for tensor in (*root.parameters(), *root.buffers())
        }
    share = sum(held.values())
    if strategy == "zero3":  # DeepSpeed keeps the shards elsewhere
        share = sum(sizes) // context.dp_size
    return {
        "share_bytes": share,
        "largest_bytes": max(sizes),
        "model_bytes": sum(sizes),
        "peak_bytes": anonymous.peak_bytes,
    }


def load_twice(context: Any, strategy: str, small: Path, folder: Path) -> dict[str, int]:
    """The figures of `load` for a folder, after another was loaded: libraries have their memory."""
    load(context, strategy, small)
    return load(context, strategy, folder)
