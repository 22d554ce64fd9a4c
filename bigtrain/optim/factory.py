"""Optimizers from a job's keys, and the learning rate as a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bigtrain.job.schema import LOW_BIT, OptimConfig
from bigtrain.optim.lean_adamw import LeanAdamW
from bigtrain.optim.low_bit_adamw import LowBitAdamW, quantization_maps
from bigtrain.optim.update import MakeOptimizer

_LOOP = {"foreach": False}
"""One parameter after the other."""


def optimizer_factory(config: OptimConfig, seed: int = 0) -> MakeOptimizer:
    """Return what makes the job's optimizer from the parameters a rank updates.

    Args:
        config: the job's `optim`.
        seed: of stochastic rounding, where there is any.

    Raises:
        ConfigError: a package that the optimizer needs is not installed.
    """
    if config.name in LOW_BIT:
        quantization_maps(LOW_BIT[config.name])
    if config.lean:
        return _lean_factory(config, seed)
    kernels = {
        "auto": {"fused": True},
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "loop": _LOOP,
    }[config.implementation]

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if config.name == "adafactor":
            # One parameter at a time, unless asked otherwise: all at once needs a copy of all.
            foreach = config.implementation == "foreach"
            return torch.optim.Adafactor(
                parameters, lr=config.lr, weight_decay=config.weight_decay, foreach=foreach
            )
        if config.name == "sgd":
            parameter_list = list(parameters)
            shards = any(isinstance(parameter, DTensor) for parameter in parameter_list)
            return torch.optim.SGD(
                parameter_list,
                lr=config.lr,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                # torch's fused SGD does not know DTensors (its fused AdamW does).
                **(_LOOP if shards and config.implementation == "auto" else kernels),
            )
        return torch.optim.AdamW(
            parameters,
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            **kernels,
        )

    return make


def _lean_factory(config: OptimConfig, seed: int) -> MakeOptimizer:
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        keys: dict[str, Any] = {
            "lr": config.lr,
            "betas": config.betas,
            "weight_decay": config.weight_decay,
            "stochastic_rounding": config.stochastic_rounding is not False,
            "seed": seed,
        }
        if config.name in LOW_BIT:
            return LowBitAdamW(parameters, LOW_BIT[config.name], **keys)
        state = torch.bfloat16 if config.state == "bf16" else torch.float32
        return LeanAdamW(parameters, state=state, **keys)

    return make


def learning_rate(
    config: OptimConfig, step: int, total_steps: int, global_batch_size: int
) -> float:
    """The rate of optimizer step `step`, counted from 0.

    Linear warm-up, then constant, half a cosine, or a line down to `final_lr_share` of the
    highest rate. With `base_batch_size` the rate grows in proportion to the global batch
    (Goyal et al. 2017, arXiv 1706.02677, section 2.1).
    """
    highest = config.lr
    if config.base_batch_size is not None:
        highest *= global_batch_size / config.base_batch_size
    if step < config.warmup_steps:
        return highest * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return highest
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    remaining = (
        (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    )
    return highest * (config.final_lr_share + (1 - config.final_lr_share) * remaining)
