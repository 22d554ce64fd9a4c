"""Make the parts of a run from its job: data, described model, loss, optimizer, plan, steps.

A described model is on the meta device, so it has no values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bigtrain.assembly.resolve import resolve_plan
from bigtrain.checkpoint.folders import find_checkpoint
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import CutStrategy, Plan
from bigtrain.core.workload import Workload
from bigtrain.data import (
    Data,
    GlobalOrder,
    MicroBatch,
    StepLoader,
    check_data,
    open_data,
    validation_batches,
)
from bigtrain.devices import is_accelerator
from bigtrain.engine.engine import Engine
from bigtrain.engine.run_loss.choose_loss import check_chunks, choose_loss
from bigtrain.engine.run_loss.follow_loss import follow_loss, with_own_totals
from bigtrain.engine.run_loss.infer_loss import infer_loss
from bigtrain.engine.start_facts import start_facts
from bigtrain.errors import ConfigError
from bigtrain.hub.lora import Adapters, adapters_of
from bigtrain.hub.nf4 import Nf4Layout, parameter_elements
from bigtrain.job.deepspeed_json import schedule_of
from bigtrain.job.deepspeed_schedules import Schedule
from bigtrain.job.import_path import load_object
from bigtrain.job.optim_keys import OptimConfig
from bigtrain.job.schema import Job
from bigtrain.losses.accuracy import TrainingAccuracy
from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy
from bigtrain.losses.loss import CrossEntropy, Loss, as_loss
from bigtrain.losses.tasks import CustomTask, UntoldTask
from bigtrain.machine.rates import usable_cores
from bigtrain.models.blueprint import Blueprint
from bigtrain.models.parameters import low_names
from bigtrain.models.spec import ModelSpec
from bigtrain.optim.factory import learning_rate, optimizer_factory, warmup_length
from bigtrain.own_loop.model_inputs import set_model_inputs
from bigtrain.prediction.shorten import uses_by_block
from bigtrain.ranks.agreement import Facts
from bigtrain.ranks.context import RunContext
from bigtrain.units import format_bytes, format_count

MAX_WORKERS = 4
"""The most reader processes of a rank on a GPU, unless `data.workers` sets their number."""


@dataclass(frozen=True)
class RunSetup:
    """The parts of a run, from which its engine and its batches are made."""

    job: Job
    data: Data
    blueprint: Blueprint
    workload: Workload
    """The model of the blueprint with one full micro-batch of the first samples of the data."""
    resolved: ResolvedPlan
    order: GlobalOrder
    """The order of the training samples."""
    total_steps: int
    """The number of steps of the run."""
    model: ModelSpec
    parameters: int
    """The number of elements of all parameters of the whole model, before anything is sharded."""
    frozen_parameters: int = 0
    """The number of elements of the parameters that are not trained."""
    schedule: Schedule | None = None
    """The scheduler of a DeepSpeed file that sets the learning rates; None if there is none."""

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self.resolved.plan

    def engine(self, context: RunContext) -> Engine:
        """Make the engine of this run. Collective."""
        return Engine(
            self.blueprint,
            self.workload.loss,
            self.workload.make_optimizer,
            self.job,
            context,
            task=self.data.task,
            example=self.workload.example,
            learning_rate=self.learning_rate,
            resolved=self.resolved,
        )

    def facts(self, *, one_node: bool) -> Facts:
        """Return the facts that must be equal on all ranks.

        Args:
            one_node: see `start_facts`.
        """
        return start_facts(
            self.job, self.workload, self.resolved, one_node=one_node, data=self.data
        )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if self.schedule is not None:
            return self.schedule.rate(step, self.job.optim.lr)
        batch, epoch = self.plan.batch.global_size, self.order.steps_per_epoch
        return learning_rate(self.job.optim, step, self.total_steps, batch, epoch)

    @property
    def warmup_steps(self) -> int:
        """The number of steps in which the learning rate rises; 0 if a DeepSpeed file sets it."""
        if self.schedule is not None:
            return 0
        return warmup_length(self.job.optim, self.order.steps_per_epoch)

    def training_steps(self, context: RunContext, samples_seen: int) -> StepLoader:
        """Return a loader of this rank's steps.

        Args:
            context: this rank's context.
            samples_seen: the number of samples of the global order that earlier steps have used.
        """
        return StepLoader(
            self.data.train,
            self.order,
            count=self.workload.loss.count,
            dp_rank=self.plan.data_rank(context.dp_rank),
            dp_size=self.plan.batch.dp_size,
            micro_batch_size=self.plan.batch.micro_size,
            samples_seen=samples_seen,
            on_read=context.recorder.read_data,
            workers=self._workers(context),
            pin_memory=is_accelerator(context.device),
            collate=self.data.collate,
        )

    def _workers(self, context: RunContext) -> int:
        """Return the number of reader processes; see `DataConfig.workers`."""
        if self.job.data.workers is not None:
            return self.job.data.workers
        if not is_accelerator(context.device):
            return 0
        return min(MAX_WORKERS, usable_cores() // max(1, context.local_world_size))

    def validation_batches(self, context: RunContext) -> Iterable[MicroBatch]:
        """Return this rank's micro-batches of the validation samples; empty if there are none.

        The samples of lost ranks are divided among the remaining ranks. Collective if ranks may be
        lost.

        Args:
            context: this rank's context.
        """
        if self.data.validation is None:
            return []
        data_rank, lost = self.plan.data_rank(context.dp_rank), context.agreed_lost_ranks()
        return validation_batches(
            self.data.validation,
            count=self.workload.loss.count,
            dp_rank=None
            if data_rank is None
            else data_rank - sum(rank < context.rank for rank in lost),
            dp_size=max(1, self.plan.batch.dp_size - len(lost)),
            micro_batch_size=self.plan.batch.micro_size,
            workers=self._workers(context),
            pin_memory=is_accelerator(context.device),
            collate=self.data.collate,
        )


def check_job(job: Job) -> ModelSpec:
    """Refuse a job whose model, data source or checkpoint cannot work, before data are read.

    Returns:
        The specification of the job's model, for `open_setup`.

    Raises:
        ConfigError: a key is wrong; the message names the key and the fix.
    """
    model = ModelSpec.of(job.model)
    model.check()
    check_chunks(model)
    check_data(job.data.name, job.data.path, job.data.args, job.model.name)
    if job.checkpoint.resume not in (None, "auto"):
        find_checkpoint(str(job.checkpoint.resume))
    return model


def open_setup(
    job: Job, plan: Plan, model: ModelSpec | None = None, *, by_block: bool = False
) -> RunSetup:
    """Open the data, describe the model, and resolve the plan, without weights or process groups.

    Args:
        job: a job that `check_job` accepts.
        plan: the plan of the job.
        model: the result of `check_job`; None to look the job's model up.
        by_block: whether a shortened copy of the model, with few of its equal blocks, shows how a
            forward pass uses parameters. The planner sets True. A run uses the whole model.

    Raises:
        ConfigError: there are fewer samples than ranks or than rows of a global batch; the model
            does not fit the data; or the plan cannot train the model.
    """
    model = ModelSpec.of(job.model) if model is None else model
    data = _opened_data(job, model)
    samples = len(data.train)
    _check_samples(samples, plan)
    order = GlobalOrder(samples, plan.batch.global_size, seed=job.train.seed)
    total_steps = _total_steps(job, order)
    schedule = _file_schedule(job, order, total_steps)
    blueprint = model.describe(
        num_classes=data.task.num_classes,
        sequence_length=_length_of(data) if data.task.name == "language" else None,
    )
    if data.for_model is not None:
        data = data.for_model(blueprint.model)
    data, loss, example, notes = _followed_loss(job, plan, data, model, blueprint)
    loss = _with_accuracy(job, plan, data, loss)
    optimizer = optimizer_factory(job.optim, job.train.seed)
    workload = Workload(
        blueprint.model,
        example,
        loss,
        optimizer,
        blueprint.whole_bytes,
        blueprint.read_widths,
        known_uses=uses_by_block(blueprint.model, example, loss) if by_block else None,
        notes=(*blueprint.notes, *_model_notes(job, plan, model, blueprint), *notes),
    )
    # A plan that cannot train the model is refused here, before the ranks connect.
    resolved = resolve_plan(plan, workload)
    elements = parameter_elements(blueprint.model)
    return RunSetup(
        job=job,
        data=data,
        blueprint=blueprint,
        workload=workload,
        resolved=resolved,
        order=order,
        total_steps=total_steps,
        model=model,
        parameters=sum(elements.values()),
        frozen_parameters=sum(
            elements[name]
            for name, parameter in blueprint.model.named_parameters()
            if not parameter.requires_grad
        ),
        schedule=schedule,
    )


def _check_samples(samples: int, plan: Plan) -> None:
    """Refuse fewer samples than ranks that share them, or than a global batch has.

    Raises:
        ConfigError: with both numbers and the fix.
    """
    sharing = plan.batch.dp_size
    if samples < sharing:
        raise ConfigError(
            f"data: {samples} training samples are fewer than the {sharing} ranks that share "
            f"them. Start at most {samples} ranks."
        )
    if samples < plan.batch.global_size:
        raise ConfigError(
            f"train.global_batch_size={plan.batch.global_size} is more than the {samples} samples "
            f"there are. Use train.global_batch_size={samples // sharing * sharing} or less."
        )


def _opened_data(job: Job, model: ModelSpec) -> Data:
    """Return the data of the job.

    Raises:
        ConfigError: the data cannot be opened, or do not fit the model or `checkpoint.best`.
    """
    data = open_data(
        job.data.name,
        job.data.path,
        job.data.args,
        seed=job.train.seed,
        sequence_length=model.sequence_length,
        model=job.model.name,
    )
    _check_task(job, model, data)
    _check_best(job, data)
    return data


def _followed_loss(
    job: Job, plan: Plan, data: Data, model: ModelSpec, blueprint: Blueprint
) -> tuple[Data, Loss, MicroBatch, list[str]]:
    """Return the data with their task, the loss of the run, an example, and lines on the loss.

    Raises:
        ConfigError: no loss follows from data and model, or its divisors cannot be found.
    """
    loss = _given_loss(job, data)
    is_given = loss is not None
    example = _example(data, plan.batch.micro_size, loss or data.task.loss())
    set_model_inputs(blueprint, None, example.inputs)
    notes: list[str] = []
    if isinstance(data.task, UntoldTask):
        if loss is None:
            loss, note = infer_loss(job.data.name, blueprint.model, example)
            notes.append(note)
            example = replace(example, count=loss.count(example.targets))
        data, is_given = replace(data, task=CustomTask(loss)), True
    loss = loss or data.task.loss()
    loss = follow_loss(loss, blueprint.model, example, plan.batch.num_parts)
    example = with_own_totals(loss, example)
    if not is_given:
        cut = plan.techniques.get("cut")
        several_waiting = (
            isinstance(cut, CutStrategy) and max(cut.in_flight(plan)[-1:], default=1) > 1
        )
        loss = choose_loss(
            model,
            data.task,
            blueprint.model,
            example,
            several_waiting=several_waiting,
            copies_modules=plan.replicate.copies_modules,
            device_type=plan.device_type,
        )
    return data, loss, example, notes


def _given_loss(job: Job, data: Data) -> Loss | None:
    """Return the loss that the job or the data name; None if the task has to define it."""
    if job.model.loss is not None:
        return as_loss(load_object(job.model.loss, "model.loss"))
    return None if data.loss is None else as_loss(data.loss)


def neutral_notes(job: Job, model: ModelSpec) -> list[str]:
    """Return a line on the default optimizer, for a user's model in a job without `optim` keys.

    The list is empty for other jobs.
    """
    if not model.is_custom or job.optim != OptimConfig():
        return []
    name, rate = job.optim.name, job.optim.lr
    return [
        f"optim: {name}, lr {rate:g} constant, no warm-up, no weight decay, no clipping: the "
        "defaults, as no key of optim is set. Set optim.KEY=VALUE"
    ]


def _model_notes(job: Job, plan: Plan, model: ModelSpec, blueprint: Blueprint) -> list[str]:
    """Return lines on the parameters, and on the optimizer if the job sets no key of `optim`."""
    kept = [*dtype_notes(plan, model, blueprint), *frozen_notes(job, plan, blueprint)]
    return [*kept, *neutral_notes(job, model)]


def dtype_notes(plan: Plan, model: ModelSpec, blueprint: Blueprint) -> list[str]:
    """Return a line on the dtypes of the parameters and of the files that they are read from.

    The list is empty for models that are not from the Hub.
    """
    if model.hub is None:
        return []
    kept = {
        "fp32": "parameters, gradients and optimizer state in fp32",
        "fp64": "parameters, gradients and optimizer state in fp64",
        "bf16": "parameters and optimizer state in fp32 (masters), computed in bf16",
    }[plan.precision]
    if plan.precision == "bf16" and not plan.master_weights:
        kept = "parameters and optimizer state in bf16, without fp32 masters"
    if not blueprint.saved_dtypes:
        return [f"{model.hub.key}: initial weights; {kept}"]
    return [f"{model.hub.key}: {' and '.join(blueprint.saved_dtypes)} in the files; {kept}"]


def frozen_notes(job: Job, plan: Plan, blueprint: Blueprint) -> list[str]:
    """Return lines on the adapters and the frozen parameters of a job.

    The list is empty if the job sets neither `model.lora` nor `model.freeze`.
    """
    if job.model.lora is None and not job.model.freeze:
        return []
    model, lines = blueprint.model, list[str]()
    named = dict(model.named_parameters())
    frozen = {name: p for name, p in named.items() if not p.requires_grad}
    trained = sum(p.numel() for p in named.values() if p.requires_grad)
    adapters = adapters_of(model)
    if adapters is not None:
        words = f"rank {adapters.config.rank}, alpha {adapters.alpha:g}"
        own = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in adapters.targets))
        lines.append(
            f"model.lora: {words} on {len(adapters.targets)} layers ({own}); "
            f"{format_count(trained)} trained parameters"
        )
        experts = [name for name, p in frozen.items() if p.dim() == 3 and "experts" in name]
        if experts:
            lines.append(
                f"model.lora: {len(experts)} stacked weights of experts ({experts[0]}, ...) are no "
                "layers of their own, get no adapter and stay frozen"
            )
    rest = "frozen parameters"
    if adapters is not None and adapters.quantized:
        lines.append(_quantized_note(adapters))
        frozen = {n: p for n, p in frozen.items() if p.is_floating_point()}
        rest = f"other {rest}"
    used, held = plan.bf16_parameters, plan.frozen_in_bf16
    low = set(low_names(model, bf16_parameters=used, frozen_in_bf16=held))
    wide = 8 if plan.precision == "fp64" else 4
    nbytes = sum(p.numel() * (2 if name in low else wide) for name, p in frozen.items())
    kept = f"fp{8 * wide}" if not low else "bf16" if low >= frozen.keys() else "bf16 and fp32"
    count = sum(p.numel() for p in frozen.values())
    return [
        *lines,
        f"{rest}: {format_count(count)}, {format_bytes(nbytes)} in {kept} before they "
        "are sharded or cut; no gradients, no optimizer state",
    ]


def _quantized_note(adapters: Adapters) -> str:
    """Return a line on the weights that are quantized to 4 bits."""
    layouts = [Nf4Layout(layer.shape) for layer in adapters.quantized.values()]
    elements = sum(math.prod(layout.shape) for layout in layouts)
    nbytes = sum(layout.nbytes for layout in layouts)
    line = (
        f"model.lora.quantize=nf4: {format_count(elements)} weights of {len(layouts)} layers in "
        f"{format_bytes(nbytes)} ({8 * nbytes / elements:.2f} bits each) before they are sharded "
        "or cut"
    )
    if adapters.unquantized:
        few = ", ".join(adapters.unquantized[:3])
        more = len(adapters.unquantized) - 3
        line += f"; not quantized: {few}{f' and {more} more' if more > 0 else ''}"
    return line


def _with_accuracy(job: Job, plan: Plan, data: Data, loss: Loss) -> Loss:
    """Return the loss of a run; with `log.accuracy` it also counts correct predictions.

    Raises:
        ConfigError: correct predictions cannot be counted in this job.
    """
    if not job.log.accuracy:
        return loss
    if data.task.name != "classification" or type(loss) is not CrossEntropy:
        loss_source = (
            f"model.loss={job.model.loss}" if job.model.loss else f"data.name={job.data.name}"
        )
        loss_source = (
            "model.chunked_loss=true" if isinstance(loss, ChunkedCrossEntropy) else loss_source
        )
        raise ConfigError(
            f"log.accuracy=true counts the right classes of samples by the task's own cross "
            f"entropy, and {loss_source} has another loss. Use log.accuracy=false."
        )
    if plan.replicate.num_servers:
        raise ConfigError(
            "log.accuracy=true adds up the counts of all ranks after each step, and with "
            "parameter servers they are not in the same step. Use log.accuracy=false."
        )
    return replace(loss, accuracy=TrainingAccuracy())


def _file_schedule(job: Job, order: GlobalOrder, total_steps: int) -> Schedule | None:
    """Return the scheduler of the job's DeepSpeed file; None without such a file or scheduler."""
    path = job.strategy.deepspeed_file
    if path is None:
        return None
    warmup = warmup_length(job.optim, order.steps_per_epoch)
    return schedule_of(path, dict(job.optim), warmup, total_steps)


