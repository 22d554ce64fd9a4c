"""`bigtrain plan`: the fastest plan that fits, before anything runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import get_args

from rich.console import Console

from bigtrain.errors import ConfigError
from bigtrain.files.regular import is_regular, is_there, open_regular
from bigtrain.job.arguments import PlanOptions, plan_arguments
from bigtrain.job.load import load_job
from bigtrain.job.schema import Job
from bigtrain.machine.cluster import Cluster, load_cluster
from bigtrain.machine.rate_cache import faster_precision
from bigtrain.machine.residuals import EngineName
from bigtrain.planner.ask import (
    PlannedAnswer,
    Question,
    ask,
    engine_margins,
    limit_on_peaks,
    rank_limits,
)
from bigtrain.planner.show import (
    figure_caveats,
    frontier_table,
    no_fit_lines,
    plan_document,
    plan_text,
    plans_table,
    rejection_lines,
    search_line,
)
from bigtrain.units import parse_bytes

PLANNED_ENGINES: tuple[str, ...] = get_args(EngineName)
"""The engines whose forecasts have been compared with measurements."""
MAX_REJECTIONS_SHOWN = 6
"""The most lines that are printed about plans that do not fit."""


def main(arguments: list[str]) -> int:
    """Run `bigtrain plan` and return the exit status: 1 if no plan fits."""
    options = plan_arguments(arguments)
    _check_picture(options.picture)
    path = Path(options.output or "plan.yaml")
    replaced = _check_output(path, named=options.output is not None)
    job = load_job(options.job, "single", options.overrides)
    cluster = load_cluster(options.cluster) if options.cluster else this_machine(options.devices)
    question, margin = make_question(job, cluster, options)
    planned = ask(question)
    words = ["bigtrain", "plan", *arguments]
    if options.as_json:
        sys.stdout.write(json.dumps(plan_document(planned, margin), indent=1) + "\n")
    if not planned.result.best:
        lines = no_fit_lines(planned)
        if not options.as_json:
            for line in [*rejection_lines(planned)][:MAX_REJECTIONS_SHOWN]:
                Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
        for line in lines:
            sys.stderr.write(f"{line}\n")
        return 1
    _write(path, plan_text(planned, planned.result.best[0], shlex.join(words)))
    if options.picture is not None:
        from bigtrain.planner.front_picture import write_front

        write_front(Path(options.picture), planned)
    if not options.as_json:
        _show(planned, margin, f"{path}{replaced}", path, options)
    return 0


def read_engines(text: str) -> tuple[str, ...]:
    """Return the engines that the value of `--engines` names.

    Args:
        text: names, separated by commas.

    Raises:
        ConfigError: there is no name, or the planner does not know a name.
    """
    engines = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in engines if name not in PLANNED_ENGINES]
    if unknown or not engines:
        raise ConfigError(
            f"--engines {text}: {unknown[0] if unknown else 'nothing'} is not one of "
            f"the planner's engines. Use --engines {','.join(PLANNED_ENGINES)}"
        )
    return engines


def make_question(job: Job, cluster: Cluster, options: PlanOptions) -> tuple[Question, str]:
    """Make the planner's question from the options of the command line.

    Args:
        job: the job to plan.
        cluster: the cluster of `options.cluster`, or this machine if the option is None.
        options: the options of `bigtrain plan`.

    Returns:
        The question, and a line that explains the reserved memory and the engines' margins.

    Raises:
        ConfigError: an engine or a size is wrong.
    """
    engines = read_engines(options.engines)
    memory, line = rank_limits(cluster, memory=options.memory, cap=options.cap)
    described = cluster.device if options.cluster else None
    margins_by_engine, why = engine_margins(engines, described)
    if options.frontier or options.at is not None:
        at = None if options.at is None else parse_bytes(options.at, "--at")
        memory, margins_by_engine = limit_on_peaks(memory, margins_by_engine, "--at ", at)
    samples = options.global_batch_size
    if samples is None:
        samples = job.train.global_batch_size or 32
    question = Question(
        job=job,
        cluster=cluster,
        devices=options.devices if options.devices is not None else cluster.node.devices,
        memory=memory,
        global_batch_size=samples,
        pp=job.mesh.pp,
        dp=None if job.mesh.dp == -1 else job.mesh.dp,
        tp=job.mesh.tp,
        rows=_number_in_words(options.overrides, "train.micro_batch_size"),
        at_hand=options.cluster is None,
        peak_option="" if options.at is None else "--at ",
        frontier=options.frontier,
        margins=margins_by_engine,
    )
    return question, f"{line}; {why}"


def _number_in_words(words: list[str], key: str) -> int | None:
    """The number that an override sets; None if no override sets the key to a number."""
    for word in words:
        if word.startswith(f"{key}="):
            value = word.partition("=")[2]
            return int(value) if value.isdigit() else None
    return None


def this_machine(devices: int | None) -> Cluster:
    """Return this machine as a cluster; its rates are measured unless they are cached.

    Args:
        devices: the number of ranks that share the CPU; None for one rank for each core. The number
            has no effect on a machine with GPUs.
    """
    from bigtrain.machine.local_cluster import measure_local_cluster

    return measure_local_cluster(devices if devices is not None and devices > 0 else None)


def _check_picture(path: str | None) -> None:
    if path is not None and Path(path).suffix not in (".svg", ".png"):
        raise ConfigError(f"--picture {path}: name a file that ends in .svg or .png.")


def _check_output(path: Path, *, named: bool) -> str:
    """Check that the plan may be written to a path.

    Args:
        path: the path of the plan file.
        named: whether the user named the path. A file that exists there is then replaced.

    Returns:
        A note for the user if a file will be replaced, or an empty string.

    Raises:
        ConfigError: the path is not a regular file, or the user did not name it and `bigtrain plan`
            has not written it.
    """
    if not is_there(path):
        return ""
    if not is_regular(path):
        raise ConfigError(f"--output {path}: is not a file. Use --output FILE.yaml")
    if not named:
        with open_regular(path) as file:
            ours = file.read(len(_HEAD)) == _HEAD
        if not ours:
            raise ConfigError(
                f"{path} exists, and bigtrain plan has not written it. Use --output FILE.yaml"
            )
    return " (replaces an older one)"


_HEAD = b"# bigtrain plan"
"""The first bytes of a plan file that this command has written."""


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}.") from error


def _show(
    planned: PlannedAnswer, margin: str, shown_path: str, path: Path, options: PlanOptions
) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print((frontier_table if options.frontier else plans_table)(planned, console.width))
    lines = [search_line(planned), margin, *list(rejection_lines(planned))[:MAX_REJECTIONS_SHOWN]]
    if options.cluster is None and planned.question.job.train.precision == "fp32":
        lines += faster_precision(planned.question.cluster.device.flops.model_dump())
    lines.append(planned.seconds_line)
    lines += figure_caveats(planned)
    lines.append(f"plan: {shown_path}")
    lines += run_lines(planned, path, options)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def run_lines(planned: PlannedAnswer, path: Path, options: PlanOptions) -> list[str]:
    """Lines on how to run the plan; the last line can be pasted into a shell."""
    job = [] if options.job is None else [options.job]
    # The plan file sets these keys, and an override would replace their values.
    in_plan: tuple[str, ...] = ("strategy.",)
    if options.global_batch_size is not None:
        in_plan = (*in_plan, "train.global_batch_size=")
    overrides = [word for word in options.overrides if not word.startswith(in_plan)]
    devices, node = planned.question.devices, planned.question.cluster.node.devices
    rest = [*job, "--plan", str(path), *overrides]
    if devices <= node:
        return ["run it:", shlex.join(["bigtrain", "train", "-n", str(devices), *rest])]
    nodes = -(-devices // node)
    launcher = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={devices // nodes}"]
    launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29400", "-m", "bigtrain.train"]
    return [
        f"run it on each of {nodes} nodes, with the name of the first node for HOST:",
        shlex.join([*launcher, *rest]),
    ]
