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
"""The shortest timeout of a collective, in seconds, if blocks are compiled (`train.compile`)."""


def connect_job(
    job: Job, plan: Plan, placement: RankInfo, facts: Facts
) -> AbstractContextManager[RunContext]:
    """Connect to the other ranks, with the job's mesh, device and seed, for a `with` block.

    Rank 0 first prints the warnings of the techniques to standard error.

    Args:
        job: this rank's job.
        plan: the plan of the job.
        placement: the rank of this process, as the launcher set it.
        facts: texts by name that must be equal on all ranks; see `start_facts`.

    Raises:
        ConfigError: when the block is entered, before any process group exists; see
            `bigtrain.ranks.connect.connect`.
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

    Args:
        first_engine: the engine whose connection is shared; None to connect.
        job: see `connect_job`.
        plan: see `connect_job`.
        placement: see `connect_job`.
        facts: see `connect_job`.

    Raises:
        ConfigError: `first_engine` is None, and the ranks are connected already; or `first_engine`
            is given, and its mesh or device is not that of the job.
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
    """Make an engine for a model, on the ranks that a launcher started. Collective.

    Args:
        model: a class or function that makes the module, of which each rank builds only the part
            that it needs; or a module that is already built.
        loss: a mean loss of (output, targets) such as `F.cross_entropy`.
        optimizer: makes the optimizer from parameters: a class, a functools.partial of a class, or
            a function. The parameter groups of the result are those of `engine.optimizer`.
        strategy: the name of a preset, or the path of a YAML file.
        task: defines the figures of a validation; None to measure the loss only.
        example: (inputs, targets) of one micro-batch, which a strategy that cuts the model needs.
            With it the memory is predicted before anything is built. If a key sets another number
            of rows, rows of the example are repeated or left out.
        learning_rate: a number; a function from the step, counted from 0, to the rate of all
            parameter groups or to a list with the rate of each; or a function that makes a torch
            scheduler from an optimizer. A scheduler is stepped after each step, saved and loaded.
            With None the rate is that of `optimizer`; the loop may change `engine.optimizer`.
        forward: (model, inputs) -> outputs, which calls the model on the inputs of a batch. With
            None a dict is passed as keyword arguments if the model's forward has parameters of
            these names; all other inputs are passed as the first argument.
        metrics: functions of (outputs, targets) by name, which `engine.evaluate` measures in
            addition to the loss.
        beside: another engine of this process, such as that of a GAN's other network. The new
            engine uses the connection and device of that engine, and must be closed before it.
        keys: any key of a job, with two underscores for the dot: `train__micro_batch_size=8`,
            `train__precision="bf16"`, `optim__clip_norm=1.0`, `device="cpu"`.

    Returns:
        The engine: `step(batch)` trains on this rank's (inputs, targets) of a global batch.

    Raises:
        ConfigError: an argument is wrong. It is raised before any process group exists.
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
    """Let the engine's `close` restore the settings that `prepare` changed in the caller's module.

    These are the module's `forward`, `requires_grad` of the parameters that the loss does not
    reach, and `use_cache` in the configurations. Parameters that the strategy has cut, sliced or
    sharded are not restored; the module is then recorded, so that `_check_whole` refuses it.

    Args:
        engine: the engine of the module.
        model: the caller's module.
        form: the module's `_form` before the engine was made.
        undo: restores the module's `forward`.
    """
    if _form(model) != form:
        _TAKEN_APART[model] = engine.plan.strategy.name
    engine.close_last(undo)
    engine.close_with(_handed_back(model, engine.blueprint, engine.resolved))


def _asked_by_verify() -> dict[str, Any] | None:
    """Return the request of `bigtrain verify --script`; None if another command runs the script.

    Raises:
        UnreadableError: the variable does not hold a request.
    """
    asked: dict[str, Any] | None = json_in(os.environ, VERIFY_VARIABLE)
    if asked is not None:
        kinds = {key: type(asked.get(key)) for key in ("strategy", "steps", "report")}
        if kinds != {"strategy": str, "steps": int, "report": str}:
            raise odd_value(os.environ, VERIFY_VARIABLE, "what bigtrain verify asks of a script")
    return asked


def _job_of_loop(strategy: str, keys: dict[str, Any], asked: dict[str, Any] | None) -> Job:
    """Return the job of the keys that were passed to `prepare`, or the job to verify.

    Args:
        strategy: the argument of `prepare`.
        keys: the keys that were passed to `prepare`.
        asked: the result of `_asked_by_verify`, which replaces the strategy.
    """
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
    """Plan the job, connect the ranks and make the engine; its `close` ends the connection."""
    placement = detect_rank_info(os.environ)
    plan = make_plan(job, placement.world_size, device_type_of(job), one_host=placement.one_node)
    workload = _workload(blueprint, loss, optimizer, example, job, plan)
    # A model that cannot be cut, or a loss that cannot be used, is refused before ranks connect.
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
"""The modules that an engine has cut, sliced or sharded, with the name of the strategy."""


def _form(model: object) -> dict[str, tuple[Any, ...]]:
    """Return the type and shape of each parameter of a module; empty for a function or class."""
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    return {name: (type(p.data), tuple(p.shape)) for name, p in named}


def _check_whole(model: object) -> None:
    """Refuse a module that an earlier engine of this process has cut, sliced or sharded.

    Raises:
        ConfigError: the module is one of these. Training would take this rank's part for the whole
            model.
    """
    strategy = _TAKEN_APART.get(model) if isinstance(model, nn.Module) else None
    if strategy is not None:
        raise ConfigError(
            f"prepare: this module was given to an engine before, and strategy {strategy} has left "
            "each rank a part of it. Make a new module, or give the class or function that makes "
            "it; engine.save(folder) and engine.load(folder) carry the weights over."
        )


def _handed_back(model: nn.Module, blueprint: Blueprint, resolved: ResolvedPlan) -> ExitStack:
    """Return callbacks that restore the caller's module when the engine is closed."""
    undo = ExitStack()
    undo.callback(unfreeze, model, resolved.unreached)
    undo.callback(blueprint.give_back)
    return undo


def left_to_the_loop(job: Job) -> list[str]:
    """Return a line on the sections of a DeepSpeed file that a user's loop replaces.

    The list is empty if there is no such file or section.
    """
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
    """Return the workload; with an example, its loss has the divisors that follow from it."""
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
        read_widths=blueprint.read_widths,
        notes=blueprint.notes,
    )


VERIFY_VARIABLE = "BIGTRAIN_VERIFY"
"""The environment variable in which `bigtrain verify --script` gives the script its request: JSON
with the strategy, the number of steps, and the path of the report to write."""


def _end_after_check(engine: Engine, report: Path) -> None:
    """Replace the engine's `step` by one that ends the script after the last compared step."""
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
