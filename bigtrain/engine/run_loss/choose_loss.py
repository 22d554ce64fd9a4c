"""Choose the loss of a job: the task's loss as it is, or computed in chunks at the model's head."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from bigtrain.data.loader import MicroBatch
from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.job.schema import ModelConfig
from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy, check_head
from bigtrain.losses.linear_cross_entropy import ACCELERATOR_CHUNK_BYTES, DEFAULT_CHUNK_BYTES
from bigtrain.losses.loss import CrossEntropy, Loss, main_logits
from bigtrain.losses.tasks import Task
from bigtrain.models.blocks import independent_blocks
from bigtrain.models.spec import ModelSpec
from bigtrain.prediction.shorten import shorten_model
from bigtrain.tensors.fake import fake_model
from bigtrain.tensors.fake_mode import FakeMode
from bigtrain.tensors.tree import tree_tensors

GPT_HEAD = "head"
"""The name of the head of bigtrain's own language models."""


def check_chunks(spec: ModelSpec) -> None:
    """Refuse keys of the chunked loss that contradict other keys.

    Args:
        spec: the specification of the model, with the job's section `model`.

    Raises:
        ConfigError: two keys contradict each other; the message names the keys and the fix.
    """
    config: ModelConfig = spec.config
    if config.chunked_loss and config.loss is not None:
        raise ConfigError(
            f"model.chunked_loss=true is the task's own cross entropy in chunks, and model.loss="
            f"{config.loss} is another loss. Leave one of the two out."
        )
    if config.auxiliary_weight is not None and config.loss is not None:
        raise ConfigError(
            f"model.auxiliary_weight={config.auxiliary_weight} is for the task's own cross "
            f"entropy, and model.loss={config.loss} is another loss. Leave one of the two out."
        )
    keys = {"head": config.head, "chunk_size": config.chunk_size}
    by_default = (spec.is_language or spec.is_hub_language) and config.loss is None
    chunked = by_default if config.chunked_loss is None else config.chunked_loss
    for key in (name for name, value in keys.items() if value is not None and not chunked):
        state = "false" if config.chunked_loss is not None else "off for this model and loss"
        raise ConfigError(
            f"model.{key}={keys[key]} is for a chunked loss, and model.chunked_loss is {state}. "
            f"Set model.chunked_loss=true, or leave model.{key} out."
        )


def choose_loss(
    spec: ModelSpec,
    task: Task,
    model: nn.Module,
    example: MicroBatch,
    *,
    several_waiting: bool = False,
    copies_modules: bool = False,
    device_type: str = "cpu",
) -> Loss:
    """Return the task's loss, in chunks if `model.chunked_loss` is true or not set.

    If the key is not set, the loss is in chunks only for bigtrain's own language models, and for
    language models of the Hub whose logits are the unchanged output of a linear layer.

    Args:
        spec: the specification of the model; its `config.loss` is None.
        task: the task of the data.
        model: a model on any device, including the meta device; it is not changed.
        example: one micro-batch, with which a run on fake tensors finds the head.
        several_waiting: whether several micro-batches wait at the head (GPipe). Each of them then
            keeps in memory a gradient of the head's weight with chunks, and logits without chunks.
        copies_modules: see `Traits.copies_modules`. A copy of the head would have no targets.
        device_type: the device type of the run, which decides the default size of a chunk.

    Raises:
        ConfigError: `model.chunked_loss` is true, and the task, the model or the strategy allows
            no chunked loss; or `model.auxiliary_weight` does not fit the loss.
    """
    config: ModelConfig = spec.config
    task_loss = task.loss()
    if config.auxiliary_weight is not None:
        task_loss = _weighted(task_loss, spec, model)
    is_default = config.chunked_loss is None
    is_chunked = config.chunked_loss
    if is_chunked is None:
        is_chunked = spec.is_language or (spec.is_hub_language and task.name == "language")
    if not is_chunked:
        return task_loss
    if copies_modules:
        if config.chunked_loss is None:
            return task_loss
        raise ConfigError(
            "model.chunked_loss=true: the head makes the loss, and --strategy data_parallel runs "
            "copies of it that know no targets. Set model.chunked_loss=false, or use --strategy "
            "ddp with a rank for each GPU."
        )
    if type(task_loss) is not CrossEntropy or task_loss.class_dim != -1:
        if config.chunked_loss is None:
            return task_loss
        raise ConfigError(
            f"model.chunked_loss=true needs a task whose loss is a cross entropy over the last dim "
            f"of the logits, and the loss of a {task.name} task is another. "
            "Set model.chunked_loss=false."
        )
    try:
        name = config.head or (GPT_HEAD if spec.is_language else None) or find_head(model, example)
    except ConfigError:
        if is_default:
            return task_loss
        raise
    check_head(name, model)
    head = model.get_submodule(name)
    if config.chunked_loss is None and several_waiting and isinstance(head, nn.Linear):
        targets = sum(tensor.numel() for tensor in tree_tensors(example.targets))
        if head.in_features > targets:  # the gradient is larger than the logits
            return task_loss
    default = ACCELERATOR_CHUNK_BYTES if is_accelerator(device_type) else DEFAULT_CHUNK_BYTES
    size = default if config.chunk_size is None else config.chunk_size
    return ChunkedCrossEntropy(**asdict(task_loss), head=name, chunk_size=size)


