"""Suggest the keys of a job for the names that public training scripts use."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bigtrain.errors import ConfigError, unquoted_word

PUBLIC_NAMES: dict[str, tuple[str, ...]] = {
    "optim.lr": ("base_lr", "learning_rate", "init_lr", "lr_base", "peak_lr", "max_lr"),
    "optim.name": ("optimizer", "opt", "optim", "optimizer_type"),
    "optim.betas": ("adam_betas", "adam_beta1", "adam_beta2", "beta1", "beta2"),
    "optim.eps": ("epsilon", "adam_eps", "adam_epsilon"),
    "optim.weight_decay": ("wd", "l2", "weight_decay_rate"),
    "optim.clip_norm": (
        *("max_grad_norm", "clip_grad", "grad_clip", "clip_grad_norm", "gradient_clipping"),
        "gradient_clip_val",
    ),
    "optim.schedule": (
        *("lr_policy", "lr_scheduler", "lr_scheduler_type", "scheduler", "sched"),
        "lr_decay_style",
    ),
    "optim.milestones": ("lr_steps", "decay_epochs", "lr_milestones"),
    "optim.step_factor": ("lr_mult", "lr_gamma", "gamma", "decay_rate"),
    "optim.final_lr_share": ("min_lr", "lr_min", "end_lr", "min_lr_ratio"),
    "optim.warmup_steps": ("warmup", "warmup_iters", "num_warmup_steps", "warmup_num_steps"),
    "optim.warmup_epochs": ("warmup_epoch", "warm_up_epochs", "lr_warmup_epochs"),
    "optim.warmup_factor": ("warmup_lr", "warmup_start_factor", "lr_warmup_decay"),
    "optim.decay_norms_and_biases": ("norm_weight_decay", "bn_weight_decay", "no_bias_decay"),
    "train.epochs": ("max_epoch", "max_epochs", "num_epochs", "num_train_epochs", "n_epochs"),
    "train.steps": (
        "max_steps",
        "max_iters",
        "max_iter",
        "num_steps",
        "train_iters",
        "total_steps",
    ),
    "train.global_batch_size": ("train_batch_size", "total_batch_size", "gbs"),
    "train.micro_batch_size": (
        *("per_device_train_batch_size", "train_micro_batch_size_per_gpu", "batch_size_per_gpu"),
        *("batch_per_gpu", "mbs", "device_batch_size"),
    ),
    "train.accumulation_steps": (
        *("gradient_accumulation_steps", "accum_steps", "grad_accum", "accumulate_grad_batches"),
        *("accum_iter", "gas"),
    ),
    "train.precision=bf16": ("fp16", "bf16", "amp", "mixed_precision", "half", "use_amp", "dtype"),
    "train.seed": ("rng_seed", "random_seed", "manual_seed"),
    "train.eval_every": ("eval_steps", "eval_interval", "val_interval", "eval_freq"),
    "train.sync_batchnorm": ("syncbn", "sync_bn", "sync_batch_norm"),
    "train.compile=blocks": ("torch_compile", "torchcompile", "compile_model"),
    "train.matmul=high": ("tf32", "allow_tf32"),
    "train.memory_format=channels_last": ("channels_last", "nhwc"),
    "model.name": ("arch", "model_name", "model_type", "architecture", "backbone"),
    "model.pretrained": ("weights", "model_name_or_path", "init_checkpoint", "finetune"),
    "model.args.num_classes": ("num_classes", "nb_classes", "n_classes"),
    "data.name": ("dataset_name", "dataset_type"),
    "data.path": ("dataset", "data_dir", "data_path", "dataset_path", "data_root", "root"),
    "data.workers": ("num_workers", "dataloader_num_workers", "n_workers"),
    "data.args.size": ("im_size", "img_size", "image_size", "input_size", "crop_size"),
    "strategy.recompute=full": (
        *("gradient_checkpointing", "activation_checkpointing", "grad_checkpointing"),
        *("recompute", "checkpoint_activations"),
    ),
    "strategy.replicate.stage": ("zero_stage", "zero"),
    "mesh.tp": ("tensor_parallel_size", "tensor_model_parallel_size", "tensor_parallel"),
    "mesh.pp": ("pipeline_parallel_size", "pipeline_model_parallel_size", "pipeline_parallel"),
    "mesh.backend": ("dist_backend", "distributed_backend"),
    "mesh.timeout": ("ddp_timeout", "distributed_timeout"),
    "checkpoint.every": ("save_steps", "save_interval", "save_freq", "checkpoint_interval"),
    "checkpoint.keep": ("save_total_limit", "keep_checkpoint_max", "max_checkpoints"),
    "checkpoint.resume": ("auto_resume", "resume_from_checkpoint", "resume_from", "load"),
    "log.dir": ("out_dir", "output_dir", "save_dir", "log_dir", "logdir", "work_dir"),
    "log.name": ("run_name", "exp_name", "experiment_name", "experiment"),
    "log.every": ("print_freq", "logging_steps", "log_interval", "log_freq"),
    "log.accuracy": ("train_accuracy", "train_acc", "training_accuracy"),
}
"""By key of a job, or KEY=VALUE, the names that public training scripts use for it."""
_BY_PUBLIC_NAME = {name: ours for ours, names in PUBLIC_NAMES.items() for name in names}
_AMBIGUOUS = {
    "batch_size": "train.global_batch_size (of all ranks) or train.micro_batch_size (of one)",
    "optim.steps": "optim.milestones",
    "warmup_ratio": "optim.warmup_steps or optim.warmup_epochs",
}


def public_hint(path: tuple[str, ...]) -> str | None:
    """Return the key of a job for a public script's key, given by its parts; None if unknown."""
    name = path[-1].lower()
    full = ".".join(path).lower()
    return _AMBIGUOUS.get(full) or _AMBIGUOUS.get(name) or _BY_PUBLIC_NAME.get(name)


