"""Train: the whole run, readable from top to bottom.

deepspeed|torchrun|srun|mpiexec|python bigtrain/train.py [--strategy NAME] [KEY=VALUE ...]
"""

import os
import sys

# A launcher that runs this file by its path puts bigtrain/ itself first on sys.path, and not the
# folder that holds the package. Only os and sys may be imported before that is put right.
if not __package__ and sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(__file__):
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from pathlib import Path

from rich.console import Console

import bigtrain


def main(arguments: list[str]) -> int:
    """Read the job, refuse what cannot work, connect the ranks, train; return the exit status."""
    options = bigtrain.train_arguments(arguments)
    placement = bigtrain.detect_rank_info(os.environ)
    job, reasons = bigtrain.read_job(options, placement)
    restart = bigtrain.Restart.taken(os.environ)
    if restart is not None:  # memory ran out in an earlier life of this process
        job = bigtrain.override_job(job, restart.words)
    plan = bigtrain.make_plan(job, placement.world_size, bigtrain.device_type_of(job))
    bigtrain.check_job(job)
    # Without a download everything that can be refused is refused before the ranks connect.
    download = bool(job.data.args.get("download"))
    parts = None if download else bigtrain.open_setup(job, plan)
    console = bigtrain.console()
    for line in reasons if placement.rank == 0 else ():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if options.dry_run:
        return show(job, plan, parts or bigtrain.open_setup(job, plan), console)
    has_gpu = plan.device_type == "cuda"
    hint = bigtrain.launcher_hint(placement, os.cpu_count() or 1, has_gpu=has_gpu)
    if hint is not None:
        console.print(hint, highlight=False, soft_wrap=True)

    with bigtrain.connect_job(job, plan, placement) as context:
        if parts is None:
            if context.is_main:
                bigtrain.prepare_data(job.data.name, job.data.path, job.data.args)
            context.barrier()
            parts = bigtrain.open_setup(job, plan)
        folder = bigtrain.run_folder(job, context)
        if restart is not None and context.is_main:
            console.print(restart.said, highlight=False, markup=False, soft_wrap=True)
        with bigtrain.adapt_on_oom(job, parts.plan, parts.workload.model, folder, restart):
            return train(job, parts, context, folder, console)


def train(
    job: bigtrain.Job,
    parts: bigtrain.RunSetup,
    context: bigtrain.RunContext,
    folder: Path,
    console: Console,
) -> int:
    """Build the engine, go through the steps, and leave the results behind."""
    with parts.engine(context) as engine:
        resumed = resume(job, engine, folder)
        with bigtrain.RunLog(
            folder,
            job,
            parts.plan,
            context,
            console,
            total_steps=parts.total_steps,
            first_step=engine.steps_done,
            predicted=engine.predicted,
        ) as log:
            for line in bigtrain.opening_lines(parts, engine, resumed):
                log.print_line(line)
            if engine.steps_done < parts.total_steps:
                for batch in parts.training_steps(context, engine.samples_seen):
                    result = engine.step(batch)
                    log.step(result)
                    last = result.step == parts.total_steps
                    wanted = last or due(result.step, job.train.eval_every)
                    if wanted and parts.data.validation is not None:
                        measured = engine.evaluate(parts.validation_batches(context))
                        log.validation(result.step, measured)
                    if (last and job.checkpoint.at_end) or due(result.step, job.checkpoint.every):
                        engine.save(folder / "checkpoints")
                    if last:
                        break
            log.memory(engine.memory())
            for line in bigtrain.closing_lines(parts, folder):
                log.print_line(line)
    return 0


def due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps is done after this one."""
    return every > 0 and step % every == 0


def resume(job: bigtrain.Job, engine: bigtrain.Engine, folder: Path) -> Path | None:
    """Continue from the checkpoint that the job names, if it names one."""
    if job.checkpoint.resume is None:
        return None
    if job.checkpoint.resume == "auto":
        found = bigtrain.newest_checkpoint(folder / "checkpoints")
    else:
        found = bigtrain.find_checkpoint(job.checkpoint.resume)
    # All ranks continue from the one that rank 0 has found.
    path: Path | None = engine.context.broadcast_object(found)
    if path is not None:
        engine.load(path)
    return path


def show(job: bigtrain.Job, plan: bigtrain.Plan, parts: bigtrain.RunSetup, console: Console) -> int:
    """Print the resolved job and the predicted peak, and run nothing."""
    for line in bigtrain.dry_run_lines(job, plan, parts):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(bigtrain.run_guarded(lambda: main(sys.argv[1:])))
