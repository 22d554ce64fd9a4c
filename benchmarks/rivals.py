"""Train the jobs of `frontier.py` by torch, Lightning, Accelerate and DeepSpeed, on two ranks.

    pip install accelerate pytorch-lightning

A rival trains the model of a job from the job's initial weights on the job's batches, half of each
batch on each rank and in one pass. It has fused AdamW and clips to a norm of 1. Its processes are
its own, with one thread each, and have the C library's allocator, as users start them.

Seconds are those of a step without the reading of its batch, as in bigtrain's `metrics.jsonl`. They
are measured after the tracked steps and one more. The peak is that of the bytes of tensors, from
`bigtrain.memory.tracker`, on the rank with the highest, in the tracked steps. What building the
model takes is not counted for rivals (it is for bigtrain), because there are several ways to build.
gloo's thread may release a tensor late while steps are tracked, so of several runs the lowest peak
of a rival counts. `pages` are measured in a run of its own, as in `overhead.py`.

Rivals that shard have every block wrapped, and `_full` recomputes the activations of every block.
DDP has its gradients as views of its buckets everywhere. DeepSpeed has buckets of 25 MiB, as DDP
has, and stage 3 keeps at most 50 MiB of whole parameters. Its defaults are made for larger models:
buckets of 2 GB in fp32, and in these models no parameter is released. Accelerate has no FSDP for
CPUs: it falls back to DDP. Here its state is told that the run is FSDP, so its own functions shard
the model.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overhead import OwnPages
from plain_loops import (
    Ddp,
    DeepSpeed,
    FullyShard,
    Loop,
    MakeModel,
    ZeroRedundancy,
    adamw,
    blocks_of,
    checkpoint_blocks,
    loss_of,
    mean_over_ranks,
    shard_blocks,
)
from torch import Tensor, nn

import bigtrain
from bigtrain.assembly.make_plan import make_plan
from bigtrain.compare.subprocess_runs import run_bigtrain
from bigtrain.engine.prepare import connect_job
from bigtrain.engine.setup import RunSetup, check_job, open_setup
from bigtrain.job.load import load_job
from bigtrain.memory.allocator import allocator_environ, release_free_memory
from bigtrain.memory.tracker import StorageTracker
from bigtrain.ranks.context import RunContext

RANKS = 2
PAGES_STEPS = 3
"""Steps of a run that measures pages."""
_BUCKET = 25 * 2**20 // 4
BUCKETS = {"reduce_bucket_size": _BUCKET, "allgather_bucket_size": _BUCKET}
"""Elements of DeepSpeed's buckets; see the top of this file."""
LIVE = {
    "stage3_prefetch_bucket_size": _BUCKET,
    "stage3_max_live_parameters": 2 * _BUCKET,
    "stage3_max_reuse_distance": 2 * _BUCKET,
}
"""Elements of the parameters that DeepSpeed's stage 3 keeps gathered."""
Batches = Iterator[tuple[Tensor, Tensor]]


class Watch:
    """The seconds and losses of a run's steps, and the peak of the first ones.

    Args:
        tracked: the steps, from the first, in which tensors are tracked.
    """

    def __init__(self, tracked: int) -> None:
        self._tracker = StorageTracker(device_type="cpu")
        self._tracked = tracked
        self._began = 0.0
        self.losses: list[float] = []
        self.seconds: list[float] = []
        if tracked:
            self._tracker.__enter__()

    @property
    def peak_bytes(self) -> int:
        """The peak of the bytes of tensors since the model was built."""
        return self._tracker.peak_bytes

    def built(self) -> None:
        """Note that the first step is next."""
        self._tracker.peak_bytes = self._tracker.live_bytes

    def begin(self) -> None:
        """Note that a step begins."""
        self._began = time.perf_counter()

    def end(self, loss: float) -> None:
        """Note that a step has ended."""
        self.seconds.append(time.perf_counter() - self._began)
        self.losses.append(loss)
        if len(self.losses) == self._tracked:
            self._tracker.__exit__(None, None, None)
            self._tracker.close()