_SECTIONS = {"MODEL", "TRAIN", "TEST", "OPTIM", "CUDNN"}
_Words = Callable[[Any], Mapping[str, Any]]


def _as(key: str) -> _Words:
    return lambda value: {key: value}


def _where_set(key: str, ours: Any = None) -> _Words:
    """Return a function to `key` with `ours` or the public value; to nothing for an empty value."""
    return lambda value: {key: value if ours is None else ours} if value else {}


def _policy(value: Any) -> Mapping[str, Any]:
    return {"optim.schedule": {"cos": "cosine", "steps": "step"}.get(str(value), value)}


def _steps(value: Any) -> Mapping[str, Any]:
    return {"optim.milestones": [epoch for epoch in value or [] if epoch]}


YACS: dict[str, _Words] = {
    "MODEL.ARCH": _as("model.name"),
    "MODEL.SYNCBN": _as("train.sync_batchnorm"),
    "MODEL.PRETRAINED": _where_set("model.pretrained", "cache"),
    "MODEL.WEIGHTS": _where_set("model.pretrained"),
    "TRAIN.DATASET": _as("data.path"),
    "TRAIN.IM_SIZE": _as("data.args.size"),
    "TRAIN.WORKERS": _as("data.workers"),
    "TRAIN.BATCH_SIZE": lambda value: {
        "train.micro_batch_size": value,
        "train.global_batch_size": None,
    },
    "TRAIN.PRINT_FREQ": _as("log.every"),
    "TRAIN.AUTO_RESUME": _where_set("checkpoint.resume", "auto"),
    "OPTIM.MAX_EPOCH": _as("train.epochs"),
    "OPTIM.BASE_LR": lambda value: {"optim.lr": value, "optim.base_batch_size": None},
    "OPTIM.LR_POLICY": _policy,
    "OPTIM.MIN_LR": _as("optim.final_lr_share"),
    "OPTIM.STEPS": _steps,
    "OPTIM.LR_MULT": _as("optim.step_factor"),
    "OPTIM.MOMENTUM": _as("optim.momentum"),
    "OPTIM.DAMPENING": _as("optim.dampening"),
    "OPTIM.NESTEROV": _as("optim.nesterov"),
    "OPTIM.WARMUP_EPOCHS": _as("optim.warmup_epochs"),
    "OPTIM.WARMUP_FACTOR": _as("optim.warmup_factor"),
    "OPTIM.WEIGHT_DECAY": lambda value: {
        "optim.weight_decay": value,
        "optim.decay_norms_and_biases": True,
    },
    "CUDNN.DETERMINISTIC": _as("train.deterministic"),
    "OUT_DIR": _as("log.dir"),
    "RNG_SEED": _where_set("train.seed"),
}
"""By key of distribuuuu (github.com/BIGBALLON/distribuuuu), a function from its value to keys of a
job. Its batch size is that of one GPU, and weight decay applies to all of its parameters."""


PUBLIC_VALUES = {
    "train.precision": {
        **dict.fromkeys(("fp16", "float16", "half", "bfloat16", "amp", "mixed", "16"), "bf16"),
        **dict.fromkeys(("bf16-mixed", "16-mixed", "bf16-true", "16-true"), "bf16"),
        **dict.fromkeys(("float32", "float", "single", "false", "32", "32-true"), "fp32"),
        **dict.fromkeys(("float64", "double", "64", "64-true"), "fp64"),
    },
}
"""By key of a job, values of other tools in lower case, each with the value of a job.

fp16 becomes bf16, which needs no loss scaling.
"""


def refuse_yacs(values: Mapping[str, Any], shown: str) -> None:
    """Refuse a YACS file with capital sections, such as distribuuuu's.

    Args:
        values: the values of the file.
        shown: the path of the file, for the message.

    Raises:
        ConfigError: the file has such sections; the message contains the equivalent command.
    """
    if len(_SECTIONS & values.keys()) < 2:
        return
    flat_values = dict(_flat(values, ()))
    words: dict[str, Any] = {"model.name": None, "data.name": "imagenet"}
    for key, value in flat_values.items():
        if key in YACS:
            words |= YACS[key](value)
    if not words.get("optim.warmup_epochs"):
        words.pop("optim.warmup_factor", None)
    if words.get("optim.schedule") == "cosine":
        words |= {"optim.milestones": []}
        words.pop("optim.step_factor", None)
    words = {k: v for k, v in words.items() if k != "model.name" or v is not None}
    line = shlex.join(unquoted_word(key, value) for key, value in words.items())
    others = [key for key in flat_values if key not in YACS]
    more = f" (ignored: {', '.join(others)})" if others else ""
    raise ConfigError(
        f"{shown} is a YACS file, as of distribuuuu. The equivalent command: bigtrain train "
        f"-n GPUS --config imagenet {line}{more}"
    )


def _flat(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, (*path, str(key)))
        else:
            yield ".".join((*path, str(key))), value
