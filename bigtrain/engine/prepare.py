"""`bigtrain.prepare`: an engine for the user's own module, loss, optimizer and training loop."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.assembly.make_plan import device_type_of, make_plan
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import Plan
from bigtrain.core.workload import Workload
from bigtrain.engine.engine import Engine, StepResult
from bigtrain.engine.first_batch import example_batch
from bigtrain.engine.first_steps import DifferentNumbersError, disable_dropout
from bigtrain.engine.run_loss.follow_loss import follow_loss, with_own_totals
from bigtrain.engine.start_facts import start_facts
from bigtrain.errors import ConfigError
from bigtrain.files.environment import json_in, odd_value
from bigtrain.job.deepspeed_json import typed_sections
from bigtrain.job.load import job_from_keys
from bigtrain.job.schema import Job
from bigtrain.losses.loss import Loss, as_loss
from bigtrain.losses.tasks import Task
from bigtrain.models.blueprint import Blueprint, as_blueprint
from bigtrain.optim.whole import MakeOptimizer, whole_optimizer
from bigtrain.own_loop.evaluation import Metrics, check_metrics
from bigtrain.own_loop.keys import check_keys
from bigtrain.own_loop.learning_rate import RateArgument
from bigtrain.own_loop.model_inputs import ForwardFunction, set_model_inputs
from bigtrain.own_loop.optimizer_argument import check_optimizer_maker
from bigtrain.ranks.agreement import Facts
from bigtrain.ranks.connect import connect
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.launcher_env import RankInfo, detect_rank_info
from bigtrain.tracing.unreached import unfreeze

COMPILING_S = 1800.0
"""The least timeout of a collective, in seconds, if blocks are compiled (`train.compile`)."""


def connect_job(
    job: Job, plan: Plan, placement: RankInfo, facts: Facts
) -> AbstractContextManager[RunContext]:
    """Connect to the other ranks, with the job's mesh, device and seed, for a `with` block.

    Before that rank 0 prints the warnings of the techniques to standard error.

    Args:
        job: this rank's job.
        plan: made from the job.
        placement: the rank of this process, as the launcher set it.
        facts: must be equal on all ranks; see `start_facts`.

    Raises:
        ConfigError: before any process group exists; see `bigtrain.ranks.connect.connect`.
    """
    for line in plan.warnings if placement.rank == 0 else ():
        sys.stderr.write(f"bigtrain: {line}\n")
    return connect(
        placement,
        device=job.device,
        backend=job.mesh.backend,
        pp=plan.pp,
        dp=plan.dp,
        tp=plan.tp,
        setup_timeout=job.mesh.setup_timeout,
        # While one rank compiles, the others wait for it in their first collective.
        timeout=max(job.mesh.timeout, COMPILING_S if plan.compiles_blocks else 0.0),
        seed=job.train.seed,
        force_group=any(t.traits.needs_group for t in plan.techniques.values()),
        facts=facts,
    )


def connect_beside(
    first_engine: Engine | None, job: Job, plan: Plan, placement: RankInfo, facts: Facts
) -> AbstractContextManager[RunContext]:
    """Connect as `connect_job` does, or share the connection of another engine of this process.

    Raises:
        ConfigError: the ranks are connected already and no engine is given, or its mesh or device
            differs.
    """
    if first_engine is None:
        if dist.is_initialized():
            raise ConfigError(
                "prepare: the ranks are connected already, by another engine or by the script. "
                "Give prepare(..., beside=engine) for a second engine, or close the first."
            )
        return connect_job(job, plan, placement, facts)
    context = first_engine.context
    sizes, wanted = (context.pp_size, context.dp_size, context.tp_size), (plan.pp, plan.dp, plan.tp)
    if sizes != wanted or device_type_of(job) != context.device.type:
        raise ConfigError(
            f"prepare(..., beside=engine): the engine's ranks are pp {sizes[0]} x dp {sizes[1]} x "
            f"tp {sizes[2]} on {context.device.type}, and this one's would be pp {wanted[0]} x dp "
            f"{wanted[1]} x tp {wanted[2]} on {device_type_of(job)}. Use one mesh and device."
        )
    context.agreement.require(facts)
    return nullcontext(replace(context, seed=job.train.seed))


def prepare(
    model: Callable[[], nn.Module] | nn.Module | Blueprint,
    loss: Loss | Callable[[Any, Any], Tensor],
    optimizer: MakeOptimizer,
    *,
    strategy: str = "ddp",
    task: Task | None = None,
    example: tuple[Any, Any] | None = None,
    learning_rate: RateArgument | None = None,
    forward: ForwardFunction | None = None,
    metrics: Metrics | None = None,
    beside: Engine | None = None,
    **keys: Any,
) -> Engine:
    """Put a model under a strategy, on the ranks that a launcher started.

    Args:
        model: the class or function that makes the module (each rank builds the part that it
            needs), or a module already built.
        loss: a mean loss of (output, targets) such as `F.cross_entropy`.
        optimizer: makes the optimizer from parameters: a class, a functools.partial of one, or a
            function. The optimizer is `engine.optimizer`.
        strategy: a preset's name, or the path of a YAML file.
        task: defines the figures of a validation; by default only the loss is measured.
        example: (inputs, targets) of one micro-batch. A strategy that cuts the model needs it;
            with it the memory is predicted before anything is built. If its number of rows differs
            from the keys, rows are repeated or left out.
        learning_rate: a number; a function from the step, counted from 0, to the rate of all
            parameter groups or a list of one rate for each; or a function that makes a torch
            scheduler from an optimizer, which is stepped after each step. It is saved and resumed.
            Left out, the rate is the optimizer's, and the loop may set it (`engine.optimizer`).
        forward: (model, inputs) -> outputs, calls the model on the inputs of a batch. Left out,
            a dict is passed by keyword where the model's forward has parameters of these names;
            anything else is the first argument.
        metrics: functions of (outputs, targets) by name, which `engine.evaluate` measures besides
            the loss.
        beside: another engine of this process, such as that of a GAN's other network. The new
            engine uses its connection and device, and must be closed before it.
        keys: any key of a job, with two underscores for the dot: `train__micro_batch_size=8`,
            `train__precision="bf16"`, `optim__clip_norm=1.0`, `device="cpu"`.

    Returns:
        The engine: `step(batch)` trains on this rank's (inputs, targets) of a global batch.

    Raises:
        ConfigError: an argument does not fit the strategy; before any process group exists.
    """
    _check_arguments(model, optimizer, task, metrics, keys)
    form, asked = _form(model), _asked_by_verify()
    job, blueprint = _job_of_loop(strategy, keys, asked), as_blueprint(model)
    with set_model_inputs(blueprint, forward, None if example is None else example[0]) as undo:
        if asked is not None:
            disable_dropout(blueprint.model)
        engine = _opened(
            blueprint,
            as_loss(loss),
            optimizer,
            job,
            example=example,
            task=task,
            learning_rate=learning_rate,
            metrics=metrics,
            beside=beside,
        )
        if asked is not None:
            _end_after_check(engine, Path(asked["report"]))
        if isinstance(model, nn.Module):
            _restore_at_close(engine, model, form, undo.pop_all())
        undo.pop_all()
    return engine


def _check_arguments(
    model: object,
    optimizer: MakeOptimizer,
    task: Task | None,
    metrics: Metrics | None,
    keys: dict[str, Any],
) -> None:
    check_keys(keys)
    check_optimizer_maker(optimizer)
    _check_whole(model)
    check_metrics(metrics, () if task is None else task.figures)


def _restore_at_close(
    engine: Engine, model: nn.Module, form: Mapping[str, tuple[Any, ...]], undo: ExitStack
) -> None:
    """Let the engine restore the caller's module when it is closed.

    Args:
        engine: made of the module.
        model: the caller's.
        form: its parameters before; see `_form`.
        undo: restores how the module takes its inputs.
    """
    if _form(model) != form:
        _TAKEN_APART[model] = engine.plan.strategy.name
    engine.close_last(undo)
    engine.close_with(_handed_back(model, engine.blueprint, engine.resolved))


def _asked_by_verify() -> dict[str, Any] | None:
    """The request of `bigtrain verify --script` to this script; None outside of it."""
    asked: dict[str, Any] | None = json_in(os.environ, VERIFY_VARIABLE)
    if asked is not None:
        kinds = {key: type(asked.get(key)) for key in ("strategy", "steps", "report")}
        if kinds != {"strategy": str, "steps": int, "report": str}:
            raise odd_value(os.environ, VERIFY_VARIABLE, "what bigtrain verify asks of a script")
    return asked


def _job_of_loop(strategy: str, keys: dict[str, Any], asked: dict[str, Any] | None) -> Job:
    """The job of the keys that were passed to `prepare`; or the one that `verify` asked for."""
    if asked is not None:
        strategy, keys = asked["strategy"], {**keys, "train__check_first_steps": asked["steps"]}
    job = job_from_keys(strategy, {key.replace("__", "."): value for key, value in keys.items()})
    if job.memory.on_oom == "adapt":
        raise ConfigError(
            "memory.on_oom=adapt starts the program again, which only `bigtrain train` can do. "
            "Leave it out; the message of bigtrain.OutOfMemoryError names changes that fit."
        )
    return job


def _opened(
    blueprint: Blueprint,
    loss: Loss,
    optimizer: MakeOptimizer,
    job: Job,
    *,
    example: tuple[Any, Any] | None,
    task: Task | None,
    learning_rate: RateArgument | None,
    metrics: Metrics | None,
    beside: Engine | None,
) -> Engine:
    """Plan the job, connect the ranks and make the engine; closing it ends the connection."""
    placement = detect_rank_info(os.environ)
    plan = make_plan(job, placement.world_size, device_type_of(job))
    workload = _workload(blueprint, loss, optimizer, example, job, plan)
    # A model that the plan cannot cut, or a loss that it cannot use, is refused before connecting.
    resolved = resolve_plan(plan, workload)
    facts = start_facts(job, workload, resolved, one_node=placement.one_node)
    connection = connect_beside(beside, job, resolved.plan, placement, facts)
    context = connection.__enter__()
    try:
        engine = Engine(
            blueprint,
            workload.loss,
            workload.make_optimizer,
            job,
            context,
            task=task,
            example=workload.example,
            learning_rate=learning_rate,
            metrics=metrics,
            resolved=resolved,
        )
    except BaseException as error:
        connection.__exit__(type(error), error, error.__traceback__)
        raise
    engine.in_own_loop = True
    for line in (*resolved.notes, *left_to_the_loop(job)) if context.is_main else ():
        sys.stderr.write(f"bigtrain: {line}\n")
    engine.close_with(connection)
    return engine


_TAKEN_APART: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Modules that an engine has cut, sliced or sharded, with the name of its strategy."""