Train = Callable[[MakeModel, Batches, int, Watch], None]
"""(make, batches, rows of a rank, watch): trains until the batches end."""


def by_steps(make_loop: Callable[[MakeModel], Loop]) -> Train:
    """Return what trains with a loop of `plain_loops`."""

    def train(make: MakeModel, batches: Batches, rows: int, watch: Watch) -> None:  # noqa: ARG001
        step_through(make_loop(make), batches, watch)

    return train


def step_through(loop: Loop, batches: Batches, watch: Watch) -> None:
    """Take a step of the loop on each of the batches."""
    watch.built()
    for inputs, targets in batches:
        watch.begin()
        watch.end(loop.step(inputs, targets))


def on_deepspeed(stage: int) -> Train:
    """Return what trains with DeepSpeed's engine."""

    def train(make: MakeModel, batches: Batches, rows: int, watch: Watch) -> None:
        keys = {**BUCKETS, **(LIVE if stage == 3 else {})}
        step_through(DeepSpeed(make, stage, rows, keys), batches, watch)

    return train


def accelerator_for_fsdp2(block: type[nn.Module]) -> Any:
    """Return an Accelerator that wraps the modules of a class; see the top of this file."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[block.__name__],
        cpu_ram_efficient_loading=False,
    )
    return accelerator


class Accelerated:
    """A training loop on Accelerate.

    Args:
        make: makes the model.
        fsdp2: whether to shard with FSDP2, and not to replicate with DDP.
    """

    def __init__(self, make: MakeModel, *, fsdp2: bool) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        model = make()
        if fsdp2:
            self.accelerator = accelerator_for_fsdp2(type(blocks_of(model)[0]))
        else:
            views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
            self.accelerator = Accelerator(cpu=True, kwargs_handlers=[views])
        made = self.accelerator.prepare(model, adamw(model.parameters()))
        self.model, self.optimizer = made

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        loss = loss_of(self.model(inputs), targets)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean_over_ranks(loss)


def on_lightning(*, fsdp2: bool) -> Train:
    """Return what trains with Lightning's strategy for FSDP2, or with that for DDP."""

    def train(make: MakeModel, batches: Batches, rows: int, watch: Watch) -> None:  # noqa: ARG001
        import pytorch_lightning as lightning
        from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = make()

            def configure_model(self) -> None:
                if fsdp2:
                    shard_blocks(self.model, self.device_mesh["data_parallel"], reshard=True)

            def training_step(self, batch: Any, _: int) -> Tensor:
                return loss_of(self.model(batch[0]), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return adamw(self.parameters())

        class Watching(lightning.Callback):  # type: ignore[misc]
            def on_train_start(self, *_: Any) -> None:
                watch.built()

            def on_train_batch_start(self, *_: Any) -> None:
                watch.begin()

            def on_train_batch_end(self, _: Any, __: Any, outputs: Any, *___: Any) -> None:
                watch.end(mean_over_ranks(outputs["loss"]))

        strategy = (
            ModelParallelStrategy(RANKS, 1, process_group_backend="gloo")
            if fsdp2
            else DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
        )
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy=strategy,
            max_epochs=1,
            gradient_clip_val=1.0,
            callbacks=[Watching()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), train_dataloaders=batches)

    return train


def recomputing(train: Train) -> Train:
    """Return what trains with the activations of every block recomputed."""

    def trains(make: MakeModel, batches: Batches, rows: int, watch: Watch) -> None:
        train(lambda: checkpoint_blocks(make()), batches, rows, watch)

    return trains


