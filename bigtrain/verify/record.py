"""Record the losses, gradient norms, gradients and weights of a run.

`bigtrain verify` starts this command once for the reference and once for each strategy:

    bigtrain record -n N --record FOLDER [--trace] [--no-dropout] [--strategy NAME] [KEY=VALUE ...]

    FOLDER/record.json                losses and norms; the difference from a plain torch loop
           gradients-K.safetensors    whole gradients of step K by parameter, before clipping
           weights-before.safetensors, weights-after.safetensors
           trace-RANK.json            with --trace: see bigtrain/verify/execution_trace.py
           dropout-RANK.json          modules whose masks are not tied to samples, and why
"""

import os
import sys

# If Python runs a file by its path, sys.path begins with the file's folder, where Python does not
# find the package `bigtrain`.
if not __package__ and sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(__file__):
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import json
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigtrain.assembly.make_plan import device_type_of, make_plan
from bigtrain.checkpoint.write import write_tensors
from bigtrain.core.runner import StepLoss
from bigtrain.data.loader import MicroBatch, Step
from bigtrain.devices import grow_segments, set_current
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_steps import disable_dropout
from bigtrain.engine.prepare import connect_job
from bigtrain.engine.setup import RunSetup, check_job, open_setup
from bigtrain.errors import BigtrainError
from bigtrain.job.arguments import train_arguments
from bigtrain.job.load import load_job
from bigtrain.job.schema import Job
from bigtrain.models.blocks import find_blocks
from bigtrain.ranks.connect import pick_device
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.exit_status import run_guarded
from bigtrain.ranks.launcher_env import detect_rank_info
from bigtrain.verify.execution_trace import ExecutionTrace
from bigtrain.verify.tied_dropout import NoDropout, TiedDropout, sample_places


def main(arguments: list[str]) -> int:
    """Run `bigtrain record` on this rank: train the job's first steps and record them.

    Args:
        arguments: the command's arguments.

    Returns:
        The exit status 0.
    """
    options = train_arguments(arguments, records=True)
    job = load_job(options.config, options.strategy, options.overrides)
    placement = detect_rank_info(os.environ)
    plan = make_plan(job, placement.world_size, device_type_of(job), one_host=placement.one_node)
    check_job(job)
    grow_segments(os.environ)  # as `train` does, before a forecast uses the rank's GPU
    set_current(pick_device(job.device, placement, os.environ))
    parts = open_setup(job, plan)
    if options.no_dropout:
        disable_dropout(parts.workload.model)
    folder = Path(options.record)
    facts = parts.facts(one_node=placement.one_node)
    with connect_job(job, plan, placement, facts) as context:
        record_run(job, parts, context, folder, job.train.steps or 1, traced=options.trace)
    return 0


def record_run(
    job: Job,
    parts: RunSetup,
    context: RunContext,
    folder: Path,
    steps: int,
    *,
    traced: bool = False,
) -> None:
    """Train some steps and write the recording. Collective.

    Each rank writes its trace and its file about dropout; rank 0 writes all other files.

    Args:
        job: the job.
        parts: the job's model and data.
        context: the context of all ranks.
        folder: the folder for the recording.
        steps: the number of steps.
        traced: whether each rank writes a trace.
    """
    # Buffers are not recorded, because BatchNorm's running statistics depend on a rank's samples.
    names = {name for name, _ in parts.workload.model.named_parameters(remove_duplicate=False)}
    norms = has_batchnorm(parts.workload.model)
    with parts.engine(context) as engine:
        if engine.first_steps is not None:
            engine.first_steps.ends_run = False
        recording: dict[str, Any] = {
            "losses": [],
            "norms": [],
            "chance": None,
            "no_gradients": None,
        }
        is_compiled = parts.resolved.plan.compiles_blocks
        dropout = NoDropout() if is_compiled else tie_dropout(engine)
        record_gradients(engine, recording, folder)
        write_weights(folder / "weights-before.safetensors", engine, names)
        trace: ExecutionTrace | None = None
        for batch in parts.training_steps(context, 0):
            alone = context.world_size == 1 and not job.optim.release_gradients
            places = sample_places(batch, context, parts.resolved.plan)
            first = engine.steps_done == 0 and not traced
            if isinstance(dropout, TiedDropout) and first and alone:
                recording["chance"] = random_losses(engine, batch, dropout, places)
            if traced and trace is None:
                trace = ExecutionTrace(engine.runner.roots, context.dp_size)
            dropout.begin_step(engine.steps_done + 1, places)
            with trace or nullcontext(), dropout:
                result = engine.step(batch)
            recording["losses"].append(result.loss)
            recording["norms"].append(result.grad_norm)
            if engine.steps_done == steps:
                break
            if trace is not None:
                trace.next_step()
        if trace is not None:
            trace.close()
            write_trace(folder, trace, engine, len(batch.micro_batches))
        dropout.close()
        dropout.write(folder, context.rank)
        write_weights(folder / "weights-after.safetensors", engine, names)
    if context.is_main:
        recording["has_batchnorm"] = norms
        first_steps = engine.first_steps
        recording["plain_loop"] = first_steps.note if first_steps else None
        recording["differs_from_plain_loop"] = first_steps.difference if first_steps else None
        (folder / "record.json").write_text(json.dumps(recording) + "\n", "utf-8")