def _form(model: object) -> dict[str, tuple[Any, ...]]:
    """The type and shape of each parameter of a module; empty for a function or class."""
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    return {name: (type(p.data), tuple(p.shape)) for name, p in named}


def _check_whole(model: object) -> None:
    """Refuse a module that an earlier engine of this process has cut, sliced or sharded.

    Raises:
        ConfigError: it is one; training would treat this rank's part as the whole model.
    """
    strategy = _TAKEN_APART.get(model) if isinstance(model, nn.Module) else None
    if strategy is not None:
        raise ConfigError(
            f"prepare: this module was given to an engine before, and strategy {strategy} has left "
            "each rank a part of it. Make a new module, or give the class or function that makes "
            "it; engine.save(folder) and engine.load(folder) carry the weights over."
        )


def _handed_back(model: nn.Module, blueprint: Blueprint, resolved: ResolvedPlan) -> ExitStack:
    """Callbacks that restore the caller's module when the engine is closed."""
    undo = ExitStack()
    undo.callback(unfreeze, model, resolved.unreached)
    undo.callback(blueprint.give_back)
    return undo


def left_to_the_loop(job: Job) -> list[str]:
    """A line on the sections of a DeepSpeed file that a user's loop replaces."""
    path = job.strategy.deepspeed_file
    parts = typed_sections(path, ("optimizer", "scheduler")) if path is not None else []
    if not parts:
        return []
    return [f"{path}: not used: {', '.join(parts)}: the loop has its own optimizer and its rate"]