RIVALS: Mapping[str, Train] = {
    "torch_ddp": by_steps(Ddp),
    "torch_ddp_full": recomputing(by_steps(Ddp)),
    "torch_zero1": by_steps(ZeroRedundancy),
    "torch_fsdp2": by_steps(partial(FullyShard, reshard=True)),
    "torch_fsdp2_zero2": by_steps(partial(FullyShard, reshard=False)),
    "torch_fsdp2_full": recomputing(by_steps(partial(FullyShard, reshard=True))),
    "lightning_ddp": on_lightning(fsdp2=False),
    "lightning_fsdp2": on_lightning(fsdp2=True),
    "accelerate_ddp": by_steps(partial(Accelerated, fsdp2=False)),
    "accelerate_fsdp2": by_steps(partial(Accelerated, fsdp2=True)),
    **{f"deepspeed_zero{stage}": on_deepspeed(stage) for stage in (1, 2, 3)},
    "deepspeed_zero3_full": recomputing(on_deepspeed(3)),
}
"""By name. torch_fsdp2_zero2 keeps the parameters gathered from the forward to the backward."""
LIBRARIES = {
    "lightning": "pytorch_lightning",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
}
"""The module that a rival imports, by the first part of its name."""


def names_of(text: str) -> list[str]:
    """Return the rivals that `--rivals` names.

    Raises:
        SystemExit: a name is not that of a rival.
    """
    if text in ("all", "none"):
        return list(RIVALS) if text == "all" else []
    names = text.split(",")
    if unknown := [name for name in names if name not in RIVALS]:
        raise SystemExit(f"--rivals {unknown[0]}: there are {', '.join(RIVALS)}")
    return names


def rival_words(words: Sequence[str], samples: int) -> list[str]:
    """Return the words of a job with one pass of half of the batch on each rank."""
    batch = [f"train.global_batch_size={samples}", f"train.micro_batch_size={samples // RANKS}"]
    return [*words, *batch]


def run_rival(
    name: str, words: Sequence[str], samples: int, steps: int, tracked: int, limit_s: float
) -> dict[str, Any]:
    """Run a rival; return its peak in bytes, its seconds and its losses, or its error.

    Args:
        name: a key of `RIVALS`.
        words: the words of the job.
        samples: the samples of a step on both ranks.
        steps: the steps of the run.
        tracked: how many of them are tracked.
        limit_s: the seconds after which the run is ended.
    """
    spec = {"rival": name, "words": rival_words(words, samples), "steps": steps, "tracked": tracked}
    return _start(spec, limit_s, {})


def pages_of_rival(name: str, words: Sequence[str], samples: int, limit_s: float) -> dict[str, Any]:
    """Run a few steps of a rival; return the peak of its processes' own pages, or its error.

    Args:
        name: see `run_rival`, also for the other arguments.
        words: see there.
        samples: see there.
        limit_s: see there.
    """
    spec = {"rival": name, "words": rival_words(words, samples), "steps": PAGES_STEPS, "tracked": 0}
    return _start(spec, limit_s, {})