def find_head(model: nn.Module, example: MicroBatch) -> str:
    """Return the name of the linear layer whose output is, unchanged, the model's logits.

    To save time, a copy with few of the model's equal blocks is run first. The whole model is run
    only if the copy shows no head outside of the blocks.

    Args:
        model: a model on any device, including the meta device. Copies run on fake tensors.
        example: one micro-batch; only its shapes matter.

    Raises:
        ConfigError: there is no such layer, or the model does not run on fake tensors.
    """
    shortened = shorten_model(model)
    if shortened is not None:
        blocks = tuple(f"{name}." for name, _ in independent_blocks(shortened[0]))
        with suppress(ConfigError):
            name = _head_of(shortened[0], example)
            if not name.startswith(blocks):
                return name
    return _head_of(model, example)


def _head_of(model: nn.Module, example: MicroBatch) -> str:
    outputs_of: list[tuple[str, Tensor]] = []
    cpu = torch.device("cpu")
    try:
        with FakeMode(), torch.no_grad():
            fake = fake_model(model, cpu, double=False).train()
            for name, module in fake.named_modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_hook(
                        lambda _module, _inputs, output, name=name: outputs_of.append(
                            (name, output)
                        )
                    )
            output = fake(example.fake(cpu).inputs)
        logits = main_logits(output)
    except Exception as error:  # noqa: BLE001 - user code of any kind runs here
        first = (str(error).splitlines() or [""])[0]
        reason = f"the model does not run on fake tensors ({type(error).__name__}: {first})"
    else:
        matching = [name for name, tensor in outputs_of if tensor is logits]
        if matching:
            return matching[-1]
        reason = (
            f"the model returns the output of none of its {len(outputs_of)} calls of linear layers"
        )
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    some = f" (the last ones are {', '.join(names[-3:])})" if names else ""
    raise ConfigError(
        f"model.chunked_loss=true: no head was found: {reason}. Set model.head to the linear layer "
        f"whose output the model returns as its logits{some}, or set model.chunked_loss=false."
    )


def _weighted(loss: Loss, spec: ModelSpec, model: nn.Module) -> CrossEntropy:
    """Return the loss with the job's weight of auxiliary heads.

    Raises:
        ConfigError: the loss is no cross entropy, or a built-in model has no auxiliary head.
    """
    config: ModelConfig = spec.config
    key = f"model.auxiliary_weight={config.auxiliary_weight}"
    if not isinstance(loss, CrossEntropy):
        raise ConfigError(
            f"{key} is for a cross entropy, and the loss of these data is a "
            f"{type(loss).__name__}. Leave model.auxiliary_weight out."
        )
    headless = spec.task == "segmentation" and model.aux_classifier is None
    if headless and config.auxiliary_weight:
        raise ConfigError(
            f"{key} is for an auxiliary head, and {config.name} has none. Set "
            "model.args.aux_loss=true, or model.auxiliary_weight=null."
        )
    return replace(loss, auxiliary_weight=config.auxiliary_weight)