def _workload(
    blueprint: Blueprint,
    loss: Loss,
    optimizer: MakeOptimizer,
    example: tuple[Any, Any] | None,
    job: Job,
    plan: Plan,
) -> Workload:
    """The workload; its loss has the divisors that the example shows, if there is one."""
    make_optimizer = whole_optimizer(optimizer, blueprint.model)
    first_batch = None
    if example is not None:
        first_batch = example_batch(example, loss, job, plan)
        loss = follow_loss(loss, blueprint.model, first_batch, plan.batch.num_parts)
        first_batch = with_own_totals(loss, first_batch)
    return Workload(
        blueprint.model,
        first_batch,
        loss,
        make_optimizer,
        whole_bytes=blueprint.whole_bytes,
        notes=blueprint.notes,
    )


VERIFY_VARIABLE = "BIGTRAIN_VERIFY"
"""The variable by which `bigtrain verify --script` asks the script, as JSON: strategy, steps,
report (the path of the answer)."""


def _end_after_check(engine: Engine, report: Path) -> None:
    """Make the engine end the script after the last step that is compared."""
    step, first_steps = engine.step, engine.first_steps

    def leave(difference: str | None) -> None:
        if engine.context.is_main and first_steps is not None:
            record = {"steps": first_steps.compared, "note": first_steps.note}
            text = json.dumps({**record, "difference": difference})
            report.write_text(f"{text}\n", "utf-8")
        engine.context.barrier()

    def step_and_end(batch: Any) -> StepResult:
        try:
            result = step(batch)
        except DifferentNumbersError as error:  # raised on all ranks
            leave(str(error))
            raise
        if first_steps is not None and not first_steps.active:
            leave(None)
            raise SystemExit(0)
        return result

    engine.step = step_and_end  # type: ignore[method-assign]
