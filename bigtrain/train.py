"""Train a model: the whole run, from top to bottom.

deepspeed|torchrun|srun|mpiexec|python bigtrain/train.py [--strategy NAME] [KEY=VALUE ...]
"""

import os
import sys

# A launcher that runs this file by its path puts bigtrain/ itself first on sys.path, instead of the
# folder that contains the package. Until that is corrected only os and sys may be imported.
if not __package__ and sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(__file__):
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

if __name__ == "__main__":
    import gc

    from bigtrain.memory.allocator import start_with_allocator
    from bigtrain.ranks.exit_status import end_quietly_on_interrupt

    start_with_allocator()
    gc.disable()  # the collector takes a sixth of the time of the imports, and finds nothing
    end_quietly_on_interrupt()  # while torch is loaded

from pathlib import Path

from rich.console import Console

from bigtrain.assembly.make_plan import device_type_of, make_plan
from bigtrain.data import prepare_data
from bigtrain.devices import grow_segments, is_accelerator, set_current
from bigtrain.engine.engine import Engine
from bigtrain.engine.out_of_memory import adapt_on_oom
from bigtrain.engine.prepare import connect_job
from bigtrain.engine.resume import Saving, StopReport, StopSignals, resume, run_note
from bigtrain.engine.setup import RunSetup, check_job, open_setup
from bigtrain.files.drafts import write_cache
from bigtrain.job.arguments import TrainOptions, train_arguments
from bigtrain.job.load import load_job, override_job
from bigtrain.job.schema import Job
from bigtrain.ranks.connect import pick_device
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.exit_status import run_guarded, warn_on_rank_0
from bigtrain.ranks.launcher_env import RankInfo, detect_rank_info, launcher_hint
from bigtrain.ranks.preemption import PreemptionNotice
from bigtrain.ranks.restart import Restart
from bigtrain.report.dry_run import show_dry_run
from bigtrain.report.lines import closing_lines, make_console, opening_lines
from bigtrain.report.metric_writers import check_writers
from bigtrain.report.run_log import RunLog, run_folder


def main(arguments: list[str]) -> int:
    """Read and check the job, connect the ranks and train; return the exit status.

    Args:
        arguments: the command line without the program's name.
    """
    options = train_arguments(arguments)
    placement = detect_rank_info(os.environ)
    warn_on_rank_0(placement.rank)
    job, reasons = read_job(options, placement)
    restart = Restart.taken(os.environ)
    if restart is not None:  # the ranks were started again after a fault
        job = override_job(job, restart.words)
    plan = make_plan(job, placement.world_size, device_type_of(job), one_host=placement.one_node)
    model = check_job(job)
    check_writers(job.log)
    if not options.dry_run:  # each rank selects its GPU before a forecast touches one
        grow_segments(os.environ)
        set_current(pick_device(job.device, placement, os.environ))
    # Errors are found before the ranks connect, unless rank 0 has to download the data first.
    download = bool(job.data.args.get("download"))
    parts = None if download else open_setup(job, plan, model)
    console = make_console()
    for line in reasons if placement.rank == 0 else ():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if options.dry_run:
        return show_dry_run(job, plan, parts, console) if placement.rank == 0 else 0
    has_gpu = is_accelerator(plan.device_type)
    hint = launcher_hint(placement, os.cpu_count() or 1, has_gpu=has_gpu)
    if hint is not None:
        console.print(hint, highlight=False, soft_wrap=True)

    facts = parts.facts(one_node=placement.one_node) if parts else {}
    stopped = StopReport(speaks=placement.rank == 0)
    with stopped, connect_job(job, plan, placement, facts) as context:
        if parts is None:
            if context.is_main:
                prepare_data(job.data.name, job.data.path, job.data.args, job.model.name)
            context.barrier()
            parts = open_setup(job, plan, model)
            context.agreement.require(parts.facts(one_node=placement.one_node))
        folder = context.recorder.folder = stopped.folder = run_folder(job, context)
        if context.is_main:
            if parts.data.counts:
                write_cache(folder / "data.json", parts.data.counts, indent=1)
            run_note(job, parts.plan, folder, restart, planned=bool(reasons)).leave(os.environ)
        if restart is not None and restart.said and context.is_main:
            console.print(restart.said, highlight=False, markup=False, soft_wrap=True)
        with adapt_on_oom(job, parts.plan, parts.workload.model, folder, restart):
            return train(job, parts, context, folder, console)


def read_job(options: TrainOptions, placement: RankInfo) -> tuple[Job, list[str]]:
    """Return the job of this command line, and the lines that explain a plan of the planner.

    Raises:
        ConfigError: a file, a key or a value is wrong; for `--strategy auto` and for a budget, also
            if no plan fits.
    """
    auto = options.strategy == "auto"
    if not auto:
        job = load_job(options.config, options.strategy, options.overrides, plan=options.plan)
    if auto or job.strategy.budget is not None:
        from bigtrain.planner.auto import plan_job  # noqa: PLC0415 - no other run needs the planner

        return plan_job(options, placement)
    return job, []


def train(job: Job, parts: RunSetup, context: RunContext, folder: Path, console: Console) -> int:
    """Build the engine, train, and write the results; return the exit status."""
    with parts.engine(context) as engine:
        engine.saver.reserve(folder / "checkpoints")
        resumed = resume(job, engine, folder)  # from a checkpoint, if the job names one
        saving = Saving(job, engine, folder, parts.total_steps)
        with (
            RunLog(
                folder,
                job,
                parts.plan,
                context,
                console,
                total_steps=parts.total_steps,
                first_step=engine.steps_done,
                predicted=engine.prediction.fullest.peak if engine.prediction.fullest else None,
                predicted_step=engine.prediction.step,
                predicted_volume=engine.prediction.volume,
            ) as log,
            PreemptionNotice(context, parts.plan.replicate.notice_every) as notice,
        ):
            for line in opening_lines(parts, engine, resumed):
                log.print_line(line)
            signals = StopSignals(notice, engine, saving)
            remains = engine.steps_done < parts.total_steps
            if remains and not take_steps(parts, engine, saving, log, signals):
                return notice.exit_status
            log.memory(engine.memory())
            for line in closing_lines(parts, folder):
                log.print_line(line)
    return 0


def take_steps(
    parts: RunSetup, engine: Engine, saving: Saving, log: RunLog, signals: StopSignals
) -> bool:
    """Train to the last step; return False if a signal stops the run before it. Collective."""
    for batch in parts.training_steps(engine.context, engine.samples_seen):
        if signals.before_step(batch):
            signals.save(log.sync, log.print_line)
            return False
        result, measured = engine.step(batch), None
        last = result.step == parts.total_steps
        validates = parts.data.validation is not None and (last or saving.validates(result.step))
        stops = signals.after_step(result, at_once=last or validates) and not last
        log.step(result, getattr(engine.runner, "figures", {}), signals.highest)
        if stops:  # before a validation: the process may be killed soon
            signals.save(log.sync, log.print_line)
        if validates:
            measured = engine.evaluate(parts.validation_batches(engine.context))
            log.validation(result.step, measured)
        if stops:
            return False
        for line in saving.after_step(result.step, measured, log.sync):
            log.print_line(line)
        if last:
            break
    return True


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(run_guarded(lambda: main(sys.argv[1:])))