def _example(data: Data, micro_size: int, loss: Loss) -> MicroBatch:
    rows = min(micro_size, len(data.train))
    order = GlobalOrder(len(data.train), rows, shuffle=False)
    loader = StepLoader(
        data.train, order, count=loss.count, micro_batch_size=rows, collate=data.collate
    )
    return next(iter(loader)).micro_batches[0]


def _check_task(job: Job, model: ModelSpec, data: Data) -> None:
    expected_task = model.task
    if expected_task is None or data.task.name in (expected_task, "custom"):
        return
    suggestions = {
        "language": "model.name=gpt",
        "classification": "model.name=lenet or model.name=resnet18",
        "segmentation": "model.name=deeplabv3_resnet50",
    }
    raise ConfigError(
        f"model.name={job.model.name} is for {expected_task}, and data.name={job.data.name} is "
        f"{data.task.name}. Use {suggestions[data.task.name]}, or a data.name for {expected_task}."
    )


def _check_best(job: Job, data: Data) -> None:
    best, figures = job.checkpoint.best, data.task.figures
    if best is not None and best not in figures:
        raise ConfigError(
            f"checkpoint.best={best}: a validation of data.name={job.data.name} gives "
            f"{', '.join(figures)}. Use checkpoint.best={figures[-1]}."
        )
    if best is not None and data.validation is None:
        raise ConfigError(
            f"checkpoint.best={best}: data.name={job.data.name} has no validation samples. Leave "
            "checkpoint.best out."
        )


def _length_of(data: Data) -> int | None:
    inputs, _ = data.train[0]
    return int(inputs.shape[0]) if hasattr(inputs, "shape") and inputs.ndim == 1 else None


def _total_steps(job: Job, order: GlobalOrder) -> int:
    if job.train.steps is not None:
        return job.train.steps
    return math.ceil((job.train.epochs or 1) * order.steps_per_epoch)
