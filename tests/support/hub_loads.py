"""Host memory of a rank while it loads a model of the Hub."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
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
        self._patches.setattr(Materializer, "__init__", self._beginning(Materializer.__init__))
        for owner, name in ((Materializer, "__call__"), (SavedParts, "copy")):
            self._patches.setattr(owner, name, self._noting(getattr(owner, name)))
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.undo()
        self._ended.set()
        self.join()

    def _beginning(self, function: Callable[..., None]) -> Callable[..., None]:
        def beginning(*args: Any, **kwargs: Any) -> None:
            function(*args, **kwargs)
            release_free_memory()  # otherwise values go where freed memory was
            self._before = self._highest = self._now()

        return beginning

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
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


def load(
    context: Any, strategy: str, folder: Path, keys: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, int]:
    """The bytes that a rank holds after it has loaded a model, and its peak while it did.

    Args:
        context: the rank's.
        strategy: words of a strategy.
        folder: of the model.
        keys: further keys of the job, such as `model.lora.rank`.

    Returns:
        share_bytes: parameters and buffers of this rank.
        largest_bytes: the largest tensor of the whole model.
        model_bytes: all of its parameters.
        peak_bytes: added to the process's anonymous memory from its first value to the last.
    """
    keys = {"train.global_batch_size": 4, "train.micro_batch_size": 1, "device": "cpu", **keys}
    keys |= {"model.name": f"hf:{folder}", "memory.predict": False, "memory.track_steps": 0}
    job = job_from_keys(strategy, keys)
    plan = make_plan(job, context.world_size, "cpu")
    blueprint = ModelSpec.of(job.model).describe(num_classes=None, sequence_length=None)
    sizes = [parameter.nbytes for parameter in blueprint.model.parameters()]
    loss, ids = as_loss(of_logits), torch.ones(1, 8, dtype=torch.long)
    example = example_batch((ids, ids), loss, job, plan)
    return_large_blocks(1 << 16)  # as under a cap; freed pieces would stay in the heap otherwise
    with AnonymousPeak() as anonymous:
        engine = Engine(blueprint, loss, sgd, job, context, example=example)
    with engine:
        share = sum(_held(engine).values())
    return {
        "share_bytes": share,
        "largest_bytes": max(sizes),
        "model_bytes": sum(sizes),
        "peak_bytes": anonymous.peak_bytes,
    }


def _held(engine: Engine) -> dict[int, int]:
    """The bytes of this rank's part of each parameter and buffer, by the tensor."""
    held = {}
    for root in engine.runner.roots:
        for tensor in (*root.parameters(), *root.buffers()):
            part = getattr(tensor, "ds_tensor", None)  # ZeRO stage 3 of DeepSpeed
            held[id(tensor)] = (local_tensor(tensor) if part is None else part).nbytes
    return held


def load_twice(
    context: Any,
    strategy: str,
    small: Path,
    folder: Path,
    keys: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, int]:
    """The figures of `load` for a folder, after another was loaded: libraries have their memory."""
    load(context, strategy, small, keys)
    return load(context, strategy, folder, keys)