def record_gradients(engine: Engine, recording: dict[str, Any], folder: Path) -> None:
    """Make an engine write its gradients to a file before each update.

    Args:
        engine: the engine of the run.
        recording: the recording. If gradients cannot be read, the reason is stored under its key
            `no_gradients`.
        folder: the folder for the files.
    """
    update = engine.runner.update

    def record_and_update(loss: StepLoss | None = None) -> float:
        try:
            gradients = engine.runner.gradients()
        except BigtrainError as error:  # the backward pass has used and freed the gradients
            recording["no_gradients"] = str(error)
        else:
            path = folder / f"gradients-{engine.steps_done + 1}.safetensors"
            write_tensors(path, gradients, engine.context)
        return update(loss)

    engine.runner.update = record_and_update  # type: ignore[method-assign]


def tie_dropout(engine: Engine) -> TiedDropout:
    """Return a `TiedDropout` for an engine's model.

    The engine is changed to call `begin_micro_batch` before it places a micro-batch on the device.
    """
    runner: Any = engine.runner
    spine = {""} if engine.context.pp_size > 1 else set()
    for root in runner.roots:
        spine |= set(getattr(root, "cut_through", ()))
    dropout = TiedDropout(runner.module, engine.context.seed, spine)
    runner.draw_whole()
    place_batch = runner.place_batch

    def begin_and_place(micro_batch: MicroBatch) -> MicroBatch:
        dropout.begin_micro_batch(micro_batch)
        placed: MicroBatch = place_batch(micro_batch)
        return placed

    runner.place_batch = begin_and_place
    return dropout


def write_trace(
    folder: Path, trace: ExecutionTrace, engine: Engine, num_micro_batches: int
) -> None:
    """Write the trace of this rank to its file.

    Args:
        folder: the folder for the file.
        trace: the trace.
        engine: the engine of the run.
        num_micro_batches: the number of micro-batches of this rank in a step.
    """
    context = engine.context
    document = {
        "rank": context.rank,
        "dp_rank": context.dp_rank,
        "tp_rank": context.tp_rank,
        "num_micro_batches": num_micro_batches,
        "blocks": [name for name, _ in find_blocks(engine.runner.module)],
        "entries": trace.entries,
    }
    (folder / f"trace-{context.rank}.json").write_text(json.dumps(document) + "\n", "utf-8")


def write_weights(path: Path, engine: Engine, names: Collection[str]) -> None:
    """Write the current parameters to a file. Collective.

    Args:
        path: the file.
        engine: the engine of the run.
        names: the names of the parameters in the user's model.
    """
    prefix = "model."
    state = engine.runner.state().items()
    named = {name.removeprefix(prefix): value for name, value in state if name.startswith(prefix)}
    weights = {name: value for name, value in named.items() if name in names}
    write_tensors(path, weights, engine.context)


def random_losses(
    engine: Engine, batch: Step, dropout: TiedDropout, places: Mapping[int, tuple[int, ...]]
) -> tuple[float, float] | None:
    """Return the losses of two passes over one batch with different seeds, if the losses differ.

    They differ if the model draws random numbers that are not tied to samples. Otherwise the result
    is None.

    Args:
        engine: the engine of the run.
        batch: the batch.
        dropout: the context for the passes.
        places: see `TiedDropout.begin_step`.
    """
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        dropout.begin_step(0, places)
        with dropout:
            losses.append(engine.runner.forward_backward(batch.micro_batches).read())
        engine.runner.forget_gradients()
    same = abs(losses[0] - losses[1]) <= 1e-6 * abs(losses[0])
    return None if same else (losses[0], losses[1])


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether a model has BatchNorm.

    With BatchNorm the output for a sample depends on the other samples of its micro-batch.
    """
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: main(sys.argv[1:])))