def pages_of_plan(plan: str, words: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a few steps of a plan as bigtrain's commands start it; see `pages_of_rival`.

    Args:
        plan: the text of the plan's file.
        words: see `run_rival`.
        limit_s: see there.
    """
    spec = {"plan": plan, "words": list(words), "steps": PAGES_STEPS, "tracked": 0}
    return _start(spec, limit_s, allocator_environ(os.environ))


def _start(spec: dict[str, Any], limit_s: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run both ranks of a run; return what rank 0 has written, or the error of a rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "spec.json").write_text(json.dumps(spec))
        command = ["--standalone", "--nproc-per-node", str(RANKS), __file__, name]
        variables = {"OMP_NUM_THREADS": "1", **environ}
        module = "torch.distributed.run"
        outcome = run_bigtrain(command, folder / "log", limit_s, variables, module)
        for path in sorted(folder.glob("error-*")):
            return {"error": without_paths(path.read_text())}
        if outcome.reason is not None:
            return {"error": without_paths(outcome.reason)}
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return found


def without_paths(text: str) -> str:
    """Return a text on one line, with the paths of this machine replaced."""
    return re.sub(r"/[\w./-]*/[\w.-]+", "PATH", " ".join(text.split()))[:500]


def parts_of(words: Sequence[str], strategy: str | None, plan: str | None, steps: int) -> RunSetup:
    """Return the parts of a run that is neither forecast nor saved.

    Args:
        words: the words of the job.
        strategy: the strategy; None if there is a plan.
        plan: the path of a plan's file, or None.
        steps: the steps of the run.
    """
    quiet = [f"train.steps={steps}", "memory.track_steps=0", "memory.predict=false", "device=cpu"]
    job = load_job(None, strategy, [*words, *quiet], plan=plan)
    return open_setup(job, make_plan(job, RANKS, "cpu"), check_job(job))


def batches_of(parts: RunSetup, context: RunContext, steps: int) -> Batches:
    """Yield this rank's inputs and targets of some steps."""
    for _, step in zip(range(steps), parts.training_steps(context, 0), strict=False):
        (micro_batch,) = step.micro_batches
        yield micro_batch.inputs, micro_batch.targets


def train_rival(spec: dict[str, Any]) -> dict[str, Any]:
    """Train a rival on this rank; return the figures of both."""
    name, steps = spec["rival"], spec["steps"]
    if library := LIBRARIES.get(name.partition("_")[0]):
        importlib.import_module(library)
    parts = parts_of(spec["words"], "ddp", None, steps)
    with bigtrain.connect(bigtrain.detect_rank_info(os.environ), device="cpu") as context:
        torch.set_num_threads(1)
        data = batches_of(parts, context, steps)
        release_unused()
        # While pages are sampled, a thread of Python runs beside the steps.
        with nullcontext() if spec["tracked"] else OwnPages() as pages:
            watch = Watch(spec["tracked"])
            make = partial(parts.blueprint.materialize, "cpu", seed=0)
            RIVALS[name](make, data, parts.plan.batch.micro_size, watch)
        if pages is None:
            return {**_highest(peak_bytes=watch.peak_bytes), **_steps_of(watch)}
        return _highest(pages_bytes=pages.peak_bytes)


def train_plan(spec: dict[str, Any], path: Path) -> dict[str, Any]:
    """Train a plan on this rank; return the highest peak of both ranks' pages."""
    path.write_text(spec["plan"])
    parts = parts_of(spec["words"], None, str(path), spec["steps"])
    placement = bigtrain.detect_rank_info(os.environ)
    with connect_job(parts.job, parts.plan, placement, {}) as context:
        release_unused()
        with OwnPages() as pages, parts.engine(context) as engine:
            for step in parts.training_steps(context, 0):
                engine.step(step)
                if engine.steps_done == spec["steps"]:
                    break
        return _highest(pages_bytes=pages.peak_bytes)


def release_unused() -> None:
    """Return unused memory to the system: tensors that reuse it would add no pages."""
    gc.collect()
    release_free_memory()


def _highest(**found: int) -> dict[str, Any]:
    """Return the highest of all ranks of each number. Collective."""
    numbers = torch.tensor(list(found.values()), dtype=torch.int64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return dict(zip(found, numbers.tolist(), strict=True))


def _steps_of(watch: Watch) -> dict[str, Any]:
    return {"seconds": watch.seconds, "losses": watch.losses}


def rank_main(folder: Path) -> None:
    """Do one run on this rank; write its figures, or its error, into the run's folder."""
    rank = os.environ["RANK"]
    warnings.simplefilter("ignore")
    spec = json.loads((folder / "spec.json").read_text())
    try:
        if "rival" in spec:
            found = train_rival(spec)
        else:
            found = train_plan(spec, folder / f"plan-{rank}.yaml")
    except Exception as error:
        traceback.print_exc()
        (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
        raise
    if rank == "0":
        (folder / "result.json").write_text(json.dumps(found))


def timed(seconds: Iterable[Sequence[float]], tracked: int) -> float:
    """Return the median seconds of the steps of some runs after the tracked ones and one more."""
    return statistics.median(s for run in seconds for s in run[tracked + 1 :])


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
