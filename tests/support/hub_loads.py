"""Host memory of a rank while it loads a model of the Hub."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from bigtrain.core.strategy import Plan
from bigtrain.core.workload import Workload
from bigtrain.data.loader import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.job.load import job_from_keys
from bigtrain.job.schema import Job
from bigtrain.losses.loss import Loss, as_loss
from bigtrain.memory.allocator import release_free_memory, return_large_blocks
from bigtrain.memory.host_memory import proc_status_bytes
from bigtrain.memory.timeline import Peak
from bigtrain.models.blueprint import Blueprint
from bigtrain.models.parameters import low_names
from bigtrain.models.saved_parts import SavedParts
from bigtrain.models.spec import ModelSpec
from bigtrain.prediction.building import made_one_by_one
from bigtrain.prediction.predict import forecast_rank
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


@dataclass
class Loaded:
    """A job for a model of the Hub, before its engine is made."""

    job: Job
    plan: Plan
    blueprint: Blueprint
    loss: Loss
    example: MicroBatch

    @classmethod
    def of(cls, context: Any, strategy: str, folder: Path, keys: Mapping[str, Any]) -> Loaded:
        batch = {"train.global_batch_size": 4, "train.micro_batch_size": 1, "device": "cpu"}
        job = job_from_keys(strategy, {**batch, "model.name": f"hf:{folder}", **keys})
        plan = make_plan(job, context.world_size, "cpu")
        blueprint = ModelSpec.of(job.model).describe(num_classes=None, sequence_length=None)
        loss, ids = as_loss(of_logits), torch.ones(1, 8, dtype=torch.long)
        return cls(job, plan, blueprint, loss, example_batch((ids, ids), loss, job, plan))

    def engine(self, context: Any) -> Engine:
        return Engine(self.blueprint, self.loss, sgd, self.job, context, example=self.example)

    def model_bytes(self) -> int:
        """The bytes of all parameters in the dtypes of the run."""
        plan, model = self.plan, self.blueprint.model
        low = set(
            low_names(
                model, bf16_parameters=plan.bf16_parameters, frozen_in_bf16=plan.frozen_in_bf16
            )
        )
        fp32_masters = plan.master_weights and plan.replicate.engine != "deepspeed"
        return sum(
            2 * p.numel() if name in low and not (p.requires_grad and fp32_masters) else p.nbytes
            for name, p in model.named_parameters()
        )


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
        largest_bytes: the largest tensor of the whole model, in fp32.
        model_bytes: all of its parameters, in the dtypes of the run.
        peak_bytes: added to the process's anonymous memory from its first value to the last.
    """
    quiet = {"memory.predict": False, "memory.track_steps": 0}
    loaded = Loaded.of(context, strategy, folder, {**quiet, **keys})
    largest = max(parameter.nbytes for parameter in loaded.blueprint.model.parameters())
    model_bytes = loaded.model_bytes()
    return_large_blocks(1 << 16)  # as under a cap; freed pieces would stay in the heap otherwise
    with AnonymousPeak() as anonymous:
        engine = loaded.engine(context)
    with engine:
        share = sum(_held(engine).values())
    return {
        "share_bytes": share,
        "largest_bytes": largest,
        "model_bytes": model_bytes,
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


def building(context: Any, strategy: str, folder: Path, keys: Mapping[str, Any]) -> tuple[int, int]:
    """The forecast of the bytes of tensors while the model is built, and the measured ones."""
    tracked = {"memory.track_steps": 1}
    loaded = Loaded.of(context, strategy, folder, {**tracked, **keys})
    twin, example = loaded.blueprint.twin(), loaded.example
    widths = twin.read_widths
    with loaded.engine(context) as engine:
        measured = engine.meter.measured().peak
        resolved = engine.resolved
    assert measured is not None
    assert measured.phase == "build"
    plan = replace(resolved.plan, tp_rank=context.tp_rank)
    resolved = replace(resolved, plan=plan)
    workload = Workload(twin.model, example, loaded.loss, sgd, read_widths=widths)
    rank = forecast_rank(resolved, workload, context.pp_rank)
    assert rank.forecast is not None
    peaks = made_one_by_one(rank.profiles, resolved, workload)
    return max(peak.bytes for peak in (*peaks, Peak("build", rank.forecast.building))), (
        measured.bytes
    )
