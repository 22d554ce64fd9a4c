"""`bigtrain fit`: the memory and the plan of fine-tuning a model that is given by its name."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

import torch
from rich.console import Console

from bigtrain.devices import device_names, in_use
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.fit.methods import Method, Setting, answer, methods
from bigtrain.fit.show import MethodReport, fit_document, fit_lines, fit_table, method_report
from bigtrain.fit.subject import Subject, find_subject
from bigtrain.job.arguments import FitOptions, fit_arguments
from bigtrain.job.load import parse_overrides
from bigtrain.machine.cluster import Cluster, load_cluster
from bigtrain.machine.rates import usable_cores
from bigtrain.planner.ask import engine_margins, rank_limits, uncollected
from bigtrain.planner.command import read_engines, this_machine

DEFAULT_CLUSTER = "a100-node"
"""The cluster that is assumed on a machine without a GPU."""
DEFAULT_BATCH = 16


def main(arguments: list[str]) -> int:
    """Run `bigtrain fit` and return the exit status: 0, or 1 if no way of fine-tuning fits.

    Raises:
        ConfigError: the model, the devices or a number is wrong.
    """
    options = fit_arguments(arguments)
    _check_numbers(options)
    cluster = _cluster(options)
    batch = options.global_batch_size or max(DEFAULT_BATCH, options.devices)
    setting, notes = _setting(options, cluster, batch)
    keys = parse_overrides(options.overrides).values
    with uncollected():
        subject = find_subject(
            options.name,
            length=options.length,
            args=_section(_section(keys, "model"), "args"),
            has_data="data" in keys,
            samples=max(batch, 1),
        )
        chosen = [m for m in methods(options.lora) if m.name == "qlora" or not options.qlora]
        reports = _reports(subject, chosen, setting)
        if all(report.refused is not None for report in reports):
            raise ConfigError(str(reports[0].refused))
        if options.as_json:
            document = fit_document(subject, setting, reports)
            sys.stdout.write(json.dumps(document, indent=1) + "\n")
        else:
            _show(subject, setting, reports, notes)
    return 0 if any(report.fits for report in reports) else 1


def _reports(subject: Subject, chosen: Sequence[Method], setting: Setting) -> list[MethodReport]:
    """Plan each way of fine-tuning, in parallel processes if there are several cores.

    The processes are forked, so that libraries are imported only once. Forked processes cannot run
    a backward pass if this process has used a GPU, or has run a backward pass where torch sees a
    GPU. The plans are then made in this process, one after the other.

    Raises:
        BigtrainError: one of the processes was killed.
    """
    report = partial(_report, subject, setting)
    processes = min(len(chosen), usable_cores())
    if processes == 1 or not _can_fork():
        return [report(method) for method in chosen]
    sys.stdout.flush()
    context = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(processes, context, initializer=_end_quietly) as pool:
            # Full training begins first: if it does not fit, its remedies take longest.
            return list(pool.map(report, chosen))
    except BrokenProcessPool:
        raise BigtrainError(
            f"fit: one of the {processes} processes that make plans was ended. If the host's "
            "memory is short, run fit on one core: taskset -c 0 bigtrain fit ..."
        ) from None


def _can_fork() -> bool:
    """Whether a forked process can run a backward pass."""
    if not hasattr(os, "fork") or in_use():
        return False
    process = multiprocessing.get_context("fork").Process(target=_run_backward)
    process.start()
    process.join()
    return process.exitcode == 0


def _run_backward() -> None:
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError:  # autograd has a thread for each GPU, which a fork does not copy
        os._exit(1)


def _end_quietly() -> None:
    """Let Ctrl-C end this process without a traceback; the parent reports the Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _report(subject: Subject, setting: Setting, method: Method) -> MethodReport:
    return method_report(subject, setting, answer(subject, method, setting))


def _section(keys: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = keys.get(name)
    return section if isinstance(section, dict) else {}


def _check_numbers(options: FitOptions) -> None:
    """Refuse numbers that no run can have.

    Raises:
        ConfigError: a number is below 1, or the batch is smaller than the number of devices.
    """
    numbers = {
        "--devices": (options.devices, "--devices 8"),
        "--lora": (options.lora, "--lora 16"),
        "--length": (options.length, "--length 2048"),
        "--global-batch-size": (options.global_batch_size, "--global-batch-size 16"),
        "--micro-batch-size": (options.micro_batch_size, "--micro-batch-size 1"),
    }
    for option, (number, fix) in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"fit: {option} {number}: at least 1 is needed. Use {fix}.")
    batch = options.global_batch_size
    if batch is not None and batch < options.devices:
        raise ConfigError(
            f"fit: --global-batch-size {batch} is less than one sample for each of "
            f"{options.devices} devices. Use --global-batch-size {options.devices} or more."
        )


def _cluster(options: FitOptions) -> Cluster:
    """Return the named cluster, or else this machine's GPUs, or else `DEFAULT_CLUSTER`."""
    if options.cluster is not None:
        return load_cluster(options.cluster)
    return this_machine(options.devices) if device_names() else load_cluster(DEFAULT_CLUSTER)


def _setting(options: FitOptions, cluster: Cluster, batch: int) -> tuple[Setting, list[str]]:
    """Return the setting, and lines about assumptions.

    Raises:
        ConfigError: an engine or a size is wrong.
    """
    engines = read_engines(options.engines)
    memory, reserved = rank_limits(cluster, memory=options.memory, cap=None)
    at_hand = options.cluster is None and bool(device_names())
    margins, why = engine_margins(engines, None if at_hand else cluster.device)
    notes = [f"{reserved}; {why}"]
    if options.cluster is None and not at_hand:
        notes.insert(
            0,
            f"this machine has no GPU: {cluster.name} is assumed. Name other devices with "
            "--cluster, or another memory with --memory 24GiB",
        )
    setting = Setting(
        cluster=cluster,
        devices=options.devices,
        memory=memory,
        global_batch_size=batch,
        rows=options.micro_batch_size,
        margins=margins,
        overrides=tuple(options.overrides),
        every_plan=options.every_plan,
    )
    return setting, notes


def _show(
    subject: Subject, setting: Setting, reports: Sequence[MethodReport], notes: Sequence[str]
) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(fit_table(subject, setting, reports))
    for line in [*notes, *fit_lines(reports)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
